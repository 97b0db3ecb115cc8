"""The drafter that learns beside the one that serves: its optimizer, its adapters, and what a restart needs of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.errors import UserError
from models.lora import add_adapters, merged
from models.target import Target
from train.adaptation.batches import replay_batch
from train.adaptation.records import Record
from train.adaptation.regime import LossSettings, OnlineRegime, OptimizerSettings
from train.adaptation.replay import DRAWS, ReplayBuffer, draw_positions

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Updates:
    """When and from what is learnt: every `every` requests, `steps` steps of `requests` texts each.

    Not before the buffer holds `wait` requests: a few texts would be learnt by heart. The share `fresh_share` of the
    texts are fresh ones, the others of the buffer, drawn by `draw`; of each text `positions` are learnt (None: all).
    Gradients are clipped at the norm `clip`. What is served is a moving average of the weights, `average` of it staying
    at each step (0: the last weights): a few texts at a constant learning rate leave every single step's weights worse
    than their mean.
    """

    every: int = 8
    steps: int = 4
    requests: int = 8
    wait: int = 0
    fresh_share: float = 0.5
    positions: int | None = None
    draw: str = "priority"
    clip: float = 0.5
    average: float = 0.95

    def __post_init__(self) -> None:
        for name in ("every", "steps", "requests"):
            if getattr(self, name) < 1:
                raise UserError(f"adaptation.updates.{name} is {getattr(self, name)}: it must be at least 1.")
        if self.positions is not None and self.positions < 1:
            raise UserError(f"adaptation.updates.positions is {self.positions}: at least 1, or null for all.")
        if self.wait < 0:
            raise UserError(f"adaptation.updates.wait is {self.wait}: it must not be below 0.")
        if not 0 <= self.fresh_share <= 1:
            raise UserError(f"adaptation.updates.fresh_share is {self.fresh_share}: it must be from 0 to 1.")
        if self.draw not in DRAWS:
            raise UserError(f"adaptation.updates.draw is {self.draw!r}: choose {', '.join(DRAWS)}.")
        if not self.clip > 0:
            raise UserError(f"adaptation.updates.clip is {self.clip}: it must be above 0.")
        if not 0 <= self.average < 1:
            raise UserError(f"adaptation.updates.average is {self.average}: it must be at least 0, and below 1.")


class Learner:
    """Trains `drafter`, which nothing else may use; with `lora` adapters in it alone (`models.lora`).

    `depth` is how many tokens deep its drafts are.
    """

    def __init__(
        self,
        drafter: Any,
        target: Target,
        updates: Updates,
        loss: LossSettings,
        optimizer: OptimizerSettings,
        lora: Mapping[str, Any] | None,
        *,
        depth: int,
        seed: int,
    ) -> None:
        self.drafter: nn.Module = drafter.train()
        self.updates, self.seed, self.step = updates, seed, 0
        self.adapted = lora is not None
        if lora is not None:
            torch.manual_seed(seed)
            add_adapters(self.drafter, lora, "adaptation.lora")
        self.regime = OnlineRegime(drafter, target, loss, optimizer, depth=depth, seed=seed)
        made = self.regime.configure_optimizers()
        self._optimizer, self._schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
        self._average = _weights(self.drafter)

    def update(self, fresh: Sequence[Record], buffer: ReplayBuffer) -> dict[str, float]:
        """Learn from a mix of fresh and replayed records: `loss`, its parts, and `seconds`; nothing without records."""
        started, told = time.perf_counter(), {}
        for _ in range(self.updates.steps):
            records = self._mix(fresh, buffer)
            if not records:
                break
            told = self.learn(records)
            self.step += 1
        return {**told, "seconds": time.perf_counter() - started}

    def learn(self, records: Sequence[Record]) -> dict[str, float]:
        """One step on some positions of these records."""
        chosen = [draw_positions(r, self.updates.positions, self.updates.draw, self.seed, self.step) for r in records]
        torch.manual_seed(self.seed * 1_000_003 + self.step)  # of dropout
        batch = replay_batch(records, chosen, self.regime.target.device)
        found = self.regime.training_losses(batch, self.step)
        self._optimizer.zero_grad(set_to_none=True)
        found["loss"].backward()
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(trained, self.updates.clip)
        self._optimizer.step()
        self._schedule.step()
        self._follow()
        return {name: float(value.detach()) for name, value in found.items()}

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the average a step towards the weights; what is no floating-point number is the last."""
        for name, tensor in self.drafter.state_dict().items():
            if tensor.is_floating_point():
                self._average[name].lerp_(tensor, 1 - self.updates.average)
            else:
                self._average[name].copy_(tensor)

    def _mix(self, fresh: Sequence[Record], buffer: ReplayBuffer) -> list[Record]:
        """Different records: a share of fresh ones, then of the buffer, and fresh ones again where that has too few."""
        fresh = [record for record in fresh if not record.redacted and len(record.place)]
        wanted = self.updates.requests
        order = torch.randperm(
            len(fresh), generator=torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
        ).tolist()
        new = [fresh[i] for i in order[: round(self.updates.fresh_share * wanted)]]
        taken = {record.request for record in new}
        drawn = buffer.draw(wanted, self.updates.draw, self.step)
        replayed = [record for record in drawn if record.request not in taken][: wanted - len(new)]
        taken |= {record.request for record in replayed}
        rest = [fresh[i] for i in order if fresh[i].request not in taken]
        return [*new, *replayed, *rest[: wanted - len(new) - len(replayed)]]

    def weights(self) -> Weights:
        """A copy of the weights as they would be served: adapters are a part of them."""
        with self.averaged() as drafter, merged(drafter) if self.adapted else nullcontext():
            return _weights(drafter)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Within, the drafter has the averaged weights."""
        last = _weights(self.drafter)
        self.drafter.load_state_dict(self._average)
        try:
            yield self.drafter
        finally:
            self.drafter.load_state_dict(last)

    @contextmanager
    def candidate(self) -> Iterator[nn.Module]:
        """Within, the drafter drafts as one that serves `weights` would."""
        with self.averaged() as drafter, merged(drafter) if self.adapted else nullcontext():
            drafter.eval()
            try:
                yield drafter
            finally:
                drafter.train()

    def state(self) -> dict[str, Any]:
        """A copy of all that a restart needs: weights, their average, optimizer, learning rate and count of steps."""
        return {
            "drafter": _weights(self.drafter),
            "average": _copied(self._average),
            "optimizer": _copied(self._optimizer.state_dict()),
            "schedule": self._schedule.state_dict(),
            "step": self.step,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to what `state` gave."""
        self.drafter.load_state_dict(state["drafter"])
        place = next(self.drafter.parameters()).device
        self._average = {name: tensor.to(place, copy=True) for name, tensor in state["average"].items()}
        self._optimizer.load_state_dict(_copied(state["optimizer"]))
        self._schedule.load_state_dict(state["schedule"])
        self.step = state["step"]


def _weights(drafter: nn.Module) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value
