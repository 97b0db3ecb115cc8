"""How many tokens ahead are trained, and when it becomes one more (2505.22757: forward, from few to many).

`curriculum.by` chooses:
  constant      all from the start
  steps         one more every `every` optimizer steps; null: so that each number gets an equal share of the training
  epochs        min(k_max, first + per_epoch · epoch)
  acceptance    one more once `patience` measurements in the engine did not raise the acceptance of the first k tokens
                by `least_gain`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.stats import DecodingStats
from models.errors import UserError


class Curriculum(nn.Module):
    """All `num_steps` tokens from the start; a module, so that what a subclass learns on the way is in checkpoints."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.most = num_steps

    def num_steps(self, step: int, epoch: int) -> int:
        """How many tokens ahead are trained at an optimizer step, in an epoch of the answers; both count from 0."""
        return self.most

    def measured(self, stats: DecodingStats) -> None:
        """Take note of what the engine measured on validation prompts."""


class BySteps(Curriculum):
    """One more every `every` steps."""

    def __init__(self, num_steps: int, first: int, every: int) -> None:
        super().__init__(num_steps)
        self.first, self.every = first, every

    def num_steps(self, step: int, epoch: int) -> int:
        return min(self.most, self.first + step // self.every)


class ByEpochs(Curriculum):
    """`per_epoch` more every epoch."""

    def __init__(self, num_steps: int, first: int, per_epoch: float) -> None:
        super().__init__(num_steps)
        self.first, self.per_epoch = first, per_epoch

    def num_steps(self, step: int, epoch: int) -> int:
        return min(self.most, int(self.first + self.per_epoch * epoch))


class ByAcceptance(Curriculum):
    """One more whenever validation acceptance stalls."""

    current: Tensor  # how many tokens
    best: Tensor  # the largest acceptance with so many
    stalls: Tensor  # measurements since then

    def __init__(self, num_steps: int, first: int, patience: int, least_gain: float) -> None:
        super().__init__(num_steps)
        self.patience, self.least_gain = patience, least_gain
        self.register_buffer("current", torch.tensor(first))
        self.register_buffer("best", torch.tensor(0.0, dtype=torch.float64))
        self.register_buffer("stalls", torch.tensor(0))

    def num_steps(self, step: int, epoch: int) -> int:
        return min(self.most, int(self.current))

    def measured(self, stats: DecodingStats) -> None:
        """Compare the acceptance of the first k tokens, k being what is trained now, with the best one so far."""
        k = int(self.current)
        tested = stats.tested[:, :k].sum()
        acceptance = stats.accepted[:, :k].sum() / tested if tested else 0.0
        if acceptance >= float(self.best) + self.least_gain:
            self.best.fill_(acceptance)
            self.stalls.zero_()
            return
        self.stalls += 1
        if int(self.stalls) >= self.patience and k < self.most:
            self.current += 1
            self.best.zero_()
            self.stalls.zero_()


def check_reach(curriculum: Mapping[str, Any], num_steps: int, max_steps: int, evaluate_every: int) -> None:
    """Refuse a curriculum by acceptance that a training has too few measurements for to reach `num_steps`.

    With each number of tokens the first measurement is the one to be beaten, and `patience` more must not do so; the
    one behind the last step comes too late. Raises UserError that says what to set.
    """
    if curriculum.get("by") != "acceptance":
        return
    first, patience = curriculum.get("first", 1), curriculum.get("patience", 2)
    asked, found = (num_steps - first) * (1 + patience), (max_steps - 1) // evaluate_every
    if found < asked:
        raise UserError(
            f"drafter.training.curriculum.by=acceptance goes from {first} to {num_steps} tokens ahead by {asked} "
            f"measurements at least, and there are {found} before the last of {max_steps} steps: set "
            f"fit.evaluate_every={max(1, (max_steps - 1) // asked)} or less, or "
            f"fit.max_steps={asked * evaluate_every + 1} or more, or a smaller drafter.training.curriculum.patience."
        )


def make_curriculum(
    num_steps: int,
    max_steps: int,
    *,
    by: str = "constant",
    first: int = 1,
    every: int | None = None,
    per_epoch: float = 1,
    patience: int = 2,
    least_gain: float = 0.01,
) -> Curriculum:
    """The curriculum that `drafter.training.curriculum` describes, for a training of `max_steps` optimizer steps.

    Raises UserError for an unknown kind, and for numbers with which it would not move.
    """
    kinds: dict[str, Any] = {
        "constant": lambda: Curriculum(num_steps),
        "steps": lambda: BySteps(num_steps, first, every or max(1, max_steps // max(1, num_steps - first + 1))),
        "epochs": lambda: ByEpochs(num_steps, first, per_epoch),
        "acceptance": lambda: ByAcceptance(num_steps, first, patience, least_gain),
    }
    if by not in kinds:
        raise UserError(f"drafter.training.curriculum.by is {by!r}: choose {', '.join(kinds)}.")
    if not 1 <= first <= num_steps:
        raise UserError(f"drafter.training.curriculum.first is {first}: it must be between 1 and num_steps.")
    for name, value in {"every": every, "per_epoch": per_epoch, "patience": patience}.items():
        if value is not None and not value > 0:
            raise UserError(f"drafter.training.curriculum.{name} is {value}: it must be above 0.")
    made: Curriculum = kinds[by]()
    return made
