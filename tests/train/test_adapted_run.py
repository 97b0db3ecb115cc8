"""Runs that train the target too, from prompts to the table: what they export, and what then reads it."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch

from conf.compose import ROOT, plain
from data import prompts
from data.stdlib import documents
from engine.loop import generate
from engine.settings import DecodeSettings
from eval.acceptance import measure_exports
from eval.adapted import distance, report
from models.checkpoint import format_of, native
from models.errors import UserError
from models.target import Target, load_target
from models.target.adapted import AdaptedTarget, Lora, save_target
from tests.helpers.characters import character_tokenizer
from tests.helpers.drafters import prompts as random_prompts
from tests.helpers.models import random_model
from train import export as command
from train import pipeline, settings

SMALL = [
    "trainer=cpu", "target=hf", "data=stdlib", "data.sizes.train=8", "data.sizes.validation=2", "data.sizes.test=2",
    "data.source.max_tokens=32", "data.answers.max_new_tokens=24", "fit.max_steps=8", "fit.batch_size=4",
    "fit.evaluate_every=4", "fit.validation_prompts=2", "decode.max_new_tokens=16", "measure.num_prompts=2",
    "measure.temperatures=[0]", "drafter.training.lr=3e-2",
]  # fmt: skip
MEDUSA = [
    "+drafter=medusa2",
    "drafter.model.num_heads=2",
    "drafter.tree.num_nodes=4",
    "drafter.training.backbone.rank=4",
]
RUNS = {
    "merged": [*MEDUSA, "export.formats=[vllm_medusa]"],
    "separate": [*MEDUSA, "drafter.training.backbone.export=separate"],
    "full": ["+drafter=mtp_parallel", "drafter.training.backbone.by=full", "drafter.training.projection=true"],
}


@dataclass(frozen=True)
class Made:
    """A finished run, and what it printed."""

    folder: Path
    printed: str

    @property
    def export(self) -> Path:
        return self.folder / "export"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of single characters."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = random_model("llama", dtype=torch.float32, max_position_embeddings=256, **sizes)
    folder = tmp_path_factory.mktemp("base")
    save_target(Target(model, character_tokenizer(64)), folder)
    return folder


@pytest.fixture(scope="module")
def _a_few_documents() -> Any:
    few = [document for split in prompts.SPLITS for document in itertools.islice(documents(split), 4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "documents", lambda: few)
        yield


@pytest.fixture(scope="module")
def runs(base: Path, tmp_path_factory: pytest.TempPathFactory, _a_few_documents: None) -> dict[str, Made]:
    made = {}
    for name, own in RUNS.items():
        folder = tmp_path_factory.mktemp(name)
        place = [f"target.name_or_path={base}", f"data.folder={folder.parent / 'data'}"]
        with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
            options = plain(hydra.compose("train", overrides=[own[0], *SMALL, *own[1:], *place]))
        with pytest.MonkeyPatch.context() as patch:
            said: list[str] = []
            patch.setattr("builtins.print", lambda *parts, said=said, **kw: said.append(" ".join(map(str, parts))))
            pipeline.run_job(settings.with_tree(options), folder / "run")
        made[name] = Made(folder / "run", "\n".join(said))
    return made


def original_of(base: Path) -> Target:
    return load_target("hf", name_or_path=str(base), device="cpu")


@pytest.mark.parametrize("name", RUNS)
def test_the_export_says_whom_it_drafts_for(name: str, runs: dict[str, Made], base: Path) -> None:
    run, original = runs[name], original_of(base)
    export = native.read(run.export)
    files = {p.name for p in run.export.iterdir()} - {"README.md", "config.json", "model.safetensors"}
    assert files == {"adapter" if name == "separate" else "target"}
    assert str(run.folder) not in (run.export / "config.json").read_text()
    told = export.target["adapted"]
    assert told["original"] == {"name": str(base), "fingerprint": original.fingerprint}
    assert export.target["fingerprint"] != original.fingerprint
    assert told["kl"] > 1e-6 and told["positions"] == 32 and 0 < told["top1_agreement"] <= 1
    sentence = report(export.target)
    assert (
        sentence is not None and "lossless for the ADAPTED target" in sentence and f"{told['kl']:.3g} nats" in sentence
    )
    card = (run.export / "README.md").read_text()
    assert sentence in card and sentence in run.printed and "as before the export" in run.printed
    (result,) = json.loads((run.folder / "acceptance.json").read_text())["results"]
    assert result["identical_to_plain"] == result["prompts"] == 2


@pytest.mark.parametrize("name", RUNS)
def test_the_export_is_refused_by_the_original_and_brings_its_own_target(
    name: str, runs: dict[str, Made], base: Path
) -> None:
    export, original = runs[name].export, original_of(base)
    with pytest.raises(UserError, match="The target that it was trained with lies in its own folder"):
        native.load(export, original)
    target = load_target(**native.read(export).target["load"], device="cpu")
    assert target.fingerprint == native.read(export).target["fingerprint"]
    drafter, start = native.load(export, target), random_prompts([3, 9, 5], 64)
    decode = DecodeSettings(20, 3, stop_token_ids=frozenset())
    plain_answers = generate(target, start, decode).token_ids
    assert generate(target, start, decode, drafter).token_ids == plain_answers
    assert native.target_of(export, target) is target
    found = native.target_of(export, original)
    assert found.fingerprint == target.fingerprint
    assert generate(found, start, decode, native.load(export, found)).token_ids == plain_answers


def test_merged_and_separate_exports_are_interchangeable(runs: dict[str, Made]) -> None:
    """The same training gives the same target, whatever form it is written in, and either drafter drafts for it."""
    merged, separate = (load_target(**native.read(runs[n].export).target["load"]) for n in ("merged", "separate"))
    assert merged.fingerprint == separate.fingerprint
    for name, parameter in merged.model.named_parameters():
        assert torch.equal(separate.model.get_parameter(name), parameter), name
    native.load(runs["merged"].export, separate)
    native.load(runs["separate"].export, merged)


def test_acceptance_is_measured_against_the_adapted_target(
    runs: dict[str, Made], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With nothing but the export's name, and after the export was moved."""
    moved = runs["merged"].export.rename(tmp_path / "elsewhere")
    options = [
        f"export=[{moved},{runs['separate'].export}]", "num_prompts=2", "temperatures=[0]", "decode.max_new_tokens=12",
        f"output={tmp_path / 'out'}",
    ]  # fmt: skip
    try:
        with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
            measured = measure_exports(plain(hydra.compose("acceptance", overrides=options)))
    finally:
        moved.rename(runs["merged"].export)
    assert all(m.identical == 2 for _, m in measured) and len(measured) == 2
    written = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    assert [told["export"] for told in written["adapted_targets"]] == ["merged", "separate"]
    assert capsys.readouterr().out.count("Decoding is lossless for the ADAPTED target") == 2


def test_exports_are_written_again_with_their_target(runs: dict[str, Made], tmp_path: Path) -> None:
    for name in RUNS:
        native.save_int8(runs[name].export, tmp_path / name)
        target = load_target(**native.read(tmp_path / name).target["load"], device="cpu")
        drafter = native.load(tmp_path / name, target)
        before = native.read(tmp_path / name)
        native.update(drafter, tmp_path / name)
        assert native.read(tmp_path / name).target == before.target
        native.load(tmp_path / name, load_target(**before.target["load"], device="cpu"))


def test_another_drafter_is_trained_for_the_adapted_target(runs: dict[str, Made]) -> None:
    """It is a Hugging Face folder like any other."""
    target = load_target("hf", name_or_path=str(runs["full"].export / "target"), device="cpu")
    assert target.fingerprint == native.read(runs["full"].export).target["fingerprint"]
    again = AdaptedTarget(target, Lora(2, 2.0, 0.0, "all-linear"))
    with torch.no_grad():
        again.trained[1].add_(1)
    assert again.finished().fingerprint not in (target.fingerprint, target.original.fingerprint)


def test_an_engines_folder_names_the_adapted_target(runs: dict[str, Made]) -> None:
    run, module = runs["merged"], format_of("vllm_medusa")
    export, place = module.read(run.folder / "vllm_medusa"), run.export / "target"
    assert Path(export.target["load"]["name_or_path"]) == place
    target = load_target(**export.target["load"])
    assert target.fingerprint == export.target["fingerprint"]
    ours, theirs = native.load(run.export, target), module.load(run.folder / "vllm_medusa", target)
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())
    card = (run.folder / "vllm_medusa" / "README.md").read_text()
    assert "ADAPTED" in card and f'model="{place}"' in card


def test_engines_get_no_drafter_whose_target_is_an_adapter(runs: dict[str, Made], base: Path, tmp_path: Path) -> None:
    with (
        hydra.initialize_config_dir(str(ROOT), version_base="1.3"),
        pytest.raises(UserError, match=r"backbone\.export=merged"),
    ):
        command.job(hydra.compose("export", [f"export={runs['separate'].export}", "format=vllm_medusa"]))


def test_the_distance_is_that_of_loops(base: Path, runs: dict[str, Made]) -> None:
    original, adapted = original_of(base), load_target(**native.read(runs["merged"].export).target["load"])
    texts = [([3, 1, 4, 1, 5, 9], 2), ([2, 7, 1, 8], 1)]
    kl, agree, count = 0.0, 0, 0
    with torch.no_grad():
        for ids, start in texts:
            p, q = (t.model(input_ids=torch.tensor([ids])).logits[0].double().softmax(-1) for t in (original, adapted))
            for t in range(start - 1, len(ids) - 1):
                kl += sum((p[t, v] * (p[t, v] / q[t, v]).log()).item() for v in range(64))
                agree += int(p[t].argmax() == q[t].argmax())
                count += 1
    found = distance(original, adapted, texts)
    assert found == {"kl": pytest.approx(kl / count, rel=1e-4), "top1_agreement": agree / count, "positions": 7}
    assert distance(original, original, texts) == {"kl": pytest.approx(0), "top1_agreement": 1, "positions": 7}
    assert report({"name": "frozen"}) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [(["drafter.training.backbone.by=full", "draft_vocab_size=32"], "set draft_vocab_size=null"),
     (["drafter.training.backbone.ramp=2"], "backbone.ramp is 2"),
     (["drafter.training.backbone.target_modules=[lm_head]"], "neither the embedding nor the head"),
     (["drafter.training.backbone.export=separate", "export.formats=[vllm_medusa]"], "backbone.export=merged")],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_before_the_long_work(
    changes: list[str], said: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "prepare_data", lambda *args: pytest.fail("the long work has begun"))
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        overrides = [MEDUSA[0], *SMALL, *MEDUSA[1:], f"target.name_or_path={base}", *changes]
        options = plain(hydra.compose("train", overrides=overrides))
    with pytest.raises(UserError, match=said):
        pipeline.run_job(options, tmp_path / "run")


def test_a_damaged_record_of_the_target_is_refused(runs: dict[str, Made], tmp_path: Path) -> None:
    config = json.loads((runs["separate"].export / "config.json").read_text())
    config["target"]["adapted"]["export"] = "both"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"is damaged: ValueError: target\.adapted\.export is 'both'"):
        native.read(tmp_path)
