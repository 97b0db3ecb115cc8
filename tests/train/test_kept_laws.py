"""Training from the likeliest tokens of the target's laws, kept in place of its last state."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import datasets
import hydra
import pytest
import torch
from torch import Tensor

from conf.compose import ROOT, plain
from data.features import CacheSettings
from data.loader import StepBatches
from data.shards import spread, top_laws
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, tiny_target

VOCAB = 10
ROWS = [[(3 * i + j * (i % 4 + 1)) % VOCAB for j in range(6 + i % 7)] for i in range(24)]
KEPT = torch.tensor([0, 2, 3, 5, 8, 9])


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64, vocab_size=VOCAB)


def regime_of(name: str, target: Target, vocab: DraftVocab, *overrides: str) -> Any:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        options = plain(hydra.compose("train", overrides=[f"+drafter={name}", *overrides]))["drafter"]
    drafter = build_shaken(options["model"], target, vocab).train()
    return hydra.utils.instantiate(options["training"], drafter, target, max_steps=10, seed=0)


def batches_of(regime: Any, root: Path, top_k: int | None) -> StepBatches:
    masks = [[0, 0] + [1] * (len(row) - 2) for row in ROWS]
    batches = StepBatches(datasets.Dataset.from_dict({"token_ids": ROWS, "loss_mask": masks}), 6, 12, seed=0)
    if top_k is not None:
        regime.keep_laws(top_k)
    regime.cache_states(batches, root, settings=CacheSettings(top_k=top_k))
    return batches


def losses(regime: Any, batches: StepBatches) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    found = regime.training_losses(batches[1], 1)
    parameters = [p for p in regime.parameters() if p.requires_grad]
    return found, list(torch.autograd.grad(found["loss"], parameters, allow_unused=True))


@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
@pytest.mark.parametrize("name", ["eagle3", "dflash", "distilled_lm"])
def test_laws_of_all_tokens_teach_what_states_do(name: str, reduced: bool, target: Target, tmp_path: Path) -> None:
    vocab = DraftVocab(VOCAB, KEPT if reduced else None)
    whole = regime_of(name, target, vocab)
    expected, theirs = losses(whole, batches_of(whole, tmp_path, None))
    regime = regime_of(name, target, vocab)
    batches = batches_of(regime, tmp_path, VOCAB)
    found, ours = losses(regime, batches)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key].double(), value.double(), atol=1e-5, rtol=1e-5, msg=key)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert batches.cache is not None and batches.cache.layout.num_layers == len(regime.drafter.capture_layers)


def test_what_few_tokens_leave_over_is_spread_evenly() -> None:
    """Against loops, over the whole vocabulary and a part of it, of any leading shape."""
    logits = 2 * torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    laws = top_laws(logits, 4)
    for token_ids in (None, KEPT):
        found = spread(laws, VOCAB, token_ids)
        for row in range(2):
            for column in range(3):
                law = logits[row, column].softmax(-1).tolist()
                likeliest = sorted(range(VOCAB), key=lambda x: -law[x])[:4]
                rest = (1 - sum(law[x] for x in likeliest)) / (VOCAB - 4)
                expected = [math.log(law[x] if x in likeliest else rest) for x in range(VOCAB)]
                chosen = range(VOCAB) if token_ids is None else token_ids.tolist()
                assert found[row, column].tolist() == pytest.approx([expected[x] for x in chosen])
    torch.testing.assert_close(spread(laws, VOCAB).exp().sum(-1), torch.ones(2, 3, dtype=torch.float64))


def test_what_the_drafter_reads_and_the_first_choices_are_as_before(target: Target, tmp_path: Path) -> None:
    regime = regime_of("eagle3", target, DraftVocab(VOCAB, KEPT))
    full, states = regime.features(batches_of(regime, tmp_path, None)[0])
    batches = batches_of(regime, tmp_path, 3)
    batch = batches[0]
    features, laws = regime.features(batch)
    assert features.hidden is not None and torch.equal(features.hidden, full.hidden.to(features.hidden))
    assert laws.shape[-1] == 6
    supervised = batch.loss_mask
    assert torch.equal(regime.first_choices(laws[supervised]), target.head(states[supervised]).argmax(-1))
    with regime.whole_states(batches):
        assert regime.features(batches[0])[1].shape[-1] == target.hidden_size
    assert batches[0].hidden is not None


@pytest.mark.parametrize(
    ("name", "top_k", "overrides", "message"),
    [
        ("eagle", 4, (), "EagleDrafter reads that itself"),
        ("mtp", 4, (), "SequentialMTP reads that itself"),
        ("eagle3", 32, (), "they take 8 bytes a token, 256 in all, and the state no more"),
        ("distilled_lm", 4, ("drafter.training.w_layers=1.0",), "w_layers compares that itself"),
    ],
)
def test_where_laws_cannot_stand_for_the_state_it_is_said(
    name: str, top_k: int, overrides: tuple[str, ...], message: str, target: Target
) -> None:
    with pytest.raises(UserError, match=message):
        regime_of(name, target, DraftVocab(VOCAB), *overrides).keep_laws(top_k)
