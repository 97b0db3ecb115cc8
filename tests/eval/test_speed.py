"""Ratios, bounds and turns of the speed report, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine.stats import DecodingStats
from eval.speed import Timed, Way, in_turns, passes, ratio, summaries
from models.target import Target


def way(name: str, answers: list[Timed], baseline: str | None = None) -> Way:
    return Way(name, lambda context: answers[0], baseline, list(answers))


PLAIN = way("plain", [Timed([1, 2, 3], 3.5, 0.5, 0.0, 3.0, 2), Timed([4, 5], 1.5, 0.5, 0.0, 1.0, 1)], "theirs")
DRAFTED = way("drafted", [Timed([1, 2, 3], 2.0, 0.5, 0.4, 1.0, 1), Timed([4, 6], 1.5, 0.5, 0.2, 0.6, 1)])
THEIRS = way("theirs", [Timed([1, 2, 3], 7.0), Timed([4, 5], 3.0)])


def test_ratios_are_of_seconds_per_token() -> None:
    assert ratio(DRAFTED, PLAIN)[0] == pytest.approx(5.0 / 3.5)
    assert ratio(PLAIN, THEIRS)[0] == pytest.approx(2.0)
    value, low, high = ratio(DRAFTED, THEIRS)
    assert low == pytest.approx(2.0) and high == pytest.approx(3.5) and low < value < high
    assert ratio(PLAIN, PLAIN) == (1.0, 1.0, 1.0)


def test_the_parts_of_a_round_add_up() -> None:
    plain, drafted, theirs = summaries([PLAIN, DRAFTED, THEIRS])
    assert plain["identical_to_plain"] == theirs["identical_to_plain"] == 2 and drafted["identical_to_plain"] == 1
    assert plain["speedup_over_baseline"][0] == pytest.approx(2.0) and "speedup_over_baseline" not in drafted
    assert drafted["block_efficiency"] == (5 - 2) / 2
    assert drafted["draft_ms"] == pytest.approx(300) and drafted["verify_ms"] == pytest.approx(800)
    assert drafted["other_ms"] == pytest.approx(1250 - 1100)
    assert drafted["other_share"] == pytest.approx(150 / 1250)
    assert drafted["bound"] == pytest.approx(1.5 * (4.0 / 3) / 1.1)
    assert drafted["bound_reached"] == pytest.approx(1100 / 1250)
    assert "draft_ms" not in theirs and theirs["tokens_per_s"] == pytest.approx(0.5)


def test_predictions_are_those_of_the_measurement() -> None:
    stats = [DecodingStats.empty(1, 2) for _ in range(2)]
    for part, accepted in zip(stats, ([2, 0, 1], [1]), strict=True):
        for count in accepted:
            part.add_round(0, np.ones(2), min(count + 1, 2), count, count + 1, np.zeros(2))
    plain = way("plain", [Timed([1] * 7, 7.0, 1.0), Timed([1] * 3, 3.0, 1.0)])
    drafted = way(
        "drafted", [Timed([1] * 7, 4.0, 1.0, 0.6, 1.8, 3, stats[0]), Timed([1] * 3, 2.0, 1.0, 0.2, 0.6, 1, stats[1])]
    )
    (_, row) = summaries([plain, drafted])
    assert row["conditional_acceptance"] == [3 / 4, 1 / 3]
    round_s = 0.8 / 8 * 2 + 2.4 / 4 + (6.0 - 2.0 - 0.8 - 2.4) / 4
    rounds = 8 / (1 + 3 / 4 + 3 / 4 * 1 / 3)  # of eight emitted tokens, by theory
    assert row["predicted_speedup"] == pytest.approx(1.0 / ((2.0 + rounds * round_s) / 10))
    assert "predicted_speedup" not in summaries([plain])[0]
    short_stats = DecodingStats.empty(1, 1)  # what it accepted itself is not looked at
    for _ in range(5):
        short_stats.add_round(0, np.ones(1), 1, 0, 1, np.zeros(1))
    short = way("short", [Timed([1] * 6, 9.0, 1.0, 5.0, 2.0, 5, short_stats), Timed([1], 0.5, 0.5, 0.0, 0.0, 0)])
    short.longest = "drafted"
    predicted = summaries([plain, drafted, short])[2]["predicted_speedup"]
    round_s = 0.8 / 8 * 1 + 2.0 / 5 + 0.8 / 4
    assert predicted == pytest.approx(1.0 / ((1.5 + 5 / (1 + 3 / 4) * round_s) / 7))


def test_the_fastest_of_several_turns_counts_and_all_go_first_once() -> None:
    order: list[str] = []
    seconds = iter([5.0, 1.0, 2.0, 3.0, 4.0, 9.0])

    def made(name: str) -> Way:
        def answer(context: list[int]) -> Timed:
            order.append(name)
            return Timed(context, next(seconds))

        return Way(name, answer)

    ways = [made("a"), made("b"), made("c")]
    in_turns(ways, [7], repeats=2, index=1)
    assert order == ["b", "c", "a", "c", "a", "b"]
    assert [w.answers[0].total_s for w in ways] == [2.0, 5.0, 1.0]


def test_passes_tell_times_beside_the_bound(tiny: Target) -> None:
    found = passes(tiny, context=32, repeats=2)
    assert list(found["least_ms"]) == [1, 2, 3, 5, 8, 16]
    assert all(0 < found["least_ms"][n] <= found["median_ms"][n] for n in found["least_ms"])
    weights = sum(p.nbytes for p in tiny.model.parameters()) - tiny.embedding.weight.nbytes
    if tiny.embedding.weight.data_ptr() == tiny.head.weight.data_ptr():
        weights += tiny.head.weight.nbytes
    assert found["weights_mb"] == pytest.approx(weights / 1e6)
    assert found["bound_ms"] == pytest.approx(found["weights_mb"] / found["bandwidth_gb_per_s"])
    assert not math.isnan(found["bound_ms"])
