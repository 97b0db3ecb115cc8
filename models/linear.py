"""The same matrix product by the fastest of several routes, for decoding on a CPU.

Decoding multiplies a few rows (1 to some 30) by weights that do not fit into the processor's cache. torch's default
product then takes up to four times as long as other routes to the same result on the same machine. `accelerate`
measures the routes for each shape and number of rows once, and lets frozen modules use the fastest; training, other
dtypes and GPUs are left alone. Routes differ in the last bits of their results, as any change of batch size does.

m rows, K inputs, F outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from models.target.head import Head

_BUCKETS = (1, 2, 4, 8, 16, 32)  # rows are rounded up to one of these; more rows than the last take torch's route
_CACHE_BYTES = 64 * 2**20  # more weights than the last-level cache holds, so that they are read from memory

Route = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]  # x (m, K), W (F, K), packed W, bias


def _plain(x: Tensor, weight: Tensor, packed: Tensor | None, bias: Tensor | None) -> Tensor:
    return nn.functional.linear(x, weight, bias)


def _transposed(x: Tensor, weight: Tensor, packed: Tensor | None, bias: Tensor | None) -> Tensor:
    out = torch.mm(weight, x.t()).t()
    return out if bias is None else out + bias


def _packed(x: Tensor, weight: Tensor, packed: Tensor | None, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


ROUTES: dict[str, Route] = {"plain": _plain, "transposed": _transposed, "packed": _packed}


def pack(weight: Tensor) -> Tensor:
    """Reorder a weight (F, K) into oneDNN's blocked layout; an opaque copy."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return packed


class Product:
    """x ↦ x·Wᵀ + b for a frozen weight (F, K) by the route that was fastest for the number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.routes = tuple(fastest(*weight.shape, rows, torch.get_num_threads()) for rows in _BUCKETS)
        self._packed = pack(weight) if "packed" in self.routes else None

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if rows > _BUCKETS[-1] or rows == 0:
            return nn.functional.linear(x, self.weight, self.bias)
        index = next(i for i, most in enumerate(_BUCKETS) if rows <= most)
        route = ROUTES[self.routes[index]]
        out = route(x.reshape(rows, -1), self.weight, self._packed, self.bias)
        return out.view(*x.shape[:-1], -1) if out.is_contiguous() else out.reshape(*x.shape[:-1], -1)


def accelerate(module: nn.Module) -> None:
    """Give every linear layer of a frozen module, and of the heads that it holds, its fastest routes.

    Float32 on a CPU only. The module must not be trained afterwards: a route may hold a reordered copy of a weight.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for part in module.modules():
        heads = [value.linear for value in vars(part).values() if isinstance(value, Head)]
        for linear in [part, *heads] if isinstance(part, nn.Linear) else heads:
            weight = linear.weight.detach()
            routed = "forward" in vars(linear)  # a head that several modules share
            if not routed and weight.dtype == torch.float32 and weight.device.type == "cpu":
                bias = None if linear.bias is None else linear.bias.detach()
                linear.forward = Product(weight, bias)  # type: ignore[method-assign, assignment]


@cache
@torch.inference_mode()
def fastest(outputs: int, inputs: int, rows: int, threads: int) -> str:
    """The name of the fastest route for x (rows, inputs) and W (outputs, inputs), by measurement in this process."""
    copies = max(1, min(32, -(-_CACHE_BYTES // (4 * outputs * inputs))))
    weights = [torch.randn(outputs, inputs) for _ in range(copies)]
    packed = [pack(weight) for weight in weights]
    x = torch.randn(rows, inputs)
    seconds = dict.fromkeys(ROUTES, float("inf"))
    for _ in range(4):  # in turns, so that a disturbance does not hit one route alone
        for name, route in ROUTES.items():
            started = time.perf_counter()
            for weight, reordered in zip(weights, packed, strict=True):
                route(x, weight, reordered, None)
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return min(seconds, key=lambda name: seconds[name])
