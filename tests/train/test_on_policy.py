"""What the drafter says for itself: its own greedy and sampled text, where it ends, and how it is mixed in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from data.loader import Batch
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, tiny_target
from train.on_policy import continue_answers, mixed

MODEL = {"_target_": "models.drafter.distilled_lm.DistilledLM", "num_layers": 1}
NONE: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64, max_position_embeddings=64)


@pytest.fixture(scope="module")
def drafter(target: Target) -> Any:
    return build_shaken(MODEL, target, DraftVocab(64))


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Answers behind 5, 2 and 30 tokens, the last row's two turns; and one with nothing that was said."""
    ids = torch.randint(64, (4, 50), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(4, 50, dtype=torch.bool)
    mask[0, 5:40], mask[1, 2:20], mask[2, 30:34], mask[2, 40:50] = True, True, True, True
    return Batch(ids, mask, torch.tensor([40, 20, 50, 9]), None)


def greedy_by_loop(drafter: Any, text: list[int], length: int) -> list[int]:
    """One whole forward pass for every token."""
    text = list(text)
    while len(text) < length:
        hidden = drafter.lm.model.base_model(torch.tensor([text]), use_cache=False).last_hidden_state[0, -1]
        text.append(int(drafter.vocab.to_target(drafter.logits(hidden).argmax())))
    return text


@torch.no_grad()
def test_greedy_continuations_are_the_drafters_own(drafter: Any, batch: Batch) -> None:
    made = continue_answers(drafter, batch, temperature=0.0, seed=0, stop_token_ids=NONE)
    assert made.lengths.tolist() == [40, 20, 50, 9] and made.hidden is None
    for row, known in enumerate([6, 3, 31, 9]):
        length = int(made.lengths[row])
        expected = greedy_by_loop(drafter, batch.token_ids[row, :known].tolist(), length)
        assert made.token_ids[row, :length].tolist() == expected
        mask = [known <= t < length for t in range(made.token_ids.shape[1])]
        assert made.loss_mask[row].tolist() == mask
    assert len(set(made.token_ids[0, 6:40].tolist())) > 5


def test_sampled_continuations_depend_on_the_seed_and_the_row_alone(drafter: Any, batch: Batch) -> None:
    once, again, other = (
        continue_answers(drafter, batch, temperature=1.0, seed=seed, stop_token_ids=NONE).token_ids
        for seed in (1, 1, 2)
    )
    assert torch.equal(once, again)
    assert (once[0, 6:40] != other[0, 6:40]).any() and (once[0, :6] == batch.token_ids[0, :6]).all()


def test_a_stop_token_ends_a_text(drafter: Any, batch: Batch) -> None:
    free = continue_answers(drafter, batch, temperature=0.0, seed=0, stop_token_ids=NONE)
    stop = int(free.token_ids[0, 25])  # behind the first piece of sixteen
    where = free.token_ids[0, 6:].tolist().index(stop) + 6
    made = continue_answers(drafter, batch, temperature=0.0, seed=0, stop_token_ids=frozenset({stop}))
    assert int(made.lengths[0]) == where + 1
    assert torch.equal(made.token_ids[0, : where + 1], free.token_ids[0, : where + 1])
    assert not made.loss_mask[0, where + 1 :].any() and made.loss_mask[0, where]


def test_a_full_context_ends_a_text(target: Target, batch: Batch) -> None:
    config = target.config.to_diff_dict() | {"max_position_embeddings": 24}
    drafter = build_shaken(MODEL | {"num_layers": None, "config": config}, target, DraftVocab(64))
    short = Batch(batch.token_ids[:2], batch.loss_mask[:2], batch.lengths[:2], None)
    made = continue_answers(drafter, short, temperature=0.0, seed=0, stop_token_ids=NONE)
    assert made.lengths.tolist() == [25, 20]


def test_mixing_takes_whole_rows(batch: Batch) -> None:
    def states(b: Batch) -> Tensor:
        return b.token_ids[..., None].double() + torch.arange(3)

    shorter = Batch(batch.token_ids[:, :40] + 100, ~batch.loss_mask[:, :40], batch.lengths.clamp(max=40), None)
    chosen = torch.tensor([True, False, False, True])
    for ours, theirs in ((batch, shorter), (shorter, batch)):
        ours, theirs = (b._replace(hidden=states(b)) for b in (ours, theirs))
        found = mixed(ours, theirs, chosen)
        for row, source in enumerate([theirs, ours, ours, theirs]):
            width = source.token_ids.shape[1]
            assert found.token_ids.shape[1] == 50
            for name in ("token_ids", "loss_mask", "hidden"):
                assert torch.equal(getattr(found, name)[row, :width], getattr(source, name)[row])
                assert not getattr(found, name)[row, width:].any()
            assert found.lengths[row] == source.lengths[row]
    assert mixed(batch, shorter, chosen).hidden is None
