"""What a round costs by the length of its draft, and what a drafted token is worth: both learnt while rounds run.

Plain numbers, no arrays: there are few of them, and behind a target's pass every call into a library is a slow one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

_BINS = 10
_NEIGHBOURS = 4  # rounds before a round, and after it, that tell the pace of the machine
_STEADY = 1.15  # the most by which the pace may change between them
_PRIOR = 4.0  # tokens that the drafter's own confidence counts for in a bin, beside those that were tested


class RoundCosts:
    """Seconds of a round by how many tokens were drawn, 0 to `most`, from rounds that were timed.

    A length costs the lower median of its last rounds. Between lengths that were timed lies a straight line; a longer
    draft never costs less, and what a shorter one is said to take is corrected downwards, since what disturbs a clock
    makes it late.

    A machine that becomes slower, or a text longer, does so for all lengths, while one of them is drafted nearly always
    and the others hardly ever. So seconds are those at the pace of the first rounds: behind the `first` ones of its
    length, a round is put in proportion to the rounds of other lengths just before and after it, and left out where
    there are too few of them or they disagree.

    With a given `draft_cost`, in target steps, nothing is measured: a round costs 1 + draft_cost · n.
    """

    def __init__(self, most: int, draft_cost: float | None, *, first: int = 2, keep: int = 16) -> None:
        self._draft_cost, self._first = draft_cost, first
        self._timed: list[deque[float]] = [deque(maxlen=keep) for _ in range(most + 1)]
        self._table: list[float] | None = None  # until one of them changes
        self._last: deque[tuple[int, float]] = deque(maxlen=2 * _NEIGHBOURS + 1)
        self.counts = [0] * (most + 1)

    def add(self, drawn: int, seconds: float) -> None:
        """Take in a round that was timed."""
        self.counts[drawn] += 1
        if self.counts[drawn] <= self._first:
            self._believe(drawn, seconds)
        self._last.append((drawn, seconds))
        if len(self._last) == self._last.maxlen and self.counts[self._last[_NEIGHBOURS][0]] > self._first:
            self._settle(*self._last[_NEIGHBOURS])

    def _settle(self, drawn: int, seconds: float) -> None:
        """Take in the round in the middle of the last ones, at the pace that the others tell."""
        rounds = list(self._last)
        before, after = (self._pace(part, drawn) for part in (rounds[:_NEIGHBOURS], rounds[_NEIGHBOURS + 1 :]))
        if before is not None and after is not None and max(before, after) <= _STEADY * min(before, after):
            self._believe(drawn, 2 * seconds / (before + after))

    def _believe(self, drawn: int, seconds: float) -> None:
        self._timed[drawn].append(seconds)
        self._table = None

    def _pace(self, rounds: list[tuple[int, float]], drawn: int) -> float | None:
        """Seconds over expected seconds of the rounds of other lengths than `drawn`; None of less than half of them."""
        ratios = [seconds / _lower_median(self._timed[n]) for n, seconds in rounds if n != drawn]
        return _lower_median(ratios) if 2 * len(ratios) >= _NEIGHBOURS else None

    def table(self) -> list[float]:
        """The cost of a round with 0, 1, .. drawn tokens. Raises ValueError where nothing was timed."""
        if self._table is None:
            self._table = self._costs()
        return self._table

    def _costs(self) -> list[float]:
        lengths = range(len(self._timed))
        if self._draft_cost is not None:
            return [1 + self._draft_cost * n for n in lengths]
        known = [n for n in lengths if self._timed[n]]
        if not known:
            raise ValueError("no round was timed")
        costs = np.interp(lengths, known, [_lower_median(self._timed[n]) for n in known])
        return np.minimum.accumulate(costs[::-1])[::-1].tolist()


def _lower_median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


class Worth:
    """Chances of acceptance: of a drawn token by the drafter's confidence in it, and of the next ones by their depth.

    What was counted fades by `memory` whenever something is added to it, so that it follows the text, and is kept where
    nothing was tried; but where no draft begins, nothing at all is learnt, so then what is known of the first token
    fades as well, and as it does more may be hoped of it. Only tested tokens count.
    """

    def __init__(self, most: int, memory: float) -> None:
        self._memory = memory
        self._by_chance = [[0.0, 0.0] for _ in range(_BINS)]  # accepted, tested
        self._by_depth = [[0.0, 0.0] for _ in range(most)]

    def chance(self, confidence: float) -> float:
        """The chance that a token drawn with this confidence is accepted, once it is tested."""
        accepted, tested = self._by_chance[_bin(confidence)]
        return (accepted + _PRIOR * confidence) / (tested + _PRIOR)

    def by_depth(self) -> list[float]:
        """The chance that the token at each of N depths is accepted, once it is tested and before it is drawn."""
        return [(accepted + 0.5) / (tested + 1.0) for accepted, tested in self._by_depth]

    def hoped(self) -> list[float]:
        """`by_depth`, the first by a standard error higher, as in discounted UCB (Garivier & Moulines 2011)."""
        first, *others = self.by_depth()
        return [min(first + (first * (1 - first) / (self._by_depth[0][1] + 1.0)) ** 0.5, 1.0), *others]

    def add(self, confidence: list[float], accepted: int, drafted: int) -> None:
        """Count a request's draft: `accepted` of `drafted` tokens, drawn with these confidences; none may be."""
        if not drafted:
            self._by_depth[0] = [self._memory * count for count in self._by_depth[0]]
        for depth in range(min(accepted + 1, drafted)):
            for counts in (self._by_chance[_bin(confidence[depth])], self._by_depth[depth]):
                counts[0] = self._memory * counts[0] + (depth < accepted)
                counts[1] = self._memory * counts[1] + 1


def _bin(confidence: float) -> int:
    return min(int(confidence * _BINS), _BINS - 1)


def best_gain(
    survival: list[float], limits: list[int], depth: int, by_depth: list[float], costs: list[float], rate: float
) -> float:
    """What drawing on behind `depth` tokens is worth at best, in tokens.

    Of every number j of further tokens: those expected of all requests, Σ_b P_b Σ_{i≤j} Π a, less what the added time
    earns at `rate` tokens per unit of cost. `survival` are the P_b, `limits` the most tokens of each request, by_depth
    the chances a of tokens not drawn yet. So one more is drawn iff it survives with more than cost · rate, where
    the rate is that of all rounds: what the time would bring elsewhere (the marginal value theorem).
    """
    gained, best, going = 0.0, float("-inf"), 1.0
    for length in range(depth + 1, len(costs)):
        going *= by_depth[length - 1]
        gained += going * sum(chance for chance, limit in zip(survival, limits, strict=True) if limit >= length)
        best = max(best, gained - rate * (costs[length] - costs[depth]))
    return best
