"""The model of a training's peak memory against what the allocator counts."""

from __future__ import annotations

from typing import Any

import hydra
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from conf.compose import ROOT, plain
from data.loader import Batch
from models.checkpoint import native
from models.recompute import recompute_activations
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import tiny_target
from train.memory import Peak, peak

BATCH_SIZE, ROWS = 8, 256
NEAR = 0.2


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=6, max_position_embeddings=ROWS
    )


def regime_of(name: str, target: Target, *overrides: str) -> Any:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        options = plain(hydra.compose("train", overrides=[f"+drafter={name}", *overrides]))["drafter"]
    torch.manual_seed(0)
    drafter = native.build(options["model"], target, DraftVocab(target.vocab_size)).train()
    return hydra.utils.instantiate(options["training"], drafter, target, max_steps=10, seed=0)


def batch_of(target: Target, regime: Any, *, online: bool) -> Batch:
    ids = torch.randint(target.vocab_size, (BATCH_SIZE, ROWS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    hidden = None if online else target.states(ids, regime.capture_layers).detach().clone()
    return Batch(ids, mask, torch.full((BATCH_SIZE,), ROWS), hidden)


def measured(regime: Any, batch: Batch) -> int:
    """The most bytes that the second step allocates on top of what there was before it, moments being there."""
    optimizer = torch.optim.AdamW([p for p in regime.parameters() if p.requires_grad], lr=1e-4)

    def step(number: int) -> None:
        regime.training_losses(batch, number)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step(1)
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    alive = most = 0
    for _, change in changes:
        alive += change
        most = max(most, alive)
    assert most > 0
    return most


def told(found: Peak) -> int:
    """The same, of the model: weights, moments and cached states are there before."""
    return found.total - found.weights - found.moments - found.states


@pytest.mark.parametrize("twice", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp", "dflash"])
def test_the_model_is_near_what_is_measured(name: str, twice: bool, target: Target) -> None:
    regime = regime_of(name, target, *(["drafter.model.num_layers=2"] if name != "dflash" else []))
    if name == "dflash":
        regime.num_anchors = ROWS
    if twice:
        recompute_activations(regime.drafter)
    found = peak(regime, BATCH_SIZE, ROWS, online=False)
    assert told(found) == pytest.approx(measured(regime, batch_of(target, regime, online=False)), rel=NEAR)


def test_computing_twice_saves_what_the_model_says(target: Target) -> None:
    both = []
    for twice in (False, True):
        regime = regime_of("eagle3", target, "drafter.model.num_layers=2")
        if twice:
            recompute_activations(regime.drafter)
        found = told(peak(regime, BATCH_SIZE, ROWS, online=False))
        both.append((found, measured(regime, batch_of(target, regime, online=False))))
    (plain_told, plain_measured), (twice_told, twice_measured) = both
    assert twice_measured < 0.6 * plain_measured
    assert plain_told - twice_told == pytest.approx(plain_measured - twice_measured, rel=NEAR)


def test_what_is_there_before_the_step_is_counted(target: Target) -> None:
    regime = regime_of("eagle3", target)
    found = peak(regime, BATCH_SIZE, ROWS, online=True)
    own = sum(p.numel() for p in regime.drafter.parameters())
    assert found.weights == 4 * (own + sum(p.numel() for p in target.model.parameters()))
    assert (found.gradients, found.moments) == (4 * own, 8 * own)
    assert found.states == BATCH_SIZE * ROWS * 4 * 128 * 4  # three captured layers, and the last
    assert found.target_pass == BATCH_SIZE * ROWS * (6 * 128 + 3 * 256) * 4
    cached = peak(regime, BATCH_SIZE, ROWS, online=False)
    assert cached.target_pass == 0 and cached.activations == found.activations
    regime.keep_laws(8)
    assert peak(regime, BATCH_SIZE, ROWS, online=False).states == BATCH_SIZE * ROWS * (3 * 128 + 2 * 8) * 4
    assert "memory: about" in str(found) and "activations" in str(found)


def test_it_leaves_gradients_and_random_numbers_alone(target: Target) -> None:
    regime = regime_of("eagle3", target)
    state = torch.get_rng_state()
    peak(regime, 2, 32, online=False)
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in regime.parameters())
