"""Prompts to the target's own answers, as a data set on disk.

A drafter learns what the target would say, so its training text is the target's own (regenerated) answers. They are
generated in fixed chunks by the engine's plain decoding; a chunk that is finished is on the disk and is never done
again. The data set's folder is named by the fingerprint of everything that the answers depend on.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets

from data.progress import Progress
from data.prompts import Prompt
from data.resumable import run_chunks
from data.template import encode_conversation, encode_prompt, messages_of
from engine.loop import generate
from engine.settings import DecodeSettings
from models.errors import UserError
from models.files import atomic_folder, damaged_files, write_hashes, write_text
from models.sampling import SamplingParams
from models.target import Target

FORMAT = 1  # of the rows; a change makes older folders unusable, and says so


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How answers are made. `answers` is "target" (generated) or "given" (the data set's own)."""

    answers: str = "target"
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 128
    max_prompt_tokens: int = 512
    chunk_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.answers not in ("target", "given"):
            raise UserError(f"data.answers.answers is {self.answers!r}: choose target or given.")
        for name in ("max_new_tokens", "max_prompt_tokens", "chunk_size"):
            if getattr(self, name) < 1:
                raise UserError(f"data.answers.{name} is {getattr(self, name)}: it must be at least 1.")
        SamplingParams(self.temperature, top_p=self.top_p)


def build_answers(target: Target, prompts: list[Prompt], settings: AnswerSettings, root: Path) -> datasets.Dataset:
    """Return rows of `token_ids` and `loss_mask` (1 on answer tokens), made now or read from `root`.

    A folder under `root` is named by the fingerprint; it is reused when its manifest matches. Prompts of more than
    `max_prompt_tokens` are left out and counted. Raises UserError when nothing is left, or the disk refuses.
    """
    manifest = describe(target, prompts, settings)
    folder = root / f"answers-{fingerprint(manifest)}"
    if (folder / "dataset").exists():
        if not (damaged := damaged_files(folder / "dataset")):
            return _opened(folder, manifest)
        print(f"{str(folder / 'dataset')!r} is damaged ({', '.join(damaged)}), and is made again from what was logged")
    write_text(folder / "manifest.json", json.dumps(manifest, indent=1))
    make = _given_rows if settings.answers == "given" else _generated_rows
    rows = make(target, prompts, settings, folder)
    if not any(sum(row["loss_mask"]) for row in rows):
        raise UserError("No answer has a single token to learn from: the loss mask is 0 everywhere.")
    datasets.disable_progress_bars()
    with atomic_folder(folder / "dataset") as temporary:
        datasets.Dataset.from_list(rows).save_to_disk(temporary)
        write_hashes(temporary)
    return _opened(folder, manifest)


def open_answers(folder: Path, manifest: dict[str, Any] | None = None) -> datasets.Dataset:
    """Read a finished data set. Raises UserError where it is missing, damaged, or was made from something else."""
    if damaged := damaged_files(folder / "dataset"):
        raise UserError(f"The answers in {str(folder)!r} are damaged ({', '.join(damaged)}): make them again.")
    return _opened(folder, manifest)


def _opened(folder: Path, manifest: dict[str, Any] | None) -> datasets.Dataset:
    try:
        stored = json.loads((folder / "manifest.json").read_text())
        rows = datasets.load_from_disk(str(folder / "dataset"))
    except (OSError, ValueError) as error:
        raise UserError(f"{str(folder)!r} holds no finished answers: {str(error).splitlines()[0]}") from error
    if manifest is not None:
        different = [key for key in manifest if stored.get(key) != manifest[key]]
        if different:
            raise UserError(
                f"The answers in {str(folder)!r} were made with another {', '.join(different)}: "
                "they are not what this target would say. Leave data.reuse out to make new ones."
            )
    return rows


def describe(target: Target, prompts: list[Prompt], settings: AnswerSettings) -> dict[str, Any]:
    """Everything that the answers depend on."""
    template = getattr(target.tokenizer, "chat_template", None) or ""
    given = settings.answers == "given"
    asked = json.dumps([[p.turns, p.system, p.continuation, p.answers if given else ()] for p in prompts])
    return {
        "format": FORMAT,
        "target": target.fingerprint,
        "weights": target.weights_fingerprint,
        "dtype": str(target.dtype),
        "template": hashlib.sha256(str(template).encode()).hexdigest()[:16],
        "prompts": hashlib.sha256(asked.encode()).hexdigest()[:16],
        "num_prompts": len(prompts),
        "settings": asdict(settings),
    }


def fingerprint(manifest: dict[str, Any]) -> str:
    """Short hash of a manifest."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:12]


def context_ids(target: Target, prompt: Prompt, answers: tuple[str, ...] = ()) -> list[int]:
    """Token ids that the target reads before it says its next answer."""
    if prompt.continuation:
        return target.encode(prompt.turns[0], special_tokens=True)
    turns = prompt.turns[: len(answers) + 1]
    return encode_prompt(target, messages_of(turns, answers, prompt.system))


def _generated_rows(
    target: Target, prompts: list[Prompt], settings: AnswerSettings, folder: Path
) -> list[dict[str, Any]]:
    """Let the target answer every turn; a later turn's context holds the answers it gave to the earlier ones."""
    lengths = {p.id: len(context_ids(target, p)) for p in prompts}
    short = [p for p in prompts if lengths[p.id] <= min(settings.max_prompt_tokens, target.max_positions - 1)]
    if len(short) < len(prompts):
        left_out = len(prompts) - len(short)
        print(f"{left_out} of {len(prompts)} prompts are longer than data.answers.max_prompt_tokens: left out")
    if not short:
        raise UserError("Every prompt is longer than data.answers.max_prompt_tokens.")
    ordered = sorted(short, key=lambda p: (lengths[p.id], p.id))  # neighbours of equal length waste no padding
    chunks = [ordered[i : i + settings.chunk_size] for i in range(0, len(ordered), settings.chunk_size)]

    def answer(chunk: int) -> list[dict[str, Any]]:
        return _answer_chunk(target, chunks[chunk], settings)

    with Progress("answers of the target", len(ordered)) as progress:

        def more(chunk: int, made: list[dict[str, Any]]) -> bool:
            progress.advance(len(chunks[chunk]))
            return chunk + 1 < len(chunks)

        rows = run_chunks(folder / "answers.jsonl", answer, more)
    position = {p.id: i for i, p in enumerate(prompts)}
    return sorted(rows, key=lambda row: (position[row["prompt_id"]], row["turn"]))


def _answer_chunk(target: Target, prompts: list[Prompt], settings: AnswerSettings) -> list[dict[str, Any]]:
    sampling = SamplingParams(settings.temperature, top_p=settings.top_p)
    decode = DecodeSettings(max_new_tokens=settings.max_new_tokens, sampling=sampling)
    answers: dict[str, tuple[str, ...]] = {p.id: () for p in prompts}
    rows = []
    for turn in range(max(len(p.turns) for p in prompts)):
        asking = [p for p in prompts if turn < len(p.turns)]
        contexts = {p.id: context_ids(target, p, answers[p.id]) for p in asking}
        longest = min(settings.max_prompt_tokens, target.max_positions - 1)
        asking = [p for p in asking if len(contexts[p.id]) <= longest]
        if not asking:
            break
        seeds = [(int(p.id, 16) + settings.seed * 7919 + turn) % 2**40 for p in asking]
        made = generate(target, [contexts[p.id] for p in asking], decode, seeds=seeds)
        for prompt, ids in zip(asking, made.token_ids, strict=True):
            context = contexts[prompt.id]
            mask = [0] * len(context) + [1] * len(ids)
            rows.append(_row(prompt, turn, context + ids, mask))
            answers[prompt.id] += (target.decode(ids),)
    return rows


def _given_rows(target: Target, prompts: list[Prompt], settings: AnswerSettings, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for prompt in prompts:
        if not prompt.answers:
            raise UserError(f"data.answers.answers=given, but the prompt {prompt.turns[0][:60]!r} has no answer.")
        room = target.max_positions
        if prompt.continuation:
            context, said = context_ids(target, prompt), target.encode(prompt.answers[0])[: settings.max_new_tokens]
            ids, mask = context + said, [0] * len(context) + [1] * len(said)
        else:
            turns = prompt.turns[: len(prompt.answers)]
            ids, mask = encode_conversation(target, messages_of(turns, prompt.answers, prompt.system))
        rows.append(_row(prompt, 0, ids[:room], mask[:room]))
    return rows


def _row(prompt: Prompt, turn: int, token_ids: list[int], loss_mask: list[int]) -> dict[str, Any]:
    return {
        "prompt_id": prompt.id,
        "turn": turn,
        "category": prompt.category,
        "token_ids": token_ids,
        "loss_mask": loss_mask,
    }
