"""Drafts on while the tokens that it gains are worth more than the time that it takes.

B batch, Vd draft vocabulary, N drafted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.draft_length.costs import RoundCosts, Worth, best_gain
from engine.draft_length.policy import DraftLength, Lengths, Round, check_number
from models.chain_drafting import StopRule
from models.types import Drafter

_FIRST_ROUNDS = 2  # of every length, before costs are believed


@dataclass(frozen=True)
class CostAware(DraftLength):
    """Draws one token more while some number of further ones is expected to earn its time; see `costs.best_gain`.

    What a round costs is timed by length, acceptance is estimated from the drafter's confidence as rounds that were
    verified calibrate it, and both are kept from run to run for as long as this object lives. Of the time, one part in
    `explore` at most goes to lengths that were timed least. What is chosen because it promised most gives less than it
    promised, so tokens behind the first must promise `margin` more than their time would bring. The first is drawn
    unless it is known not to be worth it, since where no draft begins nothing more is learnt of drafts. A batch draws
    or stops together, since a step costs the same for all. With `cost`, a draft step over a target step, nothing is
    timed, every run begins anew, and drafts can be repeated.
    """

    name: ClassVar[str] = "cost_aware"
    reads_laws: ClassVar[bool] = True
    cost: float | None = None
    explore: int = 256
    margin: float = 0.1
    memory: float = 0.99
    _known: dict[int, _Known] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.cost is not None:
            check_number("cost", self.cost, 0)
        check_number("margin", self.margin, 0)
        check_number("explore", self.explore, 2, whole=True)
        check_number("memory", self.memory, 0, 1)

    def start(self, num_requests: int, most: int, drafter: Drafter) -> Lengths:
        """Go on with what is known of drafts of at most `most` tokens; with a given cost, begin anew."""
        known = _Known(self, most)
        if self.cost is None:
            known = self._known.setdefault(most, known)
        return _CostAwareLengths(known, 1 + self.margin)

    def describe(self) -> dict[str, Any]:
        """Its settings, without what it has learnt."""
        settings = {"explore": self.explore, "margin": self.margin, "memory": self.memory}
        return {"policy": self.name, "cost": self.cost, **settings}


class _Known:
    """What is learnt for drafts of one greatest length: costs and rates by the number of requests, worth for all."""

    def __init__(self, policy: CostAware, most: int) -> None:
        self._policy, self._most = policy, most
        self.worth = Worth(most, policy.memory)
        self._by_size: dict[int, _Pace] = {}

    def pace(self, num_requests: int) -> _Pace:
        """Of batches of about this size: 1, 2, 3 to 4, 5 to 8, ..."""
        size = (num_requests - 1).bit_length()
        return self._by_size.setdefault(size, _Pace(self._policy, self._most))


class _Pace:
    """How long rounds take, and how many tokens they bring per unit of cost."""

    def __init__(self, policy: CostAware, most: int) -> None:
        self._policy, self.costs = policy, RoundCosts(most, policy.cost)
        self._tried = [0] * (most + 1)  # rounds of each length that were timed, or had to try it
        self._tokens, self._cost = 0.0, 0.0
        self._unexplored = 0.0  # cost of the rounds since the last that tried a length

    def forced(self, limit: int) -> int | None:
        """The length, up to `limit`, that this round has to try, if any."""
        if self._policy.cost is not None:
            return None
        length = max(range(limit + 1), key=lambda n: (-self._tried[n], n))
        if self._tried[length] < _FIRST_ROUNDS:
            return length
        return length if self._unexplored >= self._policy.explore * self.costs.table()[length] else None

    def rate(self, num_requests: int) -> float:
        """Tokens that a unit of cost brings: as many as in the last rounds, or in plain decoding."""
        return self._tokens / self._cost if self._cost else num_requests / self.costs.table()[0]

    def after(self, made: Round, timed: bool, forced: bool) -> None:
        """Take in a round, and whether it had to try a length."""
        self._tried[made.drawn] += timed or forced
        if timed and self._policy.cost is None:
            self.costs.add(made.drawn, made.seconds)
        if timed or self._policy.cost is not None:
            self._tokens = self._policy.memory * self._tokens + sum(made.accepted) + len(made.accepted)
            cost = self.costs.table()[made.drawn]
            self._cost = self._policy.memory * self._cost + cost
            self._unexplored = 0.0 if forced else self._unexplored + cost


class _CostAwareLengths(Lengths):
    def __init__(self, known: _Known, ask_more: float) -> None:
        self._known, self._ask_more = known, ask_more
        self._rule: _CostAwareRule | None = None
        self._forced = False  # to try a length in this round
        self._caught_up = False  # the drafter's first draft reads the prompt as well, and is no measure

    def ask(self, requests: list[int], limits: list[int]) -> list[int]:
        self._rule = None
        pace, worth = self._known.pace(len(requests)), self._known.worth
        forced = pace.forced(max(limits))
        self._forced = forced is not None
        if forced is not None:
            return [min(limit, forced) for limit in limits]
        costs, rate = pace.costs.table(), pace.rate(len(requests))
        gain = best_gain([1.0] * len(limits), limits, 0, worth.hoped(), costs, rate)
        return limits if gain > 0 else [0] * len(limits)

    def rule(self, requests: list[int], limits: list[int]) -> StopRule:
        pace = self._known.pace(len(requests))
        if self._forced:
            self._rule = _CostAwareRule(self._known.worth, limits, None, 0.0)
        else:
            rate = self._ask_more * pace.rate(len(requests))
            self._rule = _CostAwareRule(self._known.worth, limits, pace.costs.table(), rate)
        return self._rule

    def after(self, made: Round) -> None:
        worth, rule = self._known.worth, self._rule
        for row, (drafted, accepted) in enumerate(zip(made.drafted, made.accepted, strict=True)):
            worth.add(rule.confidence(row) if rule is not None else [], accepted, drafted)
        self._known.pace(len(made.requests)).after(made, self._caught_up or not made.drawn, self._forced)
        self._caught_up |= made.drawn > 0


class _CostAwareRule:
    """Never ends a chain without `costs`."""

    def __init__(self, worth: Worth, limits: list[int], costs: list[float] | None, rate: float) -> None:
        self.limits, self._worth, self._costs, self._rate = limits, worth, costs, rate
        self._by_depth = worth.by_depth()
        self._survival = [1.0] * len(limits)
        self._confidence: list[list[float]] = []  # of each depth, by request

    def confidence(self, row: int) -> list[float]:
        """The chances that a request's tokens were drawn with."""
        return [chances[row] for chances in self._confidence]

    def draws(self, law: Tensor) -> Tensor:
        return torch.ones(len(law), dtype=torch.bool)

    def goes_on(self, chance: Tensor) -> Tensor:
        confidence = chance.tolist()
        self._confidence.append(confidence)
        going = True
        if self._costs is not None:
            self._survival = [s * self._worth.chance(c) for s, c in zip(self._survival, confidence, strict=True)]
            depth = len(self._confidence)
            going = best_gain(self._survival, self.limits, depth, self._by_depth, self._costs, self._rate) > 0
        return torch.full((len(chance),), going, dtype=torch.bool)
