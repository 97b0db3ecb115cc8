"""The definitions of recipes §10 on an example counted by hand, and against a loop over tokens."""

from __future__ import annotations

import math
import random
from dataclasses import fields

import numpy as np
import pytest

from engine.stats import DecodingStats

# request, limit, accepted, Σ min(p, q) at each drafted position
ROUNDS = [
    (0, 3, 3, [0.9, 0.8, 0.7]),
    (0, 3, 1, [0.5, 0.4, 0.3]),  # the third token stands behind a rejected one
    (1, 2, 0, [0.25, 0.6]),
    (1, 0, 0, []),
]


def counted(rounds: list[tuple[int, int, int, list[float]]], num_requests: int, num_positions: int) -> DecodingStats:
    stats = DecodingStats.empty(num_requests, num_positions)
    for request, limit, accepted, expected in rounds:
        drafted = (np.arange(num_positions) < limit).astype(float)
        stats.add_round(request, drafted, min(accepted + 1, limit), accepted, accepted + 1, np.array(expected))
    return stats


@pytest.fixture
def stats() -> DecodingStats:
    return counted(ROUNDS, 2, 3)


def as_lists(stats: DecodingStats) -> dict[str, list[object]]:
    return {f.name: getattr(stats, f.name).tolist() for f in fields(stats)}


def test_counters_by_hand(stats: DecodingStats) -> None:
    assert stats.rounds.tolist() == [2, 2]
    assert stats.emitted.tolist() == [6, 2]
    assert stats.drafted.tolist() == [[2, 2, 2], [1, 1, 0]]
    assert stats.tested.tolist() == [[2, 2, 1], [1, 0, 0]]
    assert stats.accepted.tolist() == [[2, 1, 1], [0, 0, 0]]
    np.testing.assert_allclose(stats.expected, [[1.4, 1.2, 0.7], [0.25, 0, 0]], atol=1e-15)


def test_what_lies_behind_a_stop_token_is_not_counted() -> None:
    expected, four = np.array([0.9, 0.8, 0.7, 0.6]), np.ones(4)
    stats = DecodingStats.empty(3, 4)
    stats.add_round(0, four, 4, accepted=4, emitted=2, expected=expected)  # the second drafted token ends the answer
    stats.add_round(1, four, 2, accepted=1, emitted=2, expected=expected)  # the correction does
    stats.add_round(2, four, 3, accepted=2, emitted=1, expected=expected)  # the first drafted token does
    assert stats.drafted.tolist() == [[1, 1, 1, 1]] * 3
    assert stats.tested.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert stats.accepted.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert stats.emitted.tolist() == [2, 2, 1]


def test_a_tree_has_several_tokens_at_a_depth_and_may_end_before_its_limit() -> None:
    stats = DecodingStats.empty(1, 3)
    stats.add_round(0, np.array([4.0, 6.0, 2.0]), 2, accepted=2, emitted=3, expected=np.array([0.9, 0.5, 0.0]))
    stats.add_round(0, np.array([4.0, 1.0, 0.0]), 1, accepted=0, emitted=1, expected=np.array([0.3, 0.0, 0.0]))
    assert stats.drafts.tolist() == [[2, 2, 1]]
    assert stats.drafted.tolist() == [[8, 7, 2]]
    assert stats.tested.tolist() == [[2, 1, 0]], "an accepted leaf has nothing below it to test"
    assert stats.acceptance_per_position == [1 / 2, 1 / 2, 0]
    assert stats.draft_utilization == 2 / 17
    assert stats.expected_acceptance_rate == pytest.approx(1.7 / 3)


def test_definitions_by_hand(stats: DecodingStats) -> None:
    assert stats.block_efficiency == 8 / 4
    assert stats.acceptance_rate == 4 / 6
    assert stats.expected_acceptance_rate == pytest.approx(3.55 / 6)
    assert stats.draft_utilization == 4 / 8
    assert stats.acceptance_per_position == [2 / 3, 1 / 3, 1 / 2]
    assert stats.conditional_acceptance == [2 / 3, 1 / 2, 1 / 1]


def test_rates_pool_rounds_and_are_not_means_of_rates(stats: DecodingStats) -> None:
    single = [stats.select([i]) for i in range(2)]
    assert [s.block_efficiency for s in single] == [3, 1]
    assert [s.acceptance_rate for s in single] == [4 / 5, 0]
    assert stats.acceptance_rate != pytest.approx(np.mean([s.acceptance_rate for s in single]))
    uneven = counted([(0, 1, 1, [1.0])] * 3 + [(1, 1, 0, [0.0])], 2, 1)
    assert uneven.block_efficiency == 7 / 4
    assert uneven.acceptance_rate == 3 / 4


def test_the_extra_token_counts_in_block_efficiency_only() -> None:
    nothing_accepted = counted([(0, 4, 0, [0.0] * 4)] * 5, 1, 4)
    assert nothing_accepted.block_efficiency == 1
    assert nothing_accepted.acceptance_rate == 0
    all_accepted = counted([(0, 4, 4, [1.0] * 4)] * 5, 1, 4)
    assert all_accepted.block_efficiency == 5
    assert all_accepted.acceptance_rate == all_accepted.expected_acceptance_rate == 1


def test_rates_are_nan_where_nothing_was_counted() -> None:
    empty = DecodingStats.empty(3, 2)
    for rate in ("block_efficiency", "acceptance_rate", "expected_acceptance_rate", "draft_utilization"):
        assert math.isnan(getattr(empty, rate))
    for rates in ("acceptance_per_position", "conditional_acceptance"):
        assert len(getattr(empty, rates)) == 2 and all(map(math.isnan, getattr(empty, rates)))
    plain = counted([(0, 0, 0, [])] * 7, 1, 0)  # decoding with no drafter
    assert plain.block_efficiency == 1
    assert math.isnan(plain.acceptance_rate) and plain.acceptance_per_position == []
    half = counted([(0, 1, 0, [0.5])], 1, 2)
    assert half.conditional_acceptance[0] == 0 and math.isnan(half.conditional_acceptance[1])


def test_select_by_index_mask_and_repetition(stats: DecodingStats) -> None:
    second = {name: values[1:] for name, values in as_lists(stats).items()}
    assert as_lists(stats.select([1])) == second
    assert as_lists(stats.select(np.array([False, True]))) == second
    resampled = stats.select(np.array([1, 0, 0]))
    assert resampled.emitted.tolist() == [2, 6, 6]
    assert resampled.block_efficiency == 14 / 6
    assert as_lists(stats) == as_lists(counted(ROUNDS, 2, 3))


def test_concatenate_puts_requests_one_behind_another(stats: DecodingStats) -> None:
    first, second = counted(ROUNDS[:2], 1, 3), counted([(0, *r[1:]) for r in ROUNDS[2:]], 1, 3)
    assert as_lists(DecodingStats.concatenate([first, second])) == as_lists(stats)
    assert as_lists(DecodingStats.concatenate([stats])) == as_lists(stats)


def test_accumulate_adds_a_whole_run_to_one_request(stats: DecodingStats) -> None:
    total = DecodingStats.empty(3, 3)
    total.accumulate(1, stats)
    total.accumulate(1, counted(ROUNDS[:1], 1, 3))
    total.accumulate(2, counted(ROUNDS[:1], 1, 3))
    assert total.rounds.tolist() == [0, 5, 1]
    assert total.emitted.tolist() == [0, 12, 4]
    assert total.drafted.tolist() == [[0, 0, 0], [4, 4, 3], [1, 1, 1]]
    assert total.tested.tolist() == [[0, 0, 0], [4, 3, 2], [1, 1, 1]]
    assert total.accepted.tolist() == [[0, 0, 0], [3, 2, 2], [1, 1, 1]]
    np.testing.assert_allclose(total.expected[1], [2.55, 2.0, 1.4], atol=1e-15)


def test_rates_of_random_rounds_are_those_of_a_loop_over_tokens() -> None:
    rng = random.Random(0)
    rounds = []
    for _ in range(300):
        limit = rng.randint(0, 4)
        rounds.append((rng.randrange(5), limit, rng.randint(0, limit), [rng.random() for _ in range(4)]))
    stats = counted(rounds, 5, 4)
    fates = []  # position, tested, accepted, Σ min(p, q) of every drafted token
    for _, limit, accepted, expected in rounds:
        fates += [(i, i <= accepted, i < accepted, expected[i]) for i in range(limit)]
    tested = [f for f in fates if f[1]]
    assert stats.block_efficiency == sum(r[2] + 1 for r in rounds) / len(rounds)
    assert stats.acceptance_rate == sum(f[2] for f in fates) / len(tested)
    assert stats.expected_acceptance_rate == pytest.approx(sum(f[3] for f in tested) / len(tested))
    assert stats.draft_utilization == sum(f[2] for f in fates) / len(fates)
    for i in range(4):
        here = [f for f in fates if f[0] == i]
        assert stats.acceptance_per_position[i] == sum(f[2] for f in here) / len(here)
        assert stats.conditional_acceptance[i] == sum(f[2] for f in here) / sum(f[1] for f in here)
