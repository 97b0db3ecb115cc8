"""transformers' own rounds on random models, and what is exchanged with vLLM's environment."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.settings import DecodeSettings
from eval import engines
from eval.engines import (
    Answers,
    Task,
    counts_of,
    observed,
    point_masses,
    refuse_unreadable,
    run_reference,
    run_transformers,
    samples,
    speculative_config,
    vllm_runner,
)
from eval.rounds import VLLM, Counts, count, trace
from models.checkpoint import format_of, native
from models.drafter.draft_lm import DraftLM
from models.drafter.eagle import EagleDrafter
from models.drafter.prompt_lookup import PromptLookupDrafter
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.characters import with_characters
from tests.helpers.drafters import prompts, shaken, tiny_target

SIZE, LENGTH = 3, 20


@pytest.fixture(scope="module")
def target() -> Target:
    """Of few tokens, so that it repeats itself, and drafts are accepted now and then."""
    made = tiny_target(torch.float64, vocab_size=12, num_hidden_layers=2, max_position_embeddings=96, sharpness=2.0)
    return with_characters(made)


def near_copy(target: Target) -> DraftLM:
    """A draft model that is the target with some noise: about half of its drafts are accepted."""
    options = {"num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    drafter = DraftLM(target, DraftVocab(target.vocab_size), **options)
    drafter.lm.model.load_state_dict(target.model.state_dict())
    return shaken(drafter, amount=0.04)


@pytest.fixture
def task(target: Target, tmp_path: Path) -> Task:
    """Of a draft model, answers end at 20 tokens."""
    drafter = near_copy(target)
    place = {"name": target.name, "fingerprint": target.fingerprint, "load": {}}
    export = native.Export("mine", {"_target_": "models.drafter.draft_lm.DraftLM"}, place, SIZE, {})
    format_of("hf_causal_lm").save(drafter, target, export, tmp_path / "lm", "")
    contexts = prompts([6, 3, 11, 8], target.vocab_size)
    return Task(target, drafter, tmp_path / "lm", "hf_causal_lm", contexts, [0] * 4, LENGTH, SIZE, 0.0, frozenset())


def look_up(task: Task) -> Task:
    drafter = PromptLookupDrafter(task.target, DraftVocab(12), prefer="earliest")
    return replace(task, drafter=drafter, folder=None, format=None)


def ours(task: Task, made: Answers) -> list[Counts]:
    settings = DecodeSettings(task.max_new_tokens, SIZE)
    traces = [trace(task.target, task.drafter, context, settings) for context in task.contexts]
    ends = {"max_new_tokens": task.max_new_tokens, "positions": SIZE, "stop": task.stop}
    return [count(found, made.rule, **ends) for found in traces]


@pytest.mark.parametrize("stop", [(), (3, 7), (0, 1, 2, 4, 5)], ids=["no stop", "rare", "often"])
@pytest.mark.parametrize("length", [1, 2, 19, 20, 21])
@pytest.mark.parametrize("kind", ["draft model", "look-up"])
def test_transformers_counts_what_we_count(task: Task, kind: str, length: int, stop: tuple[int, ...]) -> None:
    asked = replace(task if kind == "draft model" else look_up(task), max_new_tokens=length, stop=frozenset(stop))
    made = run_transformers(asked)
    assert made.counts == ours(asked, made)
    if length >= 19 and not stop:  # there is something to count
        accepted, drafted = (
            sum(values) for values in zip(*((sum(c.accepted), c.drafted) for c in made.counts), strict=True)
        )
        assert 0.1 * drafted < accepted < 0.9 * drafted


def test_another_draft_model_is_noticed(task: Task) -> None:
    made = run_transformers(task)
    other = replace(task, drafter=shaken(near_copy(task.target), seed=3, amount=0.2))
    assert made.counts != ours(other, made)
    assert [c.token_ids for c in made.counts] == [c.token_ids for c in ours(other, made)]


@pytest.mark.parametrize("kind", ["draft model", "look-up"])
def test_the_reference_counts_what_we_count(task: Task, kind: str) -> None:
    asked = replace(task if kind == "draft model" else look_up(task), stop=frozenset({3, 7}))
    made = run_reference(asked)
    assert made.counts == ours(asked, made)


def test_rounds_are_told_from_passes() -> None:
    assert observed([1, 2, 3, 4, 5, 6], [[2, 9], [4, 5, 6]], 3) == Counts([1, 2, 3, 4, 5, 6], 2, 5, [2, 1, 1])
    assert observed([1, 2, 3, 4, 5, 6], [[2, 9], [4, 5, 6]], 3).rounds == [1, 3]
    assert observed([1, 2, 3], [[], [3, 4]], 2) == Counts([1, 2, 3], 1, 2, [1, 0])
    with pytest.raises(RuntimeError, match="1 rounds make 3 tokens, not the 6"):
        observed([1, 2, 3, 4, 5, 6], [[2, 9]], 3)


def test_what_an_engine_cannot_do_is_refused(task: Task) -> None:
    with pytest.raises(UserError, match=r"engine=vllm does not read format=sglang_eagle: choose vllm_eagle,"):
        refuse_unreadable("vllm", "sglang_eagle")
    with pytest.raises(UserError, match=r"engine=transformers does not read format=vllm_eagle"):
        refuse_unreadable("transformers", "vllm_eagle")
    refuse_unreadable("vllm", None)
    layers = EagleDrafter(task.target, DraftVocab(12))
    with pytest.raises(UserError, match="EagleDrafter has no files that an engine loads: give a format"):
        run_transformers(replace(task, drafter=layers, folder=None, format=None))
    with pytest.raises(UserError, match=r"prefer=earliest, or format=native"):
        PromptLookupDrafter(task.target, DraftVocab(12)).vllm_options(2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "with drafter.model.prefer=earliest to compare"),
        ({"prefer": "earliest", "min_ngram": 2}, "with drafter.model.min_ngram=1 to compare"),
        ({"min_ngram": 3}, "with drafter.model.prefer=earliest drafter.model.min_ngram=1 to compare"),
    ],
)
def test_a_look_up_that_transformers_does_otherwise_is_refused(task: Task, settings: dict[str, Any], said: str) -> None:
    drafter = PromptLookupDrafter(task.target, DraftVocab(12), **settings)
    with pytest.raises(UserError, match=f"earliest place of a match, .* {said}"):
        run_transformers(replace(task, drafter=drafter, folder=None, format=None))
    assert drafter.transformers_options(2)["max_matching_ngram_size"] == 3  # as for timing, where another may do


def test_samples_have_seeds_of_their_own() -> None:
    assert samples([[1], [2, 3]], 2, 5) == ([[1], [1], [2, 3], [2, 3]], [5, 6, 7, 8])


def test_vllms_settings(task: Task) -> None:
    greedy = {"method": "draft_model", "model": "drafter", "num_speculative_tokens": SIZE}
    assert speculative_config(task) == greedy
    assert speculative_config(replace(task, temperature=1.0)) == greedy | {"draft_sample_method": "probabilistic"}
    assert speculative_config(look_up(task))["method"] == "ngram"
    for name, method in engines.METHODS.items():
        asked = speculative_config(replace(task, format=name, folder=Path("/runs/eagle-1/EAGLE3/dflash/dspark")))
        assert asked["method"] == method
        assert not any(word in str(asked["model"]).lower() for word in ("eagle-", "eagle3", "dflash", "dspark"))
    own = speculative_config(replace(task, format="native", temperature=1.0))
    assert own["model"] == "models.vllm_proposer.TextProposer" and "draft_sample_method" not in own
    assert point_masses(replace(task, format="vllm_medusa"), "vllm")
    assert not point_masses(task, "vllm") and not point_masses(replace(task, format="vllm_medusa"), "reference")


MADE = {
    "versions": {"vllm": "0"},
    "answers": [
        {"token_ids": [1, 2], "histogram": [3, 2, 0, 1], "drafted": 17, "accepted_by_round": [0, 1, 3, 0, 1, 0]},
        {"token_ids": [4], "histogram": [0, 0, 0, 0], "drafted": 0, "accepted_by_round": []},
    ],
    "counters": {"drafts": 6, "drafted": 17, "accepted": 5},
}


def test_vllms_counts() -> None:
    assert counts_of(MADE, 3) == [Counts([1, 2], 6, 17, [3, 1, 1]), Counts([4], 0, 0, [0, 0, 0])]
    assert counts_of(MADE, 3)[0].histogram == [3, 2, 0, 1]
    assert counts_of(MADE, 3)[0].rounds == [0, 1, 3, 0, 1, 0]
    with pytest.raises(RuntimeError, match="by answer"):
        counts_of(MADE | {"counters": {"drafts": 6, "drafted": 17, "accepted": 4}}, 3)


def worker(folder: Path, text: str) -> Path:
    path = folder / "worker.py"
    path.write_text(f"import json, sys\nrequest = json.load(open(sys.argv[1]))\n{text}\n")
    return path


SETTINGS = {"python": sys.executable, "sampling_fix": True, "batch_size": 2}


def test_what_is_handed_to_vllm(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that answers every prompt with its own numbers; our packages are out of its sight."""
    text = f"""
assert "eval" not in sys.modules and not any(p.endswith("eval") for p in sys.path)
made = {MADE!r}
made["answers"] = [dict(made["answers"][0], token_ids=a["prompt"] + [a["seed"]]) for a in request["answers"]]
assert open("drafter/config.json").read()  # vLLM is started where the link is
made["counters"] = {{k: 4 * v for k, v in made["counters"].items()}}
json.dump(made, open(sys.argv[2], "w"))"""
    monkeypatch.setattr(engines, "WORKER", worker(tmp_path, text))
    asked = replace(task, seeds=[7, 8, 9, 10], stop=frozenset({5, 2}))
    made = vllm_runner(SETTINGS, tmp_path)(asked)
    assert made.rule is VLLM and made.versions == {"vllm": "0"}
    assert [c.token_ids for c in made.counts] == [[*c, s] for c, s in zip(task.contexts, asked.seeds, strict=True)]
    request: dict[str, Any] = json.loads((tmp_path / "hf_causal_lm-0.request.json").read_text())
    assert request["speculative_config"]["model"] == "drafter" and request["packages"] is None
    assert (tmp_path / "drafter").resolve() == task.folder
    assert request["max_model_len"] == 11 + LENGTH + 2 * (SIZE + 1) and request["stop_token_ids"] == [2, 5]
    assert request["sampling_fix"] is True and request["batch_size"] == 2
    model = Path(request["model"])
    assert (model / "config.json").exists() and (model / "tokenizer.json").exists()


def test_a_worker_that_fails_is_quoted(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "WORKER", worker(tmp_path, 'raise ValueError("no such tensor")'))
    with pytest.raises(UserError, match=r"vLLM ended with code 1: ValueError: no such tensor .*hf_causal_lm-0\.log"):
        vllm_runner(SETTINGS, tmp_path)(task)
