"""What the cost-aware policy learns and decides: by hand, against loops, and against the best length that is known."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from engine.draft_length import CostAware, Round
from engine.draft_length.costs import RoundCosts, Worth, best_gain
from tests.helpers.scripted import ScriptedDrafter

DRAFTER: Any = ScriptedDrafter(lambda text: 0)


def test_costs_are_lower_medians_on_straight_lines_and_never_fall() -> None:
    costs = RoundCosts(5, None, first=99)
    for drawn, seconds in [(1, 3.0), (1, 9.0), (1, 2.0), (3, 4.0), (3, 8.0), (4, 3.5)]:
        costs.add(drawn, seconds)
    # 1: 3; 3: 4, which 4's 3.5 corrects downwards; 2 lies between, 0 is as 1, 5 as 4
    assert costs.table() == [3.0, 3.0, 3.5, 3.5, 3.5, 3.5]
    assert costs.counts == [0, 3, 0, 2, 1, 0]
    costs.add(5, 10.0)
    assert costs.table() == [3.0, 3.0, 3.5, 3.5, 3.5, 10.0]
    for _ in range(16):
        costs.add(4, 7.0)  # only the last ones count
    assert costs.table()[3:] == [4.0, 7.0, 10.0]
    assert RoundCosts(3, 0.25).table() == [1, 1.25, 1.5, 1.75]
    with pytest.raises(ValueError):
        RoundCosts(3, None).table()


def test_rounds_are_compared_with_others_of_the_same_time() -> None:
    """Length 1 takes 2 s and length 2 takes 3 s, until everything takes twice as long."""
    costs = RoundCosts(2, None)
    for drawn, seconds in [(0, 1.0), (1, 2.0), (2, 3.0)] * 2:
        costs.add(drawn, seconds)
    for _ in range(40):
        costs.add(1, 4.0)  # nothing to compare it with
    assert costs.table() == [1.0, 2.0, 3.0]
    for drawn, seconds in [(2, 7.0), *[(1, 4.0)] * 4, (2, 7.0), *[(1, 4.0)] * 4]:
        costs.add(drawn, seconds)  # 3.5 at the first pace, twice: the lower median of 3, 3, 3.5, 3.5 is 3
    assert costs.table() == [1.0, 2.0, 3.0]
    for drawn, seconds in [(2, 7.0), *[(1, 4.0)] * 4]:
        costs.add(drawn, seconds)
    assert costs.table() == [1.0, 2.0, 3.5]
    for _ in range(8):  # what is timed while the pace changes is not believed
        for drawn, seconds in [(2, 20.0), *[(1, 4.0)] * 4, *[(1, 2.0)] * 4]:
            costs.add(drawn, seconds)
    assert costs.table() == [1.0, 2.0, 3.5]


def test_worth_counts_tested_tokens_by_confidence_and_by_depth() -> None:
    worth = Worth(3, 0.5)
    worth.add([0.95, 0.35, 0.36], accepted=1, drafted=3)  # the third was not tested
    worth.add([0.31], accepted=1, drafted=1)
    worth.add([1.0, 0.0], accepted=2, drafted=2)
    assert worth.by_depth() == pytest.approx([2.25 / 2.75, 1.5 / 2.5, 0.5])
    expected = [(1.5 + 4 * 0.92) / 5.5, (1 + 4 * 0.33) / 5.5, (1 + 4 * 0.05) / 5, 0.55]
    assert [worth.chance(confidence) for confidence in (0.92, 0.33, 0.05, 0.55)] == pytest.approx(expected)
    assert worth.hoped() == pytest.approx([1.0, 1.5 / 2.5, 0.5])  # 0.82 + 0.23 is no chance
    worth.add([], accepted=0, drafted=0)  # no draft: the first depth alone fades, from 1.75 of 1.75
    assert worth.by_depth() == pytest.approx([1.375 / 1.875, 1.5 / 2.5, 0.5])
    worth.add([0.2], accepted=0, drafted=1)  # 0.4375 of 1.4375
    assert worth.hoped()[0] == pytest.approx(0.9375 / 2.4375 + (0.9375 * 1.5 / 2.4375**3) ** 0.5)


def test_the_best_gain_is_that_of_a_loop_over_lengths() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        survival, limits, by_depth = (x.tolist() for x in (rng.random(3), rng.integers(0, 6, 3), rng.random(5)))
        costs, rate, depth = np.sort(rng.random(6)).tolist(), 3 * rng.random(), int(rng.integers(0, 5))
        gains = []
        for length in range(depth + 1, 6):
            tokens = sum(
                survival[b] * np.prod(by_depth[depth:upto])
                for b in range(3)
                for upto in range(depth + 1, length + 1)
                if upto <= limits[b]
            )
            gains.append(tokens - rate * (costs[length] - costs[depth]))
        assert best_gain(survival, limits, depth, by_depth, costs, rate) == pytest.approx(max(gains))
    assert best_gain(survival, limits, 5, by_depth, costs, rate) == float("-inf")


def play(policy: CostAware, confidences: list[list[float]], most: int, accepted: Any, seconds: Any) -> list[int]:
    """Rounds of one request after another: the chances its tokens would have; returns the drafted lengths."""
    lengths = policy.start(1, most, DRAFTER)
    drafted = []
    for chances in confidences:
        limit = lengths.ask([0], [most])[0]
        drawn = 0
        if limit:
            rule = lengths.rule([0], [limit])
            assert rule is not None and rule.limits == [limit]
            for drawn in range(1, limit + 1):
                assert rule.draws(torch.ones(1, 3) / 3).tolist() == [True]
                if not rule.goes_on(torch.tensor([chances[drawn - 1]])).item():
                    break
        drafted.append(drawn)
        lengths.after(Round([0], [drawn], [accepted(chances, drawn)], drawn, seconds(drawn)))
    return drafted


def test_the_first_decisions_by_hand() -> None:
    """Cost 0.3 a token, nothing known: every next token is taken to be accepted with 1/2, and 1 token costs 1."""
    rule: Any = CostAware(cost=0.3, margin=0)
    lengths = rule.start(1, 4, DRAFTER)
    assert lengths.ask([0], [4]) == [4]  # 0.5 − 0.3 > 0
    rule = lengths.rule([0], [4])
    # (0 + 4 · 0.9) / 4: a chance is believed as it is. 0.9 · 0.5 > 0.3; 0.9 · 0.7 · 0.5 = 0.315 > 0.3; then 0.2205
    answers = [rule.goes_on(torch.tensor([chance])).item() for chance in (0.9, 0.7, 0.7)]
    assert answers == [True, True, False]
    lengths.after(Round([0], [3], [3], 3, 0.0))
    # 4 tokens for 1.9: a token must now bring 0.3 · 4 / 1.9 = 0.63. At depth 1 (1 + 0.5) / 2 = 0.75 does.
    assert lengths.ask([0], [4]) == [4]
    rule = lengths.rule([0], [4])
    # 0.9 → 4.6 / 5 = 0.92 · 0.75 = 0.69 > 0.63, then 0.92² · 0.75 = 0.635 > 0.632, then 0.92³ · 0.5 < 0.63
    answers = [rule.goes_on(torch.tensor([chance])).item() for chance in (0.9, 0.9, 0.9)]
    assert answers == [True, True, False]
    for cost, asked in ((0.9, [1]), (1.1, [0])):  # while nothing is known, the first is hoped to be accepted with 1
        assert CostAware(cost=cost).start(1, 1, DRAFTER).ask([0], [1]) == asked
    for margin, going in ((0.4, True), (0.6, False)):  # 0.9 · 0.5 against 0.3 · 1.4 and 0.3 · 1.6
        rule = CostAware(cost=0.3, margin=margin).start(1, 2, DRAFTER).rule([0], [2])
        assert rule.goes_on(torch.tensor([0.9])).item() == going


def test_a_batch_draws_or_stops_together_as_far_as_there_is_room() -> None:
    lengths = CostAware(cost=1.1, margin=0).start(2, 1, DRAFTER)
    assert lengths.ask([0, 1], [1, 1]) == [0, 0]  # a rate of 2 tokens a step: 2 hoped for at 1.1 · 2
    lengths = CostAware(cost=0.4, margin=0).start(2, 4, DRAFTER)
    assert lengths.ask([0, 1], [4, 2]) == [4, 2]
    rule: Any = lengths.rule([0, 1], [4, 2])
    assert rule.goes_on(torch.tensor([0.99, 0.7])).tolist() == [True, True]  # 0.845 gained for 0.8, though 0.35 < 0.4
    assert rule.goes_on(torch.tensor([0.99, 0.99])).tolist() == [False, False]  # 0.49 for 0.8: the second has no room


BEST = {0.02: 6, 0.35: 3, 1.5: 0}  # seconds of a step: the length that gives most tokens per second, as checked below


@pytest.mark.parametrize("disturbed", [False, True])
@pytest.mark.parametrize("step_s", list(BEST))
def test_it_finds_the_best_length_without_being_told(step_s: float, disturbed: bool) -> None:
    """Three tokens are right with 0.9 each, the next ones with 0.6, at confidences that say so; some rounds explore.

    A machine that is now and then slower for a while is so for all lengths, also those that are not drafted then.
    """
    by_depth = [0.9, 0.9, 0.9, 0.6, 0.6, 0.6]
    rng = np.random.default_rng(1)
    pace = itertools.cycle([1.0] * 61 + [1.7] * 37)

    def seconds(drawn: int) -> float:
        return float((1 + step_s * drawn) * (1 + 0.05 * rng.random())) * (next(pace) if disturbed else 1.0)

    def rate(n: int) -> float:
        return (1 + sum(np.prod(by_depth[:i]) for i in range(1, n + 1))) / (1 + step_s * n)

    assert max(range(7), key=rate) == BEST[step_s]
    draws = [[float(rng.random() < a) for a in by_depth] for _ in range(600)]
    outcome = iter(draws)

    def accepted(_: Any, drawn: int) -> int:
        return sum(itertools.takewhile(bool, map(int, next(outcome)[:drawn])))

    made = play(CostAware(), [by_depth] * 600, 6, accepted, seconds)
    assert all(made[:16].count(n) >= 2 for n in range(7))
    last = made[200:]
    assert np.mean(np.array(last) == BEST[step_s]) > 0.85
    gained = sum(rate(n) * (1 + step_s * n) for n in last) / sum(1 + step_s * n for n in last)
    assert gained > 0.98 * rate(BEST[step_s])


@pytest.mark.parametrize("cost", [0.13, None])
def test_bad_luck_does_not_end_drafting_and_a_useless_drafter_is_seldom_asked(cost: float | None) -> None:
    """A first token worth 0.28 earns its 0.13 of a step; behind 40 that failed in a row it is drafted again."""
    rng = np.random.default_rng(5)

    def seconds(drawn: int) -> float:
        return float((1 + 0.13 * drawn) * (1 + 0.05 * rng.random()))

    def lucky(_: Any, drawn: int) -> int:
        return int(rng.random() < next(luck)) if drawn else 0

    luck = iter([0.0] * 40 + [0.28] * 900)
    made = play(CostAware(cost=cost, explore=10**6), [[0.3]] * 940, 1, lucky, seconds)
    assert np.mean(made[640:]) > 0.98
    useless = play(CostAware(cost=cost, explore=10**6), [[0.3]] * 1000, 1, lambda _, drawn: 0, seconds)
    assert 0.01 < np.mean(useless[100:]) < 0.1


def test_a_length_that_there_is_never_room_for_is_not_waited_for() -> None:
    """Answers of four tokens: a draft of eight is never made, and exploring ends all the same."""
    policy, drafted = CostAware(), list[int]()
    for _ in range(60):
        lengths = policy.start(1, 8, DRAFTER)
        for room in (4, 3, 2, 1):
            (limit,) = lengths.ask([0], [room])
            rule: Any = lengths.rule([0], [limit]) if limit else None
            going = [rule.goes_on(torch.tensor([0.05])).item() for _ in range(limit)]
            drawn = going.index(False) + 1 if False in going else limit
            drafted.append(drawn)
            lengths.after(Round([0], [drawn], [0], drawn, 1.0 + drawn))
    assert drafted.count(4) >= 2 and max(drafted) == 4
    assert np.mean(drafted[120:]) < 0.5


def test_with_a_given_cost_every_run_begins_anew() -> None:
    policy = CostAware(cost=0.2)
    chances = [[0.9, 0.5, 0.3]] * 30

    def played(accepted: int) -> list[int]:
        return play(policy, chances, 3, lambda _, drawn: min(drawn, accepted), lambda drawn: 0.0)

    never, always, again = played(0), played(3), played(0)
    assert never == again != always
    assert policy._known == {}


def test_what_was_learnt_is_kept_between_runs_for_each_greatest_length() -> None:
    policy = CostAware()
    for _ in range(4):
        play(policy, [[0.9] * 4] * 10, 4, lambda chances, drawn: drawn, lambda drawn: 1 + 0.1 * drawn)
    assert len(set(play(policy, [[0.9] * 4] * 5, 4, lambda chances, drawn: drawn, lambda drawn: 1 + 0.1 * drawn))) == 1
    other = play(policy, [[0.9] * 3] * 9, 3, lambda chances, drawn: drawn, lambda drawn: 1 + 0.1 * drawn)
    assert set(other) == {0, 1, 2, 3}
    assert policy == CostAware() and "known" not in repr(policy)
