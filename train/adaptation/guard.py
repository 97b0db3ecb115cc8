"""The guard: does a drafter that learnt the new traffic still draft the old?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.loop import generate
from engine.settings import DecodeSettings
from models.errors import UserError
from models.target import Target
from train.adaptation.versus import Versus, counted, versus

_LONGEST = 16  # pauses make one at most


@dataclass(frozen=True)
class GuardSettings:
    """Held-out old requests are answered after every `every` updates, before these weights are served.

    Their acceptance rate is compared with that of the drafter as it was handed in, request by request. Where the whole
    95% interval of the difference lies below −`max_loss`, or the difference itself below −`stop_loss`, the last drafter
    that passed comes back, with its optimizer; and no update is made for `pause` requests, twice as many each time that
    it happens again, up to 16 times as many. With `forget` the buffer loses what was served since. `enabled` false
    measures, and lets all pass.

    The same holds for the `num_prompts` requests served last, where the drafter as it was handed in answered them as
    well: what makes the very traffic that it learns from worse is undone altogether, back to that drafter.
    """

    enabled: bool = True
    every: int = 2
    max_loss: float = 0.03
    stop_loss: float = 0.06
    pause: int = 16
    forget: bool = True
    num_prompts: int = 16

    def __post_init__(self) -> None:
        for name in ("every", "num_prompts"):
            if getattr(self, name) < 1:
                raise UserError(f"adaptation.guard.{name} is {getattr(self, name)}: it must be at least 1.")
        for name in ("max_loss", "pause"):
            if getattr(self, name) < 0:
                raise UserError(f"adaptation.guard.{name} is {getattr(self, name)}: it must not be below 0.")
        if self.stop_loss < self.max_loss:
            raise UserError(
                f"adaptation.guard.stop_loss is {self.stop_loss}: it must not be below max_loss, {self.max_loss}."
            )

    def refuses(self, found: Versus) -> bool:
        """Whether so much was surely lost, or so much that no interval is asked for."""
        return self.enabled and (found.interval[1] < -self.max_loss or found.difference < -self.stop_loss)


class Guard:
    """Measures drafters on `prompts` by `decode`, and compares with the first that it measured."""

    def __init__(
        self, settings: GuardSettings, target: Target, prompts: Sequence[list[int]], decode: DecodeSettings
    ) -> None:
        self.settings, self._target, self._prompts, self._decode = settings, target, list(prompts), decode
        self.baseline: np.ndarray | None = None  # (n, 2) accepted and tested of each prompt
        self.rollbacks = 0

    def due(self, updates: int) -> bool:
        """Whether the guard looks after this many updates."""
        return updates % self.settings.every == 0

    def measure(self, drafter: Any) -> Versus:
        """Acceptance on the held-out requests beside that of the drafter which was measured first."""
        found = counted(generate(self._target, self._prompts, self._decode, drafter).stats, "acceptance_rate")
        if self.baseline is None:
            self.baseline = found
        return versus("held out", np.concatenate([self.baseline, found], axis=1))

    def rolled_back(self) -> int:
        """Note a rollback; returns for how many requests nothing is learnt."""
        self.rollbacks += 1
        return self.settings.pause * min(2 ** (self.rollbacks - 1), _LONGEST)

    def state(self) -> dict[str, Any]:
        """What a restart needs."""
        return {"baseline": None if self.baseline is None else self.baseline.tolist(), "rollbacks": self.rollbacks}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        baseline = state["baseline"]
        self.baseline, self.rollbacks = None if baseline is None else np.array(baseline), state["rollbacks"]
