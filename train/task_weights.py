"""How much the loss of each token ahead counts.

`weights.by` chooses, with k the number of tokens ahead that are trained now:
  uniform       1/k
  exponential   beta^i / Σ_j beta^j (FastMTP, 2509.18362)
  uncertainty   e^(−s_i)·L_i + s_i, with s_i learnt (1705.07115)
  gradnorm      so that the weighted gradients on what the tasks share get lengths in proportion to r^asymmetry, where r
                is how much less a loss has fallen than the others (1711.02257)

T tasks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.errors import UserError

_LEAST = 1e-3  # no weight falls below: a task without any could not come back


class TaskWeights(nn.Module):
    """1/k. A module, so that what is learnt is in checkpoints."""

    needs_gradients = False  # whether `update` is to be told the lengths of the tasks' gradients

    def factor(self, task: int, count: int) -> Tensor | float:
        """By what task `task` of `count` is multiplied."""
        return 1 / count

    def weigh(self, loss: Tensor, task: int, count: int) -> Tensor:
        """What task `task` of `count` adds to the loss."""
        return self.factor(task, count) * loss

    def update(self, losses: Tensor, lengths: Tensor) -> None:
        """Take note of the tasks' losses, and of the lengths of their weighted gradients on what they share: (T,)."""


class Exponential(TaskWeights):
    """β^i, adding up to 1."""

    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = beta

    def factor(self, task: int, count: int) -> float:
        return float(self.beta**task / sum(self.beta**other for other in range(count)))


class Uncertainty(TaskWeights):
    """A learnt log-variance for each task."""

    def __init__(self, num_tasks: int) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(num_tasks))

    def factor(self, task: int, count: int) -> Tensor:
        return (-self.log_variance[task]).exp()

    def weigh(self, loss: Tensor, task: int, count: int) -> Tensor:
        return self.factor(task, count) * loss + self.log_variance[task]


class GradNorm(TaskWeights):
    """w_i / k, the w_i adding up to k; each `update` is one step of the weights with learning rate `lr`."""

    needs_gradients = True
    weights: Tensor
    first: Tensor  # the losses when each task was first seen; NaN before

    def __init__(self, num_tasks: int, asymmetry: float, lr: float) -> None:
        super().__init__()
        self.asymmetry, self.lr = asymmetry, lr
        self.register_buffer("weights", torch.ones(num_tasks, dtype=torch.float64))
        self.register_buffer("first", torch.full((num_tasks,), float("nan"), dtype=torch.float64))

    def factor(self, task: int, count: int) -> float:
        weights = self.weights[:count]
        return float(weights[task] / weights.sum())

    @torch.no_grad()
    def update(self, losses: Tensor, lengths: Tensor) -> None:
        """One step down Σ_i |w_i·n_i − Ḡ·r_i^α|, n_i being the gradient's length without its weight."""
        count = len(losses)
        device = self.weights.device
        losses, lengths = losses.to(device, torch.float64), lengths.to(device, torch.float64)
        self.first[:count] = torch.where(self.first[:count].isnan(), losses, self.first[:count])
        weights = self.weights[:count] * (count / self.weights[:count].sum())
        bare = lengths * count / weights
        fallen = losses / self.first[:count].clamp(min=1e-12)
        wanted = (weights * bare).mean() * (fallen / fallen.mean().clamp(min=1e-12)) ** self.asymmetry
        weights = (weights - self.lr * (weights * bare - wanted).sign() * bare).clamp(min=_LEAST)
        self.weights[:count] = weights * (count / weights.sum())


def make_weights(
    num_tasks: int, *, by: str = "uniform", beta: float = 0.6, asymmetry: float = 1.5, lr: float = 0.025
) -> TaskWeights:
    """The weights that `drafter.training.weights` describes. Raises UserError for an unknown kind or a senseless β."""
    kinds: dict[str, Any] = {
        "uniform": TaskWeights,
        "exponential": lambda: Exponential(beta),
        "uncertainty": lambda: Uncertainty(num_tasks),
        "gradnorm": lambda: GradNorm(num_tasks, asymmetry, lr),
    }
    if by not in kinds:
        raise UserError(f"drafter.training.weights.by is {by!r}: choose {', '.join(kinds)}.")
    for name, value in {"beta": beta, "lr": lr}.items():
        if not value > 0:
            raise UserError(f"drafter.training.weights.{name} is {value}: it must be above 0.")
    made: TaskWeights = kinds[by]()
    return made
