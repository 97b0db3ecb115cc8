"""An export is written again with int8 weights, loaded, and measured beside the first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.compose import ROOT
from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.errors import UserError
from models.quantization import dequantized, quantized
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, prompts, tiny_target
from train import quantize

MODEL = {"_target_": "models.drafter.distilled_lm.DistilledLM", "num_layers": 1}


def saved(target: Target, folder: Path, load: dict[str, Any] | None = None, **model: Any) -> Any:
    vocab = DraftVocab(target.vocab_size, torch.arange(0, target.vocab_size, 2))
    drafter = build_shaken(MODEL | model, target, vocab)
    place = {"name": target.name, "fingerprint": target.fingerprint, "load": load or {}}
    provenance = {"versions": {}, "data": None, "command": "python", "git_revision": "none"}
    native.save(drafter, native.Export("some", MODEL | model, place, 4, provenance), vocab, folder, "card")
    return drafter


def test_the_weights_are_those_of_the_export_rounded(tmp_path: Path) -> None:
    target = tiny_target(torch.float64)
    drafter = saved(target, tmp_path / "e")
    native.save_int8(tmp_path / "e", tmp_path / "e8")
    loaded = native.load(tmp_path / "e8", target)
    expected = dequantized(quantized(drafter.state_dict()))
    assert native.read(tmp_path / "e8").int8 and not native.read(tmp_path / "e").int8
    matrices = [name for name, tensor in drafter.state_dict().items() if tensor.dim() == 2]
    assert len(matrices) == 9 and native.read(tmp_path / "e8").name == "some-int8"
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name].double()), name
        assert torch.equal(tensor, drafter.state_dict()[name]) == (name not in matrices), name
    start, settings = prompts([5, 9], 64), DecodeSettings(12, 3, stop_token_ids=frozenset())
    assert generate(target, start, settings, loaded).token_ids == generate(target, start, settings).token_ids
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("e", "e8")]
    assert sizes[1] < 0.2 * sizes[0]  # of float64


def test_a_damaged_export_is_refused(tmp_path: Path) -> None:
    target = tiny_target()
    saved(target, tmp_path / "e")
    native.save_int8(tmp_path / "e", tmp_path / "e8")
    with pytest.raises(UserError, match="has int8 weights already"):
        native.save_int8(tmp_path / "e8", tmp_path / "e88")
    path = tmp_path / "e8" / "model.safetensors"
    tensors = load_file(path)
    name = "lm_head.weight"
    for broken, said in (
        ({k: t for k, t in tensors.items() if k != f"{name}.scale"}, f"{name}.scale is missing"),
        (
            tensors | {f"{name}.scale": tensors[f"{name}.scale"] * float("nan")},
            f"{name} holds values that are not finite",
        ),
        (tensors | {"more.scale": torch.ones(3)}, "unknown more.scale"),
        (tensors | {f"{name}.scale": tensors[f"{name}.scale"] * 2}, "was altered after the export"),
    ):
        save_file(broken, path)
        with pytest.raises(UserError, match=said):
            native.load(tmp_path / "e8", target)
    original = tmp_path / "e" / "model.safetensors"
    save_file({k: t + 1 for k, t in load_file(original).items()}, original)
    with pytest.raises(UserError, match="was altered after the export"):
        native.save_int8(tmp_path / "e", tmp_path / "e9")
    config = json.loads((tmp_path / "e8" / "config.json").read_text())
    (tmp_path / "e8" / "config.json").write_text(json.dumps(config | {"weights": "int4"}))
    with pytest.raises(UserError, match="weights are 'int4'; this version reads 'int8' or none"):
        native.read(tmp_path / "e8")


def test_both_are_measured(tiny: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tiny, tmp_path / "e", {"source": "tiny"}, start="first_layers", num_layers=6)
    arguments = [
        f"export={tmp_path / 'e'}", f"output={tmp_path / 'out'}", "prompts=stdlib", "num_prompts=1",
        "temperatures=[0]", "decode.max_new_tokens=12",
    ]  # fmt: skip
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        quantize.job(hydra.compose("quantize", overrides=arguments))
    results = json.loads((tmp_path / "out" / "acceptance.json").read_text())["results"]
    assert [result["drafter"] for result in results] == ["some", "some-int8"]
    assert all(result["identical_to_plain"] == 1 for result in results)
    printed = capsys.readouterr().out
    assert "MB" in printed and "some-int8" in printed
    card = (tmp_path / "e-int8" / "README.md").read_text()
    assert "Weights: int8" in card and f"{results[1]['block_efficiency']:.3f}" in card


def test_several_exports_are_refused() -> None:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        config = hydra.compose("quantize", overrides=["export=[a,b]"])
    with pytest.raises(UserError, match="name one folder"):
        quantize.job(config)
