"""Several drafters for one target, and which of them answers a request.

Members are the drafter that learns, and experts that do not. A member's score for a domain is

    quality · τ/(k + 1)  +  speed · (its tokens per second / the best's)  −  resource · (its bytes / the target's)

with τ and the speed as they were on the domain's latest requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.errors import UserError
from train.adaptation.domains import DomainDetector
from train.adaptation.records import Record

ADAPTED = "adapted"  # the member that learns
BY = ("score", "domain")
_MEMORY = 0.9  # what is left of an estimate after a request


@dataclass(frozen=True)
class PoolSettings:
    """`experts` are exports by their names. `by` score takes the member of the best score, having tried each `tries`
    times in a domain, and every `explore` requests the one that was tried least; by domain takes the expert that has
    the detected domain's name, and for a domain without one the drafter that learns.
    """

    experts: Mapping[str, str]
    by: str = "score"
    quality: float = 1.0
    speed: float = 0.0
    resource: float = 0.1
    tries: int = 2
    explore: int = 20

    def __post_init__(self) -> None:
        if self.by not in BY:
            raise UserError(f"adaptation.pool.by is {self.by!r}: choose {' or '.join(BY)}.")
        for name in ("quality", "speed", "resource"):
            if getattr(self, name) < 0:
                raise UserError(f"adaptation.pool.{name} is {getattr(self, name)}: it must not be below 0.")
        for name in ("tries", "explore"):
            if getattr(self, name) < 1:
                raise UserError(f"adaptation.pool.{name} is {getattr(self, name)}: it must be at least 1.")
        if ADAPTED in self.experts:
            raise UserError(f"adaptation.pool.experts has {ADAPTED!r}, which is the drafter that learns: rename it.")

    def check(self, domains: Sequence[str]) -> None:
        """Raise UserError where `by` is domain, and an expert has the name of none: no request would ever reach it."""
        for name in self.experts if self.by == "domain" else ():
            if name not in domains:
                known = ", ".join(domains)
                raise UserError(f"adaptation.pool.experts has {name!r}: the domains that are told apart are {known}.")


@dataclass
class _Estimate:
    """Sums of a member in a domain, of which older requests count less and less."""

    tries: int = 0
    rounds: float = 0.0
    emitted: float = 0.0
    seconds: float = 0.0

    def add(self, rounds: float, emitted: float, seconds: float) -> None:
        self.tries += 1
        self.rounds = _MEMORY * self.rounds + rounds
        self.emitted = _MEMORY * self.emitted + emitted
        self.seconds = _MEMORY * self.seconds + seconds


class Pool:
    """Chooses among `members`, the first of which learns; `shares` are their bytes over the target's."""

    def __init__(
        self,
        members: Mapping[str, Any],
        shares: Mapping[str, float],
        detector: DomainDetector,
        settings: PoolSettings,
        depth: int,
    ) -> None:
        self._members, self._shares, self._detector, self._settings = dict(members), shares, detector, settings
        self._depth = depth
        self._known: dict[tuple[str, str], _Estimate] = {}

    def choose(self, prompt: list[int], number: int) -> tuple[str, Any]:
        """The name of a member, and the member."""
        name = self._choose(self._detector.detect(prompt), number)
        return name, self._members[name]

    def _choose(self, domain: str, number: int) -> str:
        names = list(self._members)
        if self._settings.by == "domain" or len(names) == 1:
            return domain if domain in self._members else names[0]
        tries = {name: self._of(name, domain).tries for name in names}
        least = min(names, key=lambda name: tries[name])
        if tries[least] < self._settings.tries or (number + 1) % self._settings.explore == 0:
            return least
        scores = self.scores(domain)
        return max(names, key=lambda name: scores[name])

    def scores(self, domain: str) -> dict[str, float]:
        """The score of every member that was tried in a domain."""
        known = {name: found for name in self._members if (found := self._of(name, domain)).tries}
        speeds = {name: e.emitted / e.seconds if e.seconds else 0.0 for name, e in known.items()}
        fastest = max(speeds.values(), default=0.0) or 1.0
        s = self._settings
        return {
            name: s.quality * (e.emitted / e.rounds if e.rounds else 1.0) / (self._depth + 1)
            + s.speed * speeds[name] / fastest
            - s.resource * self._shares[name]
            for name, e in known.items()
        }

    def served(self, member: str, record: Record) -> None:
        """Take note of a request that a member answered; without its text its domain is not known any more."""
        if record.redacted:
            return
        domain = self._detector.detect(record.token_ids[: record.prompt_tokens].tolist())
        about = record.about
        estimate = self._known.setdefault((member, domain), _Estimate())
        estimate.add(about["rounds"], about["emitted"], about["seconds"])

    def _of(self, member: str, domain: str) -> _Estimate:
        return self._known.get((member, domain), _Estimate())

    def state(self) -> list[Any]:
        """What a restart needs."""
        return [[*key, *vars(estimate).values()] for key, estimate in self._known.items()]

    def load_state(self, state: list[Any]) -> None:
        """Go on from what `state` gave."""
        self._known = {(member, domain): _Estimate(*values) for member, domain, *values in state}
