"""Loading a target, and one clear sentence for all that can be wrong with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from models.errors import UserError
from models.target import load_target
from tests.helpers.models import VOCAB_SIZE, random_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    random_model("llama_tied", dtype=torch.float32).save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), eos_token="w2")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "target"))


@pytest.mark.parametrize("source", ["hf", "smollm2"])
def test_a_folder_is_loaded_with_its_weights_and_tokenizer(saved: Path, source: str) -> None:
    target = load_target(source, name_or_path=str(saved), device="cpu")
    expected = random_model("llama_tied", dtype=torch.float32)
    for name, parameter in expected.named_parameters():
        assert torch.equal(target.model.get_parameter(name), parameter)
    assert target.name == str(saved) and target.stop_token_ids == {2} and target.dtype == torch.float32
    assert target.tokenizer.convert_tokens_to_ids("w7") == 7


def test_a_home_folder_may_be_abbreviated(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(saved.parent))
    assert load_target("hf", name_or_path=f"~/{saved.name}").vocab_size == VOCAB_SIZE


def test_the_bundled_target_is_loaded_and_checked() -> None:
    target = load_target("tiny")
    assert target.name == "tiny" and target.tokenizer is not None
    assert target.stop_token_ids


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_the_dtype_is_that_of_all_weights(saved: Path, dtype: str) -> None:
    target = load_target("hf", name_or_path=str(saved), dtype=dtype)
    assert {parameter.dtype for parameter in target.model.parameters()} == {getattr(torch, dtype)} == {target.dtype}


@pytest.mark.parametrize(("wanted", "found"), [("auto", "sdpa"), ("eager", "eager"), ("sdpa", "sdpa")])
def test_the_attention_is_as_asked_for(saved: Path, wanted: str, found: str) -> None:
    target = load_target("hf", name_or_path=str(saved), attn_implementation=wanted)
    assert target.config._attn_implementation == found


def test_soft_capped_attention_is_eager_unless_sdpa_is_forced(saved: Path, tmp_path: Path) -> None:
    random_model("gemma2", dtype=torch.float32).save_pretrained(tmp_path)
    for file in saved.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    assert load_target("hf", name_or_path=str(tmp_path)).config._attn_implementation == "eager"
    with pytest.raises(UserError, match=r"Cannot load the target .*scaled_dot_product_attention"):
        load_target("hf", name_or_path=str(tmp_path), attn_implementation="sdpa")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "nope"}, "target.source is 'nope': choose tiny, smollm2 or hf"),
        ({"source": "hf"}, "target=hf needs target.name_or_path=FOLDER"),
        ({"source": "hf", "name_or_path": "/no/such/folder"}, "there is no folder '/no/such/folder'"),
        ({"source": "hf", "name_or_path": "./folder"}, "there is no folder './folder'"),
        ({"source": "hf", "name_or_path": "not/a/model"}, "there is no folder 'not/a/model'"),
        ({"source": "tiny", "dtype": "float31"}, "target.dtype is 'float31': choose float32, float64, bfloat16"),
        ({"source": "tiny", "dtype": "int8"}, "target.dtype is 'int8'"),
        ({"source": "tiny", "device": "gpu"}, "Cannot use target.device=gpu: "),
        ({"source": "tiny", "device": "cuda:77"}, "Cannot use target.device=cuda:77: "),
        (
            {"source": "tiny", "attn_implementation": "flash_attention_2"},
            "attn_implementation is 'flash_attention_2': choose auto, sdpa or eager; drafts are checked with four",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_target(**arguments)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_a_hub_that_cannot_be_reached_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files.\nCheckout your connection.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(UserError, match=r"^Cannot load the target 'owner/model': We couldn't connect to .* files\.$"):
        load_target("hf", name_or_path="owner/model")


def _without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])


def _pickled_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    _without_weights(folder)


def _rewritten(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def _drop(weights: dict[str, torch.Tensor]) -> None:
    for layer in range(3):
        weights[f"model.layers.{layer}.mlp.wide.weight"] = weights.pop(f"model.layers.{layer}.mlp.up_proj.weight")
    weights.pop("model.norm.weight")


def _extended(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.1.self_attn.q_proj.bias"] = torch.ones(32)


def _reshape(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = torch.ones(7)


def _without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def _other_architecture(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_config, "Cannot load the target .*config.json"),
        (_without_weights, "Cannot load the target .*model.safetensors"),
        (_cut_weights, "Cannot load the target .*header"),
        (_pickled_weights, "Cannot load the target .*no file named model.safetensors"),
        (
            _rewritten(_drop),
            ": "
            + "; ".join(f"missing model.layers.{layer}.mlp.up_proj.weight" for layer in range(3))
            + "; missing model.norm.weight; "
            + "; ".join(f"unread model.layers.{layer}.mlp.wide.weight" for layer in range(3))
            + r"\.$",
        ),
        (_rewritten(_reshape), r": model.norm.weight is \(7,\), not \(32,\)\.$"),
        (_without_tokenizer, "Cannot load the tokenizer of the target"),
        (_other_architecture(model_type="nosuch"), "Cannot load the target .*nosuch"),
        (_other_architecture(model_type="t5"), "Cannot load the target .*T5Config"),
        (_other_architecture(model_type="mine", auto_map={"AutoConfig": "mine.Config"}), "contains custom code"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_folders_are_told_in_one_sentence(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        load_target("hf", name_or_path=str(folder))
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_tensors_that_nothing_reads_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    _rewritten(_extended)(folder)
    load_target("hf", name_or_path=str(folder))
    assert "does not read: unread model.layers.1.self_attn.q_proj.bias" in caplog.text


def test_an_unsupported_architecture_is_refused_when_it_is_loaded(saved: Path, tmp_path: Path) -> None:
    config = AutoConfig.for_model("bloom", vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for file in saved.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    with pytest.raises(UserError, match="'bloom' is not supported: it does not run with our cache"):
        load_target("hf", name_or_path=str(tmp_path))
