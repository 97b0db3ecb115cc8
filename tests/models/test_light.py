"""Light drafters: layers that go over rows in parts do what they do at once, and sparse MLPs keep the largest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models import light
from models.drafter.eagle import EagleDrafter
from models.errors import UserError
from models.layers import layer_config
from models.light import SparseMLP
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import EXACT, build_shaken, tiny_target

MODELS: dict[str, dict[str, Any]] = {
    "conv": {"_target_": "models.drafter.conv.ConvDrafter"},
    "linear_attention": {"_target_": "models.drafter.linear_attention.LinearAttentionDrafter", "num_layers": 2},
    "experts": {"_target_": "models.drafter.experts.ExpertsDrafter", "num_layers": 2},
    "top1": {"_target_": "models.drafter.experts.ExpertsDrafter", "route": "top1", "active": 3},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64, hidden_size=16, intermediate_size=24)


@pytest.mark.parametrize("name", MODELS)
def test_rows_in_parts_are_the_rows_at_once(name: str, target: Target) -> None:
    """Behind any split, and row by row; and no row depends on a later one. The last state can be had alone."""
    layer = build_shaken(MODELS[name], target, DraftVocab(64)).layers[0]
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    state = torch.randn(2, *layer.state_shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).abs()
    with torch.no_grad():
        whole, states = layer.scan(x, state)
        assert states.shape == (2, 9, *layer.state_shape)
        for cut in range(1, 9):
            first, before = layer.scan(x[:, :cut], state)
            second, after = layer.scan(x[:, cut:], before[:, -1])
            torch.testing.assert_close(torch.cat([first, second], dim=1), whole, **EXACT)
            torch.testing.assert_close(torch.cat([before, after], dim=1), states, **EXACT)
        alone, last = layer.scan(x, state, each=False)
        torch.testing.assert_close(alone, whole, **EXACT)
        torch.testing.assert_close(last, states[:, -1:], **EXACT)
    x.requires_grad_()
    out, _ = layer.scan(x, state)
    for row in range(9):
        (grad,) = torch.autograd.grad(out[0, row].sum(), x, retain_graph=True)
        reached = grad[0].abs().amax(-1) > 1e-12
        assert reached[row] and not reached[row + 1 :].any()


@pytest.mark.parametrize("name", MODELS)
def test_started_from_a_linear_map_it_is_that_map(name: str, target: Target) -> None:
    drafter = build_shaken(MODELS[name], target, DraftVocab(64))
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drafter.start_linear(weight, [])
    ids = torch.tensor([[3, 5, 7]])
    past = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    states = [past.new_zeros(1, *layer.state_shape) for layer in drafter.layers]
    with torch.no_grad():
        found, _ = drafter.scan(ids, past, states)
        torch.testing.assert_close(found, drafter.window(ids, past) @ weight.t(), **EXACT)


def kept_by_loop(mlp: Any, rows: Tensor, active: int) -> Tensor:
    """What an MLP (..., D) → (..., D) gives of which each row keeps its `active` largest inner numbers."""
    made = []
    for row in rows.reshape(-1, rows.shape[-1]):
        inner = torch.nn.functional.silu(mlp.gate_proj(row)) * mlp.up_proj(row)
        kept = sorted(range(len(inner)), key=lambda i: -abs(inner[i].item()))[:active]
        made.append(torch.stack([inner[i] * mlp.down_proj.weight[:, i] for i in kept]).sum(0))
    return torch.stack(made).view_as(rows) if made else rows  # an expert that is never chosen


def test_a_sparse_mlp_keeps_the_largest(target: Target) -> None:
    config = layer_config(target, 1)
    torch.manual_seed(0)
    sparse, dense = SparseMLP(config, 5).double(), SparseMLP(config).double()
    dense.load_state_dict(sparse.state_dict())
    x = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    found, expected = sparse(x), kept_by_loop(sparse, x, 5)
    torch.testing.assert_close(found, expected, **EXACT)
    upstream, leaves = torch.randn(4, 16, dtype=torch.float64), [x, *sparse.parameters()]
    ours, theirs = (torch.autograd.grad((made * upstream).sum(), leaves) for made in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b, **EXACT)
    assert (sparse(x) - dense(x)).abs().max() > 0.01
    for wrong in (-1, 25):
        with pytest.raises(UserError, match=f"active is {wrong}: it must be from 0"):
            SparseMLP(config, wrong)


@pytest.mark.parametrize("name", MODELS)
def test_active_is_an_option_of_each(name: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """All MLPs of all layers keep as many, and no more: values and gradients are those of loops."""
    model = {**MODELS[name], "num_layers": 2, "active": 3}
    drafter = build_shaken(model, target, DraftVocab(64))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(64, (2, 5), generator=generator)
    past = torch.randn(2, 5, 16, generator=generator, dtype=torch.float64)
    parameters = dict(drafter.named_parameters())

    def told() -> tuple[Tensor, list[Tensor]]:
        states = drafter.new_state(2, 10).layers
        found, _ = drafter.scan(ids, past, states)
        options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
        return found.detach(), list(torch.autograd.grad(found.square().sum(), list(parameters.values()), **options))

    ours, gradients = told()
    whole = build_shaken({**model, "active": 0}, target, DraftVocab(64))
    assert (whole.scan(ids, past, drafter.new_state(2, 10).layers)[0] - ours).abs().max() > 1e-3
    monkeypatch.setattr(SparseMLP, "forward", lambda mlp, rows: kept_by_loop(mlp, rows, 3))
    theirs, expected = told()
    torch.testing.assert_close(ours, theirs, **EXACT)
    for key, a, b in zip(parameters, gradients, expected, strict=True):
        torch.testing.assert_close(a, b, **EXACT, msg=key)
    assert sum(b.abs().max() > 1e-6 for b in expected) > len(expected) / 2


def test_what_is_remembered_does_not_grow(target: Target) -> None:
    eagle = EagleDrafter(target, DraftVocab(64)).new_state(2, 1000)
    assert eagle.cache.capacity == 1000
    for name in MODELS:
        drafter = build_shaken(MODELS[name], target, DraftVocab(64))
        sizes = [sum(state.numel() for state in drafter.new_state(2, room).layers) for room in (10, 1000)]
        assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize("name", MODELS)
def test_long_prompts_are_gone_over_in_parts(name: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests of different lengths: what is told and remembered is what one part for all rows gives."""
    drafter = build_shaken(MODELS[name], target, DraftVocab(64))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(64, (4, 11), generator=generator)
    hidden = torch.randn(4, 11, 16, generator=generator, dtype=torch.float64)
    committed = TargetFeatures(ids, ids.roll(-1, 1), hidden, torch.tensor([11, 1, 5, 4]))
    told = []
    for part in (64, 4):
        monkeypatch.setattr(light, "_PART", part)
        state = drafter.new_state(4, 100)
        with torch.no_grad():
            told.append([drafter.expander(state, committed).root(), *state.layers])
    for whole, parts in zip(*told, strict=True):
        torch.testing.assert_close(parts, whole, **EXACT)


def test_states_are_not_made_of_every_row_that_needs_none(target: Target) -> None:
    """Neither of a long prompt nor in training by one step: linear attention has a matrix a head and row."""
    drafter = build_shaken(MODELS["linear_attention"], target, DraftVocab(64))
    ids = torch.zeros(1, 640, dtype=torch.int64)
    features = TargetFeatures(ids, ids, torch.randn(1, 640, 16, dtype=torch.float64), torch.tensor([640]))
    matrix = drafter.new_state(1, 10).layers[0].numel()
    largest = []

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            if isinstance(made, Tensor):
                largest.append(made.numel())
            return made

    with Largest():
        drafter.expander(drafter.new_state(1, 1000), features).root()
        next(drafter.unroll(features, 1))
    assert max(largest) < 320 * matrix
    with Largest():
        next(drafter.unroll(features, 2))
    assert max(largest) >= 640 * matrix
