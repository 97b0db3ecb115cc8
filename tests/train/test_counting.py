"""The main job with drafters that learn by counting: the answers are counted, exported, reloaded and measured."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import hydra
import pytest

from conf.compose import ROOT, plain
from data import prompts
from data.answers import open_answers
from data.stdlib import documents
from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab
from train import pipeline

SMALL = [
    "trainer=cpu",
    "data.sizes.train=4",
    "data.sizes.validation=1",
    "data.sizes.test=2",
    "data.answers.max_new_tokens=24",
    "decode.max_new_tokens=12",
    "measure.num_prompts=1",
    "measure.temperatures=[0]",
]


def composed(*overrides: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        return plain(hydra.compose("train", overrides=[*SMALL, *overrides]))


@pytest.fixture(autouse=True)
def _a_few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [document for split in prompts.SPLITS for document in itertools.islice(documents(split), 4)]
    monkeypatch.setattr(prompts, "documents", lambda: few)


@pytest.mark.parametrize("name", ["suffix", "lookup_cache"])
def test_answers_are_counted_exported_and_measured(
    name: str, tiny: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, run = composed(f"+drafter={name}", f"data.folder={tmp_path / 'data'}"), tmp_path / "run"
    pipeline.run_job(options, run)
    printed = capsys.readouterr().out
    assert "as before the export" in printed and "identical to plain decoding on 1 of 1 prompts" in printed
    (result,) = json.loads((run / "acceptance.json").read_text())["results"]
    assert result["drafter"] == name
    assert "4 prompts with the target's own answers" in (run / "export" / "README.md").read_text()
    assert not (run / "checkpoints").exists()

    (folder,) = (tmp_path / "data").glob("answers-*")
    rows = open_answers(folder)
    contexts = [ids[: mask.index(1)] for ids, mask in zip(rows["token_ids"], rows["loss_mask"], strict=True)]
    settings = DecodeSettings(24, 4)
    known = generate(tiny, contexts, settings, native.load(run / "export", tiny))
    assert [c + a for c, a in zip(contexts, known.token_ids, strict=True)] == rows["token_ids"]
    assert known.stats.acceptance_rate > 0.9
    bare = native.build(options["drafter"]["model"], tiny, DraftVocab(tiny.vocab_size))
    assert generate(tiny, contexts, settings, bare).stats.rounds.sum() > 1.5 * known.stats.rounds.sum()


def test_a_drafter_that_cannot_count_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "prepare_data", lambda *args: pytest.fail("the long work has begun"))
    options = composed("+drafter=eagle")
    options["drafter"]["training"] = {"_target_": "train.counting.Counting"}
    with pytest.raises(UserError, match="EagleDrafter does not learn by counting"):
        pipeline.run_job(options, tmp_path / "run")


def test_counting_leaves_no_weights_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "prepare_data", lambda *args: pytest.fail("the long work has begun"))
    with pytest.raises(
        UserError, match=r"drafter\.training trains no weights that draft, and the weights of drafter '\w+' would be"
    ):
        pipeline.run_job(composed("+drafter=hybrid"), tmp_path / "run")
