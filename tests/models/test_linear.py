"""Every route is the same product; only frozen float32 modules on a CPU are given routes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models import linear
from models.linear import ROUTES, Product, Route, accelerate
from models.target.head import Head, linears_of

SHAPES = [(1,), (2,), (3,), (5,), (2, 4), (1, 16), (33,), (2, 40)]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_route_is_the_product(
    route: str, bias: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "fastest_routes", lambda *_: (route,) * len(linear._BUCKETS))
    torch.manual_seed(0)
    layer = nn.Linear(48, 80, bias=bias).requires_grad_(False)
    x = torch.randn(*shape, 48)
    expected = layer.double()(x.double()).float()
    layer.float()
    product = Product(layer.weight, layer.bias)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(product(x), expected, **close)
    if len(shape) > 1:
        crossed = x.transpose(0, 1)  # not contiguous
        torch.testing.assert_close(product(crossed), expected.transpose(0, 1), **close)


def test_no_rows_give_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "fastest_routes", lambda *_: ("packed",) * len(linear._BUCKETS))
    assert Product(torch.randn(8, 4), None)(torch.randn(0, 4)).shape == (0, 8)


class Holder(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.LayerNorm(8, dtype=dtype))
        self.head = Head(nn.Linear(8, 20, dtype=dtype), softcap=2.0)


def test_the_linears_of_a_module_and_of_its_heads_are_given_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        linear, "fastest_routes", lambda *key: asked.append(key[:2]) or ("transposed",) * len(linear._BUCKETS)
    )
    holder = Holder(torch.float32).eval()
    x = torch.randn(3, 8)
    with torch.no_grad():
        before = holder.body(x), holder.head(x)
        accelerate(linears_of(holder))
        after = holder.body(x), holder.head(x)
    assert sorted(asked) == [(8, 8), (20, 8)]
    for ours, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_gradients_pass_through_an_accelerated_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "fastest_routes", lambda *_: ("packed",) * len(linear._BUCKETS))
    head = Head(nn.Linear(8, 20), softcap=2.0)
    x = torch.randn(3, 8)
    gradients = []
    for _ in range(2):
        rows = x.clone().requires_grad_()
        head(rows).square().sum().backward()
        gradients.append(rows.grad)
        accelerate([head.linear])
    assert torch.equal(*gradients)


def test_what_is_no_module_has_no_linears() -> None:
    assert linears_of(object()) == []


def test_other_dtypes_are_left_alone() -> None:
    holder = Holder(torch.float64)
    accelerate(linears_of(holder))
    assert "forward" not in vars(holder.body[0]) and "forward" not in vars(holder.head.linear)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, float]:
    """An empty cache, and routes that take as long as the dictionary says."""
    now = [0.0]
    cost = {"plain": 3.0, "transposed": 2.0, "packed": 5.0}

    def route(name: str) -> Route:
        def run(*_: Any) -> Any:
            now[0] += cost[name]

        return Route(lambda weight: weight, run)

    monkeypatch.setattr(linear, "ROUTES", {name: route(name) for name in cost})
    monkeypatch.setattr(linear.time, "perf_counter", lambda: now[0])
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return cost


def measured_afresh(outputs: int) -> tuple[str, ...]:
    linear.fastest_routes.cache_clear()
    return linear.fastest_routes(outputs, 4, 1)


def test_the_fastest_route_is_the_one_that_takes_least_time(clock: dict[str, float]) -> None:
    assert measured_afresh(8) == ("transposed",) * len(linear._BUCKETS)
    clock["packed"] = 1.0
    assert measured_afresh(16) == ("packed",) * len(linear._BUCKETS)
    clock |= {"plain": 1.01}
    assert measured_afresh(24) == ("plain",) * len(linear._BUCKETS), "too little is gained to leave torch's own route"


def test_what_was_measured_once_is_kept(clock: dict[str, float], tmp_path: Path) -> None:
    assert measured_afresh(8) == measured_afresh(16) == ("transposed",) * len(linear._BUCKETS)
    clock["plain"] = 0.1
    assert measured_afresh(8) == measured_afresh(16) == ("transposed",) * len(linear._BUCKETS)
    assert measured_afresh(32) == ("plain",) * len(linear._BUCKETS)
    (path,) = (tmp_path / "cache").glob("routes-*.json")
    for damage in ("{", "[]", path.read_text().replace("transposed", "gone")):
        path.write_text(damage)
        assert measured_afresh(8) == ("plain",) * len(linear._BUCKETS)


def test_a_cache_that_cannot_be_written_is_done_without(clock: dict[str, float], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert measured_afresh(8) == ("transposed",) * len(linear._BUCKETS)


@pytest.mark.parametrize("route", [name for name in ROUTES if name != "plain"])
def test_preparing_a_weight_keeps_its_values(route: str) -> None:
    weight = torch.randn(24, 48)
    prepared = ROUTES[route].prepare(weight)
    product = ROUTES[route].run(torch.eye(48), prepared, None)
    torch.testing.assert_close(product, weight.t(), rtol=0, atol=1e-6)
