"""The comparison of draft lengths: ratios by category, by hand; every way is there, and refused where it must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
import torch

from conf.compose import ROOT, plain
from engine.draft_length import POLICIES, Confidence, CostAware, Entropy, Fixed, Window
from engine.stats import DecodingStats
from eval import draft_length
from eval.draft_length import all_ways, print_report, summaries
from eval.speed import Timed, Way
from models.checkpoint import native
from models.drafter.eagle import EagleDrafter
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab

EAGLE = {"_target_": "models.drafter.eagle.EagleDrafter"}


def way(name: str, seconds: list[float], rounds: float = 2, drafted: float = 3) -> Way:
    """Answers of 4 tokens each."""
    stats = DecodingStats.empty(1, 1)
    stats.drafted[0, 0] = drafted
    answers = [Timed([1, 2, 3, 4], s, rounds=rounds, stats=stats) for s in seconds]
    return Way(name, lambda context: answers[0], None, answers)


WAYS = [
    way("plain", [4.0, 4.0, 8.0]),
    way("fixed 1", [2.0, 3.0, 6.0]),
    way("fixed 2", [4.0, 4.0, 5.0]),
    way("window", [2.0, 2.0, 4.0], rounds=1, drafted=5),
]


def test_ratios_are_over_plain_and_over_the_best_fixed_length_of_the_category() -> None:
    one, two, window = summaries(WAYS, ["a", "a", "b"])
    assert [row["name"] for row in (one, two, window)] == ["fixed 1", "fixed 2", "window"]
    found = window["by_category"]
    assert list(found) == ["all", "a", "b"]
    assert [found[c]["prompts"] for c in found] == [3, 2, 1]
    assert [found[c]["best_fixed"] for c in found] == ["fixed 1", "fixed 1", "fixed 2"]
    assert [found[c]["speedup"][0] for c in found] == pytest.approx([16 / 8, 8 / 4, 8 / 4])
    assert [found[c]["over_best_fixed"][0] for c in found] == pytest.approx([11 / 8, 5 / 4, 5 / 4])
    value, low, high = found["all"]["speedup"]
    assert low <= value <= high
    assert one["by_category"]["a"]["over_best_fixed"] == (1.0, 1.0, 1.0)
    assert two["by_category"]["all"]["over_best_fixed"][0] == pytest.approx(11 / 13)
    assert window["block_efficiency"] == 9 / 3 and window["drafted_per_round"] == 5
    assert one["block_efficiency"] == 9 / 6 and one["drafted_per_round"] == 1.5
    assert one["identical_to_plain"] == one["prompts"] == 3


def test_a_single_category_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    rows = summaries(WAYS, ["a", "a", "a"])
    assert list(rows[0]["by_category"]) == ["all"]
    print_report(rows)
    printed = capsys.readouterr().out
    assert "Over the best fixed length" in printed and "(fixed 1)" in printed and "2.00 [2.00, 2.00]" in printed


def composed(*overrides: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        return plain(hydra.compose("draft_length", overrides=list(overrides)))


@pytest.fixture
def export(tiny: Target, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    eagle = EagleDrafter(tiny, DraftVocab(tiny.vocab_size)).eval()
    about = {"name": tiny.name, "fingerprint": tiny.fingerprint, "load": {"source": "tiny"}}
    native.save(eagle, native.Export("eagle", EAGLE, about, 4, {}), eagle.vocab, tmp_path / "eagle", "card")
    return tmp_path / "eagle"


def test_every_way_decodes_by_its_own_policy(tiny: Target, export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def engine(target: Target, drafter: Any, settings: Any) -> Any:
        made.append(None if drafter is None else settings)
        return lambda context: None

    monkeypatch.setattr(draft_length, "our_engine", engine)
    options = composed(f"export={export}", "lengths=[1,3]", "policies.window.high=0.9")
    ways = all_ways(options, tiny)
    assert [w.name for w in ways] == ["plain", "fixed 1", "fixed 3", "window", "confidence", "entropy", "cost_aware"]
    assert {"window", "confidence", "entropy", "cost_aware"} < set(POLICIES)
    assert made.pop() is None
    assert [settings.num_speculative_tokens for settings in made] == [1, 3, 3, 3, 3, 3]
    wanted = [Fixed(), Fixed(), Window(high=0.9), Confidence(), Entropy(), CostAware()]
    assert [settings.draft_length for settings in made] == wanted
    with pytest.raises(UserError, match="EagleDrafter has none"):
        all_ways(composed(f"export={export}", f"learnt={export}"), tiny)
    with pytest.raises(UserError, match="put a policy of your own under policies"):
        all_ways(composed(f"export={export}", "decode/draft_length=window"), tiny)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("lengths=[]", "lengths is"),
        ("lengths=[0]", "lengths is"),
        ("repeats=0", "repeats is 0"),
        ("warm_up=-1", "warm_up"),
    ],
)
def test_senseless_options_are_refused(override: str, sentence: str, export: Path) -> None:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        config = hydra.compose("draft_length", overrides=[f"export={export}", override])
    with pytest.raises(UserError, match=sentence):
        draft_length.job(config)
