"""Rates of two drafters are pooled over requests, and their difference has the interval of paired resampling."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from data.streams import Request, Stream
from train.adaptation import report, timeline
from train.adaptation.timeline import Row, paired, requests_to_win
from train.adaptation.versus import RATES, versus

ROW = Row(0, "code", "adapted", 0, 10, 20, 15, 10, 0.5, 10, 18, 15, 8, 1.0)


def rows_of(gains: list[float], domain: str = "prose", start: int = 0) -> list[Row]:
    """Requests of 100 tested tokens, of which the frozen drafter has about half and the adapted that much more."""
    rng = np.random.default_rng(1)
    found = []
    for index, gain in enumerate(gains):
        frozen = 50 + int(rng.integers(-9, 10))
        noise = int(rng.integers(-3, 4))
        found.append(replace(ROW, request=start + index, domain=domain, tested=100.0, frozen_tested=100.0,
                             frozen_accepted=float(frozen), accepted=frozen + gain + noise))  # fmt: skip
    return found


def test_rates_are_pooled_and_pairs_stay_together() -> None:
    rows = rows_of([5.0] * 60)
    found = versus("x", paired(rows, "acceptance_rate"))
    assert found.frozen == pytest.approx(sum(r.frozen_accepted for r in rows) / 6000)
    assert found.difference == pytest.approx(sum(r.accepted - r.frozen_accepted for r in rows) / 6000)
    differences = np.array([r.accepted - r.frozen_accepted for r in rows]) / 100
    half = 1.96 * differences.std() / math.sqrt(60)  # of pairs: far narrower than of the two rates by themselves
    assert found.interval[1] - found.interval[0] == pytest.approx(2 * half, rel=0.15)
    assert found.outside and found.requests == 60
    ratios = versus("x", np.array([[1.0, 1, 1, 1], [0, 9, 9, 9]]))
    assert (ratios.frozen, ratios.adapted) == (0.1, 1.0)


def test_nothing_to_compare_is_no_difference() -> None:
    for table in (np.zeros((0, 4)), np.array([[math.nan, math.nan, 1.0, 2.0]])):
        found = versus("x", table)
        assert math.isnan(found.difference) and math.isnan(found.interval[0]) and not found.outside
    assert versus("x", np.array([[math.nan, math.nan, 1.0, 2.0]])).adapted == 0.5


def test_the_first_win_is_that_of_a_window() -> None:
    assert requests_to_win(rows_of([0.0] * 100 + [8.0] * 100)) in range(110, 160)
    assert requests_to_win(rows_of([-5.0] * 200)) is None


def test_a_report_tells_of_every_domain_and_of_what_was_done(tmp_path: Path) -> None:
    rows = rows_of([0.0] * 30, "code") + rows_of([9.0] * 210, "prose", 30)
    looked = {"guard_acceptance": 0.5, "guard_change": 0.02, "guard_low": -0.01, "guard_high": 0.04}
    worse = {"guard_acceptance": 0.4, "guard_change": -0.08, "guard_low": -0.1, "guard_high": -0.06}
    rows[12] = replace(rows[12], alarms="cusum", updated=1, update_s=2.4, **looked)
    rows[40] = replace(rows[40], updated=1, rolled_back=1, version=1, **worse)
    stream = Stream([Request([1], r.domain) for r in rows], [])
    held = {"code": {rate: versus("code, held out", paired(rows[:9], rate)) for rate in RATES}}
    found = report.report(rows, stream, held)
    titles = ["code, as served", "prose, as served", "prose, its first 200", "prose, its last 100", "code, held out"]
    assert [entry["acceptance_rate"].what for entry in found["compared"]] == titles
    told = "\n".join(found["told"])
    assert "240 requests, 2 updates, 2 versions" in told and "learning 0.010" in told
    assert "prose begins at request 30; a gain of the last 50 outside its interval: after 50 of its requests" in told
    assert (
        "drift alarms at 12 (cusum)" in told
        and "rollbacks at 40" in told
        and "2 looks, request 40, acceptance was -0.080 [-0.100, -0.060]" in told
    )
    console = Console(width=140, record=True, file=(tmp_path / "out").open("w"))
    timeline.print_report(found, console)
    assert "prose, its last 100" in console.export_text()
    assert report.plain(found)["compared"][1]["acceptance_rate"]["outside"] is True
    timeline.draw(rows, "code", 0.05, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes()[1:4] == b"PNG"
    timeline.write_csv(rows, tmp_path / "t.csv")
    read = list(csv.DictReader((tmp_path / "t.csv").open()))
    assert len(read) == 240 and read[12]["alarms"] == "cusum" and float(read[12]["update_s"]) == 2.4


def test_loggers_get_what_was_measured() -> None:
    found = timeline.metrics(ROW)
    assert found["acceptance_rate/code"] == 10 / 15 and found["block_efficiency/code"] == 2.0
    assert "loss" not in found and "guard/acceptance_rate" not in found
