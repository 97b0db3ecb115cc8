"""The command of the theory: its tables by hand, and what it reads out of a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
from rich.console import Console

from conf.compose import ROOT, plain
from engine.settings import DecodeSettings
from eval.acceptance import write_report
from eval.measure import Measurement
from eval.measured_drafts import measured_cost
from eval.predictions import cost_of, job, lengths_of, print_result, profile_of, read_report
from eval.theory import Constant, Decay, Linear, Roofline, Stepped, speedup
from models.errors import UserError


def printed(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        job(plain(hydra.compose("theory", overrides=list(overrides))))
    return capsys.readouterr().out


def test_a_profile_is_shown_at_each_length(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "alpha=0.5", "c=0.1", "lengths=[1,2]", "verify_per_token=0.1", "other=0.2")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert rows[0] == ["1", "0.500", "1.500", "1.100", "1.071", "1.000", "0.714", "-0.765"]
    assert rows[1][:5] == ["2", "0.500", "1.750", "1.200", "1.094"] and rows[1][5] == "2.000"
    assert "best: 2 tokens, speed-up 1.094; between whole lengths" in shown


def options(**changes: Any) -> dict[str, Any]:
    given = {"profile": "constant", "alpha": 0.8, "beta": 0.9, "fall": 0.1, "steps": [[1, 0.9], [3, 0.5]], "c": 0.1}
    return given | {"verify_per_token": 0.0, "other": 0.0, "roofline": None, "requests": 1} | changes


def test_profiles_and_costs_have_names() -> None:
    assert profile_of(options()) == Constant(0.8)
    assert profile_of(options(profile="exponential")) == Decay(0.8, 0.9)
    assert profile_of(options(profile="linear")) == Linear(0.8, 0.1)
    assert profile_of(options(profile="stepped")) == Stepped(((1, 0.9), (3, 0.5)))
    machine = {"weight_bytes": 100.0, "flops_per_row": 2.0, "bandwidth_bytes_per_s": 10.0, "peak_flops_per_s": 1.0}
    for requests in (1, 16):
        cost = cost_of(options(roofline=machine, requests=requests))
        assert cost.of(7) == Roofline(**machine).relative(7, requests) + 7 * 0.1
    assert lengths_of(3) == [3]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"profile": "flat"}, "profile is 'flat': choose constant"),
        ({"profile": "stepped", "steps": [1, 2]}, r"steps is \[1, 2\]: write"),
        ({"alpha": 1.2}, "alpha = 1.2"),
        ({"roofline": {"bytes": 3}}, "roofline is {'bytes': 3}"),
        ({"requests": 0}, "requests 0"),
        ({"verify_per_token": -1.0}, "verify_per_token is -1.0"),
    ],
)
def test_senseless_options_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        given = options(**changes)
        profile_of(given), cost_of(given)
    with pytest.raises(UserError, match=r"lengths is \[1.5\]"):
        lengths_of([1.5])


def report(folder: Path) -> Path:
    """Two prompts, 8 rounds of two drafted tokens each; a plain token takes 0.1 s."""
    measured = Measurement.empty(DecodeSettings(num_speculative_tokens=2), ["x", "x"])
    for request, accepted in ((0, [2, 1, 0, 2]), (1, [2, 2, 1, 2])):
        for count in accepted:
            measured.stats.add_round(request, np.ones(2), min(count + 1, 2), count, count + 1, np.zeros(2))
    measured.plain_tokens[:] = measured.speculative_tokens[:] = [10, 12]
    measured.plain_s[:], measured.plain_prefill_s[:] = [1.2, 1.4], 0.3
    measured.speculative_s[:], measured.speculative_prefill_s[:] = [1.0, 1.0], 0.3
    measured.draft_s[:], measured.verify_s[:] = 0.08, 0.48
    write_report({}, [("made up", measured)], folder)
    return folder / "acceptance.json"


def test_a_report_gives_predicted_beside_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (result,) = read_report(report(tmp_path))
    cost = measured_cost(result)
    assert cost is not None
    assert cost.draft == pytest.approx(0.01 / 0.1)
    assert cost.other == pytest.approx((2.0 - 0.6 - 0.16 - 0.96) / 8 / 0.1)
    assert cost.of(0) == pytest.approx(1.0)  # a plain round
    assert cost.of(2) == pytest.approx((0.02 + 0.12 + 0.035) / 0.1)  # as it was measured
    shown = printed(capsys, f"report={tmp_path / 'acceptance.json'}")
    # 7 of 8 first tokens were accepted, and 5 of 7 second ones: no draft was cut short, so τ is exact
    assert "made up, T = 0, 2 tokens: τ predicted 2.500, measured 2.500" in shown
    assert "best of those: 2 tokens, speed-up 1.429 while decoding" in shown
    assert speedup([7 / 8, 5 / 7], cost) == pytest.approx(2.5 / 1.75)
    predicted = result["predicted_speedup"]
    assert f"speed-up predicted {predicted:.3f}, measured 1.300 (+0.0%)" in shown.replace("-0.0%", "+0.0%")
    assert predicted == pytest.approx(2.6 / 22 / ((0.6 + 20 / 2.5 * 0.175) / 22))


def test_trees_and_what_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (result,) = read_report(report(tmp_path))
    print_result(result | {"num_nodes": 20, "predicted_speedup": None}, Console(width=120))
    shown = capsys.readouterr().out
    assert "(not timed)" in shown and "theory is for chains" in shown
    counts = {name: [] for name in result["counts"]}
    for text, said in (
        ("{", "cannot read an acceptance report"),
        (json.dumps([1]), "cannot read an acceptance report"),
        (json.dumps({"results": [result | {"counts": 3}]}), "cannot read an acceptance report"),
        (json.dumps({"results": [{}]}), "lacks drafter, temperature"),
        (json.dumps({"results": [result | {"counts": counts}]}), "is of no prompt at all"),
    ):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(UserError, match=said):
            read_report(tmp_path / "broken.json")
