"""Training of several tokens ahead as so many tasks: how each counts, whether they may pull against each other, and
how many there are yet.

B batch, S rows, D hidden size, T tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from data.loader import Batch, StepBatches
from models.target import Target
from models.types import TargetFeatures
from train.curriculum import make_curriculum
from train.gradient_projection import norms, projected, random_orders
from train.law_matching import LawMatching
from train.least_squares import check_start, moments, ridge
from train.processes import means
from train.task_weights import make_weights

Gradients = list[Tensor | None]


class MultiToken(LawMatching):
    """Σ_i λ_i · D(p, q_i) over as many tokens ahead as the curriculum says; see `train.task_weights`.

    With `projection`, the tasks' gradients are projected where they conflict (`train.gradient_projection`). Tasks are
    taken one after the other. A drafter with a `trunk`, whose heads read that alone, gets each head's gradients before
    the next head is run, and the sum of what they say to the trunk passes through that once (2404.19737, §2): neither
    logits nor states of two heads are alive at a time.

    Where the target is trained too, its own loss is one more task, and its parameters are among those that are shared.
    """

    def __init__(
        self,
        drafter: Any,
        target: Target,
        *,
        num_steps: int,
        max_steps: int,
        weights: dict[str, Any],
        curriculum: dict[str, Any],
        projection: bool,
        start: str,
        **others: Any,
    ) -> None:
        super().__init__(drafter, target, num_steps=num_steps, max_steps=max_steps, position_decay=1.0, **others)
        self.weights = make_weights(num_steps, **weights)
        self.curriculum = make_curriculum(num_steps, max_steps, **curriculum)
        self.projection, self.from_least_squares = projection, check_start(start)
        self._batches_per_epoch = float("inf")

    def start(self, batches: StepBatches) -> None:
        """Before the first step: set the drafter to the best linear map of what it reads onto the next state.

        The layers then learn what is left, and heads of further tokens what is further off.
        """
        if self.from_least_squares:
            found = moments(batches, self.target.device, self._rows)
            scale = found.root_mean_squares
            self.drafter.start_linear(ridge(found.read, found.both).t() / scale[:, None], scale)

    def _rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What supervised rows read, and the states that follow them: (M, 2·D) and (M, D)."""
        features, states = self.features(batch)
        assert states is not None
        supervised = batch.loss_mask[:, 2:]
        read = self.drafter.linear_inputs(features)[:, :-2][supervised]
        return read, states[:, 1:-1][supervised].to(read.dtype)

    def on_train_start(self) -> None:
        super().on_train_start()
        batches = getattr(self.trainer.train_dataloader, "dataset", None)
        if isinstance(batches, StepBatches):
            self._batches_per_epoch = batches.num_rows / batches.batch_size

    def measured(self, stats: Any) -> None:
        self.curriculum.measured(stats)

    def training_losses(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """The loss, `num_steps` trained now, `conflict_rate` with projection, and what is told of every token ahead."""
        tasks = self._tasks(batch, step)
        told: dict[str, Tensor] = {}
        if self.projection or self.weights.needs_gradients:
            loss, told = self._from_gradients(tasks, step)
        elif hasattr(self.drafter, "trunk"):
            loss = tasks.head_by_head(self._trained)
        else:
            loss = torch.stack(list(tasks)).sum()
        return {"loss": loss, **told, **tasks.parts}

    def joined(self, batch: Batch, step: int, base: Tensor, weight: float) -> dict[str, Tensor]:
        """With projection, the target's own loss is a task among those of the tokens ahead."""
        if not self.projection:
            return super().joined(batch, step, base, weight)
        tasks = self._tasks(batch, step)
        loss, told = self._from_gradients(tasks, step, base, weight)
        return {"loss": loss, **told, **tasks.parts, "drafter_loss": (loss - base.detach()) / weight}

    def _tasks(self, batch: Batch, step: int) -> _Tasks:
        """Those of as many tokens ahead as are trained now."""
        features, states = self.features(batch)
        assert states is not None
        batch = batch._replace(loss_mask=self._proposable(states, batch.loss_mask))
        count = self.curriculum.num_steps(step // self._batches_per_step, int(step / self._batches_per_epoch))
        return _Tasks(self, batch, features, states, count)

    @property
    def _trained(self) -> list[nn.Parameter]:
        """All that is trained; last what the tasks' weights learn, which no two tasks share."""
        weights = list(self.weights.parameters())
        apart = {id(p) for p in weights}
        return [p for p in self.parameters() if p.requires_grad and id(p) not in apart] + weights

    def _from_gradients(
        self, tasks: _Tasks, step: int, base: Tensor | None = None, weight: float = 1.0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`base`, if given, and `weight` times the other losses; the gradient is made of the tasks' own, one by one."""
        own: list[Gradients] = []
        value = torch.zeros((), device=self.device)
        for loss in tasks:
            own.append(means(_gradients(weight * loss, self._trained, retain_graph=True)))
            value = value + weight * loss.detach()
        if self.weights.needs_gradients:
            self.weights.update(torch.stack([t for t in means(tasks.losses) if t is not None]), norms(own) / weight)
        found, told = own, {}
        if base is not None:
            first = means(_gradients(base, self._trained, retain_graph=True))
            found, value = [first, *own], value + base.detach()
        orders = random_orders(len(found), self.seed, step) if self.projection else [[] for _ in found]
        shared = len(self._trained) - len(list(self.weights.parameters()))
        gradients, conflict_rate = projected([task[:shared] for task in found], orders)
        gradients += projected([task[shared:] for task in found], [[] for _ in found])[0]
        if self.projection:
            told["conflict_rate"] = torch.tensor(conflict_rate)
        return with_gradients(value, self._trained, gradients), told


class _Tasks:
    """The weighted losses of the tokens ahead, one after the other; what is told of them gathers in `parts`."""

    def __init__(self, regime: MultiToken, batch: Batch, features: TargetFeatures, states: Tensor, count: int) -> None:
        self._regime, self._batch, self._features, self._states, self._count = regime, batch, features, states, count
        self.losses: list[Tensor] = []  # without their weights
        self.parts: dict[str, Tensor] = {"num_steps": torch.tensor(float(count))}

    def __iter__(self) -> Iterator[Tensor]:
        for ahead, hidden in enumerate(self._regime.drafter.unroll(self._features, self._count)):
            yield self._loss(hidden, ahead)

    def _loss(self, hidden: Tensor, ahead: int) -> Tensor:
        loss, told = self._regime.step_loss(self._batch, self._states, hidden, ahead)
        self.losses.append(loss.detach())
        name = "" if ahead == 0 else f"_{ahead}"
        self.parts |= told
        self.parts[f"weight{name}"] = torch.as_tensor(self._regime.weights.factor(ahead, self._count)).detach()
        return self._regime.weights.weigh(loss, ahead, self._count)

    def head_by_head(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The sum of all losses, with gradients that were taken head by head."""
        drafter = self._regime.drafter
        trunk = drafter.trunk(self._features)
        leaf = trunk.detach().requires_grad_()
        total: Gradients = [None] * (len(parameters) + 1)
        value = torch.zeros((), device=trunk.device)
        for ahead in range(self._count):
            loss = self._loss(drafter.ahead(leaf, self._features, ahead), ahead)
            _add(total, _gradients(loss, [leaf, *parameters]))
            value = value + loss.detach()
            del loss
        upstream, own = total[0], total[1:]
        assert upstream is not None
        hidden = self._features.hidden  # behind it, a target that is trained has a loss of its own
        _add(own, _gradients(trunk, parameters, upstream, retain_graph=hidden is not None and hidden.requires_grad))
        return with_gradients(value, parameters, own)


def with_gradients(value: Tensor, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """`value`, whose backward pass gives `parameters` these gradients; Lightning then scales and clips them."""
    result: Tensor = _Given.apply(value, list(gradients), *parameters)
    return result


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Gradients, *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        return (None, None, *(None if g is None else g * upstream[0] for g in ctx.gradients))


def _gradients(
    of: Tensor, parameters: Sequence[Tensor], upstream: Tensor | None = None, *, retain_graph: bool = False
) -> Gradients:
    found = torch.autograd.grad(of, parameters, upstream, retain_graph=retain_graph, allow_unused=True)
    return list(found)


def _add(total: Gradients, more: Sequence[Tensor | None]) -> None:
    for index, gradient in enumerate(more):
        if gradient is not None:
            known = total[index]
            total[index] = gradient if known is None else known + gradient
