"""What theory says of drafts that were measured: by acceptance, by how often a position is drafted, and by cost.

A result is one of acceptance.json. n is the longest draft that is allowed; where drafts are of several lengths, as a
look-up's or a policy's are, the shares that were measured up to n are taken to stay what they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from eval.theory import Measured, Profile, RoundCost, block_efficiency, speedup
from models.errors import UserError

_COUNTERS = ("plain_s", "plain_prefill_s", "plain_tokens", "speculative_s", "speculative_prefill_s", "draft_s",
             "verify_s", "rounds", "drafts")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reached:
    """A profile for drafts of several lengths. `reach` is the share of rounds whose draft has a token at each position.

    Its rates are α_i · reach_i / reach_(i−1): a draft that has ended counts as one whose next token fails, so that s_i
    becomes reach_i · s_i. Length and acceptance are taken as independent.
    """

    profile: Profile
    reach: tuple[float, ...]

    def rates(self, num_tokens: int) -> list[float]:
        """As those of the profile. Raises UserError for more positions than `reach` tells of."""
        if num_tokens > len(self.reach):
            raise UserError(f"The reach of {len(self.reach)} positions is told, and {num_tokens} are asked for.")
        return self._going_on(self.profile.rates(num_tokens))

    def slopes(self, num_tokens: int) -> list[float]:
        return self._going_on(self.profile.slopes(num_tokens))

    def _going_on(self, values: list[float]) -> list[float]:
        shares = [further / here if here else 0 for here, further in pairwise((1, *self.reach))]
        return [value * share for value, share in zip(values, shares, strict=False)]


def is_chain(result: dict[str, Any]) -> bool:
    """Whether no draft branched, as far as the result tells: some drafters draft trees where a chain is asked for."""
    counts, depth = result.get("counts") or {}, result.get("num_speculative_tokens")
    if result.get("tree") is not None or result.get("num_nodes", depth) != depth:
        return False
    return not (counts.get("drafted") and counts.get("drafts")) or counts["drafted"] == counts["drafts"]


def acceptance_of(result: dict[str, Any]) -> Measured:
    """Conditional acceptance by position; nan where nothing was tested."""
    told = result.get("conditional_acceptance") or []
    return Measured(tuple(math.nan if rate is None else float(rate) for rate in told))


def reach_of(result: dict[str, Any]) -> tuple[float, ...]:
    """The share of rounds whose draft has a token at each position; 1 where the result does not tell."""
    counts = result.get("counts") or {}
    if not counts.get("drafts") or not counts.get("rounds") or not sum(counts["rounds"]):
        return (1.0,) * len(result.get("conditional_acceptance") or [])
    return tuple(sum(column) / sum(counts["rounds"]) for column in zip(*counts["drafts"], strict=True))


def measured_cost(result: dict[str, Any]) -> RoundCost | None:
    """What a round costs, in units of a plain token's time; None for trees, and where nothing was drafted or timed.

    The target's pass is known at length 0, that of plain decoding, and at the mean length of the drafts; between them
    and beyond it is taken as a straight line. A prompt of several turns counts as one answer.
    """
    counts, reach = result.get("counts") or {}, reach_of(result)
    if not is_chain(result) or not all(counts.get(name) for name in _COUNTERS):
        return None
    total = {name: sum(counts[name]) for name in _COUNTERS if name != "drafts"}
    rounds, plain_rounds, length = total["rounds"], total["plain_tokens"] - len(counts["plain_s"]), sum(reach)
    plainly_s = total["plain_s"] - total["plain_prefill_s"]
    if not rounds or not length or plain_rounds <= 0 or plainly_s <= 0:
        return None
    plain_s = plainly_s / plain_rounds
    check = total["verify_s"] / rounds / plain_s
    spent = total["speculative_prefill_s"] + total["draft_s"] + total["verify_s"]
    other = max((total["speculative_s"] - spent) / rounds / plain_s, 0.0)
    return RoundCost(
        total["draft_s"] / rounds / length / plain_s,
        lambda n: max(1 - other + (check - 1 + other) * n / length, 0.0),  # a plain round has the rest in it, too
        other,
        drafted=lambda n: sum(reach[:n]),
    )


def predicted_efficiency(result: dict[str, Any], length: int) -> float:
    """τ of drafts of at most `length` tokens: 1 + Σ_i reach_i·s_i."""
    return block_efficiency(Reached(acceptance_of(result), reach_of(result)).rates(length))


def predicted_speedup(result: dict[str, Any], length: int) -> float | None:
    """The speed-up while decoding that such drafts promise; None where nothing tells their cost."""
    cost = measured_cost(result)
    return None if cost is None else speedup(Reached(acceptance_of(result), reach_of(result)).rates(length), cost)
