"""What speculative decoding should give: tokens per round, speed-up and the best draft length, from a few numbers.

n is num_speculative_tokens (γ in the papers), α_i the chance that draft token i is accepted once those before it were,
s_i = α_1 ··· α_i the chance that the draft survives up to it, τ the block efficiency (the extra token counted), c a
draft step in units of a plain token's time, S the speed-up. Chains only: for a tree τ is `StaticTree.expected_tokens`.
Source: 2211.17192, section 3. What other texts print wrongly is named where the right form stands.

    python eval/theory.py profile=exponential alpha=0.8 beta=0.95 c=0.1          # tables; conf/theory.yaml
    python eval/theory.py report=outputs/.../acceptance.json                     # predicted beside measured
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from models.errors import UserError


class Profile(Protocol):
    """How acceptance goes with the position in a draft."""

    def rates(self, num_tokens: int) -> list[float]:
        """α_1 … α_n."""

    def slopes(self, num_tokens: int) -> list[float]:
        """dα_i/dα, where α is the profile's level: how each rate moves when the drafter as a whole gets better."""


@dataclass(frozen=True, slots=True)
class Constant:
    """The same chance everywhere: α_i = α."""

    alpha: float

    def __post_init__(self) -> None:
        _check_rate("alpha", self.alpha)

    def rates(self, num_tokens: int) -> list[float]:
        return [self.alpha] * num_tokens

    def slopes(self, num_tokens: int) -> list[float]:
        return [1] * num_tokens


@dataclass(frozen=True, slots=True)
class Decay:
    """α_i = α·β^(i−1), so that E[accepted] = Σ_k α^k β^(k(k−1)/2)."""

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        _check_rate("alpha", self.alpha)
        _check_rate("beta", self.beta)

    def rates(self, num_tokens: int) -> list[float]:
        return [self.alpha * power for power in self.slopes(num_tokens)]

    def slopes(self, num_tokens: int) -> list[float]:
        return [self.beta**i for i in range(num_tokens)]


@dataclass(frozen=True, slots=True)
class Linear:
    """α_i = α − fall·(i−1), and 0 where that is negative."""

    alpha: float
    fall: float

    def __post_init__(self) -> None:
        _check_rate("alpha", self.alpha)
        _check_rate("fall", self.fall)

    def rates(self, num_tokens: int) -> list[float]:
        return [max(self.alpha - self.fall * i, 0) for i in range(num_tokens)]

    def slopes(self, num_tokens: int) -> list[float]:
        return [int(rate > 0) for rate in self.rates(num_tokens)]


@dataclass(frozen=True, slots=True)
class Stepped:
    """`steps` of (first position, α): each holds until the next one starts, the last for ever. Positions count from 1.

    Raises UserError where the first step does not start at 1, or the starts do not rise.
    """

    steps: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.steps]
        if starts[:1] != [1] or any(a >= b for a, b in pairwise(starts)):
            raise UserError(f"The steps of an acceptance profile start at {starts}: they must start at 1 and rise.")
        for start, rate in self.steps:
            _check_rate(f"the rate from position {start} on", rate)

    def rates(self, num_tokens: int) -> list[float]:
        return [[rate for start, rate in self.steps if start <= i][-1] for i in range(1, num_tokens + 1)]

    def slopes(self, num_tokens: int) -> list[float]:
        """dα_i/dα, where all steps are raised alike."""
        return [1] * num_tokens


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates as measured, such as `conditional_acceptance`. nan (a position never tested) is taken as never accepted."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        for i, value in enumerate(self.values, 1):
            if not math.isnan(value):
                _check_rate(f"the rate at position {i}", value)

    def rates(self, num_tokens: int) -> list[float]:
        """α_1 … α_n. Raises UserError for more positions than were measured."""
        if num_tokens > len(self.values):
            raise UserError(
                f"Acceptance was measured at {len(self.values)} positions, and {num_tokens} are asked for: measure "
                "with longer drafts, or choose a profile that goes on."
            )
        return [0 if math.isnan(value) else value for value in self.values[:num_tokens]]

    def slopes(self, num_tokens: int) -> list[float]:
        """dα_i/dα, where all rates are raised alike."""
        return [1] * num_tokens


@dataclass(frozen=True, slots=True)
class Roofline:
    """Time of a target pass: what must be read or what must be computed, whichever takes longer.

    A pass reads the weights once and the cache of each request; every row costs the same arithmetic.
    """

    weight_bytes: float
    flops_per_row: float
    bandwidth_bytes_per_s: float
    peak_flops_per_s: float
    cache_bytes: float = 0.0  # of one request

    def __post_init__(self) -> None:
        for name in ("weight_bytes", "flops_per_row", "bandwidth_bytes_per_s", "peak_flops_per_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}: it must be above 0.")
        if not self.cache_bytes >= 0:
            raise UserError(f"cache_bytes is {self.cache_bytes}: it must be 0 or more.")

    def seconds(self, rows: float, requests: int = 1) -> float:
        """Of one pass over so many rows, those of all requests together."""
        memory = (self.weight_bytes + requests * self.cache_bytes) / self.bandwidth_bytes_per_s
        return max(memory, rows * self.flops_per_row / self.peak_flops_per_s)

    def relative(self, num_tokens: float, requests: int = 1) -> float:
        """v: a pass that checks n drafted tokens of each request, n + 1 rows, in units of a plain pass over one row."""
        return self.seconds(requests * (num_tokens + 1), requests) / self.seconds(requests, requests)


def _free(num_tokens: float) -> float:
    return 1


def _all(num_tokens: int) -> float:
    return num_tokens


@dataclass(frozen=True, slots=True)
class RoundCost:
    """What a round costs, in units of a plain token's time: v(n) + n·c + other.

    `draft` is c; `verify(n)` is v, the target's pass over n + 1 rows (1 where nothing is said: reading the weights is
    all that counts); `other` is all the rest. In a batch all of them are for the batch, as is the plain pass.
    `drafted(n)` is how many tokens a round drafts on average of n at most, where that is not n.
    """

    draft: float
    verify: Callable[[float], float] = _free
    other: float = 0
    drafted: Callable[[int], float] = _all

    def __post_init__(self) -> None:
        for name in ("draft", "other"):
            if not getattr(self, name) >= 0:
                raise UserError(f"The cost {name!r} is {getattr(self, name)}: it must be 0 or more.")

    def of(self, num_tokens: int) -> float:
        """A round with n drafted tokens."""
        drafted = self.drafted(num_tokens)
        return self.verify(drafted) + drafted * self.draft + self.other


def survival(rates: Sequence[float]) -> list[float]:
    """s_1 … s_n: the chance that the first i tokens of a draft are all accepted."""
    return list(accumulate(rates, mul))


def expected_accepted(rates: Sequence[float]) -> float:
    """Mean number of accepted tokens in a round: Σ_i s_i, which under a constant α is α(1 − α^n)/(1 − α).

    In circulation is α[1 − (n+1)α^n + nα^(n+1)]/(1 − α)², which is Σ i·α^i: it takes the chance of *at least* i for
    that of exactly i, and exceeds n at high α. Wrong too is n·α, which counts tokens behind a rejected one.
    """
    return sum(survival(rates))


def block_efficiency(rates: Sequence[float]) -> float:
    """τ: tokens that a round gives, the correction or bonus token included: 1 + Σ_i s_i, between 1 and n + 1."""
    return 1 + expected_accepted(rates)


def constant_block_efficiency(alpha: float, num_tokens: float) -> float:
    """τ under a constant α: (1 − α^(n+1))/(1 − α), also between whole n (2211.17192, equation 1)."""
    if alpha in (0, 1):
        return 1 + alpha * num_tokens
    return -math.expm1((num_tokens + 1) * math.log1p(alpha - 1)) / (1 - alpha)


def accepted_distribution(rates: Sequence[float]) -> list[float]:
    """The chance that exactly 0, 1, …, n tokens are accepted: s_k − s_(k+1), and s_n for the whole draft."""
    reached = [1, *survival(rates), 0]
    return [here - further for here, further in pairwise(reached)]


def speedup(rates: Sequence[float], cost: RoundCost) -> float:
    """S = τ / (v(n) + n·c + other): plain decoding's seconds per token over those with drafts of n = len(rates).

    Under a constant α, v = 1 and nothing else this is (1 − α^(n+1))/((1 − α)(1 + nc)) (2211.17192, theorem 3.8). In
    circulation is (n+1)/((1 − α^(n+1))(1 + nc)), with the sum in the wrong half of the fraction: it promises a gain
    from a drafter that is never right (α = 0), and grows without bound as α → 1, though no round gives more than n + 1.
    """
    return block_efficiency(rates) / cost.of(len(rates))


def best_length(profile: Profile, cost: RoundCost, most: int) -> int:
    """The n in 0 … most with the largest speed-up, by trying all; the shortest of those that tie. 0: do not draft."""
    rates = profile.rates(most)
    return max(range(most + 1), key=lambda n: speedup(rates[:n], cost))


def best_length_by_margin(profile: Profile, cost: RoundCost, most: int) -> int:
    """The same by the marginal rule: draft one more token iff s_(n+1) > (what it adds to the round's cost)·S(n).

    Under a constant α, and c alone growing with n, that reads α^(n+1) > c·S(n). It stops at the first token that does
    not pay, which is the optimum as long as v is convex (as a roofline is): s never rises.
    """
    rates = profile.rates(most)
    for n, survives in enumerate(survival(rates)):
        if not survives > (cost.of(n + 1) - cost.of(n)) * speedup(rates[:n], cost):
            return n
    return most


def best_length_closed(alpha: float, draft_cost: float) -> float:
    """The real n ≥ 0 at which S peaks under a constant α and the cost 1 + nc: (z − 1)/L − 1/c.

    Here L = −ln α and z = −W₋₁(−exp(−1 − L(1/c − 1))); dS/dn = 0 says z·e^−z = exp(−1 − L(1/c − 1)), whence it is also
    (ln z)/L − 1, which loses no digits at small c. S rises before it and falls behind it, so the best whole length is
    one of its two neighbours. inf where every further token pays. For a cost a + bn, with any a, c is b/a.

    In circulation are sqrt(α/(c(1 − α))), a rule of thumb that drafts too much at low α, and −log(ρ(1 − α))/log α with
    ρ = c, which is always negative: it needs ρ = 1/c. Even then it puts 1/(1 − α), which S never reaches, in place of
    S, and is negative again where α > 1 − c: at α = 0.97 and c = 0.05, say, where 29 is best.
    """
    if alpha == 0 or draft_cost >= 1:
        return 0.0
    if alpha == 1 or draft_cost == 0:
        return math.inf
    fall = -math.log(alpha)
    return max(math.log1p(_excess(fall * (1 / draft_cost - 1))) / fall - 1, 0.0)


def lambert_w_minus_1(x: float) -> float:
    """W₋₁(x): the w ≤ −1 with w·e^w = x, for −1/e ≤ x < 0.

    Near −1/e it is as exact as x can tell it, about 1e-8. Raises ValueError outside.
    """
    if not -1 / math.e <= x < 0:
        raise ValueError(f"W₋₁ is real between −1/e and 0, and x is {x}")
    return -1 - _excess(max(-1 - math.log(-x), 0.0))


def _excess(d: float) -> float:
    """The u ≥ 0 with u − ln(1 + u) = d, which is −1 − W₋₁(−e^(−1−d)): d can be so large that the exponential is 0.

    Newton's method on a convex function falls from the upper bound of √(2d) + 2d/3 < u < √(2d) + d (1601.04895) towards
    the root; the lower bound holds the last digits where u and ln(1 + u) cancel.
    """
    low, u = math.sqrt(2 * d) + 2 * d / 3, math.sqrt(2 * d) + d
    while u > low:
        step = (u - math.log1p(u) - d) * (1 + u) / u
        if step <= 1e-15 * u:
            return u
        u -= step
    return low


def block_efficiency_gradient(rates: Sequence[float]) -> list[float]:
    """∂τ/∂α_1 … ∂τ/∂α_n: Σ over k ≥ j of s_k without its factor α_j, so that a rate of 0 does no harm."""
    gradient = []
    before: float = 1
    for j, rate in enumerate(rates):
        gradient.append(before * block_efficiency(rates[j + 1 :]))
        before *= rate
    return gradient


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Derivatives with respect to α (the profile's level) and c."""

    block_efficiency_by_alpha: float
    speedup_by_alpha: float
    speedup_by_draft_cost: float


def sensitivity(profile: Profile, cost: RoundCost, num_tokens: int) -> Sensitivity:
    """How τ and S answer to a better and to a faster drafter: dτ/dα, dS/dα = (dτ/dα)/cost, dS/dc = −n·S/cost.

    Under a constant α, dτ/dα = Σ_k k·α^(k−1).
    """
    rates, slopes = profile.rates(num_tokens), profile.slopes(num_tokens)
    by_alpha = sum(g * slope for g, slope in zip(block_efficiency_gradient(rates), slopes, strict=True))
    round_cost = cost.of(num_tokens)
    by_draft_cost = -cost.drafted(num_tokens) * speedup(rates, cost) / round_cost
    return Sensitivity(by_alpha, by_alpha / round_cost, by_draft_cost)


def simulate(rates: Sequence[float], num_rounds: int, seed: int) -> NDArray[np.int64]:
    """(num_rounds,) accepted tokens of rounds that are drawn token by token."""
    passed = np.random.default_rng(seed).random((num_rounds, len(rates))) < np.array(rates, dtype=np.float64)
    return np.cumprod(passed, axis=1, dtype=np.int64).sum(1)


def predict(
    acceptance: Sequence[float],
    *,
    draft_s_per_token: float,
    verify_s_per_round: float,
    plain_s_per_token: float,
    other_s_per_round: float = 0.0,
    reach: Sequence[float] | None = None,
) -> float:
    """Speed-up of the decode phase that measured numbers promise: τ·plain / (draft·n + verify + other).

    `acceptance` is the conditional acceptance at each position; nan, where it was never tested, counts as 0. `reach` is
    the share of rounds whose draft has a token there, 1 if left out: drafts are shorter where the answer's end is near,
    or the drafter chose so. Length and acceptance are taken as independent, and a stop token inside a draft is
    not foreseen: both biases are small for drafts that are short against an answer. nan where nothing was timed.
    Raises ValueError where `reach` does not hold one share for each position.
    """
    reach = [1.0] * len(acceptance) if reach is None else reach
    if len(reach) != len(acceptance) or not all(0 <= share <= 1 for share in reach):
        raise ValueError(f"reach is {list(reach)}: it must hold one share for each of {len(acceptance)} positions")
    survives = survival(Measured(tuple(acceptance)).rates(len(acceptance)))
    tokens = 1 + sum(share * s for share, s in zip(reach, survives, strict=True))
    seconds = sum(reach) * draft_s_per_token + verify_s_per_round + other_s_per_round
    return tokens * plain_s_per_token / seconds if seconds else math.nan


def _check_rate(name: str, rate: float) -> None:
    if not 0 <= rate <= 1:
        raise UserError(f"An acceptance profile has {name} = {rate}: it must lie between 0 and 1.")


if __name__ == "__main__":
    from conf.compose import main, plain
    from eval.predictions import job

    main("theory", lambda config: job(plain(config)))
