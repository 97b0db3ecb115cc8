"""What an ablation says of its arms: differences against loops, intervals against closed forms, and what is written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.ablation import STATISTICS, Ablated, Difference, difference, table_rows, value, write


def counts_of(accepted: list[list[int]], tested: list[list[int]]) -> dict[str, Any]:
    """Of prompts whose every round tests a first token: a round emits what is accepted, and one more."""
    rounds = [row[0] for row in tested]
    emitted = [sum(row) + count for row, count in zip(accepted, rounds, strict=True)]
    return {"accepted": accepted, "tested": tested, "rounds": rounds, "emitted": emitted}


GOOD = [counts_of([[8, 6], [9, 3]], [[10, 8], [12, 9]]), counts_of([[5, 5], [4, 2]], [[8, 5], [8, 4]])]
POOR = [counts_of([[6, 2], [9, 0]], [[13, 6], [15, 9]]), counts_of([[3, 1], [1, 0]], [[11, 3], [9, 1]])]


def test_statistics_are_ratios_pooled_over_a_seeds_prompts_and_averaged_over_seeds() -> None:
    assert value(GOOD, "block_efficiency") == pytest.approx(((26 + 22) / 22 + (16 + 16) / 16) / 2)
    assert value(GOOD, "first_acceptance") == pytest.approx((17 / 22 + 9 / 16) / 2)
    assert value(GOOD, "later_acceptance") == pytest.approx((9 / 17 + 7 / 9) / 2)
    assert math.isnan(value([counts_of([[3]], [[4]])], "later_acceptance"))


def test_a_difference_is_that_of_seeds_with_students_interval() -> None:
    found = difference(GOOD, POOR, "first_acceptance")
    first, second = 17 / 22 - 15 / 28, 9 / 16 - 4 / 20
    assert found.by_seed == pytest.approx([first, second])
    assert found.value == pytest.approx((first + second) / 2)
    assert found.over_seeds is not None  # two values: the mean ± 12.706 · half their distance
    assert found.over_seeds == pytest.approx(
        [found.value - 12.706 * abs(first - second) / 2, found.value + 12.706 * abs(first - second) / 2]
    )
    assert found.interval == found.over_seeds
    alone = difference(GOOD[:1], POOR[:1], "first_acceptance")
    assert alone.over_seeds is None and alone.interval == alone.over_prompts


def test_prompts_are_resampled_in_pairs() -> None:
    """Two arms that differ by the same everywhere differ by that in every resample, however prompts differ."""
    rng = np.random.default_rng(1)
    accepted = rng.integers(1, 90, size=30)
    ours, theirs = (counts_of([[int(a) + more] for a in accepted], [[100]] * 30) for more in (5, 0))
    found = difference([ours, ours], [theirs, theirs], "first_acceptance")
    assert found.over_prompts == pytest.approx((0.05, 0.05))
    spread = difference([ours], [counts_of([[45]] * 30, [[100]] * 30)], "first_acceptance")
    error = float(np.std(accepted / 100)) / math.sqrt(30)
    low, high = spread.over_prompts
    assert (high - low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.1)


def test_arms_on_other_prompts_are_not_compared() -> None:
    with pytest.raises(AssertionError, match="different prompts"):
        difference([GOOD[0]], [counts_of([[1, 1]], [[2, 1]])], "block_efficiency")


@pytest.mark.parametrize(
    ("over_seeds", "verdict"),
    [
        ((0.1, 0.3), "as the literature has it"),
        ((-0.3, -0.1), "the other way round"),
        ((-0.1, 0.3), "not told apart: the interval holds 0"),
    ],
)
def test_the_verdict_is_the_intervals(over_seeds: tuple[float, float], verdict: str) -> None:
    assert Difference(0.1, [0.0, 0.2], (0.05, 0.15), over_seeds).verdict == verdict
    assert Difference(0.1, [0.1], over_seeds, None).verdict == verdict


def test_what_was_never_tested_is_no_number() -> None:
    """Where no first token was accepted, no second one is tested; and a resample may miss the prompts where one was."""
    never, once = counts_of([[0, 0]] * 2, [[5, 0]] * 2), counts_of([[1, 1], [0, 0]], [[5, 1], [5, 0]])
    found = difference([never, never], [once, once], "later_acceptance")
    assert (
        math.isnan(found.value) and all(map(math.isnan, found.over_prompts)) and found.verdict == "nothing was counted"
    )
    arms = {"never": {0.0: [never]}, "once": {0.0: [once]}}
    rows = table_rows(Ablated("some", arms, [0], "later_acceptance", 0.0))
    assert [row["value"] for row in rows[:2]] == ["–", "1.000"] and rows[1]["first − this"] == "–"
    assert difference([once], [once], "later_acceptance").over_prompts == (0, 0)


def test_what_is_written_holds_every_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = {"good": {0.0: GOOD, 1.0: POOR}, "poor": {0.0: POOR, 1.0: POOR}, "same": {0.0: GOOD, 1.0: POOR}}
    found = Ablated("some: title", arms, [3, 4], "first_acceptance", 0.0, "python some")
    rows = table_rows(found)
    assert [row["arm"] for row in rows[:3]] == ["good", "poor", "same"]
    assert rows[0]["of"] == "acceptance of a draft's first token, T=0" and rows[0]["first − this"] == ""
    assert len(rows) == 3 * len(STATISTICS) * 2
    d = difference(GOOD, POOR, "first_acceptance")
    assert rows[1]["first − this"] == f"{d.value:+.3f}"
    assert rows[1]["by seed"] == " ".join(f"{x:+.3f}" for x in d.by_seed)
    write(found, tmp_path, {"some": "option"})
    printed, text = capsys.readouterr().out, (tmp_path / "ablation.md").read_text()
    line = f"good − poor, acceptance of a draft's first token, T=0: {d.value:+.3f}"
    assert f"\n{line}" in printed and f"- {line}" in text and "over 2 seeds: not told apart" in text
    told = json.loads((tmp_path / "ablation.json").read_text())
    assert told["command"] == "python some" and "\n    python some\n" in text
    assert told["seeds"] == [3, 4] and told["counts"]["good"]["0"] == GOOD and told["config"] == {"some": "option"}
    same = [x for x in told["differences"] if x["arm"] == "same"]
    assert len(same) == 6 and all(x["value"] == 0 and x["over_prompts"] == [0, 0] for x in same)
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")
