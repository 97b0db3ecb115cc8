"""The comparison's tables, from results written out here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
from matplotlib import pyplot
from matplotlib.container import BarContainer

from conf.compose import ROOT, plain
from data.prompts import Prompt
from engine.settings import DecodeSettings
from eval.comparison import (
    Compared,
    describe_drafter,
    draw,
    latency_margin,
    markdown,
    notes,
    readiness_rows,
    table_rows,
)
from models.checkpoint import native
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab
from train.compare import check


def result(temperature: float, tau: float, tree: bool = False, **changes: Any) -> dict[str, Any]:
    counts = {
        "drafts": [[10, 10], [5, 5]], "drafted": [[10, 10], [5, 5]], "rounds": [10, 5], "plain_s": [8.0, 4.0],
        "plain_tokens": [40, 20], "draft_s": [0.4, 0.2],
    }  # fmt: skip
    return {
        "temperature": temperature, "tree": {"depth": 4} if tree else None, "block_efficiency": tau,
        "block_efficiency_interval": [tau - 0.5, tau + 0.25], "speedup": tau / 2, "speedup_interval": [tau / 2, tau],
        "acceptance_rate": 0.6, "conditional_acceptance": [0.7, None], "counts": counts,
    } | changes  # fmt: skip


READY = {
    "top1_agreement": 0.5, "top10_coverage": 0.75, "entropy_ratio": 1.5, "kl": 0.25, "positions": 9, "ceiling": 0.875,
    "ceiling_block_efficiency": 3.14159, "num_speculative_tokens": 4,
}  # fmt: skip
EAGLE = Compared(
    "eagle",
    [result(0.0, 2.0), result(1.0, 1.5), result(0.0, 2.5, True), result(1.0, 1.75, True)],
    {"parameters": 1234567, "memory_share": 0.125, "readiness": READY,
     "training": {"tokens": 98765, "tokens_per_s": 1234.5, "peak_memory_bytes": 5e8}},
)  # fmt: skip
LOOKUP = Compared(
    "prompt_lookup",
    [result(0.0, 3.0), result(1.0, 1.25)],
    {"parameters": 0, "memory_share": 0.0, "readiness": None, "training": None},
)


def test_the_table_has_the_best_first_and_nothing_where_nothing_was_measured() -> None:
    first, second = table_rows([EAGLE, LOOKUP])
    assert (first["drafter"], second["drafter"]) == ("prompt_lookup", "eagle")
    assert first["τ tree, T=0"] == first["training tokens/s"] == first["parameters"] == "–"
    assert second["τ chain, T=0"] == "2.00 [1.50, 2.25]" and second["τ tree, T=1"] == "1.75 [1.25, 2.00]"
    assert second["speed-up chain, T=1"] == "0.75 [0.75, 1.50]"
    assert second["parameters"] == "1,234,567" and second["peak MB"] == "500" and second["α by position"] == "0.70 –"
    assert (first["trained tokens"], second["trained tokens"]) == ("–", "98,765")


def test_readiness_is_shown_where_there_is_any() -> None:
    eagle, lookup = readiness_rows([EAGLE, LOOKUP])
    assert eagle["top-1 agreement, frequent"] == "50.0%" and eagle["memory share"] == "12.5%"
    assert eagle["mass in draft vocabulary"] == "87.5%" and eagle["τ if q = p there"] == "3.14"
    assert lookup["KL, nats"] == lookup["τ if q = p there"] == "–"


def test_the_memory_share_is_of_all_that_is_held(tiny: Target) -> None:
    """Of counts, which are buffers, as well; of a weight that has two names, once."""
    asked, settings = [Prompt(("import os",), continuation=True)], DecodeSettings(6, 2)
    whole = sum(t.numel() * t.element_size() for t in (*tiny.model.parameters(), *tiny.model.buffers()))
    suffix = native.build({"_target_": "models.drafter.suffix.SuffixDrafter"}, tiny, DraftVocab(tiny.vocab_size))
    suffix.count([[1, 2, 3, 1, 2]])
    numbers = sum(t.numel() for t in suffix.buffers())
    about = describe_drafter(tiny, suffix, asked, settings)
    assert about["memory_share"] == pytest.approx(4 * numbers / whole) and numbers > 20
    assert (about["parameters"], about["readiness"]) == (0, None)
    medusa = {"_target_": "models.drafter.medusa.MedusaDrafter", "num_heads": 1, "unembedding": "shared"}
    twice = native.build(medusa, tiny, DraftVocab(tiny.vocab_size))
    own = sum(t.numel() for t in twice.parameters())
    twice.again = next(twice.parameters())
    about = describe_drafter(tiny, twice, asked, settings)
    assert about["memory_share"] == pytest.approx(4 * own / whole) and about["parameters"] == own
    found = about["readiness"]
    assert (found["ceiling"], found["ceiling_block_efficiency"]) == (pytest.approx(1), pytest.approx(2))  # one head


def test_the_latency_margin_is_that_of_the_literature() -> None:
    """0.2 s a plain token, 0.02 s a drafted one, two drafted a round, 0.6 accepted: 0.2 / (2 · 0.4 · 0.02)."""
    assert latency_margin(result(0.0, 2.0)) == pytest.approx(12.5)
    assert latency_margin(result(0.0, 2.0, acceptance_rate=1.0)) is None
    nothing = result(0.0, 1.0)
    nothing["counts"]["drafts"] = [[0, 0], [0, 0]]
    assert latency_margin(nothing) is None


def test_a_drafted_token_takes_what_drafting_took() -> None:
    """0.6 s for 30 tokens of chains at the lowest temperature, whatever trees and warmer chains took."""
    slow = result(1.0, 1.5), result(0.0, 2.5, True)
    for other in slow:
        other["counts"]["draft_s"] = [40.0, 20.0]
    found = Compared("eagle", [*slow, result(0.0, 2.0)], EAGLE.about)
    assert found.draft_ms_per_token == pytest.approx(20.0)
    assert table_rows([found])[0]["ms per drafted token"] == "20.000"
    branched = result(0.0, 2.0)
    branched["counts"]["drafted"] = [[30, 30], [15, 15]]  # three tokens at each position
    assert Compared("lookahead", [branched], EAGLE.about).draft_ms_per_token == pytest.approx(20 / 3)
    nothing = result(0.0, 1.0)
    nothing["counts"]["drafted"] = [[0, 0], [0, 0]]
    assert Compared("lookup", [nothing], LOOKUP.about).draft_ms_per_token is None
    assert table_rows([Compared("lookup", [nothing], LOOKUP.about)])[0]["ms per drafted token"] == "–"


def test_a_target_of_its_own_is_told_of() -> None:
    """What is lossless for another target than the rest must not stand in one table without a word."""
    told = {
        "by": "lora",
        "rank": 8,
        "original": {"name": "some"},
        "kl": 0.0125,
        "top1_agreement": 0.5,
        "positions": 1200,
    }
    own = Compared("medusa2", EAGLE.results, EAGLE.about | {"adapted": told})
    assert notes([EAGLE, Compared("frozen", [], {"adapted": None})]) == []
    assert notes([EAGLE, LOOKUP]) == ["Chains alone, for they draft no trees: prompt_lookup."]
    (said,) = notes([EAGLE, own])
    assert said.startswith("medusa2: Decoding is lossless for the ADAPTED target") and "(LoRA of rank 8)" in said
    assert "the original 'some'" in said and "1,200 tokens" in said and "0.0125 nats" in said and "50.0%" in said


def test_markdown() -> None:
    assert markdown([{"a": "1", "b": "x"}, {"a": "2", "b": "y"}]) == "| a | b |\n| --- | --- |\n| 1 | x |\n| 2 | y |\n"


@pytest.fixture
def axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The three plots of the picture that was written."""
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    draw([EAGLE, LOOKUP], tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes()[1:4] == b"PNG"
    figure = pyplot.gcf()
    yield figure.axes
    monkeypatch.undo()
    pyplot.close(figure)


def test_the_picture_has_a_bar_and_its_interval_for_every_result(axes: list[Any]) -> None:
    """τ − 0.5 to τ + 0.25, for those that were measured; drafters from the top in the order given."""
    left = axes[0]
    assert left.get_xlabel() == "τ, tokens per target pass" and left.yaxis_inverted()
    assert [text.get_text() for text in left.get_yticklabels()] == ["eagle", "prompt_lookup"]
    expected = {
        "chain, T = 0": [(0, 2.0), (1, 3.0)],
        "tree, T = 0": [(0, 2.5)],
        "chain, T = 1": [(0, 1.5), (1, 1.25)],
        "tree, T = 1": [(0, 1.75)],
    }
    bars = [found for found in left.containers if isinstance(found, BarContainer)]
    assert [found.get_label() for found in bars] == list(expected)
    assert [text.get_text() for text in left.get_legend().get_texts()] == list(expected)
    for index, (found, wanted) in enumerate(zip(bars, expected.values(), strict=True)):
        middles = [bar.get_y() + bar.get_height() / 2 for bar in found]
        assert middles == pytest.approx([place + 0.2 * (index - 1.5) for place, _ in wanted])
        assert [bar.get_width() for bar in found] == [tau for _, tau in wanted]
        (ends,) = found.errorbar.lines[2]
        spans = [line[:, 0].tolist() for line in ends.get_segments()]
        assert spans == [pytest.approx([tau - 0.5, tau + 0.25]) for _, tau in wanted]


def test_the_picture_has_the_chains_at_the_lowest_temperature_by_position_and_by_size(axes: list[Any]) -> None:
    _, middle, right = axes
    assert middle.get_ylabel() == "accepted / tested, chain, T = 0"
    assert [line.get_label() for line in middle.lines] == ["eagle", "prompt_lookup"]
    for line in middle.lines:
        assert line.get_xdata().tolist() == [1, 2]
        assert line.get_ydata().tolist() == pytest.approx([0.7, float("nan")], nan_ok=True)
    assert right.get_xscale() == "log" and right.get_ylabel() == "speed-up over plain decoding, chain, T = 0"
    points = [found.get_offsets().tolist() for found in right.collections]
    assert points == [[[1234567.0, 1.0]], [[1.0, 1.5]]]
    assert [(text.get_text(), text.xy) for text in right.texts] == [
        ("eagle", (1234567, 1.0)),
        ("prompt_lookup", (1, 1.5)),
    ]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["compare.drafters=[]"], "name one or more"),
        (["compare.drafters=[eagle,eagle]"], "each once"),
        (["compare.drafters=[eegle]"], "there is no drafter 'eegle'"),
        (["compare.drafters=[eagle]", "+compare.overrides.suffix=[]"], "names 'suffix', which is not among"),
        (["compare.drafters=[eagle]", "compare.equal_to=conv"], "equal_to is 'conv', which is not among"),
        (
            [
                "compare.drafters=[eagle,conv]",
                "compare.equal_to=eagle",
                "+compare.overrides.conv=['drafter.model.intermediate_size=9']",
            ],
            "overrides.conv has drafter.model.intermediate_size=…, which compare.equal_to is to find",
        ),
        (["compare.minutes=0"], "must be a number above 0"),
        (["compare.minutes=1", "fit.max_steps=5"], "two budgets"),
        (["+compare.overrides.eagle='drafter.training.lr=1'"], "give a list of settings"),
        (["+compare.overrides.eagle=['drafter.training.lrr=1']"], "Did you mean 'drafter.training.lr'"),
        (["compare.tree.top_k=0"], "top_k"),
        (["+compare.overrides.eagle=['fit.max_steps=5']"], "overrides.eagle has fit.max_steps=5, a budget of its own"),
        (["compare.minutes=1", "+compare.overrides.eagle=['fit.max_steps=5']"], "a budget of its own"),
        (["+compare.overrides.eagle=['fit.batch_size=8']"], "each of its steps train on 8 texts, and others on 16"),
        (["+compare.overrides.eagle=['trainer.accumulate_grad_batches=3']"], "on 48 texts, and others on 16"),
        (["decode.verification=block"], "for chains"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_the_long_work(overrides: list[str], said: str) -> None:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        options = plain(hydra.compose("compare", overrides=overrides))
    with pytest.raises(UserError, match=said):
        check(options, [o for o in overrides if "compare." not in o])


@pytest.mark.parametrize(
    "overrides",
    [
        ["compare.minutes=1", "+compare.overrides.eagle=['fit.batch_size=8']"],
        ["fit.batch_size=48", "+compare.overrides.eagle=['fit.batch_size=16','trainer.accumulate_grad_batches=3']"],
        ["fit.batch_size=4", "+compare.overrides.eagle=['fit.batch_size=4']"],
    ],
)
def test_batches_of_another_size_are_taken_where_the_budget_stays_the_same(overrides: list[str]) -> None:
    """Which it does not without the first of the settings."""
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        fair, unfair = (plain(hydra.compose("compare", overrides=given)) for given in (overrides, overrides[1:]))
    check(fair, [o for o in overrides if "compare." not in o])
    with pytest.raises(UserError, match="lets each of its steps train on"):
        check(unfair, [])


def test_what_is_unequal_within_the_budget_is_told() -> None:
    fewer = Compared("eagle", EAGLE.results, EAGLE.about | {"unequal": ["draft_vocab_size=64", "init_from=some"]})
    assert notes([Compared("medusa", EAGLE.results, EAGLE.about | {"unequal": []}), fewer]) == [
        "eagle: not on the same terms as the others, for it alone had draft_vocab_size=64, init_from=some."
    ]
