"""Measurements: counts against the engine's own, what near-ties report, intervals, tables and prompt sets."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from data.answers import context_ids
from data.prompts import Prompt
from engine.loop import Seconds, generate
from engine.settings import DecodeSettings
from eval.measure import Measurement, answer_logits, ceiling, measure
from eval.prompt_sets import prompt_set
from eval.table import draw, print_tables
from models.drafter.eagle import EagleDrafter
from models.errors import UserError
from models.sampling import SamplingParams
from models.target import Target
from models.vocab import DraftVocab
from tests.data.test_template import PLAIN, with_template

PROMPTS = [Prompt((text,), category=kind, continuation=True) for text, kind in (("import os", "a"), ("def f(", "b"))]
SETTINGS = DecodeSettings(max_new_tokens=10, num_speculative_tokens=3)


@pytest.fixture(scope="module")
def drafter(tiny: Target) -> EagleDrafter:
    torch.manual_seed(0)
    return EagleDrafter(tiny, DraftVocab(tiny.vocab_size)).eval()


def test_counts_are_the_engines_own_for_each_prompt(tiny: Target, drafter: EagleDrafter) -> None:
    measured = measure(tiny, drafter, PROMPTS, SETTINGS, repeats=2)
    for index, prompt in enumerate(PROMPTS):
        alone = generate(tiny, [context_ids(tiny, prompt)], SETTINGS, drafter)
        assert measured.stats.emitted[index] == alone.stats.emitted[0]
        np.testing.assert_array_equal(measured.stats.tested[index], alone.stats.tested[0])
        np.testing.assert_array_equal(measured.stats.accepted[index], alone.stats.accepted[0])
        assert measured.speculative_tokens[index] == measured.plain_tokens[index] == len(alone.token_ids[0])
    assert measured.identical == 2
    assert measured.near_ties == []
    assert (measured.plain_s > 0).all()


def test_the_logits_of_an_answer_are_those_it_was_chosen_from(tiny: Target) -> None:
    for sampling in (SamplingParams(), SamplingParams(repetition_penalty=1.5, logit_bias=((7, 3.0),))):
        context = context_ids(tiny, PROMPTS[0])
        answer = generate(tiny, [context], replace(SETTINGS, sampling=sampling)).token_ids[0]
        assert answer_logits(tiny, context, answer, sampling).argmax(-1).tolist() == answer


def test_turns_of_a_prompt_are_added_up(tiny: Target, drafter: EagleDrafter) -> None:
    target = with_template(tiny, PLAIN)
    both = measure(target, drafter, [Prompt(("a?", "b?"))], SETTINGS)
    first = measure(target, drafter, [Prompt(("a?",))], SETTINGS)
    answer = generate(target, [context_ids(target, Prompt(("a?",)))], SETTINGS).token_ids[0]
    second = generate(target, [context_ids(target, Prompt(("a?", "b?")), (target.decode(answer),))], SETTINGS, drafter)
    assert both.stats.rounds[0] == first.stats.rounds[0] + second.stats.rounds[0]
    assert both.plain_tokens[0] == first.plain_tokens[0] + len(second.token_ids[0])


def test_an_answer_that_parts_is_counted_with_the_gap_of_the_logits(
    tiny: Target, drafter: EagleDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parting(target, prompts, settings, chosen=None, **kwargs):
        made = generate(target, prompts, settings, chosen, **kwargs)
        if chosen is not None and settings.max_new_tokens == 10:
            made.token_ids[0][4] += 1
        return made

    monkeypatch.setattr("eval.measure.generate", parting)
    measured = measure(tiny, drafter, PROMPTS[:1], SETTINGS)
    assert measured.identical == 0
    context = context_ids(tiny, PROMPTS[0]) + generate(tiny, [context_ids(tiny, PROMPTS[0])], SETTINGS).token_ids[0][:4]
    logits = tiny.model(torch.tensor([context])).logits[0, -1].sort(descending=True).values
    assert measured.near_ties == [pytest.approx((logits[0] - logits[1]).item(), abs=1e-4)]


def test_the_ceiling_is_the_targets_mass_on_what_can_be_proposed(tiny: Target) -> None:
    vocab = DraftVocab(tiny.vocab_size, torch.arange(0, tiny.vocab_size, 3))
    contexts = [context_ids(tiny, prompt) for prompt in PROMPTS]
    for temperature in (0.0, 1.0):
        settings = replace(SETTINGS, sampling=SamplingParams(temperature))
        masses = []
        for context, answer in zip(contexts, generate(tiny, contexts, settings).token_ids, strict=True):
            for length in range(len(answer)):
                logits = tiny.model(torch.tensor([context + answer[:length]])).logits[0, -1]
                allowed = [t for t in range(tiny.vocab_size) if t % 3 == 0]
                mass = logits.softmax(-1)[allowed].sum() if temperature else float(logits.argmax() % 3 == 0)
                masses.append(float(mass))
        assert ceiling(tiny, vocab, contexts, settings) == pytest.approx(np.mean(masses), abs=1e-5)
    reduced = measure(tiny, EagleDrafter(tiny, vocab).eval(), PROMPTS, SETTINGS)
    assert reduced.ceiling == pytest.approx(ceiling(tiny, vocab, contexts, SETTINGS))


def made_up(accepted: list[int], rounds: int = 10) -> Measurement:
    measured = Measurement.empty(replace(SETTINGS, num_speculative_tokens=1), ["x"] * len(accepted))
    for index, count in enumerate(accepted):
        for i in range(rounds):
            measured.stats.add_round(index, np.ones(1), 1, int(i < count), 1 + int(i < count), np.array([0.5]))
    measured.plain_s[:] = 2.0
    measured.plain_tokens[:] = measured.speculative_tokens[:] = 10
    measured.speculative_s[:] = 1.0
    return measured


def test_the_interval_is_that_of_prompts_not_of_rounds() -> None:
    same = made_up([5] * 20)
    assert same.interval(lambda m: m.stats.acceptance_rate) == (0.5, 0.5)
    spread = made_up([0] * 10 + [10] * 10)
    low, high = spread.interval(lambda m: m.stats.acceptance_rate)
    error = 1.96 * 0.5 / np.sqrt(20)
    assert low == pytest.approx(0.5 - error, abs=0.06)
    assert high == pytest.approx(0.5 + error, abs=0.06)
    assert spread.interval(lambda m: m.stats.acceptance_rate) == (low, high)
    assert spread.speedup == 2.0


def timed() -> Measurement:
    measured = made_up([5, 10])  # of 10 drafted tokens in 10 rounds: 15 and 20 emitted, and the first before them
    measured.plain_tokens[:] = measured.speculative_tokens[:] = [16, 21]
    measured.plain_s[:], measured.plain_prefill_s[:] = [2.0, 2.5], 0.5
    measured.speculative_s[:], measured.speculative_prefill_s[:] = 1.0, 0.4
    measured.draft_s[:], measured.verify_s[:] = 0.1, [0.3, 0.5]
    return measured


def test_the_predicted_speedup_by_hand() -> None:
    measured = timed()
    # seconds of a round: drafts and checks, and the rest of a second that neither took nor the prompt's pass
    assert measured.select([0]).predicted_speedup == pytest.approx(2.0 / (0.4 + 15 / 1.5 * (0.04 + 0.02)))
    assert measured.select([1]).predicted_speedup == pytest.approx(2.5 / (0.4 + 20 / 2.0 * (0.06 + 0.0)))
    assert measured.predicted_speedup == pytest.approx(4.5 / (0.8 + 35 / 1.75 * (0.05 + 0.01)))
    assert measured.summary()["predicted_speedup"] == measured.predicted_speedup
    assert measured.counts()["verify_s"] == [0.3, 0.5] and measured.counts()["plain_prefill_s"] == [0.5, 0.5]
    assert np.isnan(made_up([5]).predicted_speedup)  # nothing was timed
    assert np.isnan(Measurement.empty(SETTINGS, ["x"]).predicted_speedup)


def test_times_are_those_of_the_fastest_runs(
    tiny: Target, drafter: EagleDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: dict[tuple[bool, tuple[int, ...]], list[Seconds]] = {}

    def recorded(target, prompts, settings, chosen=None, **kwargs):
        made = generate(target, prompts, settings, chosen, **kwargs)
        if settings.max_new_tokens == 10:  # not the warm-up
            runs.setdefault((chosen is not None, tuple(prompts[0])), []).append(made.seconds)
        return made

    monkeypatch.setattr("eval.measure.generate", recorded)
    measured = measure(tiny, drafter, PROMPTS, SETTINGS, repeats=3)
    for index, prompt in enumerate(PROMPTS):
        ids = tuple(context_ids(tiny, prompt))
        assert len(runs[False, ids]) == len(runs[True, ids]) == 3
        plain, fast = (min(runs[chosen, ids], key=lambda s: s.total) for chosen in (False, True))
        assert (measured.plain_s[index], measured.plain_prefill_s[index]) == (plain.total, plain.prefill)
        assert measured.speculative_prefill_s[index] == fast.prefill
        assert (measured.draft_s[index], measured.verify_s[index]) == (fast.draft, fast.verify)


def test_the_table_shows_what_was_counted(tmp_path: Path) -> None:
    measured = made_up([5] * 4)
    measured.identical = 4
    console = Console(width=140, record=True, file=(tmp_path / "out").open("w"))
    print_tables([("name", measured)], console)
    text = console.export_text()
    assert "0.500 [0.50, 0.50]" in text
    assert "1.500 [1.50, 1.50]" in text
    assert "2.000 [2.00, 2.00] │       nan" in text
    assert "greedy output identical to plain decoding on 4 of 4 prompts" in text
    measured.identical, measured.near_ties = 3, [2e-6]
    console = Console(width=140, record=True, file=(tmp_path / "out").open("w"))
    print_tables([("name", measured)], console)
    assert "on 3 of 4 prompts; where they part, the two largest logits differ by 2.0e-06" in console.export_text()
    console = Console(width=140, record=True, file=(tmp_path / "out").open("w"))
    print_tables([("name", timed())], console)
    assert f"│      {timed().predicted_speedup:.2f} │" in console.export_text()
    draw([("name", measured)], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_measured(
    tiny: Target, drafter: EagleDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.measure.generate", lambda *a, **k: pytest.fail("measured before the check"))
    long = Prompt(("x = 1\n" * 800,), continuation=True)
    with pytest.raises(UserError, match=r"Prompt 1 has \d+ tokens, but the context of 'tiny' holds 1024"):
        measure(tiny, drafter, [PROMPTS[0], long], SETTINGS)


def test_prompt_sets(tiny: Target, tmp_path: Path) -> None:
    spread = prompt_set("builtin", tiny, 14)
    counts = [p.category for p in spread]
    assert {counts.count(c) for c in set(counts)} == {2}
    assert len(set(counts)) == 7
    automatic = prompt_set("auto", tiny, 5)  # no chat template: the standard library's test split
    assert [p.split for p in automatic] == ["test"] * 5
    assert prompt_set("auto", with_template(tiny, PLAIN), None) == prompt_set("builtin", tiny, None)
    with pytest.raises(UserError, match="there is no such file; choose auto"):
        prompt_set(str(tmp_path / "none.jsonl"), tiny, None)
    with pytest.raises(UserError, match="num_prompts is 0"):
        prompt_set("builtin", tiny, 0)
