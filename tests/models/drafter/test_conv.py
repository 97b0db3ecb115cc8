"""The convolution against a loop over rows and places, values and gradients."""

from __future__ import annotations

import pytest
import torch

from models.drafter.conv import ConvDrafter, ConvLayer
from models.errors import UserError
from models.layers import layer_config
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import EXACT, shaken, tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64, hidden_size=16, intermediate_size=24)


@pytest.mark.parametrize("kernel_size", [1, 4])
def test_mixing_is_that_of_loops(kernel_size: int, target: Target) -> None:
    torch.manual_seed(0)
    layer = shaken(ConvLayer(layer_config(target, 1), kernel_size, 0).double())
    x = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
    state = torch.randn(2, kernel_size - 1, 16, dtype=torch.float64, requires_grad=True)
    found, states = layer.mix(x, state, each=True)
    rows = []
    for text in range(2):
        before = [*state[text], *x[text]]
        for t in range(6):
            places = [layer.depthwise[-1 - i] * before[kernel_size - 1 + t - i] for i in range(kernel_size)]
            total = torch.stack(places).sum(0)
            rows.append(layer.pointwise.weight @ (total * total.sigmoid()))
            if kernel_size > 1:
                last = torch.stack(before[t + 1 : t + kernel_size])
                torch.testing.assert_close(states[text, t], last, **EXACT)
    expected = torch.stack(rows).view(2, 6, 16)
    torch.testing.assert_close(found, expected, **EXACT)
    upstream = torch.randn(2, 6, 16, dtype=torch.float64)
    leaves = [x, layer.depthwise, layer.pointwise.weight, *([state] if kernel_size > 1 else [])]
    ours, theirs = (torch.autograd.grad((made * upstream).sum(), leaves) for made in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b, **EXACT)


def test_a_kernel_of_nothing_is_refused(target: Target) -> None:
    with pytest.raises(UserError, match="kernel_size is 0: it must be at least 1"):
        ConvDrafter(target, DraftVocab(64), kernel_size=0)
