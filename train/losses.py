"""Losses over supervised positions, computed a few rows at a time.

M supervised rows, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

RowLoss = Callable[[Tensor, slice], Tensor]  # hidden rows (C, D) and which rows they are → sum of their losses
_CACHED_NUMBERS = 2**18  # a megabyte of float32


def chunked_loss(
    row_loss: RowLoss, hidden: Tensor, parameters: Iterable[nn.Parameter] = (), chunk_rows: int = 512
) -> Tensor:
    """Σ over rows of `row_loss`, with at most `chunk_rows` rows of logits alive, in the backward pass too.

    hidden (M, D) → scalar. The gradient of each chunk is taken at once and kept as (chunk, D), so nothing is computed
    twice. `parameters` are those of the head inside `row_loss` that are trained; none for a frozen head.
    """
    result: Tensor = _Chunked.apply(row_loss, chunk_rows, hidden, *parameters)
    return result


def law_loss(row_loss: RowLoss, logits: Tensor) -> Tensor:
    """Σ over rows of `row_loss`, which reads logits (M, ..., Vd) many times over: → scalar.

    On the CPU it gets as few rows at a time as its processor keeps at hand: read from memory each time, laws over a
    vocabulary take as long as the products that logits come from.
    """
    if logits.is_cuda:
        return row_loss(logits, slice(0, len(logits)))
    return chunked_loss(row_loss, logits, chunk_rows=max(1, _CACHED_NUMBERS // max(1, logits[:1].numel())))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row_loss: RowLoss, chunk_rows: int, hidden: Tensor, *parameters: Tensor) -> Tensor:
        wants_grad = ctx.needs_input_grad[2:]
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        grads = [
            make(t) if wanted else None
            for make, t, wanted in zip(
                (torch.empty_like, *[torch.zeros_like] * len(parameters)),
                (hidden, *parameters),
                wants_grad,
                strict=True,
            )
        ]
        for start in range(0, len(hidden), chunk_rows):
            rows = slice(start, min(start + chunk_rows, len(hidden)))
            with torch.enable_grad():
                chunk = hidden[rows].detach().requires_grad_()
                loss = row_loss(chunk, rows)
            total += loss.detach()
            inputs = [t for t, grad in zip((chunk, *parameters), grads, strict=True) if grad is not None]
            if not inputs:
                continue
            found = iter(torch.autograd.grad(loss, inputs))
            for index, grad in enumerate(grads):
                if index == 0 and grad is not None:
                    grad[rows] = next(found)
                elif grad is not None:
                    grad.add_(next(found))
        ctx.grads = grads
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        return (None, None, *(None if grad is None else grad * upstream[0] for grad in ctx.grads))


def top_k_cross_entropy(draft_logits: Tensor, target_logits: Tensor, top_k: int) -> Tensor:
    """−Σ p(x) log q(x) per row over the `top_k` tokens x of the largest p, all if they are fewer: (M, Vd) twice → (M,).

    The laws themselves are over all Vd (HASS, 2408.15766). Laws and losses are in float32 at least.
    """
    dtype = torch.promote_types(draft_logits.dtype, torch.float32)
    p, tokens = target_logits.softmax(-1, dtype=dtype).topk(min(top_k, target_logits.shape[-1]), dim=-1)
    return -(p * draft_logits.log_softmax(-1, dtype=dtype).gather(-1, tokens)).sum(-1)


def regression(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A distance of estimated and true states, summed over rows and averaged over D.

    "mse" is the squared error, "smooth_l1" EAGLE's published Huber loss with β = 1.
    """
    elementwise = {"mse": nn.functional.mse_loss, "smooth_l1": nn.functional.smooth_l1_loss}[kind]
    return lambda estimate, true: elementwise(estimate, true, reduction="sum") / estimate.shape[-1]
