"""Text drafters as vLLM's custom proposer runs them: what they propose there is what our engine's rounds show."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.settings import DecodeSettings
from eval.rounds import trace
from models.checkpoint import native
from models.errors import UserError
from models.target import Target
from models.target.load import TINY, load_skeleton
from models.vllm_proposer import TextProposer
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, prompts

SIZE, CAPACITY = 4, 120
LOOKUP = {"_target_": "models.drafter.prompt_lookup.PromptLookupDrafter"}
SUFFIX = {"_target_": "models.drafter.suffix.SuffixDrafter"}
CACHE = {"_target_": "models.drafter.lookup_cache.LookupCacheDrafter", "ngrams": [3, 2, 1]}
EAGLE = {"_target_": "models.drafter.eagle.EagleDrafter"}


def exported(tiny: Target, folder: Path, model: dict[str, Any]) -> Any:
    drafter = build_shaken(model, tiny, DraftVocab(tiny.vocab_size))
    if hasattr(drafter, "count"):
        drafter.count(prompts([40, 30], tiny.vocab_size, seed=5) * 2)
    place = {"name": tiny.name, "fingerprint": tiny.fingerprint, "load": {"source": "tiny"}}
    native.save(drafter, native.Export("mine", model, place, SIZE, {}), drafter.vocab, folder, "")
    return drafter


def vllm_config(folder: Path | None) -> Any:
    """The parts of vLLM's configuration that it is made of."""
    return SimpleNamespace(
        additional_config={} if folder is None else {"draftsmith": str(folder)},
        model_config=SimpleNamespace(model=str(TINY), max_model_len=CAPACITY),
        speculative_config=SimpleNamespace(num_speculative_tokens=SIZE),
    )


def asked(proposer: TextProposer, texts: list[list[int]], ready: list[bool] | None = None) -> list[list[int]]:
    """One call, as vLLM makes it: rows of a table that is wider than the texts, with rubbish behind them."""
    table = np.full((len(texts) + 1, CAPACITY + 8), 7, dtype=np.int32)
    for row, text in enumerate(texts):
        table[row, : len(text)] = text
    ready = ready or [True] * len(texts)
    sampled = [[text[-1]] if there else [] for text, there in zip(texts, ready, strict=True)]
    return proposer.propose(sampled, np.array([*map(len, texts), 0]), table, slot_mappings=None)


def test_a_skeleton_has_the_targets_fingerprint(tiny: Target) -> None:
    skeleton = load_skeleton(str(TINY))
    assert skeleton.fingerprint == tiny.fingerprint and skeleton.vocab_size == tiny.vocab_size
    assert skeleton.device.type == "meta"


@pytest.mark.parametrize("model", [LOOKUP, SUFFIX, CACHE], ids=["look-up", "suffix", "cache"])
def test_it_proposes_what_the_engine_drafts(model: dict[str, Any], tiny: Target, tmp_path: Path) -> None:
    """Three requests in one batch, whose rows change places; one leaves and returns."""
    drafter = exported(tiny, tmp_path / "export", model)
    proposer = TextProposer(vllm_config(tmp_path / "export"))
    contexts = [tiny.encode(text) for text in ("for i in range(", "def f(x):\n    return x\n\ndef g(x", "import os\n")]
    traces = [trace(tiny, drafter, context, DecodeSettings(30, SIZE)) for context in contexts]
    texts, wanted = [], []
    for context, found in zip(contexts, traces, strict=True):
        given, stages = 1, []
        for done in found.rounds:
            stages.append((context + found.token_ids[:given], done.draft, given))
            given += done.accepted + 1
        whole = [stage for stage in stages if stage[2] <= 30]  # later drafts are cut by the end
        texts.append([text for text, _, _ in whole])
        wanted.append([draft for _, draft, _ in whole])
    assert sum(bool(draft) for drafts in wanted for draft in drafts) > 5
    for step in range(min(map(len, texts))):
        rows = [0, 1, 2] if step % 3 else ([2, 0] if step % 2 else [1, 2, 0])
        assert asked(proposer, [texts[row][step] for row in rows]) == [wanted[row][step] for row in rows]


def test_a_request_is_left_alone_while_its_prompt_is_read_and_where_no_room_is_left(
    tiny: Target, tmp_path: Path
) -> None:
    exported(tiny, tmp_path / "export", LOOKUP)
    proposer = TextProposer(vllm_config(tmp_path / "export"))
    text = [5, 6, 7, 5, 6]
    assert asked(proposer, [text, text], [False, True]) == [[], [7, 5, 6]]
    assert asked(proposer, [text * 24]) == [[]] and len(text * 24) == CAPACITY


def test_what_it_cannot_run_is_refused(tiny: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="additional_config"):
        TextProposer(vllm_config(None))
    exported(tiny, tmp_path / "eagle", EAGLE)
    with pytest.raises(UserError, match="EagleDrafter, which reads more than text"):
        TextProposer(vllm_config(tmp_path / "eagle"))
