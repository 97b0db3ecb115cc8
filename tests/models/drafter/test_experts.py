"""Experts against a loop over rows, values and gradients; a gate that switches with what the text is about."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.drafter.experts import ExpertsDrafter, ExpertsLayer
from models.errors import UserError
from models.layers import layer_config
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import EXACT, shaken, tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64, hidden_size=16, intermediate_size=24)


@pytest.mark.parametrize("route", ["soft", "top1"])
def test_rows_are_those_of_loops(route: str, target: Target) -> None:
    torch.manual_seed(0)
    layer = shaken(ExpertsLayer(layer_config(target, 1), 3, 0.8, route, 0).double())
    layer.gate.weight.data *= 5
    x = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
    start = torch.randn(2, 17, dtype=torch.float64)
    start[:, -1] = start[:, -1].abs()
    found, states = layer.scan(x, start)
    rows, chosen = [], set()
    for text in range(2):
        total: Tensor = start[text, :-1]
        weight = start[text, -1]
        for t in range(6):
            row = layer.norm(x[text, t])
            total, weight = 0.8 * total + row, 0.8 * weight + 1
            torch.testing.assert_close(states[text, t], torch.cat([total, weight[None]]), **EXACT)
            gates = (layer.gate.weight @ (total / weight)).softmax(0)
            best = int(gates.argmax())
            chosen.add(best)
            kept = range(3) if route == "soft" else [best]
            rows.append(x[text, t] + sum(gates[i] * layer.experts[i](row) for i in kept))
    assert len(chosen) > 1
    expected = torch.stack(rows).view(2, 6, 16)
    torch.testing.assert_close(found, expected, **EXACT)
    upstream = torch.randn(2, 6, 16, dtype=torch.float64)
    leaves = [x, layer.gate.weight, *(expert.up_proj.weight for expert in layer.experts)]
    options: dict[str, Any] = {"allow_unused": True}  # an expert that top1 never chose
    ours, theirs = (torch.autograd.grad((made * upstream).sum(), leaves, **options) for made in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        if b is None:
            assert a is None or not a.any()
        else:
            assert b.abs().max() > 1e-3
            torch.testing.assert_close(a, b, **EXACT)


def test_the_expert_switches_with_the_domain(target: Target) -> None:
    """Behind some rows of another kind, another expert; the longer it remembers, the later."""
    torch.manual_seed(0)
    one, other = torch.randn(16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    text = torch.stack([one] * 8 + [other] * 24)[None]
    switched = []
    for memory in (0.0, 0.7, 0.95):
        layer = ExpertsLayer(layer_config(target, 1), 2, memory, "top1", 0).double()
        rows = layer.norm(text)
        layer.gate.weight.data = torch.stack([rows[0, 0], rows[0, -1]])
        with torch.no_grad():
            gates = layer.gates(layer.sums(rows, torch.zeros(1, 17, dtype=torch.float64)))[0]
        best = gates.argmax(-1).tolist()
        assert best[0] == 0 and best[-1] == 1
        switched.append(best.index(1))
    assert 8 == switched[0] < switched[1] < switched[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_experts": 0}, "num_experts is 0"),
        ({"memory": 1.0}, "memory is 1.0"),
        ({"route": "hard"}, "route is 'hard': choose soft or top1"),
    ],
)
def test_senseless_settings_are_refused(arguments: dict[str, Any], message: str, target: Target) -> None:
    with pytest.raises(UserError, match=message):
        ExpertsDrafter(target, DraftVocab(64), **arguments)


def test_an_expert_is_a_quarter_of_the_targets_width(target: Target) -> None:
    for given, width in ((None, 6), (9, 9)):
        layers: Any = ExpertsDrafter(target, DraftVocab(64), intermediate_size=given).layers
        assert {expert.up_proj.out_features for expert in layers[0].experts} == {width}
