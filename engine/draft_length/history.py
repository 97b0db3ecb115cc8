"""Policies that look at past rounds only. They serve every drafter that drafts chains, those without laws too."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar

from engine.draft_length.policy import DraftLength, Lengths, Round, check_number
from models.errors import UserError
from models.types import Drafter


@dataclass(frozen=True)
class Window(DraftLength):
    """One token more where a request's recent acceptance is above `high`, one less where it is below `low`.

    Acceptance is accepted over tested tokens in the request's last `rounds` rounds with a draft. A request begins with
    `first` tokens (None: with the most), and goes from `least` to num_speculative_tokens.
    """

    name: ClassVar[str] = "window"
    high: float = 0.85
    low: float = 0.6
    rounds: int = 4
    least: int = 1
    first: int | None = None

    def __post_init__(self) -> None:
        check_number("high", self.high, 0, 1)
        check_number("low", self.low, 0, 1)
        check_number("rounds", self.rounds, 1, whole=True)
        check_number("least", self.least, 1, whole=True)
        if self.first is not None:
            check_number("first", self.first, self.least, whole=True)
        if self.low > self.high:
            raise UserError(f"decode.draft_length: low is {self.low} and high {self.high}: low must not be above high.")

    def start(self, num_requests: int, most: int, drafter: Drafter) -> Lengths:
        """Every request at its first length."""
        return _WindowLengths(self, num_requests, most)


class _WindowLengths(Lengths):
    def __init__(self, policy: Window, num_requests: int, most: int) -> None:
        self._policy, self._most = policy, most
        self._least = min(policy.least, most)
        first = most if policy.first is None else min(policy.first, most)
        self._lengths = [first] * num_requests
        self._recent: list[deque[tuple[int, int]]] = [deque(maxlen=policy.rounds) for _ in range(num_requests)]

    def ask(self, requests: list[int], limits: list[int]) -> list[int]:
        return [min(self._lengths[request], limit) for request, limit in zip(requests, limits, strict=True)]

    def after(self, made: Round) -> None:
        for request, drafted, accepted in zip(made.requests, made.drafted, made.accepted, strict=True):
            if drafted == 0:  # nothing came to the drafter's mind: no sign of what it is worth
                continue
            recent = self._recent[request]
            recent.append((accepted, min(accepted + 1, drafted)))
            rate = sum(a for a, _ in recent) / sum(tested for _, tested in recent)
            step = (rate > self._policy.high) - (rate < self._policy.low)
            self._lengths[request] = min(max(self._lengths[request] + step, self._least), self._most)


@dataclass(frozen=True)
class Fallback(DraftLength):
    """Plain decoding for `rest` rounds when `patience` drafts of a request were rejected from their first token on.

    Then one draft tries again: where it is rejected as well the request rests again, else it drafts as before.
    """

    name: ClassVar[str] = "fallback"
    patience: int = 3
    rest: int = 16

    def __post_init__(self) -> None:
        check_number("patience", self.patience, 1, whole=True)
        check_number("rest", self.rest, 1, whole=True)

    def start(self, num_requests: int, most: int, drafter: Drafter) -> Lengths:
        """Every request drafts."""
        return _FallbackLengths(self, num_requests)


class _FallbackLengths(Lengths):
    def __init__(self, policy: Fallback, num_requests: int) -> None:
        self._policy = policy
        self._rejected, self._resting = [0] * num_requests, [0] * num_requests

    def ask(self, requests: list[int], limits: list[int]) -> list[int]:
        return [0 if self._resting[request] else limit for request, limit in zip(requests, limits, strict=True)]

    def after(self, made: Round) -> None:
        for request, drafted, accepted in zip(made.requests, made.drafted, made.accepted, strict=True):
            if self._resting[request]:
                self._resting[request] -= 1
            elif drafted:
                self._rejected[request] = 0 if accepted else self._rejected[request] + 1
                if self._rejected[request] == self._policy.patience:
                    self._rejected[request] -= 1
                    self._resting[request] = self._policy.rest
