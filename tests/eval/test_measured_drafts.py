"""What theory says of drafts of several lengths, against what was measured of the same rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.settings import DecodeSettings
from eval.acceptance import write_report
from eval.measure import Measurement
from eval.measured_drafts import (
    Reached,
    acceptance_of,
    is_chain,
    measured_cost,
    predicted_efficiency,
    predicted_speedup,
)
from eval.predictions import read_report
from eval.theory import Constant, RoundCost, sensitivity, speedup
from models.errors import UserError
from tests.eval.test_predictions import printed


def look_up(lengths: list[int], accepted: list[int], drafted_at_depth: int = 1) -> Measurement:
    """Rounds of at most 4 tokens: a plain token takes 0.1 s, a drafted one 2 ms, a check 0.11 s, and the rest 5 ms."""
    measured = Measurement.empty(DecodeSettings(num_speculative_tokens=4), ["x"])
    for length, count in zip(lengths, accepted, strict=True):
        drafted = drafted_at_depth * (np.arange(4) < length)
        measured.stats.add_round(0, drafted, min(count + 1, length), count, count + 1, np.zeros(4))
    rounds, tokens = len(lengths), sum(accepted) + len(accepted)
    measured.plain_tokens[:] = measured.speculative_tokens[:] = tokens + 1
    measured.plain_s[:], measured.plain_prefill_s[:] = 0.3 + 0.1 * tokens, 0.3
    measured.draft_s[:], measured.verify_s[:] = 0.002 * sum(lengths), 0.11 * rounds
    measured.speculative_prefill_s[:] = 0.3
    measured.speculative_s[:] = 0.3 + 0.002 * sum(lengths) + 0.115 * rounds
    return measured


def written(measured: Measurement, folder: Path) -> dict[str, Any]:
    write_report({}, [("look-up", measured)], folder)
    (result,) = read_report(folder / "acceptance.json")
    return result


def test_rounds_without_a_draft_are_in_the_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every other round has no draft at all. At the setting that was measured theory must say what was measured."""
    measured = look_up([4, 0] * 6, [4, 0, 2, 0, 1, 0, 4, 0, 0, 0, 3, 0])
    result = written(measured, tmp_path)
    tau = measured.stats.block_efficiency
    assert tau == pytest.approx((14 + 12) / 12) and predicted_efficiency(result, 4) == pytest.approx(tau)
    assert predicted_efficiency(result, 1) == pytest.approx(1 + 5 / 12)
    promised = predicted_speedup(result, 4)
    assert promised == pytest.approx(0.1 * tau / (0.115 + 0.002 * 2))  # two tokens a round, not four
    whole = (0.3 + 2.6) / 27 / ((0.3 + 26 * 0.1 / promised) / 27)  # the prompt's pass put back
    assert whole == pytest.approx(measured.predicted_speedup) == pytest.approx(measured.speedup)
    # at most one token: half a token a round, and a check that lies as far between a plain round and the measured one
    assert predicted_speedup(result, 1) == pytest.approx((1 + 5 / 12) / (0.95 + 0.15 / 4 + 0.02 / 2 + 0.05))
    shown = printed(capsys, f"report={tmp_path / 'acceptance.json'}")
    assert f"τ predicted {tau:.3f}, measured {tau:.3f}" in shown
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert [row[2] for row in rows] == ["0.500"] * 4 and rows[0][1] == "0.833"
    assert rows[3][3:6] == [f"{tau:.3f}", "1.100", f"{promised:.3f}"]
    assert f"best of those: 4 tokens, speed-up {promised:.3f} while decoding" in shown


def test_drafts_of_several_lengths_are_predicted_as_measuring_does(tmp_path: Path) -> None:
    """Chances are those of tested tokens, as in `eval.measure.predicted_speedup`, and drafts end where they ended."""
    measured = look_up([4, 2, 0, 1, 3, 4, 2, 1], [3, 2, 0, 0, 1, 4, 0, 1])
    result = written(measured, tmp_path)
    tokens = measured.stats.emitted.sum()
    promised = predicted_speedup(result, 4)
    assert promised is not None
    whole = (0.3 + 0.1 * tokens) / (0.3 + tokens * 0.1 / promised)
    assert whole == pytest.approx(measured.predicted_speedup)


def test_a_position_that_was_never_tested_is_a_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = written(look_up([2, 2, 1], [1, 2, 0]), tmp_path)
    assert result["conditional_acceptance"][2:] == [None, None]
    printed(capsys, f"report={tmp_path / 'acceptance.json'}")
    assert predicted_efficiency(result, 4) == pytest.approx(1 + 2 / 3 + 2 / 3 * 2 / 3 * 1 / 2)
    nothing = written(look_up([0, 0], [0, 0]), tmp_path)
    assert "theory is for chains" in printed(capsys, f"report={tmp_path / 'acceptance.json'}")
    assert measured_cost(nothing) is None and acceptance_of(nothing).rates(4) == [0] * 4


def test_a_drafter_that_branches_of_itself_drafts_no_chains(tmp_path: Path) -> None:
    """Lookahead's trees are asked for as chains are: only the counts tell that a depth has several tokens."""
    tree = written(look_up([3, 3, 0], [2, 1, 0], drafted_at_depth=2), tmp_path)
    assert tree["tree"] is None and tree["num_nodes"] == tree["num_speculative_tokens"]
    assert not is_chain(tree) and measured_cost(tree) is None and predicted_speedup(tree, 4) is None
    assert is_chain(written(look_up([3, 3, 0], [2, 1, 0]), tmp_path))


def test_slopes_of_drafts_of_several_lengths_are_differences() -> None:
    reach, h = (0.8, 0.5, 0.5, 0.1), 1e-6

    def cost(draft: float) -> RoundCost:
        return RoundCost(draft, lambda n: 1 + 0.1 * n, 0.2, lambda n: sum(reach[:n]))

    def at(alpha: float, draft: float) -> float:
        return speedup(Reached(Constant(alpha), reach).rates(4), cost(draft))

    found = sensitivity(Reached(Constant(0.7), reach), cost(0.1), 4)
    assert found.speedup_by_alpha == pytest.approx((at(0.7 + h, 0.1) - at(0.7 - h, 0.1)) / (2 * h), rel=1e-6)
    assert found.speedup_by_draft_cost == pytest.approx((at(0.7, 0.1 + h) - at(0.7, 0.1 - h)) / (2 * h), rel=1e-6)
    tau = 1 + sum(share * 0.7**i for i, share in enumerate(reach, 1))
    assert at(0.7, 0.1) == pytest.approx(tau / (1 + 0.19 + 0.2 + 0.19))
    assert Reached(Constant(0.7), (0.5, 0.0, 0.0)).rates(3) == [0.35, 0, 0]
    with pytest.raises(UserError, match="4 positions is told, and 5 are asked"):
        Reached(Constant(0.7), reach).rates(5)
