"""Whatever is wrong with an export is refused, in a sentence that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoint import native
from models.drafter.eagle import EagleDrafter
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, tiny_target

MODEL = {"_target_": "models.drafter.eagle.EagleDrafter", "num_layers": 2, "num_key_value_heads": 4}
PROVENANCE = {"config": {"seed": 3}, "data": None}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2)


@pytest.fixture(scope="module")
def drafter(target: Target) -> EagleDrafter:
    return build_shaken(MODEL, target, DraftVocab(20, torch.tensor([0, 3, 4, 11, 19])))


def described(target: Target, model: dict[str, Any] | None = None) -> native.Export:
    place = {"name": target.name, "fingerprint": target.fingerprint, "load": {"source": "tiny"}}
    return native.Export("mine", MODEL if model is None else model, place, 6, PROVENANCE)


@pytest.fixture
def folder(target: Target, drafter: EagleDrafter, tmp_path: Path) -> Path:
    native.save(drafter, described(target), drafter.vocab, tmp_path / "export", "# a card\n")
    return tmp_path / "export"


def test_finite_values_that_were_altered_are_noticed(folder: Path, target: Target) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"][3, 5] += 0.5
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors' was altered after the export"):
        native.load(folder, target)


def test_what_is_written_comes_back(folder: Path, target: Target, drafter: EagleDrafter) -> None:
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert [p.name for p in folder.parent.iterdir()] == ["export"]
    assert native.read(folder) == described(target)
    assert (folder / "README.md").read_text() == "# a card\n"
    config = json.loads((folder / "config.json").read_text())
    assert config["format"] == "draftsmith-1" and config["draft_vocab_size"] == 5
    assert load_file(folder / "model.safetensors")["d2t"].tolist() == [0, 2, 2, 8, 15]
    torch.manual_seed(5)
    loaded = native.load(folder, target)
    assert isinstance(loaded, EagleDrafter) and not loaded.training
    assert loaded.config.num_hidden_layers == 2 and loaded.config.num_key_value_heads == 4
    assert loaded.vocab.token_ids.tolist() == [0, 3, 4, 11, 19]
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_full_vocabulary_needs_no_map(target: Target, tmp_path: Path) -> None:
    drafter = build_shaken(MODEL, target, DraftVocab(20))
    native.save(drafter, described(target), drafter.vocab, tmp_path / "export", "")
    assert "d2t" not in load_file(tmp_path / "export" / "model.safetensors")
    assert not native.load(tmp_path / "export", target).vocab.reduced


def test_saving_again_replaces_the_folder(folder: Path, target: Target, drafter: EagleDrafter) -> None:
    (folder / "stale").write_text("left by an older run")
    native.save(drafter, described(target), drafter.vocab, folder, "second")
    assert (folder / "README.md").read_text() == "second"
    assert not (folder / "stale").exists()


def test_a_failed_save_leaves_the_old_folder(
    folder: Path, target: Target, drafter: EagleDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(native, "save_file", full)
    with pytest.raises(UserError, match="the disk is full"):
        native.save(drafter, described(target), drafter.vocab, folder, "second")
    assert [p.name for p in folder.parent.iterdir()] == ["export"]
    assert (folder / "README.md").read_text() == "# a card\n"
    native.load(folder, target)


def test_the_export_of_another_target_is_refused(folder: Path) -> None:
    """Same shapes throughout, but another RoPE: only the fingerprint tells them apart."""
    rope = {"rope_type": "default", "rope_theta": 77.0}
    other = tiny_target(vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, rope_parameters=rope)
    other.name = "the-other"
    with pytest.raises(UserError) as error:
        native.load(folder, other)
    for part in ("tiny-random", native.read(folder).target["fingerprint"], "the-other", other.fingerprint):
        assert part in str(error.value)


def test_the_same_target_with_other_weights_is_accepted(target: Target, folder: Path) -> None:
    same_shape = tiny_target(vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, seed=9)
    assert not torch.equal(same_shape.head.weight, target.head.weight)
    native.load(folder, same_shape)


def edited(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "text", ["", "{", '{"format": "draftsmith-1"}', "[]", "3", "null", '"draftsmith-1"', "\x00\xff"]
)
def test_damaged_json_is_refused(text: str, folder: Path, target: Target) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    for use in (native.read, lambda path: native.load(path, target)):
        with pytest.raises(UserError, match=r"config\.json.*is damaged"):
            use(folder)


def test_a_file_says_where_its_target_is_and_not_what_may_run(folder: Path, target: Target) -> None:
    more = {"trust_remote_code": True, "device": "cuda", "revision": "abc"}
    edited(folder, lambda config: config["target"]["load"].update(more))
    assert native.read(folder).target["load"] == {"source": "tiny", "revision": "abc"}


def test_a_draft_tree_comes_back_as_it_was_stored(folder: Path) -> None:
    stored = {"parents": [-1, 0], "ranks": [0, 0]}
    assert native.read(folder).tree is None
    edited(folder, lambda config: config["decoding"].pop("tree"))  # an export of before there were any
    assert native.read(folder).tree is None
    edited(folder, lambda config: config["decoding"].update(tree=stored))
    assert native.read(folder).tree == stored
    edited(folder, lambda config: config["decoding"].update(tree=[0]))
    with pytest.raises(UserError, match=r"config\.json.*is damaged: TypeError: decoding\.tree is \[0\]"):
        native.read(folder)


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.9])
def test_a_config_that_is_cut_short_is_refused(cut: float, folder: Path) -> None:
    path = folder / "config.json"
    path.write_bytes(path.read_bytes()[: int(cut * path.stat().st_size)])
    with pytest.raises(UserError, match=r"config\.json.*is damaged"):
        native.read(folder)


@pytest.mark.parametrize(
    "key", ["name", "drafter", "target", "draft_vocab_size", "decoding", "provenance", "drafter._target_",
            "target.name", "target.fingerprint", "decoding.num_speculative_tokens"],
)  # fmt: skip
@pytest.mark.parametrize("wrong", [None, [1], "drop"])
def test_a_config_without_or_with_a_senseless_value_is_refused(key: str, wrong: Any, folder: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        *above, last = key.split(".")
        for part in above:
            config = config[part]
        if wrong == "drop":
            del config[last]
        else:
            config[last] = wrong

    edited(folder, change)
    with pytest.raises(UserError) as error:
        native.read(folder)
    assert "is damaged" in str(error.value)
    assert key.split(".")[-1] in str(error.value)


def test_another_format_is_refused(folder: Path) -> None:
    edited(folder, lambda config: config.update(format="draftsmith-9"))
    with pytest.raises(UserError, match="'draftsmith-9'; this version reads 'draftsmith-1'"):
        native.read(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, folder: Path, target: Target) -> None:
    (folder / name).unlink()
    with pytest.raises(UserError, match=name):
        native.load(folder, target)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not an export"):
        native.read(tmp_path / "nowhere")


@pytest.mark.parametrize("cut", [0, 4, 100, -1, -1000])
def test_a_truncated_tensor_file_is_refused(cut: int, folder: Path, target: Target) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:cut])
    with pytest.raises(UserError, match=r"model\.safetensors.*damaged or cut short"):
        native.load(folder, target)


def test_a_pickle_under_the_tensor_files_name_is_refused(folder: Path, target: Target) -> None:
    torch.save({"fc.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="damaged"):
        native.load(folder, target)


@pytest.mark.parametrize(
    ("d2t", "said"),
    [
        (None, "d2t is missing, but the drafter proposes 5 tokens only"),
        (torch.tensor([0, 2, 2, 8]), r"not torch.int64 \(5,\)"),
        (torch.tensor([[0, 2, 2, 8, 15]]), r"not torch.int64 \(5,\)"),
        (torch.tensor([0.0, 2, 2, 8, 15]), "d2t is torch.float32"),
        (torch.tensor([0, 2, 2, 8, 16]), "distinct target ids below 20"),  # the last would be token 20
        (torch.tensor([-1, 2, 2, 8, 15]), "distinct target ids below 20"),
        (torch.tensor([0, 2, 1, 8, 15]), "distinct target ids below 20"),  # token 3 twice
        (torch.tensor([0, 3, 4, 11, 19]), "distinct target ids below 20"),  # tokens in place of offsets
    ],
)  # fmt: skip
def test_a_wrong_vocabulary_map_is_refused(d2t: Any, said: str, folder: Path, target: Target) -> None:
    path = folder / "model.safetensors"
    tensors = {k: t for k, t in load_file(path).items() if k != "d2t"}
    save_file(tensors if d2t is None else tensors | {"d2t": d2t}, path)
    with pytest.raises(UserError, match=said) as error:
        native.load(folder, target)
    assert "d2t" in str(error.value)


def test_all_that_is_wrong_with_the_tensors_is_said_at_once(folder: Path, target: Target) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    norm = "stack.layers.1.post_attention_layernorm.weight"
    del tensors[norm]
    tensors["fc.bias"] = torch.zeros(16)
    tensors["fc.weight"] = tensors["fc.weight"].t().contiguous()
    tensors["stack.layers.0.mlp.up_proj.weight"][3, 2] = float("inf")
    tensors["stack.layers.0.mlp.gate_proj.weight"] = torch.zeros(24, 16, dtype=torch.int32)
    save_file(tensors, path)
    with pytest.raises(UserError) as error:
        native.load(folder, target)
    for part in (
        str(folder), f"missing {norm}", "unknown fc.bias", "fc.weight is (32, 16), not (16, 32)",
        "stack.layers.0.mlp.up_proj.weight holds values that are not finite",
        "stack.layers.0.mlp.gate_proj.weight holds torch.int32",
    ):  # fmt: skip
        assert part in str(error.value)


def test_a_target_of_another_width_does_not_fit_even_under_the_same_fingerprint(folder: Path) -> None:
    wide = tiny_target(vocab_size=20, hidden_size=24, intermediate_size=24, num_hidden_layers=2)
    edited(folder, lambda config: config["target"].update(fingerprint=wide.fingerprint))
    with pytest.raises(UserError, match=r"fc.weight is \(16, 32\), not \(24, 48\)"):
        native.load(folder, wide)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("os.system", "is not one of models.drafter"),
        ("models.target.load_target", "is not one of models.drafter"),
        ("models.drafter", "is not one of models.drafter"),
        ("models.drafterly.X", "is not one of models.drafter"),
        ("", "is not one of models.drafter"),
        ("models.drafter.eagle.Nothing", "has no drafter"),
        ("models.drafter.nothing.EagleDrafter", "has no drafter"),
        ("models.drafter.eagle.os.system", "has no drafter"),
        ("models.drafter.eagle.DecoderStack", "is not a drafter"),  # what the module imports
        ("models.drafter.eagle.torch", "is not a drafter"),
        ("models.drafter.eagle.layer_config", "is not a drafter"),
    ],
)
def test_nothing_but_a_drafters_class_is_built(path: str, said: str, folder: Path, target: Target) -> None:
    edited(folder, lambda config: config["drafter"].update(_target_=path))
    with pytest.raises(UserError, match=said):
        native.load(folder, target)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_layer": 2}, "takes no argument 'num_layer'. Did you mean 'num_layers'?"),
        ({"num_key_value_head": 2}, "takes no argument 'num_key_value_head'. Did you mean 'num_key_value_heads'?"),
        (
            {"zzz": 1},
            "takes no argument 'zzz'. It takes: num_layers, feature_window, num_future, fc_bias, ",
        ),
        ({"target": 1}, "takes no argument 'target'"),
        ({"vocab": 1}, "takes no argument 'vocab'"),
    ],
)
def test_an_unknown_argument_is_named(arguments: dict[str, Any], said: str, target: Target) -> None:
    with pytest.raises(UserError) as error:
        native.build({"_target_": MODEL["_target_"]} | arguments, target, DraftVocab(20))
    assert said in str(error.value)


def test_a_missing_argument_is_named(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    class Needy:
        def __init__(self, target: Target, vocab: DraftVocab, *, depth: int, width: int = 3) -> None:
            self.depth = depth

    Needy.__module__ = "models.drafter.eagle"
    monkeypatch.setattr("models.drafter.eagle.Needy", Needy, raising=False)
    path = "models.drafter.eagle.Needy"
    with pytest.raises(UserError, match="needs the argument 'depth'"):
        native.build({"_target_": path}, target, DraftVocab(20))
    assert native.build({"_target_": path, "depth": 5}, target, DraftVocab(20)).depth == 5


def test_a_description_without_a_class_is_refused(target: Target) -> None:
    with pytest.raises(UserError, match="is not one of"):
        native.build({"num_layers": 1}, target, DraftVocab(20))
