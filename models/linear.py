"""The same matrix product by the fastest of several routes, for decoding on a CPU.

Decoding multiplies a few rows (1 to some 30) by weights that do not fit into the processor's cache. torch's default
product then takes up to four times as long as other routes to the same result on the same machine. `accelerate`
lets frozen layers use the route that was fastest for their shape and number of rows; what was measured is kept in the
user's cache, so that every run on a machine takes the same routes and computes the same bits. Training, other dtypes
and GPUs are left alone. Routes differ in the last bits of their results, as any change of batch size does.

m rows, K inputs, F outputs.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor, nn

from models.errors import UserError
from models.files import cache_folder, write_text

_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)  # rows are rounded up to one of these
_MEASURED_BYTES = 64 * 2**20  # more weights than the last-level cache holds, so that they are read from memory
_PACKED_FOR = 16  # rows; packed for 1, five rows take half as long again
_LEAST_GAIN = 0.95  # another route than torch's must take at most this share of its time


@dataclass(frozen=True, slots=True)
class Route:
    """A way to compute x·Wᵀ + b: `prepare` makes of W (F, K) what `run` reads."""

    prepare: Callable[[Tensor], Tensor]
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x (m, K), what was prepared, bias → (m, F)


def _as_it_is(weight: Tensor) -> Tensor:
    return weight


def _transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(W·xᵀ)ᵀ. One row goes as two: a matrix times a vector reads memory at a third of the speed."""
    if len(x) == 1:
        out = torch.mm(weight, x.expand(2, -1).contiguous().t())[:, :1].contiguous().t()
    else:
        out = torch.mm(weight, x.t()).t()
    return out if bias is None else out + bias


def _pack(weight: Tensor) -> Tensor:
    """W in oneDNN's blocked layout for a few rows; an opaque copy."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR)
    return packed


def _packed(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


ROUTES = {
    "plain": Route(_as_it_is, nn.functional.linear),
    "transposed": Route(_as_it_is, _transposed),
    "packed": Route(_pack, _packed),
}


class Product:
    """x ↦ x·Wᵀ + b for a frozen weight (F, K) by the route that was fastest for the number of rows.

    More rows than were measured go through the packed weight where it is held, else through torch's own product. Rows
    that a gradient is wanted for, as a drafter's that learns through the target's head, always take torch's own.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        routes = fastest_routes(*weight.shape, torch.get_num_threads())
        many = "packed" if "packed" in routes else "plain"
        prepared = {name: ROUTES[name].prepare(weight) for name in {*routes, many}}
        self._routes = [(ROUTES[name].run, prepared[name]) for name in (*routes, many)]

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if rows == 0 or x.requires_grad:
            return nn.functional.linear(x, self.weight, self.bias)
        bucket = next((i for i, most in enumerate(_BUCKETS) if rows <= most), len(_BUCKETS))
        run, weight = self._routes[bucket]
        out = run(x.reshape(rows, -1).contiguous(), weight, self.bias)  # transposed rows are multiplied slowly
        return out.reshape(*x.shape[:-1], -1)


def accelerate(linears: Iterable[nn.Linear]) -> None:
    """Give frozen linear layers their fastest routes; float32 on a CPU only, others stay as they are.

    The layers must not be trained afterwards: a route may hold a reordered copy of a weight.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for linear in linears:
        weight = linear.weight.detach()
        routed = "forward" in vars(linear)  # a head that several modules share
        if not routed and weight.dtype == torch.float32 and weight.device.type == "cpu":
            bias = None if linear.bias is None else linear.bias.detach()
            linear.forward = Product(weight, bias)  # type: ignore[method-assign, assignment]


@cache
def fastest_routes(outputs: int, inputs: int, threads: int) -> tuple[str, ...]:
    """The name of the fastest route for x (m, inputs) and W (outputs, inputs), for each m of the buckets.

    Read from the user's cache, or measured (half a second) and written there, where it can be written.
    """
    path = cache_folder() / f"routes-{platform.node() or 'here'}.json"
    key = f"{outputs}x{inputs}, {threads} threads, torch {torch.__version__}, packed for {_PACKED_FOR}, {_BUCKETS}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):  # of two first runs, the second takes what the first measures
            known = _read(path)
            if set(known.get(key, [])) <= set(ROUTES) and len(known.get(key, [])) == len(_BUCKETS):
                return tuple(known[key])
            routes = _measure(outputs, inputs)
            write_text(path, json.dumps(known | {key: routes}, indent=1, sort_keys=True) + "\n")
            return routes
    except (UserError, OSError):  # a read-only home: measured anew in every process
        return _measure(outputs, inputs)


def _read(path: Path) -> dict[str, list[str]]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@torch.inference_mode()
def _measure(outputs: int, inputs: int) -> tuple[str, ...]:
    copies = max(1, min(64, -(-_MEASURED_BYTES // (4 * outputs * inputs))))
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(outputs, inputs, generator=generator) for _ in range(copies)]
    prepared = {name: [route.prepare(weight) for weight in weights] for name, route in ROUTES.items()}
    chosen = []
    for rows in _BUCKETS:
        x = torch.randn(rows, inputs, generator=generator)
        seconds = dict.fromkeys(ROUTES, float("inf"))
        for _ in range(5):  # in turns, so that a disturbance does not hit one route alone
            for name, held in prepared.items():
                run, started = ROUTES[name].run, time.perf_counter()
                for weight in held:
                    run(x, weight, None)
                seconds[name] = min(seconds[name], time.perf_counter() - started)
        best = min(seconds, key=lambda name: seconds[name])
        chosen.append(best if seconds[best] < _LEAST_GAIN * seconds["plain"] else "plain")
    return tuple(chosen)
