"""Activation checkpointing: the same gradients, with less kept, for every drafter whose layers allow it."""

from __future__ import annotations

from typing import Any

import hydra
import pytest
import torch
from torch import Tensor

from conf.compose import ROOT, plain
from models.errors import UserError
from models.recompute import Recomputing, recompute_activations
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.documents import shipped_drafters
from tests.helpers.drafters import build_shaken, tiny_target
from train.memory import saved_storages

STEPS = 3
OURS = [
    "conv", "dflash", "dspark", "eagle", "eagle3", "eagle_window", "experts", "hass", "linear_attention", "mtp",
    "mtp_cascaded", "mtp_hierarchical", "mtp_parallel",
]  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64)


def built(name: str, target: Target) -> Any:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        model = plain(hydra.compose("train", overrides=[f"+drafter={name}"]))["drafter"]["model"]
    if "num_layers" in model:
        model["num_layers"] = 2
    return build_shaken(model, target, DraftVocab(target.vocab_size)).train()


def features_of(drafter: Any, target: Target) -> TargetFeatures:
    ids = torch.randint(target.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    hidden = target(ids, capture_layers=drafter.capture_layers).hidden
    return TargetFeatures(ids, ids.roll(-1, dims=1), hidden, torch.tensor([24, 24]))


def gradients(drafter: Any, features: TargetFeatures) -> tuple[list[Tensor], list[Tensor | None], int]:
    """States of all steps, gradients of a sum of them that no two rows share, and the bytes kept in between."""
    with saved_storages([*drafter.parameters(), *drafter._embedding[0].parameters()]) as kept:
        steps = list(drafter.unroll(features, STEPS))
        weights = torch.randn(steps[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        total = torch.stack([(steps[s] * weights.roll(s, 1)).sum() for s in range(STEPS)]).sum()
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    return steps, list(torch.autograd.grad(total, parameters, allow_unused=True)), sum(kept.values())


@pytest.mark.parametrize("name", OURS)
def test_gradients_are_the_same_and_less_is_kept(name: str, target: Target) -> None:
    drafter = built(name, target)
    features = features_of(drafter, target)
    steps, expected, kept = gradients(drafter, features)
    recompute_activations(drafter)
    again, found, kept_now = gradients(drafter, features)
    for a, b in zip((*steps, *expected), (*again, *found), strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert torch.equal(a, b)
    assert sum(g is not None and float(g.abs().max()) > 1e-6 for g in expected) > 5
    assert kept_now < 0.75 * kept


def test_every_drafter_with_such_layers_is_among_them(target: Target) -> None:
    for name in sorted(set(shipped_drafters(ROOT.parent)) - set(OURS)):
        with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
            options = plain(hydra.compose("train", overrides=[f"+drafter={name}"]))["drafter"]
        if not options.get("training") or options["model"].get("export", 0) is None:
            continue
        drafter = build_shaken(options["model"], target, DraftVocab(target.vocab_size))
        assert not any(isinstance(part, Recomputing) for part in drafter.modules()), name


def test_layers_are_run_once_where_no_gradients_are_wanted(target: Target) -> None:
    drafter = built("eagle3", target)
    recompute_activations(drafter)
    calls: list[int] = []
    drafter.stack.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    features = features_of(drafter, target)
    with torch.no_grad():
        list(drafter.unroll(features, STEPS))
    assert len(calls) == STEPS
    calls.clear()
    torch.stack([s.sum() for s in drafter.unroll(features, STEPS)]).sum().backward()
    assert len(calls) == 2 * STEPS
    calls.clear()
    drafter.eval()
    torch.stack([s.sum() for s in drafter.unroll(features, STEPS)]).sum().backward()
    assert len(calls) == STEPS


def test_a_drafter_without_such_layers_is_refused(target: Target) -> None:
    with pytest.raises(UserError, match="MedusaDrafter has no decoder layers"):
        recompute_activations(built("medusa", target))
