"""Exports that are made of an export: where they may be written, and whose figures their cards show."""

from pathlib import Path
from typing import Any

import pytest

from models.checkpoint import native
from models.errors import UserError
from models.vocab import DraftVocab
from tests.helpers.adaptation import EAGLE, equal
from tests.helpers.drafters import build_shaken, tiny_target
from train import merge, meta
from train.adaptation.successors import card_of, output_of, save
from train.model_card import measured_before

CARD = "# eagle drafter\n\n## Measured\n\n| 0.5 |\n\n## Use\n\nso\n"


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def drafter(target):
    return build_shaken(EAGLE, target, DraftVocab(target.vocab_size), seed=3)


@pytest.fixture
def described(target) -> native.Export:
    named = {"name": target.name, "fingerprint": target.fingerprint, "load": {}}
    return native.Export("some", EAGLE, named, 3, {})


@pytest.fixture
def source(target, drafter, described, tmp_path: Path) -> Path:
    native.save(drafter, described, drafter.vocab, tmp_path / "export", CARD)
    return tmp_path / "export"


def test_figures_are_said_to_be_those_of_the_drafter_it_began_with(target, drafter, described, source) -> None:
    output = source.parent / "merged"
    save(drafter, described, source, output, "merge", "Merged by hand.", {"merged": []})
    assert equal(native.load(output, target).state_dict(), drafter.state_dict())
    assert native.read(output).provenance["adaptation"] == {"made_by": "merge", "merged": []}
    card = card_of(output)
    assert card.index("Merged by hand. What is measured below is of the drafter that it began with") < card.index("0.5")
    assert "not of this one" in measured_before(card) and "| 0.5 |" in measured_before(card), "engines' cards too"
    (source / "README.md").write_text("a foreign card\n")
    save(drafter, described, source, output, "merge", "Merged by hand.", {})
    assert card_of(output).startswith("Merged by hand.") and card_of(output).endswith("a foreign card\n")


def test_only_what_the_same_command_wrote_is_replaced(drafter, described, source, tmp_path: Path) -> None:
    output = tmp_path / "merged"
    save(drafter, described, source, output, "merge", "", {})
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(output)
    for free in ("nowhere", "empty", "merged", "link"):
        output_of(str(tmp_path / free), source, "merge")
    assert output_of(str(tmp_path / "link"), source, "merge") == output, "the folder and not the link to it"
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("")
    for taken in ("results", "file", "."):
        with pytest.raises(UserError, match="holds something else"):
            output_of(str(tmp_path / taken), source, "merge")
    with pytest.raises(UserError, match="holds something else"):
        output_of(str(output), source, "meta")
    (tmp_path / "itself").symlink_to(source)
    for itself in (source, tmp_path / "itself"):
        with pytest.raises(UserError, match="output and export are one folder"):
            output_of(str(itself), source, "merge")


def test_commands_refuse_such_a_folder_before_anything_is_loaded(source, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("models.target.load_target", lambda **given: pytest.fail("a target was loaded"))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis.tex").write_text("years of work")
    given: dict[str, Any] = {"export": str(source), "output": str(tmp_path / "results"), "deltas": [], "weights": None}
    with pytest.raises(UserError, match="holds something else"):
        merge.merge_deltas(given)
    with pytest.raises(UserError, match="one folder"):
        merge.merge_deltas(given | {"output": str(source)})
    monkeypatch.setattr("train.adaptation.sections.sections_of", lambda given: None)
    learning = {"adaptation": {"lora": None}, "meta": {}, "seed": 0}
    with pytest.raises(UserError, match="holds something else"):
        meta.pre_adapt_export(given | learning)
    with pytest.raises(UserError, match="lora"):
        meta.pre_adapt_export(given | learning | {"adaptation": {"lora": {"rank": 2}}})
    assert (tmp_path / "results" / "thesis.tex").read_text() == "years of work"
    assert card_of(source) == CARD
