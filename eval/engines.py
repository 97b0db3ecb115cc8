"""Other engines on our prompts: vLLM in its own environment, transformers' `generate`, and a plain re-implementation.

Each answers contexts of token ids, and tells what it counted of every answer.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.progress import Progress
from eval import reference
from eval.rounds import ASSISTANT, LOOKUP, VLLM, Counts, Rule, Trace, count
from models.checkpoint import NATIVE, is_inside_target
from models.errors import UserError
from models.files import atomic_folder, write_json
from models.target import Target
from models.target.adapted import MARK

WORKER = Path(__file__).with_name("vllm_worker.py")
# vLLM's method for each format that it reads, and the methods that take the likeliest tokens at any temperature.
METHODS = {
    "vllm_eagle": "eagle",
    "vllm_eagle3": "eagle3",
    "speculators_eagle3": "eagle3",
    "vllm_medusa": "medusa",
    "fasterdecoding_medusa": "medusa",
    "hf_causal_lm": "draft_model",
    "mimo_mtp": "mtp",
    NATIVE: "custom_class",  # our own engine's drafters that read text alone, as `models.vllm_proposer` runs them
}
_UNSAMPLED = ("medusa",)
_LINK = "drafter"


@dataclass(frozen=True, slots=True)
class Task:
    """What an engine is asked: answers to `contexts`, each with a seed, by a target and the drafter in `folder`.

    Without a folder the drafter is our own `drafter`, of the kind that has nothing to load (look-up).
    """

    target: Target
    drafter: Any
    folder: Path | None
    format: str | None
    contexts: list[list[int]]
    seeds: list[int]
    max_new_tokens: int
    num_speculative_tokens: int
    temperature: float
    stop: frozenset[int]


@dataclass(frozen=True, slots=True)
class Answers:
    """Counts of every answer, the rule by which they were counted, and what the engine is."""

    counts: list[Counts]
    rule: Rule
    versions: dict[str, str]


def refuse_unreadable(engine: str, format_name: str | None) -> None:
    """Raise UserError for a format that the engine cannot read, whatever is in it."""
    read = {"vllm": METHODS, "transformers": ("hf_causal_lm",), "reference": reference.FORMATS}[engine]
    if format_name is not None and format_name not in read:
        raise UserError(f"engine={engine} does not read format={format_name}: choose {', '.join(read)}.")


def samples(contexts: list[list[int]], count: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """Every context `count` times, and a seed for each."""
    repeated = [context for context in contexts for _ in range(count)]
    return repeated, [seed + i for i in range(len(repeated))]


def room_for(max_new_tokens: int, num_speculative_tokens: int) -> int:
    """How many tokens a context must have behind a prompt, so that no draft is cut by its end.

    Beside the answer, that is what the last round may accept behind it and the draft that would follow: where one
    request's draft does not fit any more, vLLM drafts for none of the batch.
    """
    return max_new_tokens + 2 * (num_speculative_tokens + 1)


def point_masses(task: Task, engine: str) -> bool:
    """Whether the engine's drafts are point masses at any temperature, where ours would be drawn from a law.

    vLLM draws drafts where `speculative_config` asks for it, but Medusa's are always the likeliest tokens.
    """
    return engine == "vllm" and METHODS.get(task.format or "") in _UNSAMPLED


def options_without_files(engine: str, drafter: Any, num_tokens: int) -> dict[str, Any]:
    """What a drafter without files says to an engine: the re-implementation takes what vLLM does.

    Raises UserError where it says nothing, and where the engine would not draft the same.
    """
    name = "transformers_options" if engine == "transformers" else "vllm_options"
    if not hasattr(drafter, name):
        raise UserError(f"{type(drafter).__name__} has no files that an engine loads: give a format.")
    if engine == "transformers" and hasattr(drafter, "check_transformers"):
        drafter.check_transformers()
    options: dict[str, Any] = getattr(drafter, name)(num_tokens)
    return options


# --- transformers


def run_transformers(task: Task) -> Answers:
    """`generate` with the folder's model as its assistant, or with look-up in the prompt.

    Its first draft stands behind the prompt, ours behind the first token. So it is handed the target's first token as
    the prompt's last, and rounds are then the same.
    """
    import transformers

    if task.folder is None:
        options = options_without_files("transformers", task.drafter, task.num_speculative_tokens)
        rule = ASSISTANT if "assistant_model" in options else LOOKUP
    else:
        options, rule = {"assistant_model": _assistant(task)}, ASSISTANT
    counts = []
    with Progress("transformers", len(task.contexts)) as progress:
        for context in task.contexts:
            counts.append(_generated(task, context, options))
            progress.advance(1)
    return Answers(counts, rule, {"transformers": transformers.__version__})


def _assistant(task: Task) -> Any:
    from transformers import AutoModelForCausalLM

    assert task.folder is not None
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(task.folder, dtype=task.target.dtype, use_safetensors=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"engine=transformers drafts with causal language models: {str(error).splitlines()[0]}"
        ) from error
    generation = model.generation_config
    generation.num_assistant_tokens = task.num_speculative_tokens
    generation.num_assistant_tokens_schedule = "constant"
    generation.assistant_confidence_threshold = 0.0
    return model.to(task.target.device).eval()


def _generated(task: Task, context: list[int], options: dict[str, Any]) -> Counts:
    """One answer, and the rounds that its forward passes tell."""
    from transformers import GenerationConfig

    target, stop = task.target, sorted(task.stop)
    ids = torch.tensor([context], device=target.device)
    with torch.inference_mode():
        first = int(target.model(input_ids=ids, use_cache=False).logits[0, -1].argmax())
        if first in task.stop or task.max_new_tokens == 1:
            return Counts([first], 0, 0, [0] * task.num_speculative_tokens)
        ids = torch.cat([ids, ids.new_tensor([[first]])], dim=1)
        with _passes(target.model) as drafts:
            out = target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=GenerationConfig(  # not the target's own, which may penalise repetition
                    do_sample=False,
                    max_new_tokens=task.max_new_tokens - 1,
                    eos_token_id=stop or None,
                    pad_token_id=stop[0] if stop else -1,  # the assistant reads no padding, save a stop token
                ),
                **options,
            )
    return observed([first, *out[0, len(context) + 1 :].tolist()], drafts, task.num_speculative_tokens)


@contextmanager
def _passes(model: Any) -> Iterator[list[list[int]]]:
    """Collect the drafted tokens of each forward pass of `generate`: it asks for logits at those and at the one before.

    Ends with an empty list where `generate` is handed nothing to check.
    """
    drafts: list[list[int]] = []

    def keep(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        drafted = output.logits.shape[1] - 1
        ids = kwargs["input_ids"][0]
        drafts.append(ids[len(ids) - drafted :].tolist())

    hook = model.register_forward_hook(keep, with_kwargs=True)
    try:
        yield drafts
    finally:
        hook.remove()


def observed(answer: list[int], drafts: list[list[int]], positions: int) -> Counts:
    """Counts of greedy rounds, one for each draft, of which the answer's first token is not one.

    Raises RuntimeError where the rounds do not make the answer: what was taken for a round is none.
    """
    given, by_position, rounds = 1, [0] * positions, list[int]()
    for draft in drafts:
        following = answer[given:]
        accepted = next(
            (i for i, token in enumerate(draft) if i >= len(following) or token != following[i]), len(draft)
        )
        for position in range(accepted):
            by_position[position] += 1
        given += accepted + 1
        rounds.append(accepted)
    if not len(answer) <= given <= len(answer) + 1:
        raise RuntimeError(f"{len(drafts)} rounds make {given} tokens, not the {len(answer)} that came")
    return Counts(answer, sum(map(bool, drafts)), sum(map(len, drafts)), by_position, rounds)


# --- a plain re-implementation


def run_reference(task: Task) -> Answers:
    """`eval.reference` on the folder's files; it counts as vLLM does."""
    size = task.num_speculative_tokens
    if task.folder is None:
        options = options_without_files("reference", task.drafter, size)
        propose = reference.look_up(options["prompt_lookup_max"], options["prompt_lookup_min"], size)
    else:
        propose = reference.proposer(task.folder, str(task.format), task.target, size)
    counts = []
    with Progress("re-implementation", len(task.contexts)) as progress, torch.inference_mode():
        for context in task.contexts:
            made: Trace = reference.decode(task.target, propose, context, task.max_new_tokens)
            counts.append(count(made, VLLM, max_new_tokens=task.max_new_tokens, positions=size, stop=task.stop))
            progress.advance(1)
    return Answers(counts, VLLM, {"torch": torch.__version__})


# --- vLLM


def vllm_runner(settings: dict[str, Any], work: Path) -> Callable[[Task], Answers]:
    """vLLM with the interpreter `settings["python"]`, exchanging files in `work`.

    It answers `batch_size` prompts at a time; `sampling_fix` repairs its sampling (vllm#55005).
    """

    def run(task: Task) -> Answers:
        interpreter = Path(settings["python"]).expanduser().absolute()  # a link is not followed: it says which packages
        request = {
            "model": str(_model_folder(task, work)),
            "speculative_config": speculative_config(task),
            "additional_config": {"draftsmith": _LINK} if task.format == NATIVE else {},
            "packages": str(WORKER.parents[1]) if task.format == NATIVE else None,
            "max_model_len": max(map(len, task.contexts)) + room_for(task.max_new_tokens, task.num_speculative_tokens),
            "max_new_tokens": task.max_new_tokens,
            "stop_token_ids": sorted(task.stop),
            "sampling_fix": settings["sampling_fix"],
            "batch_size": settings["batch_size"],
            "answers": [
                {"prompt": context, "seed": seed, "temperature": task.temperature}
                for context, seed in zip(task.contexts, task.seeds, strict=True)
            ],
        }
        name = f"{task.format or 'files'}-{task.temperature:g}"
        question, answer, log = (work / f"{name}.{kind}" for kind in ("request.json", "answer.json", "log"))
        write_json(question, request)
        answer.unlink(missing_ok=True)
        _link(task.folder, work / _LINK)
        _call([str(interpreter), "-I", str(WORKER), question.name, answer.name], log)
        made = json.loads(answer.read_text())
        return Answers(counts_of(made, task.num_speculative_tokens), VLLM, made["versions"])

    return run


def _call(command: list[str], log: Path) -> None:
    """Run the worker beside `log`, to which its words go. Raises UserError with the last of them where it fails."""
    with log.open("w") as file:
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, check=False, env=_environment(), cwd=log.parent
        )
    if done.returncode:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line] or lines or ["nothing was said"]
        raise UserError(f"vLLM ended with code {done.returncode}: {errors[-1][:300]} (the whole of it is in {log}).")


def _environment() -> dict[str, str]:
    """Ours, without what would lead the other interpreter to our packages."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def _link(folder: Path | None, place: Path) -> None:
    """Put a link to the drafter's folder at `place`."""
    place.unlink(missing_ok=True)
    if folder is not None:
        place.symlink_to(folder.resolve(), target_is_directory=True)


def _model_folder(task: Task, work: Path) -> Path:
    """The target's folder in Hugging Face's layout: the one it was loaded from, or one that it is written to.

    A drafter that is a part of its target's checkpoint brings that along.
    """
    if task.format is not None and is_inside_target(task.format):
        return Path(_LINK)
    target = task.target
    own = Path(target.model.config._name_or_path or "")
    merged = hasattr(target.model.config, MARK)  # then an adapter may not be in the files that it came from
    if (own / "config.json").is_file() and str(own) != "." and not merged:
        return own.resolve()
    folder = work / f"target-{target.weights_fingerprint}"
    if not folder.exists():
        with atomic_folder(folder) as temporary:
            target.model.save_pretrained(temporary)
            if target.tokenizer is not None:
                target.tokenizer.save_pretrained(temporary)
    return folder.resolve()


def speculative_config(task: Task) -> dict[str, Any]:
    """vLLM's `speculative_config`.

    The method is named, and yet 0.32 takes another one for Medusa, draft models and MTP where the path that it is given
    has "eagle-", "eagle3", "dflash" or "dspark" in it. So it gets a link that is called `_LINK`, as a relative path.
    """
    if task.folder is None:
        return options_without_files("vllm", task.drafter, task.num_speculative_tokens)
    config = {
        "method": METHODS[str(task.format)],
        "model": "models.vllm_proposer.TextProposer" if task.format == NATIVE else _LINK,
        "num_speculative_tokens": task.num_speculative_tokens,
    }
    drawn = task.temperature > 0 and task.format != NATIVE
    return config | ({"draft_sample_method": "probabilistic"} if drawn else {})


def counts_of(made: dict[str, Any], positions: int) -> list[Counts]:
    """The worker's counts. Raises RuntimeError where those of the answers are not what the engine's counters say."""
    counts = []
    for found in made["answers"]:
        reached = [sum(found["histogram"][i:]) for i in range(positions + 1)]
        counts.append(Counts(found["token_ids"], reached[0], found["drafted"], reached[1:], found["accepted_by_round"]))
    sums = {
        "drafts": sum(c.drafts for c in counts),
        "drafted": sum(c.drafted for c in counts),
        "accepted": sum(sum(c.accepted) for c in counts),
    }
    if sums != made["counters"]:
        raise RuntimeError(f"vLLM counts {sums} by answer, and {made['counters']} in all")
    return counts
