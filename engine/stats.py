"""Counters of a decoding run, kept as numerators and denominators until the last division.

Everything is counted per request, so that any statistic can be pooled over rounds and given a bootstrap interval over
prompts. R requests, N drafted positions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(slots=True)
class DecodingStats:
    """What happened to the drafts of R requests at N positions; in a draft tree a position is a depth.

    `rounds` are target passes after the prompt's own; `emitted` the tokens they gave, the extra token counted.
    `drafts` counts those that had a token at the position and `drafted` the tokens there (more than one in a tree);
    `tested` and `accepted` count positions, and `expected` sums over tested ones the chance that a token there is
    accepted: Σ_x min(p, q) in a chain.
    """

    rounds: Array  # (R,)
    emitted: Array  # (R,)
    drafts: Array  # (R, N)
    drafted: Array  # (R, N)
    tested: Array  # (R, N)
    accepted: Array  # (R, N)
    expected: Array  # (R, N)

    @classmethod
    def empty(cls, num_requests: int, num_positions: int) -> DecodingStats:
        """All counters at zero."""
        by_position = [np.zeros((num_requests, num_positions)) for _ in range(5)]
        return cls(np.zeros(num_requests), np.zeros(num_requests), *by_position)

    @classmethod
    def concatenate(cls, parts: list[DecodingStats]) -> DecodingStats:
        """Put the requests of several runs, with equally many positions, one behind another."""
        return cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)))

    def add_round(
        self, request: int, drafted: Array, reached: int, accepted: int, emitted: int, expected: Array
    ) -> None:
        """Count one round of a request.

        `drafted` (N,) tokens stood at each position, those at the first `reached` were tested, `accepted` kept, and
        `emitted` tokens given out. Where a stop token ends the answer inside the draft, what lies behind it is neither
        accepted nor tested.
        """
        tested = min(reached, emitted)
        self.rounds[request] += 1
        self.emitted[request] += emitted
        self.drafts[request] += drafted > 0
        self.drafted[request] += drafted
        self.tested[request, :tested] += 1
        self.accepted[request, : min(accepted, emitted)] += 1
        self.expected[request, :tested] += expected[:tested]

    def accumulate(self, request: int, other: DecodingStats) -> None:
        """Add all that `other` counted to one request."""
        for f in fields(self):
            getattr(self, f.name)[request] += getattr(other, f.name).sum(0)

    def select(self, requests: Any) -> DecodingStats:
        """The counters of some requests, by index or by mask."""
        return DecodingStats(*(getattr(self, f.name)[requests] for f in fields(self)))

    # The definitions below pool over all rounds of all requests (micro averages); nan where nothing was counted.

    @property
    def block_efficiency(self) -> float:
        """τ: tokens emitted per target pass, the extra token included; between 1 and N + 1."""
        return _ratio(self.emitted.sum(), self.rounds.sum())

    @property
    def acceptance_rate(self) -> float:
        """α, realised: accepted over tested tokens. A token behind a rejected one was never tested."""
        return _ratio(self.accepted.sum(), self.tested.sum())

    @property
    def expected_acceptance_rate(self) -> float:
        """α, expected: mean of Σ_x min(p(x), q(x)) over tested positions."""
        return _ratio(self.expected.sum(), self.tested.sum())

    @property
    def draft_utilization(self) -> float:
        """Accepted over drafted tokens. Not an acceptance rate: it counts tokens that were never tested."""
        return _ratio(self.accepted.sum(), self.drafted.sum())

    @property
    def acceptance_per_position(self) -> list[float]:
        """Drafts whose i-th token was accepted over all drafts of at least i tokens (joint, as vLLM reports it)."""
        return [_ratio(a, d) for a, d in zip(self.accepted.sum(0), self.drafts.sum(0), strict=True)]

    @property
    def conditional_acceptance(self) -> list[float]:
        """Accepted over tested at position i: the chance of the i-th token once those before it were accepted."""
        return [_ratio(a, t) for a, t in zip(self.accepted.sum(0), self.tested.sum(0), strict=True)]


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator else float("nan")
