"""The draft tree that an export holds: built in the run from validation prompts, and drafted where it is asked for."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import pytest

from conf.compose import ROOT, plain
from data import prompts
from data.prompts import Prompt
from data.stdlib import documents
from engine.loop import generate
from engine.options import decode_settings
from eval.prompt_sets import without_fitted
from eval.tree import measure_ranks
from models.checkpoint import native
from models.errors import UserError
from models.target import Target
from models.tree import StaticTree
from train import pipeline, settings

SMALL = [
    "trainer=cpu", "logger=csv", "draft_vocab_size=64", "drafter.model.num_heads=3", "drafter.tree.num_nodes=7",
    "data.sizes.train=8", "data.sizes.validation=2", "data.sizes.test=2", "data.answers.max_new_tokens=24",
    "fit.max_steps=6", "fit.batch_size=4", "fit.validation_prompts=2",
    "decode.max_new_tokens=16", "measure.num_prompts=1", "measure.temperatures=[0]",
]  # fmt: skip


def composed(*overrides: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        return plain(hydra.compose("train", overrides=["+drafter=medusa", *SMALL, *overrides]))


@pytest.fixture(autouse=True)
def _a_few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [document for split in prompts.SPLITS for document in itertools.islice(documents(split), 4)]
    monkeypatch.setattr(prompts, "documents", lambda: few)


@pytest.mark.parametrize("asked", [None, "calibrated"])
def test_a_run_builds_its_tree_and_drafts_it_where_asked_to(asked: str | None, tiny: Target, tmp_path: Path) -> None:
    options = settings.with_tree(composed(f"decode.tree={asked or 'null'}", f"data.folder={tmp_path / 'data'}"))
    run = tmp_path / "run"
    pipeline.run_job(options, run)
    export, drafter = native.read(run / "export"), native.load(run / "export", tiny)
    stored = export.tree
    assert stored is not None
    source = hydra.utils.instantiate(options["data"]["source"])
    validation = prompts.split_prompts(source.prompts(tiny, 12, 0), prompts.SplitSizes(8, 2, 2))["validation"]
    assert stored["prompt_ids"] == [prompt.id for prompt in validation]

    decode = replace(settings.measured_settings(options, 0.0), tree=None)
    contexts = [pipeline.context_ids(tiny, prompt) for prompt in validation]
    assert stored["acceptance"] == measure_ranks(tiny, drafter, contexts, decode, depth=3, ranks=5)
    best = StaticTree.best_first(stored["acceptance"], 7)
    assert (stored["parents"], stored["ranks"]) == (list(best.parents), list(best.ranks))

    (result,) = json.loads((run / "acceptance.json").read_text())["results"]
    numbers = {"parents": stored["parents"], "ranks": stored["ranks"]}
    assert result["tree"] == (None if asked is None else numbers)
    assert result["num_nodes"] == (4 if asked is None else 7) and result["identical_to_plain"] == 1
    assert "Draft tree: 7 nodes" in (run / "export" / "README.md").read_text()

    again = decode_settings(options["decode"] | {"tree": "calibrated"}, 0.0, 0, 4, export.tree)
    assert again.tree == best
    assert generate(tiny, contexts, again, drafter).token_ids == generate(tiny, contexts, again).token_ids


def test_prompts_that_a_tree_was_built_on_are_left_out(tmp_path: Path) -> None:
    a, b, c = (Prompt((text,)) for text in "abc")
    (tmp_path / "tree.json").write_text(json.dumps({"parents": [-1], "ranks": [0], "prompt_ids": [b.id, "other"]}))
    stored = [{"parents": [-1], "ranks": [0], "prompt_ids": [a.id]}, None, {"prompt_ids": [c.id]}]
    for tree, kept in ((None, [a, b, c]), (str(tmp_path / "tree.json"), [a, c]), ("calibrated", [b])):
        assert without_fitted([a, b, c], tree, stored) == kept
    with pytest.raises(UserError, match="built on all of these 1 prompts"):
        without_fitted([a], "calibrated", stored)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["drafter.tree=null", "decode.tree=calibrated"], "drafter 'medusa' builds no draft tree"),
        (["drafter.tree.ranks=0"], "drafter.tree.ranks is 0"),
        (["drafter.tree.ranks=2", "drafter.tree.depth=2"], "A tree of 7 nodes is asked for"),
        (["+drafter.tree.width=2"], "drafter.tree has num_nodes, depth, ranks, width"),
        (["drafter.training=null"], "a run without training does not have"),
        (["decode.tree=calibrated", "decode.verification=block"], "Block verification is for chains"),
        (["drafter.tree.depth=4"], "4 tokens deep, but MedusaDrafter looks 3 tokens ahead"),
    ],
)
def test_a_tree_that_cannot_be_built_is_refused_before_the_long_work(
    changes: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "prepare_data", lambda *args: pytest.fail("the long work has begun"))
    with pytest.raises(UserError, match=sentence):
        pipeline.run_job(settings.with_tree(composed(*changes)), tmp_path / "run")


def test_without_a_tree_in_the_export_there_is_nothing_to_draft() -> None:
    with pytest.raises(UserError, match="no export that holds a draft tree"):
        decode_settings(composed()["decode"] | {"tree": "calibrated"}, 0.0, 0)
