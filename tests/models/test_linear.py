"""Every route is the same product; only frozen float32 modules on a CPU are given routes."""

import pytest
import torch
from torch import nn

from models import linear
from models.linear import ROUTES, Product, accelerate, pack
from models.target.head import Head

SHAPES = [(1,), (2,), (3,), (5,), (2, 4), (1, 16), (33,), (2, 40)]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_route_is_the_product(
    route: str, bias: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "fastest", lambda *_: route)
    torch.manual_seed(0)
    layer = nn.Linear(48, 80, bias=bias).requires_grad_(False)
    x = torch.randn(*shape, 48)
    expected = layer.double()(x.double()).float()
    layer.float()
    product = Product(layer.weight, layer.bias)
    torch.testing.assert_close(product(x), expected, rtol=1e-5, atol=1e-5)
    if len(shape) > 1:
        crossed = x.transpose(0, 1)  # not contiguous
        torch.testing.assert_close(product(crossed), expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_no_rows_give_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "fastest", lambda *_: "packed")
    assert Product(torch.randn(8, 4), None)(torch.randn(0, 4)).shape == (0, 8)


class Holder(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.LayerNorm(8, dtype=dtype))
        self.head = Head(nn.Linear(8, 20, dtype=dtype), softcap=2.0)


def test_linears_and_heads_of_a_module_are_given_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(linear, "fastest", lambda *key: asked.append(key[:3]) or "transposed")
    holder = Holder(torch.float32).eval()
    x = torch.randn(3, 8)
    with torch.no_grad():
        before = holder.body(x), holder.head(x)
        accelerate(holder)
        after = holder.body(x), holder.head(x)
    assert {key[:2] for key in asked} == {(8, 8), (20, 8)}
    assert {key[2] for key in asked} == {1, 2, 4, 8, 16, 32}
    for ours, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_other_dtypes_are_left_alone() -> None:
    holder = Holder(torch.float64)
    accelerate(holder)
    assert "forward" not in vars(holder.body[0]) and "forward" not in vars(holder.head.linear)


def test_the_fastest_route_is_the_one_that_takes_least_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    cost = {"plain": 3.0, "transposed": 2.0, "packed": 5.0}

    def route(name: str):
        def run(x, weight, packed, bias):
            clock[0] += cost[name]

        return run

    monkeypatch.setattr(linear, "ROUTES", {name: route(name) for name in cost})
    monkeypatch.setattr(linear.time, "perf_counter", lambda: clock[0])
    linear.fastest.cache_clear()
    assert linear.fastest(8, 4, 2, 1) == "transposed"
    linear.fastest.cache_clear()


def test_packing_keeps_the_values() -> None:
    weight = torch.randn(24, 16)
    x = torch.eye(16)
    torch.testing.assert_close(ROUTES["packed"](x, weight, pack(weight), None), weight.t(), rtol=0, atol=1e-6)
