"""Exports of other engines' formats: by the command, at the end of a run, and as a start of another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch

from conf.compose import ROOT, plain
from eval import acceptance
from models.checkpoint import format_of, layout, native
from models.drafter.eagle import EagleDrafter
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken
from train import export, pipeline, settings

EAGLE = {"_target_": "models.drafter.eagle.EagleDrafter", "intermediate_size": 64}
FIGURES = "| temperature | acceptance rate |\n|---|---|\n| 0 | 0.123 [0.100, 0.150] |"


@pytest.fixture
def made(tiny: Target, tmp_path: Path) -> Path:
    """An export of ours, with figures in its card."""
    data = {"num_prompts": 7, "prompts": "abc", "settings": {"answers": "target"}}
    provenance = {"versions": {"torch": "9"}, "data": data, "command": "python train/run.py", "git_revision": "none"}
    place = {"name": tiny.name, "fingerprint": tiny.fingerprint, "load": {"source": "tiny"}}
    drafter = build_shaken(EAGLE, tiny, DraftVocab(tiny.vocab_size))
    described = native.Export("eagle", EAGLE, place, 3, provenance)
    native.save(drafter, described, drafter.vocab, tmp_path / "export", f"# x\n\n## Measured\n\n{FIGURES}\n\n## Use\n")
    return tmp_path / "export"


def run(script: Any, name: str, *overrides: str) -> None:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        script.job(hydra.compose(name, overrides=list(overrides)))


def options(*overrides: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        return plain(hydra.compose("train", overrides=["trainer=cpu", *overrides]))


def test_a_folder_of_something_else_is_never_replaced(made: Path) -> None:
    before = sorted(file.name for file in made.iterdir())
    for folder in (made, made.parent):
        with pytest.raises(UserError, match="holds something else"):
            run(export, "export", f"export={made}", "format=vllm_eagle", f"output={folder}")
    assert sorted(file.name for file in made.iterdir()) == before


def test_the_command_writes_a_folder_with_a_card(made: Path, tiny: Target, capsys: pytest.CaptureFixture[str]) -> None:
    run(export, "export", f"export={made}", "format=vllm_eagle")
    folder = made.parent / "vllm_eagle"
    assert f"wrote {folder} and loaded it again: EagleDrafter" in capsys.readouterr().out
    ours, theirs = native.load(made, tiny), format_of("vllm_eagle").load(folder, tiny)
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())
    card = (folder / "README.md").read_text()
    for said in (FIGURES, f"fingerprint `{tiny.fingerprint}`", "licence: Apache-2.0", "7 prompts with the target's own",
                 "prompts `abc`", "`python train/run.py`", '"method": "eagle"', '"num_speculative_tokens": 3',
                 f'"model": "{folder}"', f"python eval/acceptance.py export={folder}"):  # fmt: skip
        assert said in card
    assert "TARGET" not in card and "FOLDER" not in card


def test_the_snippet_for_transformers_runs(
    tiny: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"_target_": "models.drafter.distilled_lm.DistilledLM", "start": "first_layers", "num_layers": 2}
    torch.manual_seed(0)
    drafter = native.build(model, tiny, DraftVocab(tiny.vocab_size))
    place = {"name": tiny.name, "fingerprint": tiny.fingerprint, "load": {"source": "tiny"}}
    provenance = {"versions": {}, "data": None, "command": "python", "git_revision": "none"}
    native.save(drafter, native.Export("lm", model, place, 3, provenance), drafter.vocab, tmp_path / "export", "")
    run(export, "export", f"export={tmp_path / 'export'}", "format=hf_causal_lm")
    card = (tmp_path / "hf_causal_lm" / "README.md").read_text()
    assert '"method": "draft_model"' in card
    capsys.readouterr()
    monkeypatch.chdir(ROOT.parent)
    exec(card.partition("```python\n")[2].partition("```")[0], {})
    assert capsys.readouterr().out.startswith("def main(")


def test_what_it_wrote_is_measured_and_converted(made: Path, tmp_path: Path) -> None:
    run(export, "export", f"export={made}", "format=vllm_eagle", f"output={tmp_path / 'a'}")
    run(export, "export", f"export={tmp_path / 'a'}", "format=sglang_eagle", f"output={tmp_path / 'b'}")
    for name in ("a", "b"):
        (tmp_path / name / layout.RECORD).unlink()  # as published checkpoints are
    with pytest.raises(UserError, match="does not say which target it is for"):
        run(export, "export", f"export={tmp_path / 'b'}", "format=vllm_eagle")
    run(
        export,
        "export",
        f"export={tmp_path / 'b'}",
        "format=vllm_eagle",
        f"output={tmp_path / 'c'}",
        "target.source=tiny",
    )
    first, last = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "c"))
    assert first == last
    card = (tmp_path / "c" / "README.md").read_text()
    assert "Trained on: data that this folder does not tell" in card and FIGURES in card
    measured = ["prompts=stdlib", "num_prompts=1", "temperatures=[0]", "decode.max_new_tokens=12", "target.source=tiny"]
    folders = f"export=[{made},{tmp_path / 'b'}]"
    run(acceptance, "acceptance", folders, f"output={tmp_path / 'out'}", *measured, "decode.num_speculative_tokens=3")
    results = json.loads((tmp_path / "out" / "acceptance.json").read_text())["results"]
    assert [result["drafter"] for result in results] == ["eagle", "b"]
    assert results[0]["counts"]["accepted"] == results[1]["counts"]["accepted"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["format=vllm_eagle3"], "takes Eagle3Drafter, not EagleDrafter"),
        (["format=vllm_eagl"], "Did you mean 'vllm_eagle'"),
        (["format=native"], "format is 'native', our own"),
        (
            ["format=vllm_eagle", "stitch=true"],
            "stitch=true, but what format vllm_eagle holds is no part",
        ),
        (["format=vllm_eagle", "source_format=vllm_medusa"], "lacks hidden_size"),
    ],
)
def test_what_cannot_be_written_is_refused(overrides: list[str], said: str, made: Path) -> None:
    with pytest.raises(UserError, match=said):
        run(export, "export", f"export={made}", *overrides)
    assert [path.name for path in made.parent.iterdir()] == ["export"]


def test_a_run_refuses_a_format_that_will_not_fit(tiny: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Format vllm_medusa takes MedusaDrafter"):
        pipeline.rehearse(options("+drafter=eagle", "export.formats=[vllm_medusa]"), tiny, tmp_path)
    with pytest.raises(UserError, match="draft vocabulary is reduced"):
        pipeline.rehearse(
            options("+drafter=eagle", "export.formats=[vllm_eagle]", "draft_vocab_size=64"), tiny, tmp_path
        )
    pipeline.rehearse(options("+drafter=eagle", "export.formats=[vllm_eagle,sglang_eagle]"), tiny, tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="Did you mean 'vllm_eagle3'"):
        settings.check(options("+drafter=eagle3", "export.formats=[vllm_eagle33]"))
    with pytest.raises(UserError, match="which every run writes"):
        settings.check(options("+drafter=eagle3", "export.formats=[native]"))


def test_training_starts_from_a_folder(made: Path, tiny: Target, tmp_path: Path) -> None:
    run(export, "export", f"export={made}", "format=sglang_eagle", f"output={tmp_path / 'a'}")
    (tmp_path / "a" / layout.RECORD).unlink()
    ours = native.load(made, tiny)
    for folder in (made, tmp_path / "a"):
        chosen = settings.with_start(options("+drafter=eagle", f"init_from={folder}", "draft_vocab_size=100"))
        assert chosen["drafter"]["training"]["start"] == "random"  # nothing overwrites what was read
        assert chosen["drafter"]["model"]["intermediate_size"] == 64
        drafter = pipeline.build_drafter(chosen, tiny, None)
        assert isinstance(drafter, EagleDrafter) and drafter.training and not drafter.vocab.reduced
        assert all(p.requires_grad for p in drafter.parameters())
        for name, tensor in ours.state_dict().items():
            assert torch.equal(drafter.state_dict()[name], tensor), name
    assert settings.with_start(options("+drafter=eagle"))["drafter"]["training"]["start"] == "least_squares"
    with pytest.raises(UserError, match=r"holds a EagleDrafter, but \+drafter=medusa is a MedusaDrafter"):
        settings.with_start(options("+drafter=medusa", f"init_from={made}"))


@pytest.mark.slow
def test_a_run_writes_its_formats_and_another_starts_from_one(tmp_path: Path) -> None:
    small = [
        "data.sizes.train=16", "data.sizes.validation=2", "data.sizes.test=2", "data.answers.max_new_tokens=16",
        "fit.max_steps=3", "fit.evaluate_every=3", "measure.num_prompts=1", "measure.temperatures=[0]",
        "decode.max_new_tokens=16", f"output_root={tmp_path}",
    ]  # fmt: skip
    first = options("+drafter=eagle3", *small, "run_name=a", "export.formats=[vllm_eagle3,speculators_eagle3]")
    pipeline.run_job(first, settings.run_folder(first))
    cards = [(tmp_path / "a" / name / "README.md").read_text() for name in ("vllm_eagle3", "speculators_eagle3")]
    report = json.loads((tmp_path / "a" / "acceptance.json").read_text())["results"][0]
    assert all(f"{report['block_efficiency']:.3f}" in card for card in cards)
    second = options("+drafter=eagle3", *small, "run_name=b", f"init_from={tmp_path / 'a' / 'vllm_eagle3'}")
    second = settings.with_start(second)
    pipeline.run_job(second, settings.run_folder(second))
    recorded = native.read(tmp_path / "b" / "export").provenance["config"]
    assert recorded["init_from"].endswith("vllm_eagle3") and recorded["drafter"]["training"]["start"] == "random"
