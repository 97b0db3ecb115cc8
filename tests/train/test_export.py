"""Exports of other engines' formats: by the command, at the end of a run, and as a start of another."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch

from conf import compose
from conf.compose import ROOT, plain
from eval import acceptance
from models import target as target_module
from models.checkpoint import format_of, layout, native, widened
from models.drafter.distilled_lm import DistilledLM
from models.drafter.eagle import EagleDrafter
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken
from tests.helpers.formats import edited_config
from train import export, exporting, pipeline, settings
from train import run as train_run

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


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is refused before the target is loaded."""
    monkeypatch.setattr(target_module, "load_target", lambda **options: pytest.fail("the target was loaded"))


@pytest.mark.usefixtures("unloaded")
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


def test_a_reduced_vocabulary_is_widened_and_that_is_said(
    tiny: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines read the target's whole head: what comes back proposes all tokens, by the weights that were trained."""
    drafter = build_shaken(EAGLE, tiny, DraftVocab(tiny.vocab_size, torch.arange(0, 2048, 4)))
    place = {"name": tiny.name, "fingerprint": tiny.fingerprint, "load": {"source": "tiny"}}
    native.save(drafter, native.Export("eagle", EAGLE, place, 3, {}), drafter.vocab, tmp_path / "export", "")
    run(export, "export", f"export={tmp_path / 'export'}", "format=vllm_eagle", f"output={tmp_path / 'a'}")
    said = "propose 512 of the target's 2,048 tokens"
    assert said in capsys.readouterr().out
    run(export, "export", f"export={tmp_path / 'a'}", "format=sglang_eagle", f"output={tmp_path / 'b'}")
    for name, folder in (("vllm_eagle", tmp_path / "a"), ("sglang_eagle", tmp_path / "b")):
        loaded = format_of(name).load(folder, tiny)
        assert loaded.vocab.size == 2048 and loaded.head.weight.shape[0] == 2048
        assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in drafter.state_dict().items())
        card = (folder / "README.md").read_text()
        assert card.count(said) == card.count("In our own engine, in chains of drafts.") == 1
        assert json.loads((folder / layout.RECORD).read_text())["draft_vocab_size"] == 2048


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
@pytest.mark.usefixtures("unloaded")
def test_what_cannot_be_written_is_refused(overrides: list[str], said: str, made: Path) -> None:
    with pytest.raises(UserError, match=said):
        run(export, "export", f"export={made}", *overrides)
    assert [path.name for path in made.parent.iterdir()] == ["export"]


@pytest.mark.usefixtures("unloaded")
def test_a_target_that_is_an_adapter_is_refused(made: Path) -> None:
    edited_config(made, lambda config: config["target"].update(adapted={"export": "separate"}))
    with pytest.raises(UserError, match=r"'eagle' has its target as an adapter, .*backbone\.export=merged"):
        run(export, "export", f"export={made}", "format=vllm_eagle")


def test_a_run_refuses_a_format_that_will_not_fit(
    tiny: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="Format vllm_medusa takes MedusaDrafter"):
        pipeline.rehearse(options("+drafter=eagle", "export.formats=[vllm_medusa]"), tiny, tmp_path)
    with pytest.raises(UserError, match="draft vocabulary is reduced"):
        pipeline.rehearse(
            options("+drafter=medusa", "export.formats=[fasterdecoding_medusa]", "draft_vocab_size=64"), tiny, tmp_path
        )
    formats = "export.formats=[vllm_eagle,sglang_eagle]"
    pipeline.rehearse(options("+drafter=eagle", formats), tiny, tmp_path)
    assert "proposed no others" not in capsys.readouterr().out
    pipeline.rehearse(options("+drafter=eagle", formats, "draft_vocab_size=64"), tiny, tmp_path)
    assert capsys.readouterr().out.count("proposed no others") == 2
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
    with pytest.raises(UserError, match="source_format=vllm_eagle is that of init_from, and there is none"):
        settings.with_start(options("+drafter=eagle", "source_format=vllm_eagle"))


def test_a_published_language_model_is_a_start_as_by_its_own_setting(tiny: Target) -> None:
    """The bundled target's folder is one."""
    folder = ROOT.parent / "models" / "target" / "tiny"
    chosen = settings.with_start(options("+drafter=distilled_lm", f"init_from={folder}"))
    assert chosen == options("+drafter=distilled_lm", f"drafter.model.name_or_path={folder}")
    drafter = pipeline.build_drafter(chosen, tiny, None)
    assert isinstance(drafter, DistilledLM) and drafter.pretrained
    assert torch.equal(drafter.lm.head.weight, tiny.head.weight)
    with pytest.raises(UserError, match=r"is drafter\.model\.name_or_path, which is given too"):
        settings.with_start(options("+drafter=distilled_lm", f"init_from={folder}", "drafter.model.name_or_path=other"))
    with pytest.raises(UserError, match=r"holds a DraftLM, but \+drafter=medusa is a MedusaDrafter"):
        settings.with_start(options("+drafter=medusa", f"init_from={folder}"))


def test_settings_that_a_start_would_leave_unread_are_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(export, "export", f"export={made}", "format=sglang_eagle", f"output={tmp_path / 'a'}")
    (tmp_path / "a" / layout.RECORD).unlink()
    given = ["drafter.model.intermediate_size=96", "drafter.model.num_layers=1", "drafter.model.feature_window=2",
             "drafter.training.start=least_squares", "drafter.training.lr=0.1", "draft_vocab_size=100"]  # fmt: skip
    unread = {given[place] for place in (0, 2, 3, 5)}  # the others are read, or are what the folder has
    for folder in (made, tmp_path / "a"):
        asked = options("+drafter=eagle", f"init_from={folder}", *given)
        with pytest.raises(UserError, match="would not be read: ") as error:
            settings.with_start(asked, {"drafter", *(setting.partition("=")[0] for setting in given)})
        named = str(error.value).partition("would not be read: ")[2].removesuffix(". Drop them.")
        assert set(named.split(", ")) == unread
        capsys.readouterr()
        settings.with_start(asked, {"drafter", "drafter.model.num_layers", "drafter.training.lr"})
        told = (
            "drafter.model.feature_window=1, not 2; drafter.model.intermediate_size=64, not 96; drafter.training.start="
        )
        assert f"brings its own settings: {told}random, not least_squares" in capsys.readouterr().out


def test_the_command_line_tells_what_was_given(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "run_job", lambda *_: pytest.fail("it was run"))
    arguments = ["+drafter=eagle", f"init_from={made}", "drafter.model.num_future=2"]
    monkeypatch.setattr(sys, "argv", ["train/run.py", *arguments])
    with pytest.raises(SystemExit):
        compose.main("train", train_run.job)
    assert "would not be read: drafter.model.num_future=2. Drop them." in capsys.readouterr().err


def test_the_format_of_a_start_may_have_to_be_named(tiny: Target, tmp_path: Path) -> None:
    """vLLM's and SGLang's EAGLE-3 folders are alike, and count captured layers differently."""
    model = {"_target_": "models.drafter.eagle3.Eagle3Drafter", "intermediate_size": 64}
    drafter = build_shaken(model, tiny, DraftVocab(tiny.vocab_size))
    place = {"name": tiny.name, "fingerprint": tiny.fingerprint, "load": {"source": "tiny"}}
    described = native.Export("eagle3", model, place, 3, {})
    format_of("sglang_eagle3").save(drafter, tiny, described, tmp_path / "a", "")
    (tmp_path / "a" / layout.RECORD).unlink()
    start = ("+drafter=eagle3", f"init_from={tmp_path / 'a'}")
    with pytest.raises(UserError, match="can be read as sglang_eagle3 or as vllm_eagle3: say which by source_format"):
        settings.with_start(options(*start))
    layers = {}
    for name in ("vllm_eagle3", "sglang_eagle3"):
        chosen = settings.with_start(options(*start, f"source_format={name}"))
        layers[name] = pipeline.build_drafter(chosen, tiny, None).capture_layers
    assert layers["sglang_eagle3"] == drafter.capture_layers
    assert layers["vllm_eagle3"] == tuple(layer - 1 for layer in drafter.capture_layers)


def test_adapters_are_put_into_what_a_run_starts_from(tiny: Target, tmp_path: Path) -> None:
    """A draft model that began at random and was trained has weights to be adapted; a new one has none."""
    model = {"_target_": "models.drafter.distilled_lm.DistilledLM", "start": "random", "num_layers": 1}
    drafter = build_shaken(model, tiny, DraftVocab(tiny.vocab_size))
    place = {"name": tiny.name, "fingerprint": tiny.fingerprint, "load": {"source": "tiny"}}
    native.save(drafter, native.Export("lm", model, place, 3, {}), drafter.vocab, tmp_path / "export", "")
    lora = ("+drafter=distilled_lm", "drafter.training.lora={rank:4}")
    with pytest.raises(UserError, match=r"adapts a language model that has weights already: .*init_from"):
        pipeline.rehearse(options(*lora, "drafter.model.start=random"), tiny, tmp_path)
    chosen = settings.with_start(options(*lora, f"init_from={tmp_path / 'export'}"))
    pipeline.rehearse(chosen, tiny, tmp_path)
    module = pipeline._training_module(chosen, tiny, pipeline.build_drafter(chosen, tiny, None))
    kept = module.kept_state()
    assert all(torch.equal(kept[name], tensor) for name, tensor in drafter.state_dict().items())
    trained = [name for name, p in module.drafter.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)


def test_a_format_that_fails_at_the_end_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bundled target is its own draft model here; the rehearsal knows nothing of what will go wrong.

    The same command then writes what is missing, and no more.
    """
    small = ["data.sizes.test=1", "measure.num_prompts=1", "measure.temperatures=[0]", "decode.max_new_tokens=8"]
    formats = ["export.formats=[hf_causal_lm,broken,second]", f"output_root={tmp_path}", "run_name=a"]
    model = f"drafter.model.name_or_path={ROOT.parent / 'models' / 'target' / 'tiny'}"
    write, full, written = exporting.write_format, True, []

    def writes(name: str, *what: Any) -> None:
        if what[3].parent == tmp_path / "a":
            if name == "broken" and full:
                raise UserError("The disk is full.")
            written.append(name)
        write("hf_causal_lm", *what)

    monkeypatch.setattr(exporting, "write_format", writes)
    for module in (exporting, settings):
        monkeypatch.setattr(module, "format_of", lambda name: format_of("hf_causal_lm"))
    monkeypatch.setattr(exporting, "widened", lambda name, *rest: widened("hf_causal_lm", *rest))
    asked = options("+drafter=draft_lm", model, *small, *formats)
    with pytest.raises(UserError, match=r"finished and measured, but not exported as broken \(The disk is full\)\. To"):
        pipeline.run_job(asked, settings.run_folder(asked))
    run = tmp_path / "a"
    (result,) = json.loads((run / "acceptance.json").read_text())["results"]
    for folder in ("export", "hf_causal_lm", "second"):
        assert f"{result['block_efficiency']:.3f}" in (run / folder / "README.md").read_text()
    assert not (run / "broken").exists() and (run / "acceptance.png").exists()
    for text in ("not exported as broken", ""):
        capsys.readouterr()
        full, written = bool(text), []
        try:
            pipeline.run_job(asked, run)
        except UserError as error:
            assert text and text in str(error)
        assert "this run is finished" in capsys.readouterr().out
        assert written == ([] if full else ["broken"])
    cards = [(run / name / "README.md").read_text() for name in ("broken", "second")]
    assert cards[0] == re.sub(r"\bsecond\b", "broken", cards[1])
    pipeline.run_job(asked, run)
    assert written == ["broken"]


def test_a_format_that_drafts_otherwise_is_not_left_behind(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"_target_": "models.drafter.draft_lm.DraftLM", "name_or_path": str(ROOT.parent / "models/target/tiny")}
    drafter = native.build(model, tiny, DraftVocab(tiny.vocab_size)).eval()
    described = native.Export("lm", model, {"name": "tiny", "fingerprint": tiny.fingerprint, "load": {}}, 3, {})

    def refuses(*_: Any) -> None:
        raise UserError("The export is broken.")

    monkeypatch.setattr(exporting, "check_parity", refuses)
    asked = options("+drafter=draft_lm", "export.formats=[hf_causal_lm]")
    with pytest.raises(UserError, match="not exported as hf_causal_lm"):
        exporting.export_formats(asked, tiny, drafter, described, "", [], tmp_path)
    assert not (tmp_path / "hf_causal_lm").exists()


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
