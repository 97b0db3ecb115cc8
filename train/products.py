"""The matrix products of a piece of work: how many operations they are, and the same ones alone, to be timed.

Products are matrix products and attention. What they take alone, at the shapes and layouts in which the work has them
and in its order, is a bound of the work itself: it cannot be faster on this machine with these shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

_Key = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """2 · B · H · Q · W · (E + E'): scores, and the mixture of values; what a mask leaves out is counted too."""
    rows = query.shape[0] * query.shape[1] * query.shape[2]
    return int(2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _attention_backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> int:
    """Five products of the same size where the forward pass has two: the scores once more, and four gradients."""
    return _attention(query, key, value) * 5 // 2


_ON_CPU: dict[str, Callable[..., int]] = {  # which torch's own counter does not know
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}


class Products(TorchDispatchMode):
    """Within, every product is noted, those of backward passes too."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self._calls: list[tuple[Callable[..., Any], Any, dict[str, Any]]] = []
        self._tensors: dict[_Key, Tensor] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = function(*args, **kwargs)
        count = _ON_CPU.get(function.overloadpacket.__name__)
        if count is not None:
            self.flops += count(*args, **kwargs)
        elif function.overloadpacket in flop_registry:
            self.flops += flop_registry[function.overloadpacket](*args, **kwargs, out_val=found)
        else:
            return found
        self._calls.append((function, tree_map(self._like, args), tree_map(self._like, kwargs)))
        return found

    def _like(self, value: Any) -> Any:
        """A tensor of the same shape and layout, one for all that are alike; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        key = (tuple(value.shape), value.stride(), value.dtype, value.device)
        if key not in self._tensors:
            size = 1 + sum((count - 1) * stride for count, stride in zip(value.shape, value.stride(), strict=True))
            made = torch.randn(max(0, size), device=value.device).to(value.dtype)
            self._tensors[key] = made.as_strided(value.shape, value.stride())
        return self._tensors[key]

    @torch.no_grad()
    def run(self) -> None:
        """The same products once more, and nothing else."""
        for function, args, kwargs in self._calls:
            function(*args, **kwargs)
