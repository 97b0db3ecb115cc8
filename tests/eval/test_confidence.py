"""Calibration of confidences: temperatures that were put in are found again, errors are counted as by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.draft_length import Estimate
from engine.loop import generate
from engine.settings import DecodeSettings
from eval.confidence import (
    Estimated,
    calibrate,
    errors,
    expected_error,
    fit_temperatures,
    log_estimates,
    replace_chances,
    report,
)
from models.sampling import SamplingParams
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import LEAST_P_VALUE, build_shaken, five_token_target, prompts, sampled_p_value

MODEL = {
    "_target_": "models.drafter.dflash.DFlashDrafter", "block_size": 3, "num_layers": 1, "predict_at_anchor": True,
    "markov_rank": 4, "confidence": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    return five_token_target()


@pytest.fixture(scope="module")
def drafter(target: Target) -> Any:
    made = build_shaken(MODEL, target, DraftVocab(5))
    made.confidence_head.proj.weight.data *= 3
    return made


def drawn(temperatures: list[float], rounds: int, tested: float = 1.0) -> Estimated:
    """Rounds whose tokens are accepted with σ(logit / T), where σ(logit) was estimated."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rounds, len(temperatures), generator=generator, dtype=torch.float64)
    chances = (logits / torch.tensor(temperatures)).sigmoid()
    accepted = torch.rand(chances.shape, generator=generator, dtype=torch.float64) < chances
    looked = torch.rand(chances.shape, generator=generator) < tested
    return Estimated(logits.sigmoid(), looked, accepted, torch.arange(rounds))


def test_temperatures_that_were_put_in_are_found_again() -> None:
    temperatures = [0.5, 1.0, 4.0]
    logged = drawn(temperatures, 40_000, tested=0.5)
    found = fit_temperatures(logged)
    torch.testing.assert_close(found, torch.tensor(temperatures, dtype=torch.float64), atol=0, rtol=0.05)
    before, after = errors(logged), errors(replace_chances(logged, found))
    assert before[0] is not None and before[2] is not None and before[0] > 0.05 and before[2] > 0.1
    assert all(error is not None and error < 0.02 for error in after)


def test_a_position_that_is_seldom_tested_takes_the_temperature_of_all() -> None:
    logged = drawn([3.0, 3.0, 0.2], 5000)
    logged.tested[20:, 2] = False
    found = fit_temperatures(logged)
    everything = Estimated(logged.chances[:, :2], logged.tested[:, :2], logged.accepted[:, :2], logged.prompt)
    assert float(found[2]) == pytest.approx(float(fit_temperatures(everything)[0]), rel=0.1)


def test_expected_error_is_counted_bin_by_bin() -> None:
    chances = torch.tensor([0.05, 0.06, 0.95, 1.0, 0.42], dtype=torch.float64)
    accepted = torch.tensor([False, True, True, False, True])
    expected = (abs(0.11 - 1) + abs(1.95 - 1) + abs(0.42 - 1)) / 5
    assert expected_error(chances, accepted) == pytest.approx(expected)
    assert expected_error(chances[:0], accepted[:0]) is None


def test_what_is_logged_is_what_happened(target: Target, drafter: Any) -> None:
    """Tested and accepted tokens are the engine's own counts at either temperature."""
    contexts = prompts([3, 5, 4], 5)
    settings = DecodeSettings(12, 3, stop_token_ids=frozenset())
    logged = log_estimates(target, drafter, contexts, settings, [0.0, 1.0])
    counts = [generate(target, contexts, DecodeSettings(12, 3, p, frozenset()), drafter).stats for p in both()]
    drafts = sum(int(stats.drafts[:, 0].sum()) for stats in counts)
    assert len(logged.prompt) == drafts and set(logged.prompt.tolist()) == {0, 1, 2}
    for position in range(3):
        assert int(logged.tested[:, position].sum()) == sum(s.tested[:, position].sum() for s in counts)
        assert int(logged.accepted[:, position].sum()) == sum(s.accepted[:, position].sum() for s in counts)
    assert 0 < logged.accepted.sum() < logged.tested.sum()


def both() -> list[Any]:
    return [SamplingParams(), SamplingParams(1.0)]


def test_calibration_sets_the_heads_temperatures(target: Target, drafter: Any) -> None:
    drafter.confidence_head.temperatures.fill_(7.0)  # of an earlier calibration
    contexts = prompts([4] * 40, 5)
    settings = DecodeSettings(24, 3, stop_token_ids=frozenset())
    found = calibrate(target, drafter, contexts, settings, [0.0, 1.0])
    assert drafter.confidence_head.temperatures.tolist() == pytest.approx(found["temperatures"])
    assert found["error_after"] < found["error_before"]
    assert f"{found['error_before']:.3f} before" in report(found)
    again = log_estimates(target, drafter, contexts, settings, [0.0, 1.0])
    held = again.select(again.prompt % 2 == 1)
    assert found["error_after"] == pytest.approx(expected_error(held.chances[held.tested], held.accepted[held.tested]))
    assert found["tested"] == held.tested.sum(0).tolist()


def test_answers_too_short_to_draft_anything_calibrate_nothing(target: Target, drafter: Any) -> None:
    found = calibrate(target, drafter, prompts([4, 3], 5), DecodeSettings(1, 3, stop_token_ids=frozenset()), [0.0])
    assert found["temperatures"] == [1.0, 1.0, 1.0] == drafter.confidence_head.temperatures.tolist()
    assert found["error_before"] is None and found["error_after_per_position"] == [None] * 3
    assert "calibration error - before the positions' temperatures, - after, on 0 tested tokens" in report(found)


def test_estimate_keeps_the_sampled_law(target: Target) -> None:
    """With drafts of every length, and tokens both accepted and refused."""
    sampling = SamplingParams(1.0)
    for seed in range(5):
        made = build_shaken(MODEL, target, DraftVocab(5), seed)
        stats = generate(target, [[3, 0, 4, 1]] * 200, DecodeSettings(4, 3, sampling, frozenset()), made).stats
        if stats.acceptance_rate > 0.15:
            break
    assert sampled_p_value(target, made, sampling, draft_length=Estimate(0.4)) > LEAST_P_VALUE


def test_estimate_ends_drafts_before_a_token_of_little_chance(target: Target, drafter: Any) -> None:
    """As long as the product of the confidences says, for each request by itself."""
    drafter.confidence_head.temperatures.fill_(1.0)
    contexts = prompts([3, 5, 4, 6] * 4, 5)
    settings = DecodeSettings(12, 3, stop_token_ids=frozenset())
    lengths = []
    for chain in (0.0, 0.5, 0.95, 1.0):
        made = generate(target, contexts, replace(settings, draft_length=Estimate(chain)), drafter)
        assert made.token_ids == generate(target, contexts, settings).token_ids
        lengths.append(made.stats.drafted.sum() / made.stats.rounds.sum())
    assert lengths[0] > lengths[1] > lengths[2] > lengths[3] == 0
