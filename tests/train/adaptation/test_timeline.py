"""Rates of two drafters are pooled over requests, and their difference has the interval of paired resampling."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console

from data.streams import Request, Stream
from models.errors import UserError
from train.adaptation import report, timeline
from train.adaptation.timeline import Row, paired, requests_to_win
from train.adaptation.versus import RATES, versus

ROW = Row(0, "code", "adapted", 0, 10.0, 20.0, 15.0, 10.0, 0.5, 10.0, 18.0, 15.0, 8.0, 1.0, 1.0)


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
    assert "answers identical to plain decoding's: 240 of 240" in told


def test_loggers_get_what_was_measured() -> None:
    found = timeline.metrics(ROW)
    assert found["acceptance_rate/code"] == 10 / 15 and found["block_efficiency/code"] == 2.0
    assert "loss" not in found and "guard/acceptance_rate" not in found


def test_requests_of_experts_are_not_the_adapted_drafters() -> None:
    own, expert = rows_of([0.0] * 60), [replace(r, member="expert") for r in rows_of([20.0] * 60, start=60)]
    assert np.array_equal(paired([*own, *expert], "acceptance_rate"), paired(own, "acceptance_rate"))
    found = report.report([*own, *expert], Stream([Request([1], "prose")] * 120, []), {})
    (entry,) = found["compared"]
    assert entry["acceptance_rate"].requests == 60 and not entry["acceptance_rate"].outside
    told = "\n".join(found["told"])
    assert "120 requests" in told and "answered by adapted 60, expert 60" in told


def test_rows_come_back_from_the_csv_to_which_they_were_added(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [replace(r, domain='a "b",\nc', seconds=0.1 + r.request / 3) for r in rows_of([1.0] * 6)]
    rows[2] = replace(rows[2], alarms="cusum", updated=1, update_s=2.4, loss=0.3, rolled_back=1, buffer=7)
    timeline.write_csv(rows[:1], path)
    timeline.append_csv(rows[1:4], path)
    timeline.append_csv([], path)
    timeline.append_csv(rows[4:], path)
    found = timeline.read_csv(path, 6)
    assert [repr(row) for row in found] == [repr(row) for row in rows]
    assert all(type(getattr(found[2], name)) is int for name in ("request", "version", "updated", "buffer"))
    for cut in (1, 9, 40):  # a kill while the last was written, whose commit then never came
        path.write_text(path.read_text()[:-cut])
        assert repr(timeline.read_csv(path, 5)) == repr(rows[:5])
    with pytest.raises(UserError, match=r"has 6 rows, and 7 requests were served|is no timeline"):
        timeline.read_csv(path, 7)
    path.write_text("request,domain\n0,code\n")
    with pytest.raises(UserError, match="is no timeline of this session"):
        timeline.read_csv(path, 1)


def test_what_was_logged_is_on_disk_at_once(tmp_path: Path) -> None:
    logger = CSVLogger(str(tmp_path), name="metrics")
    timeline.log([ROW, replace(ROW, request=1, updated=1, loss=0.25)], logger)
    read = list(csv.DictReader((tmp_path / "metrics" / "version_0" / "metrics.csv").open()))
    assert [row["step"] for row in read] == ["0", "1"] and read[1]["loss"] == "0.25" and read[0]["loss"] == ""
