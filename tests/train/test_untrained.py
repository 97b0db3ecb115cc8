"""The main job with drafters that are not trained: no answers, no steps, an export and a table."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch

from conf.compose import ROOT, plain
from data import prompts
from data.stdlib import documents
from models.checkpoint import native
from models.errors import UserError
from models.target import Target
from tests.helpers.models import random_model
from train import pipeline, settings

SMALL = ["trainer=cpu", "data.sizes.test=3", "measure.num_prompts=2", "measure.temperatures=[0]"]


def composed(*overrides: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        return plain(hydra.compose("train", overrides=[*SMALL, "decode.max_new_tokens=12", *overrides]))


@pytest.fixture(autouse=True)
def _a_few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [document for split in prompts.SPLITS for document in itertools.islice(documents(split), 3)]
    monkeypatch.setattr(prompts, "documents", lambda: few)


@pytest.fixture
def folder(tiny: Target, tmp_path: Path) -> Path:
    random_model("llama", dtype=torch.float32, vocab_size=tiny.vocab_size).save_pretrained(tmp_path / "lm")
    assert tiny.tokenizer is not None
    tiny.tokenizer.save_pretrained(tmp_path / "lm")
    return tmp_path / "lm"


@pytest.mark.parametrize("name", ["prompt_lookup", "draft_lm"])
def test_a_run_goes_from_prompts_to_the_table(
    name: str, folder: Path, tiny: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [f"drafter.model.name_or_path={folder}"] if name == "draft_lm" else []
    options, run = composed(f"+drafter={name}", *own), tmp_path / "run"
    pipeline.run_job(options, run)
    printed = capsys.readouterr().out
    assert "as before the export" in printed and "identical to plain decoding on 2 of 2 prompts" in printed
    assert sorted(p.name for p in run.iterdir()) == ["acceptance.json", "acceptance.png", "config.json", "export"]
    (result,) = json.loads((run / "acceptance.json").read_text())["results"]
    assert result["drafter"] == name and result["prompts"] == 2 and result["identical_to_plain"] == 2
    card = (run / "export" / "README.md").read_text()
    assert "Trained on: nothing in this run" in card and f"{result['block_efficiency']:.3f}" in card
    assert native.read(run / "export").provenance["data"] is None
    loaded = native.load(run / "export", tiny)
    assert sum(p.numel() for p in loaded.parameters()) == (0 if not own else sum_of(folder))

    pipeline.run_job(options, run)
    assert "this run is finished" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"holds a run with another decode\.num_speculative_tokens"):
        pipeline.run_job(composed(f"+drafter={name}", *own, "decode.num_speculative_tokens=2"), run)


def sum_of(folder: Path) -> int:
    return sum(tensor.numel() for tensor in native.read_tensors(folder / "model.safetensors").values())


@pytest.mark.parametrize("arguments", [["+drafter=draft_lm"], ["+drafter=eagle", "drafter.training=null"]])
def test_random_weights_are_not_measured(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "prepare_data", lambda *args: pytest.fail("the long work has begun"))
    with pytest.raises(UserError, match=r"drafter\.training is null, and the weights of drafter '\w+' would be random"):
        pipeline.run_job(composed(*arguments), tmp_path / "run")


def test_the_test_prompts_are_those_of_a_trained_run(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "build_answers", lambda *args: [])
    monkeypatch.setattr(pipeline, "StepBatches", lambda *args: type("None", (), {"truncated": 0}))
    sizes = ["data.sizes.train=5", "data.sizes.validation=2"]
    untrained, trained = (
        pipeline.prepare_data(composed(f"+drafter={name}", *sizes), tiny) for name in ("prompt_lookup", "eagle")
    )
    assert untrained.test == trained.test and len(untrained.test) == 3
    assert (untrained.batches, untrained.validation, untrained.manifest) == (None, [], None)
    assert not settings.is_trained(composed("+drafter=prompt_lookup")) and settings.is_trained(
        composed("+drafter=eagle")
    )
