"""Looking into a model's own forward pass: what enters its layers, and an end as soon as enough is known.

B batch, S rows, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def states_entering(layers: nn.ModuleList, wanted: Iterable[int]) -> Iterator[dict[int, Tensor]]:
    """Collect, by their numbers, the states (B, S, D) that enter the layers `wanted` within."""
    captured: dict[int, Tensor] = {}
    hooks = [layers[i].register_forward_pre_hook(_keep_input(captured, i), with_kwargs=True) for i in wanted]
    try:
        yield captured
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def ending_before(layer: nn.Module) -> Iterator[None]:
    """A forward pass within ends where it comes to `layer`, behind hooks that stand there already."""
    hook = layer.register_forward_pre_hook(_stop)
    try:
        yield
    except _EnoughKnown:
        return
    finally:
        hook.remove()


class _EnoughKnown(Exception):
    """Ends a forward pass of which everything is known that was wanted."""


def _stop(module: nn.Module, args: tuple[Any, ...]) -> None:
    raise _EnoughKnown


def _keep_input(store: dict[int, Tensor], index: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        store[index] = args[0] if args else kwargs["hidden_states"]

    return hook
