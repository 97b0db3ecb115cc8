"""The guard: does a drafter that learnt the new traffic still draft the old?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.loop import generate
from engine.settings import DecodeSettings
from engine.stats import DecodingStats
from models.errors import UserError
from models.target import Target


@dataclass(frozen=True)
class GuardSettings:
    """Held-out old requests are answered after every `every` updates, before what was learnt is served.

    Where their acceptance rate is more than `max_loss` below that of the drafter as it was handed in, the last drafter
    that passed comes back, with its optimizer; and no update is made for `pause` requests, twice as many each time that
    it happens again. With `forget` the buffer loses what was served since. `enabled` false measures, and lets all pass.
    """

    enabled: bool = True
    every: int = 2
    max_loss: float = 0.03
    pause: int = 16
    forget: bool = True
    num_prompts: int = 16

    def __post_init__(self) -> None:
        for name in ("every", "num_prompts"):
            if getattr(self, name) < 1:
                raise UserError(f"adaptation.guard.{name} is {getattr(self, name)}: it must be at least 1.")
        if self.max_loss < 0 or self.pause < 0:
            raise UserError(
                f"adaptation.guard: max_loss is {self.max_loss} and pause {self.pause}: none may be below 0."
            )


class Guard:
    """Measures drafters on `prompts` by `decode`, and compares with the first that it measured."""

    def __init__(
        self, settings: GuardSettings, target: Target, prompts: Sequence[list[int]], decode: DecodeSettings
    ) -> None:
        self.settings, self._target, self._prompts, self._decode = settings, target, list(prompts), decode
        self.baseline: float | None = None
        self.rollbacks = 0

    def due(self, updates: int) -> bool:
        """Whether the guard looks after this many updates."""
        return updates % self.settings.every == 0

    def stats(self, drafter: Any) -> DecodingStats:
        """What the engine counts of the drafter on the held-out requests."""
        return generate(self._target, self._prompts, self._decode, drafter).stats

    def measure(self, drafter: Any) -> float:
        """The acceptance rate on the held-out requests; the first is what others are compared with."""
        rate = self.stats(drafter).acceptance_rate
        if self.baseline is None:
            self.baseline = rate
        return rate

    def refuses(self, rate: float) -> bool:
        """Whether this rate is too far below the first one."""
        assert self.baseline is not None
        return self.settings.enabled and rate < self.baseline - self.settings.max_loss

    def rolled_back(self) -> int:
        """Note a rollback; returns for how many requests nothing is learnt."""
        self.rollbacks += 1
        return self.settings.pause * 2 ** (self.rollbacks - 1)

    def state(self) -> dict[str, Any]:
        """What a restart needs."""
        return {"baseline": self.baseline, "rollbacks": self.rollbacks}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.baseline, self.rollbacks = state["baseline"], state["rollbacks"]
