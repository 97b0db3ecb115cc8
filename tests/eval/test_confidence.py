"""Calibration of confidences: temperatures that were put in are found again, errors are counted as by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor

from conf.compose import ROOT
from engine.draft_length import Estimate
from engine.loop import generate
from engine.observer import Checked
from engine.settings import DecodeSettings
from eval.confidence import (
    Estimated,
    calibrate,
    calibration_errors,
    errors,
    expected_error,
    fit_temperatures,
    job,
    log_estimates,
    replace_chances,
    report,
)
from models.checkpoint import native
from models.errors import UserError
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
    return Estimated(logits.sigmoid(), looked, accepted, torch.arange(rounds), torch.zeros(rounds))


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
    everything = replace(
        logged, chances=logged.chances[:, :2], tested=logged.tested[:, :2], accepted=logged.accepted[:, :2]
    )
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
    apart = [held.select(held.temperature == t) for t in (0.0, 1.0)]
    assert found["error_after_per_temperature"] == pytest.approx(
        [expected_error(rounds.chances[rounds.tested], rounds.accepted[rounds.tested]) for rounds in apart]
    )
    assert found["error_after_per_temperature"][0] != found["error_after_per_temperature"][1]
    assert "at temperatures 0 1: before " in report(found)


def test_an_exports_own_temperatures_are_measured_and_kept(target: Target, drafter: Any) -> None:
    """On all contexts: nothing of them is taken to fit."""
    own = [0.4, 1.0, 3.0]
    drafter.confidence_head.temperatures.copy_(torch.tensor(own))
    contexts, settings = prompts([4] * 20, 5), DecodeSettings(24, 3, stop_token_ids=frozenset())
    found = calibration_errors(target, drafter, contexts, settings, [0.0, 1.0])
    assert found["temperatures"] == drafter.confidence_head.temperatures.tolist() == pytest.approx(own)
    for key, temperatures in (("error_after", own), ("error_before", [1.0] * 3)):
        drafter.confidence_head.temperatures.copy_(torch.tensor(temperatures))
        logged = log_estimates(target, drafter, contexts, settings, [0.0, 1.0])
        assert found[key] == pytest.approx(
            expected_error(logged.chances[logged.tested], logged.accepted[logged.tested])
        )
        assert found[f"{key}_per_position"] == pytest.approx(errors(logged))
        assert found["tested"] == logged.tested.sum(0).tolist()
    assert abs(found["error_after"] - found["error_before"]) > 0.01


def exported(tiny: Target, model: dict[str, Any], folder: Path) -> DictConfig:
    """An untrained export of a drafter for the bundled target, and what is asked of it."""
    made = build_shaken(model, tiny, DraftVocab(tiny.vocab_size))
    place = {"name": tiny.name, "fingerprint": tiny.fingerprint, "load": {"source": "tiny"}}
    native.save(made, native.Export("some", model, place, 3, {}), made.vocab, folder / "export", "card")
    asked = [f"export='{folder / 'export'}'", "num_prompts=2", "decode.max_new_tokens=8", "target.device=cpu"]
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        return hydra.compose("confidence", overrides=asked)


def test_one_command_prints_and_writes_an_exports_errors(
    tiny: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(exported(tiny, MODEL, tmp_path))
    written = json.loads((tmp_path / "confidence.json").read_text())
    assert written["temperatures"] == pytest.approx([0.7, 1.1, 1.5])  # those of `build_shaken`
    assert sum(written["tested"]) > 20 and written["config"]["num_prompts"] == 2
    before, after = (f"{written[f'error_{when}']:.3f} {when}" for when in ("before", "after"))
    shown = capsys.readouterr().out
    assert f"calibration error {before} the positions' temperatures, {after}, on {sum(written['tested'])}" in shown
    assert "share of tokens there times |mean chance - share accepted|, summed" in shown


def test_a_drafter_without_such_a_head_is_refused(tiny: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no confidence head: train one with \\+drafter=dspark"):
        job(exported(tiny, {**MODEL, "confidence": False}, tmp_path))


def test_answers_too_short_to_draft_anything_calibrate_nothing(target: Target, drafter: Any) -> None:
    found = calibrate(target, drafter, prompts([4, 3], 5), DecodeSettings(1, 3, stop_token_ids=frozenset()), [0.0])
    assert found["temperatures"] == [1.0, 1.0, 1.0] == drafter.confidence_head.temperatures.tolist()
    assert found["error_before"] is None and found["error_after_per_position"] == [None] * 3
    assert "calibration error - before the positions' temperatures, - after, on 0 tested tokens" in report(found)


def test_estimate_keeps_the_sampled_law(target: Target) -> None:
    """With drafts of all lengths that answers of four tokens have room for."""
    sampling, contexts = SamplingParams(1.0), [[3, 0, 4, 1]] * 200
    made = build_shaken(MODEL, target, DraftVocab(5), 2)
    made.confidence_head.proj.weight.data *= 3
    logged = log_estimates(target, made, contexts, DecodeSettings(4, 3, sampling, frozenset()), [1.0])
    drawn = Counter(lengths_by_loop(logged.chances, 0.3))
    assert set(drawn) == {0, 1, 2} and min(drawn.values()) > 50
    assert sampled_p_value(target, made, sampling, draft_length=Estimate(0.3)) > LEAST_P_VALUE


def lengths_by_loop(chances: Tensor, chain: float) -> list[int]:
    """How many tokens are drafted before the product of their chances falls below `chain`."""
    found = []
    for row in chances.tolist():
        product, length = 1.0, 0
        for chance in row:
            product *= chance
            if product < chain:
                break
            length += 1
        found.append(length)
    return found


class FirstDrafts:
    """How many tokens were drafted for each request in the first round."""

    def __init__(self) -> None:
        self.lengths: list[int] | None = None

    def before_round(self) -> None:
        pass

    def checked(self, made: Checked) -> None:
        if self.lengths is None:
            self.lengths = made.limits


def test_estimate_drafts_as_long_as_the_product_says(target: Target, drafter: Any) -> None:
    """For each request by itself, at the positions' own temperatures; greedy output stays what it is."""
    drafter.confidence_head.temperatures.copy_(torch.tensor([0.5, 1.0, 2.0]))
    contexts = prompts([3, 5, 4, 6] * 8, 5)
    settings = DecodeSettings(12, 3, stop_token_ids=frozenset())
    chances = log_estimates(target, drafter, contexts, settings, [0.0]).chances[: len(contexts)]
    plain = generate(target, contexts, settings).token_ids
    seen = set()
    for chain in (0.0, 0.2, 0.5, 0.8, 1.0):
        first = FirstDrafts()
        decode = replace(settings, draft_length=Estimate(chain))
        assert generate(target, contexts, decode, drafter, observer=first).token_ids == plain
        assert first.lengths == lengths_by_loop(chances, chain)
        seen |= set(first.lengths)
    assert seen == {0, 1, 2, 3}
