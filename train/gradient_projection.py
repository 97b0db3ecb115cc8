"""Gradient projection for several tasks on shared parameters (PCGrad, 2001.06782, algorithm 1).

Each task's gradient loses what points against another task's: for the others in random order, where g_i·g_j < 0,
g_i ← g_i − (g_i·g_j)/‖g_j‖²·g_j, with the others as they were. Then all are added up.

T tasks, P numbers of a parameter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

TaskGradients = Sequence[Sequence[Tensor | None]]  # for each task one gradient a parameter; None: it has no part in it


def projected(gradients: TaskGradients, orders: Sequence[Sequence[int]]) -> tuple[list[Tensor | None], float]:
    """The sum of the tasks' projected gradients, and how often a pair was projected: between 0 and 1.

    Only parameters that more than one task reaches are projected, all of them as one vector; those of one task get its
    gradient as it is. orders[i] holds the other tasks in the order in which task i meets them.
    """
    columns = list(zip(*gradients, strict=True))
    shared = [column for column in columns if _count(column) > 1]
    if not shared:
        return [_sum(column, [1.0] * len(gradients)) for column in columns], 0.0
    coefficients, count = _coefficients(_gram(shared), orders)
    factors = coefficients.sum(0).tolist()
    alone = [1.0] * len(gradients)
    summed = [_sum(column, factors if _count(column) > 1 else alone) for column in columns]
    return summed, count / max(1, sum(map(len, orders)))


def random_orders(num_tasks: int, seed: int, step: int) -> list[list[int]]:
    """For each task the others, shuffled; the same for the same seed and step."""
    chance = random.Random(f"{seed} {step}")
    orders = [[other for other in range(num_tasks) if other != task] for task in range(num_tasks)]
    for order in orders:
        chance.shuffle(order)
    return orders


def norms(gradients: TaskGradients) -> Tensor:
    """Lengths (T,) of the tasks' gradients over the parameters that more than one task reaches; 0 without any."""
    shared = [column for column in zip(*gradients, strict=True) if _count(column) > 1]
    return _gram(shared).diagonal().sqrt() if shared else torch.zeros(len(gradients), dtype=torch.float64)


def _coefficients(gram: Tensor, orders: Sequence[Sequence[int]]) -> tuple[Tensor, int]:
    """C (T, T) with task i's projected gradient Σ_j C[i, j]·g_j, from all g_i·g_j; and how often one was projected.

    The projected gradients stay in the span of the given ones, so that products between these say it all.
    """
    coefficients, count = torch.eye(len(gram), dtype=gram.dtype), 0
    for task, order in enumerate(orders):
        for other in order:
            product = coefficients[task] @ gram[:, other]
            if product < 0:
                coefficients[task, other] -= product / gram[other, other]
                count += 1
    return coefficients, count


def _gram(columns: Sequence[Sequence[Tensor | None]]) -> Tensor:
    """All products g_i·g_j (T, T) on the host, in float64."""
    total: Tensor | float = 0.0
    for column in columns:
        like = next(g for g in column if g is not None)
        rows = torch.stack([torch.zeros_like(like) if g is None else g for g in column]).flatten(1)  # (T, P)
        total = total + (rows @ rows.t()).double()
    assert isinstance(total, Tensor)
    return total.cpu()


def _sum(column: Sequence[Tensor | None], factors: Sequence[float]) -> Tensor | None:
    parts = [factor * g for factor, g in zip(factors, column, strict=True) if g is not None]
    return sum(parts[1:], start=parts[0]) if parts else None


def _count(column: Sequence[Tensor | None]) -> int:
    return sum(g is not None for g in column)
