"""Theory against enumeration in fractions, numeric roots, dual numbers, simulated rounds and the engine's verifier."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import total_ordering
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import lambertw

from engine.verify import verify_chain
from eval.theory import (
    Constant,
    Decay,
    Linear,
    Measured,
    Profile,
    Roofline,
    RoundCost,
    Stepped,
    accepted_distribution,
    best_length,
    best_length_by_margin,
    best_length_closed,
    block_efficiency,
    block_efficiency_gradient,
    constant_block_efficiency,
    expected_accepted,
    lambert_w_minus_1,
    predict,
    sensitivity,
    simulate,
    speedup,
)
from models.errors import UserError
from models.tree import StaticTree

F = Fraction
PROFILES: list[Any] = [
    Constant(F(0)),
    Constant(F(1)),
    Constant(F(7, 10)),
    Decay(F(9, 10), F(4, 5)),
    Linear(F(4, 5), F(3, 10)),
    Stepped(((1, F(9, 10)), (3, F(1, 2)))),
    Measured((F(3, 4), F(1, 3), F(0), F(1, 2), F(1))),
]
ALPHAS = (0.02, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97, 0.995)
COSTS = (0.001, 0.01, 0.05, 0.12, 0.33, 0.6, 0.95)  # none of them an α: S(0) and S(1) would tie


def enumerated(rates: list[Fraction]) -> list[Fraction]:
    """The law of the accepted count: every draft token passes or does not, and what follows a failure is lost."""
    law = [F(0)] * (len(rates) + 1)
    for passes in product((True, False), repeat=len(rates)):
        chance = math.prod((r if ok else 1 - r for r, ok in zip(rates, passes, strict=True)), start=F(1))
        law[[*passes, False].index(False)] += chance
    return law


@pytest.mark.parametrize("profile", PROFILES, ids=str)
@pytest.mark.parametrize("n", range(6))
def test_accepted_tokens_are_those_of_all_outcomes(profile: Profile, n: int) -> None:
    rates = profile.rates(n)
    law = enumerated(rates)
    assert accepted_distribution(rates) == law
    assert expected_accepted(rates) == sum(k * chance for k, chance in enumerate(law))
    assert block_efficiency(rates) == sum((k + 1) * chance for k, chance in enumerate(law))
    if n:
        assert StaticTree.chain(n).expected_tokens([[float(r)] for r in rates]) == pytest.approx(
            float(block_efficiency(rates)), abs=1e-12
        )


def test_profiles_by_hand() -> None:
    assert Constant(F(1, 2)).rates(3) == [F(1, 2)] * 3
    assert Decay(F(1, 2), F(1, 3)).rates(3) == [F(1, 2), F(1, 6), F(1, 18)]
    assert Linear(F(1, 2), F(1, 5)).rates(4) == [F(1, 2), F(3, 10), F(1, 10), 0]
    assert Stepped(((1, 0.9), (3, 0.5), (4, 0.2))).rates(6) == [0.9, 0.9, 0.5, 0.2, 0.2, 0.2]
    assert Measured((0.9, math.nan, 0.5)).rates(3) == [0.9, 0, 0.5]
    assert Measured((0.9, 0.8)).rates(1) == [0.9]
    decay = Decay(F(9, 10), F(4, 5))
    closed = sum(decay.alpha**k * decay.beta ** (k * (k - 1) // 2) for k in range(1, 7))
    assert expected_accepted(decay.rates(6)) == closed


@pytest.mark.parametrize("n", (1, 2, 4, 9))
@pytest.mark.parametrize("alpha", [F(1, 100), F(1, 2), F(9, 10), 1 - F(1, 2**40)])
def test_closed_forms_of_a_constant_rate(alpha: Fraction, n: int) -> None:
    assert expected_accepted([alpha] * n) == alpha * (1 - alpha**n) / (1 - alpha)
    exact = (1 - alpha ** (n + 1)) / (1 - alpha)
    assert block_efficiency([alpha] * n) == exact
    assert constant_block_efficiency(float(alpha), n) == pytest.approx(float(exact), rel=1e-14)
    assert constant_block_efficiency(0.0, n) == 1 and constant_block_efficiency(1.0, n) == n + 1


def weighted_sum(alpha: Fraction, n: int) -> Fraction:
    return alpha * (1 - (n + 1) * alpha**n + n * alpha ** (n + 1)) / (1 - alpha) ** 2


WRONG: dict[str, Callable[[Fraction, int], Fraction]] = {
    "sum of i·α^i": weighted_sum,
    "n·α": lambda alpha, n: n * alpha,
    "with the extra token": lambda alpha, n: (1 - alpha ** (n + 1)) / (1 - alpha),
    "one position short": lambda alpha, n: alpha * (1 - alpha ** (n - 1)) / (1 - alpha),
    "the last one never ends": lambda alpha, n: alpha / (1 - alpha),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_forms_of_the_accepted_tokens_are_told_apart(name: str) -> None:
    for alpha, n in product((F(1, 10), F(1, 2), F(9, 10)), (2, 4, 8)):
        assert WRONG[name](alpha, n) != expected_accepted([alpha] * n)


def test_the_published_sum_exceeds_the_draft_and_is_the_derivative_times_alpha() -> None:
    alpha, n = F(9, 10), 4
    assert weighted_sum(alpha, n) > n > expected_accepted([alpha] * n)
    assert weighted_sum(alpha, n) == alpha * sum(block_efficiency_gradient([alpha] * n))


def test_speedup_by_hand_and_as_it_is_misprinted() -> None:
    def misprinted(alpha: Fraction, n: int, c: Fraction) -> Fraction:
        return 1 / (1 - alpha ** (n + 1)) * (n + 1) / (n * c + 1)

    n, c = 4, F(1, 10)
    assert speedup([F(1, 2)] * n, RoundCost(c)) == F(31, 16) / F(14, 10)
    whole = RoundCost(c, lambda k: F(1) + k * F(1, 20), F(1, 5))
    assert speedup([F(1, 2)] * n, whole) == F(31, 16) / (F(6, 5) + F(4, 10) + F(1, 5))
    assert speedup([], RoundCost(c)) == 1
    for alpha in (F(0), F(1, 2), F(99, 100)):
        closed = (1 - alpha ** (n + 1)) / ((1 - alpha) * (1 + n * c))
        assert speedup([alpha] * n, RoundCost(c)) == closed
    assert speedup([F(0)] * n, RoundCost(c)) < 1 < misprinted(F(0), n, c)
    assert speedup([F(999, 1000)] * n, RoundCost(c)) < n + 1 < misprinted(F(999, 1000), n, c)


def test_a_pass_takes_what_must_be_read_or_computed() -> None:
    gpu = Roofline(
        weight_bytes=100.0, flops_per_row=2.0, bandwidth_bytes_per_s=10.0, peak_flops_per_s=1.0, cache_bytes=5.0
    )
    assert gpu.seconds(1) == 10.5 and gpu.seconds(1, 8) == 14.0
    assert gpu.seconds(5, 1) == 10.5 and gpu.seconds(6, 1) == 12.0
    assert gpu.relative(4) == 1.0  # five rows are read for nothing
    assert gpu.relative(9) == 20 / 10.5
    assert gpu.relative(4, 2) == 20 / 11
    busy = 16  # requests: 32 seconds of arithmetic, 18 of reading
    assert gpu.relative(4, busy) == 5.0
    for alpha in (0.5, 0.9, 1.0):  # no draft pays where arithmetic is the limit
        assert best_length(Constant(alpha), RoundCost(0.01, lambda n: gpu.relative(n, busy)), 8) == 0
    assert best_length(Constant(0.9), RoundCost(0.01, gpu.relative), 8) == 4


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("c", COSTS)
def test_three_ways_to_the_best_length_agree(alpha: float, c: float) -> None:
    profile, most = Constant(alpha), 3000
    slow = [constant_block_efficiency(alpha, n) / (1 + n * c) for n in range(most + 1)]
    best = slow.index(max(slow))
    assert best < most
    assert best_length(profile, RoundCost(c), best + 20) == best
    assert best_length_by_margin(profile, RoundCost(c), most) == best
    real = best_length_closed(alpha, c)
    assert best in (math.floor(real), math.ceil(real))
    here = constant_block_efficiency(alpha, real) / (1 + real * c)  # between whole lengths it is the peak
    for step in (-0.01, 0.01) if real > 0.01 else (0.01,):
        assert constant_block_efficiency(alpha, real + step) / (1 + (real + step) * c) < here
    scaled = best_length_closed(alpha, c / 2.5)
    assert best_length(profile, RoundCost(c, other=1.5), 700) in (math.floor(scaled), math.ceil(scaled))
    assert scaled < 700


def test_the_closed_form_at_its_ends() -> None:
    assert best_length_closed(0.0, 0.1) == 0 and best_length_closed(0.9, 1.0) == 0 and best_length_closed(0.9, 2.0) == 0
    assert best_length_closed(1.0, 0.5) == math.inf and best_length_closed(0.5, 0.0) == math.inf
    endless = math.log(1e-300 / -math.log(0.8)) / math.log(0.8) - 1  # L·α^(n+1)/(1 − α) = c·S, and S is 1/(1 − α)
    assert best_length_closed(0.8, 1e-300) == pytest.approx(endless, rel=1e-12)
    assert best_length(Constant(1.0), RoundCost(0.5), 7) == best_length_by_margin(Constant(1.0), RoundCost(0.5), 7) == 7
    assert best_length(Constant(0.5), RoundCost(0.5), 7) == best_length_by_margin(Constant(0.5), RoundCost(0.5), 7) == 0


@pytest.mark.parametrize("profile", [*PROFILES[3:], Decay(F(19, 20), F(99, 100))], ids=str)
def test_the_marginal_rule_finds_the_best_length_of_any_profile_and_convex_cost(profile: Profile) -> None:
    gpu = Roofline(100.0, 2.0, 10.0, 1.0)
    for c in (0.0, 0.02, 0.1, 0.5):
        for verify in (lambda n: 1.0, gpu.relative, lambda n: 1.0 + 0.02 * n + 0.01 * n**2):
            cost = RoundCost(c, verify, 0.1)
            slow = [speedup(profile.rates(n), cost) for n in range(6)]
            assert best_length(profile, cost, 5) == slow.index(max(slow)) == best_length_by_margin(profile, cost, 5)


def test_rules_of_thumb_are_not_the_best_length() -> None:
    def gain(alpha: float, n: float, c: float) -> float:
        return speedup([alpha] * round(n), RoundCost(c))

    for alpha, c in ((0.1, 0.005), (0.2, 0.01), (0.3, 0.01)):
        root = math.sqrt(alpha / (c * (1 - alpha)))
        best = best_length(Constant(alpha), RoundCost(c), 50)
        assert round(root) > best and gain(alpha, root, c) < gain(alpha, best, c)
    for alpha, c in product(ALPHAS, COSTS):
        assert -math.log(c * (1 - alpha)) / math.log(alpha) < 0  # ρ = c: no length at all
    mended = -math.log((1 - 0.97) / 0.05) / math.log(0.97)
    assert mended < 0 and best_length(Constant(0.97), RoundCost(0.05), 200) == 29


@pytest.mark.parametrize("x", [-0.36, -0.3, -0.1, -1e-3, -1e-10, -1e-300])
def test_lambert_w_against_bisection(x: float) -> None:
    low, high = -800.0, -1.0  # w + ln(−w) = ln(−x), rising in w
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if middle + math.log(-middle) < math.log(-x) else (low, middle)
    assert lambert_w_minus_1(x) == pytest.approx(low, rel=1e-12)
    assert lambert_w_minus_1(x) == pytest.approx(lambertw(x, -1).real, rel=1e-12)


def test_lambert_w_at_the_branch_point_and_outside() -> None:
    edge = -1 / math.e
    assert lambert_w_minus_1(edge) == pytest.approx(-1, abs=5e-8)
    for gap in (1e-14, 1e-12, 1e-9, 1e-6):  # against the series in p = −√(2 + 2ex), from more digits of e
        p = -math.sqrt(2 * (1 + Decimal(1).exp() * Decimal(edge + gap)))
        series = -1 + p - p**2 / 3 + 11 * p**3 / 72 - 43 * p**4 / 540 + 769 * p**5 / 17280
        assert lambert_w_minus_1(edge + gap) == pytest.approx(series, abs=4e-16 / -p)
    for x in (-0.4, 0.0, 0.1):
        with pytest.raises(ValueError, match="between −1/e and 0"):
            lambert_w_minus_1(x)


@total_ordering
class Dual:
    """value + slope·ε with ε² = 0, in fractions: arithmetic on it carries the exact derivative along."""

    def __init__(self, value: Any, slope: Any = 0) -> None:
        self.value, self.slope = F(value), F(slope)

    def __add__(self, other: Any) -> Dual:
        other = as_dual(other)
        return Dual(self.value + other.value, self.slope + other.slope)

    def __mul__(self, other: Any) -> Dual:
        other = as_dual(other)
        return Dual(self.value * other.value, self.slope * other.value + self.value * other.slope)

    def __sub__(self, other: Any) -> Dual:
        return self + as_dual(other) * -1

    def __truediv__(self, other: Any) -> Dual:
        other = as_dual(other)
        return self * Dual(1 / other.value, -other.slope / other.value**2)

    def __rtruediv__(self, other: Any) -> Dual:
        return as_dual(other) / self

    __radd__, __rmul__ = __add__, __mul__

    def __eq__(self, other: object) -> bool:
        return self.value == as_dual(other).value

    def __lt__(self, other: Any) -> bool:
        return self.value < as_dual(other).value

    def __float__(self) -> float:
        return float(self.value)


def as_dual(x: Any) -> Dual:
    return x if isinstance(x, Dual) else Dual(x)


def raised(profile: Any, step: Callable[[Any], Any]) -> Any:
    """The profile with every rate that its level moves put through `step`."""
    if isinstance(profile, Stepped):
        return Stepped(tuple((start, step(rate)) for start, rate in profile.steps))
    if isinstance(profile, Measured):
        return Measured(tuple(step(rate) for rate in profile.values))
    rest = [profile.beta] if isinstance(profile, Decay) else [profile.fall] if isinstance(profile, Linear) else []
    return type(profile)(step(profile.alpha), *rest)


@pytest.mark.parametrize("profile", PROFILES, ids=str)
@pytest.mark.parametrize("n", (0, 1, 3, 5))
def test_derivatives_are_exact(profile: Any, n: int) -> None:
    def verify(k: int) -> Fraction:
        return 1 + F(k, 50)

    c, other = F(1, 12), F(1, 7)
    found = sensitivity(profile, RoundCost(c, verify, other), n)
    moving = raised(profile, lambda rate: Dual(rate, 1)).rates(n)
    assert found.block_efficiency_by_alpha == as_dual(block_efficiency(moving)).slope
    assert found.speedup_by_alpha == as_dual(speedup(moving, RoundCost(c, verify, other))).slope
    moved = speedup(profile.rates(n), RoundCost(Dual(c, 1), verify, other))
    assert found.speedup_by_draft_cost == as_dual(moved).slope
    gradient, rates = block_efficiency_gradient(profile.rates(n)), profile.rates(n)
    for j in range(n):  # τ is affine in each rate
        one, zero = ([*rates[:j], F(end), *rates[j + 1 :]] for end in (1, 0))
        assert gradient[j] == block_efficiency(one) - block_efficiency(zero)


@pytest.mark.parametrize("profile", [Constant(0.7), Decay(0.8, 0.9), Linear(0.8, 0.05), Measured((0.7, 0.6, 0.5, 0.9))])
def test_derivatives_are_those_of_finite_differences(profile: Any) -> None:
    c, h, n = 0.07, 1e-6, 4
    found = sensitivity(profile, RoundCost(c), n)
    up, down = (raised(profile, lambda rate, d=d: rate + d).rates(n) for d in (h, -h))
    by_alpha = (block_efficiency(up) - block_efficiency(down)) / (2 * h)
    assert found.block_efficiency_by_alpha == pytest.approx(by_alpha, rel=1e-8)
    by_alpha = (speedup(up, RoundCost(c)) - speedup(down, RoundCost(c))) / (2 * h)
    assert found.speedup_by_alpha == pytest.approx(by_alpha, rel=1e-8)
    rates = profile.rates(n)
    by_cost = (speedup(rates, RoundCost(c + h)) - speedup(rates, RoundCost(c - h))) / (2 * h)
    assert found.speedup_by_draft_cost == pytest.approx(by_cost, rel=1e-8)
    if isinstance(profile, Constant):
        assert found.block_efficiency_by_alpha == pytest.approx(sum(k * 0.7 ** (k - 1) for k in range(1, n + 1)))


def within(found: float, expected: float, spread: float, count: int) -> bool:
    """Four standard errors: one correct value in 16 000 is outside."""
    return abs(found - expected) <= 4 * spread / math.sqrt(count)


@pytest.mark.parametrize("profile", [Constant(0.8), Decay(0.9, 0.8), Linear(0.9, 0.25), Stepped(((1, 0.9), (3, 0.3)))])
def test_simulated_rounds_bear_the_theory_out(profile: Profile) -> None:
    rates, count, cost = profile.rates(5), 40_000, RoundCost(0.05, lambda n: 1 + 0.02 * n, 0.1)
    accepted = simulate(rates, count, seed=1)
    assert accepted.shape == (count,)
    for k, chance in enumerate(accepted_distribution(rates)):
        assert within((accepted == k).mean(), chance, math.sqrt(chance * (1 - chance)), count)
    tokens = accepted + 1.0
    assert within(tokens.mean(), block_efficiency(rates), tokens.std(), count)
    plain_s, speculative_s = tokens.sum() * 1.0, count * cost.of(5)
    assert within(plain_s / speculative_s, speedup(rates, cost), tokens.std() / cost.of(5), count)
    for wrong in (sum(rates), expected_accepted(rates), expected_accepted(rates[1:]) + 1):
        assert not within(tokens.mean(), wrong, tokens.std(), count)
    assert (simulate(rates, 100, seed=1) == simulate(rates, 100, seed=1)).all()
    assert (simulate([], 3, seed=0) == 0).all()


def test_the_engines_verifier_accepts_what_theory_says() -> None:
    g = torch.Generator().manual_seed(0)
    count, n, vocab = 20_000, 4, 6
    p = torch.rand(n + 1, vocab, generator=g, dtype=torch.float64).softmax(-1)
    q = (2 * torch.rand(n, vocab, generator=g, dtype=torch.float64)).softmax(-1)
    rates = torch.minimum(p[:n], q).sum(-1).tolist()
    tokens = torch.stack([torch.multinomial(row, count, replacement=True, generator=g) for row in q], dim=1)
    limits, uniforms = torch.full((count,), n), torch.rand(count, n + 1, generator=g, dtype=torch.float64)
    verdict = verify_chain(p.expand(count, -1, -1), tokens, q.expand(count, -1, -1), limits, uniforms)
    accepted = verdict.accepted.double()
    for k, chance in enumerate(accepted_distribution(rates)):
        assert within((accepted == k).double().mean().item(), chance, math.sqrt(chance * (1 - chance)), count)
    assert within(accepted.mean().item() + 1, block_efficiency(rates), accepted.std().item(), count)


def test_a_prediction_by_hand() -> None:
    times = {"draft_s_per_token": 0.01, "verify_s_per_round": 0.12, "plain_s_per_token": 0.1}
    assert predict([0.5, 0.5], **times) == pytest.approx(1.75 * 0.1 / 0.14)
    cost = RoundCost(0.1, lambda n: 1.2, 0.3)
    assert predict([0.5, 0.4], **times, other_s_per_round=0.03) == pytest.approx(speedup([0.5, 0.4], cost))
    assert predict([0.5, math.nan], **times) == pytest.approx(1.5 * 0.1 / 0.14)
    assert predict([0.5, 0.4], **times, reach=[0.8, 0.5]) == pytest.approx((1 + 0.4 + 0.1) * 0.1 / 0.133)
    assert predict([], **times) == pytest.approx(0.1 / 0.12)
    assert math.isnan(predict([0.5], draft_s_per_token=0.0, verify_s_per_round=0.0, plain_s_per_token=0.1))
    for reach in ([1.0], [1.0, 1.5], [1.0, math.nan]):
        with pytest.raises(ValueError, match="one share for each of 2 positions"):
            predict([0.5, 0.5], **times, reach=reach)


@pytest.mark.parametrize("length", (20, 100))
def test_a_prediction_of_answers_that_end_is_off_by_little(length: int) -> None:
    rates, draft, verify = np.array(Decay(0.9, 0.9).rates(5)), 0.08, 1.1
    rng = np.random.default_rng(3)
    drafted, tested, accepted = np.zeros(5), np.zeros(5), np.zeros(5)
    rounds, seconds, answers = 0, 0.0, 2000
    for _ in range(answers):
        left = length
        while left:
            limit = min(5, left - 1)
            passed = np.cumprod(rng.random(limit) < rates[:limit]).astype(int)
            count = int(passed.sum())
            drafted[:limit] += 1
            tested[: min(count + 1, limit)] += 1
            accepted[:count] += 1
            rounds, seconds, left = rounds + 1, seconds + verify + draft * limit, left - count - 1
    measured = answers * length / seconds
    times = {"draft_s_per_token": draft, "verify_s_per_round": verify, "plain_s_per_token": 1.0}
    assert predict(accepted / tested, **times, reach=drafted / rounds) == pytest.approx(measured, rel=0.005)
    full = predict(accepted / tested, **times)  # every draft taken as whole: too much is promised
    assert measured < full < measured * (1 + 4 / length)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(1.2), "alpha = 1.2: it must lie between 0 and 1"),
        (lambda: Constant(math.nan), "alpha = nan"),
        (lambda: Decay(0.5, -0.1), "beta = -0.1"),
        (lambda: Linear(0.5, 2.0), "fall = 2.0"),
        (lambda: Stepped(()), r"start at \[\]: they must start at 1 and rise"),
        (lambda: Stepped(((2, 0.5),)), r"start at \[2\]"),
        (lambda: Stepped(((1, 0.5), (1, 0.4))), r"start at \[1, 1\]"),
        (lambda: Stepped(((1, 0.5), (3, 1.4))), "the rate from position 3 on = 1.4"),
        (lambda: Measured((0.5, 1.1)), "the rate at position 2 = 1.1"),
        (lambda: Measured((0.5,)).rates(2), "measured at 1 positions, and 2 are asked for"),
        (lambda: RoundCost(-0.1), "The cost 'draft' is -0.1"),
        (lambda: RoundCost(0.1, other=math.nan), "The cost 'other' is nan"),
        (lambda: Roofline(1.0, 0.0, 1.0, 1.0), "flops_per_row is 0.0: it must be above 0"),
        (lambda: Roofline(1.0, 1.0, 1.0, 1.0, -1.0), "cache_bytes is -1.0: it must be 0 or more"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
