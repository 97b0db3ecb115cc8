"""Every format: what is written comes back, and whatever is wrong with a file is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.checkpoint import detect, format_of, layout, native, target_options
from models.checkpoint import formats as all_formats
from models.errors import UserError
from tests.helpers import formats
from tests.helpers.formats import CASES, EAGLE, EAGLE3, MEDUSA, MTP, Case, drafted, edited, edited_config

FIRST = list({case.format: case for case in reversed(CASES)}.values())  # one of each format
# Formats of the same architecture, whose files only their own records tell apart.
ALIKE = {"vllm_eagle3": {"sglang_eagle3", "vllm_eagle3"}, "sglang_eagle3": {"sglang_eagle3", "vllm_eagle3"}}


def loaded(case: Case, folder: Path, name: str | None = None) -> Any:
    return detect(folder, name).load(folder, formats.target_of(case.target))


def unrecorded(folder: Path) -> Path:
    """As a checkpoint that was made elsewhere is."""
    (folder / layout.RECORD).unlink()
    return folder


def same(one: Any, other: Any, case: Case) -> bool:
    """Whether two drafters draft the same by the same logits."""
    target = formats.target_of(case.target)
    (ours, tokens), (theirs, others) = drafted(one, target), drafted(other, target)
    return tokens == others and torch.equal(ours, theirs)


def test_every_format_is_tried() -> None:
    assert {case.format for case in CASES} == set(all_formats())
    assert "layout" not in all_formats() and "native" not in all_formats()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_written_comes_back(case: Case, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    drafter = formats.save(case, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["made"] and (folder / "README.md").read_text() == "# a card\n"
    again = loaded(case, folder)
    wide_product = {"hidden_size", "low_rank"} & case.arguments.keys()  # maps were multiplied out
    assert drafter.capture_layers == again.capture_layers and drafter.vocab.size == again.vocab.size
    if wide_product:
        torch.testing.assert_close(
            drafted(drafter, formats.target_of("four"))[0], drafted(again, formats.target_of("four"))[0]
        )
    else:
        assert same(drafter, again, case)
    if not {"embeddings", "low_rank"} & case.arguments.keys():
        state = again.state_dict()
        assert drafter.state_dict().keys() == state.keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in drafter.state_dict().items())
    found = format_of(case.format).read(folder)
    assert (found.name, found.num_speculative_tokens, found.provenance) == ("mine", 3, {"data": None})
    assert found.target == formats.described(case).target


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_checkpoint_that_was_made_elsewhere_is_read_by_its_config(case: Case, tmp_path: Path) -> None:
    formats.save(case, tmp_path / "made")
    ours = loaded(case, tmp_path / "made")
    folder = unrecorded(tmp_path / "made")
    if case.format in ALIKE:
        with pytest.raises(UserError, match="can be read as sglang_eagle3 or as vllm_eagle3: say which by format=NAME"):
            detect(folder)
    else:
        assert detect(folder) is format_of(case.format)
    assert same(ours, loaded(case, folder, case.format), case)
    found = format_of(case.format).read(folder)
    assert found.name == "made" and found.provenance == {} and found.model["_target_"].startswith("models.drafter.")
    with pytest.raises(UserError, match=r"does not say which target it is for: give target\.source=hf"):
        target_options(found, {"source": None}, folder)
    assert target_options(found, {"source": "tiny", "dtype": None}, folder) == {"source": "tiny"}


def a_matrix(tensors: dict[str, Tensor]) -> str:
    """The name of a matrix whose transpose has another shape."""
    found = (name for name, tensor in tensors.items() if tensor.dim() == 2 and len(set(tensor.shape)) == 2)
    return next(name for name in sorted(found) if ("embed" not in name and "mlp" not in name) or "lm_heads" in name)


def dropped(tensors: dict[str, Tensor], name: str) -> str:
    del tensors[name]
    return f"missing {name}"


def renamed(tensors: dict[str, Tensor], name: str) -> str:
    tensors[f"{name}s"] = tensors.pop(name)
    return f"missing {name}; unread {name}s"


def transposed(tensors: dict[str, Tensor], name: str) -> str:
    shape = tuple(tensors[name].shape)
    tensors[name] = tensors[name].t()
    return f"{name} is {shape[::-1]}, not {shape}"


def whole_numbers(tensors: dict[str, Tensor], name: str) -> str:
    tensors[name] = tensors[name].to(torch.int32)
    return f"{name} holds torch.int32, not torch.float64"


def half(tensors: dict[str, Tensor], name: str) -> str:
    tensors[name] = tensors[name].half()
    return f"{name} holds torch.float16, not torch.float64"


Mutation = Callable[[dict[str, Tensor], str], str]


@pytest.mark.parametrize("mutation", [dropped, renamed, transposed, whole_numbers, half])
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_tensor_that_is_wrong_is_named(case: Case, mutation: Mutation, tmp_path: Path) -> None:
    folder, said = tmp_path / "made", ""
    formats.save(case, folder)

    def change(tensors: dict[str, Tensor]) -> None:
        nonlocal said
        said = mutation(tensors, a_matrix(tensors))

    edited(folder, formats.tensor_file(case), change)
    with pytest.raises(UserError) as error:
        loaded(case, folder)
    assert said in str(error.value)


@pytest.mark.parametrize("mutation", [dropped, renamed, transposed])
@pytest.mark.parametrize("case", [case for case in FIRST if case.format != "hf_causal_lm"], ids=str)
def test_so_it_is_without_a_record(case: Case, mutation: Mutation, tmp_path: Path) -> None:
    formats.save(case, tmp_path / "made")
    folder, said = unrecorded(tmp_path / "made"), ""

    def change(tensors: dict[str, Tensor]) -> None:
        nonlocal said
        said = mutation(tensors, a_matrix(tensors))

    edited(folder, formats.tensor_file(case), change)
    with pytest.raises(UserError) as error:
        loaded(case, folder, case.format)
    assert said in str(error.value)


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_values_that_were_altered_are_noticed(case: Case, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    formats.save(case, folder)
    edited(folder, formats.tensor_file(case), lambda tensors: tensors[a_matrix(tensors)].mul_(2))
    with pytest.raises(UserError, match=rf"{formats.tensor_file(case)}' was altered after the export: .*sha256"):
        loaded(case, folder)


@pytest.mark.parametrize("case", [case for case in FIRST if "medusa" not in case.format], ids=str)
def test_another_rope_is_named(case: Case, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    formats.save(case, folder)

    def change(config: dict[str, Any]) -> None:
        inner = config.get("transformer_layer_config", config)
        inner["rope_theta"] = inner["rope_parameters"]["rope_theta"] = 500.0

    edited_config(folder, change)
    with pytest.raises(UserError, match=r"was altered after the export: .*rope_theta is 500\.0, and was 10000\.0"):
        loaded(case, folder)


EAGLE3_CASES = [case for case in FIRST if case.drafter == EAGLE3 and case.format != "safeailab_eagle3"]


@pytest.mark.parametrize("case", EAGLE3_CASES, ids=str)
def test_other_captured_layers_are_named(case: Case, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    formats.save(case, folder)

    def change(config: dict[str, Any]) -> None:
        config.get("eagle_config", config)["eagle_aux_hidden_state_layer_ids"] = [0, 1, 3]

    edited_config(folder, change)
    with pytest.raises(UserError, match=r"was altered after the export: .*layer_ids is \[0, 1, 3\], and was"):
        loaded(case, folder)


@pytest.mark.parametrize("case", EAGLE3_CASES, ids=str)
def test_what_no_file_alone_reveals_changes_the_drafts(case: Case, tmp_path: Path) -> None:
    """Other captured layers, or another RoPE, in a checkpoint without a record: parity with an engine must tell."""
    drafter = formats.save(case, tmp_path / "made")
    folder = unrecorded(tmp_path / "made")
    before = (folder / "config.json").read_text()

    def layers(config: dict[str, Any]) -> None:
        inner = config.get("eagle_config", config)
        ids = inner["eagle_aux_hidden_state_layer_ids"]
        inner["eagle_aux_hidden_state_layer_ids"] = [
            ids[0] - 1 if case.format != "sglang_eagle3" else ids[0],
            *ids[2:],
            3,
        ]

    def rope(config: dict[str, Any]) -> None:
        inner = config.get("transformer_layer_config", config)
        inner["rope_theta"] = inner["rope_parameters"]["rope_theta"] = 500.0

    for change in (layers, rope):
        (folder / "config.json").write_text(before)
        edited_config(folder, change)
        assert not same(drafter, loaded(case, folder, case.format), case)


@pytest.mark.parametrize("case", [case for case in FIRST if case.drafter == EAGLE3], ids=str)
def test_a_stale_vocabulary_map_is_named(case: Case, tmp_path: Path) -> None:
    formats.save(case, tmp_path / "made")

    def stale(tensors: dict[str, Tensor]) -> None:
        tensors["d2t"][-1] += 1

    edited(tmp_path / "made", "model.safetensors", stale)
    with pytest.raises(UserError, match="was altered after the export"):
        loaded(case, tmp_path / "made")
    with pytest.raises(UserError, match="d2t and t2d name different tokens: one of them is stale"):
        loaded(case, unrecorded(tmp_path / "made"), case.format)


def test_a_dropped_map_is_missed(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.format == "vllm_eagle3" and case.reduced)
    formats.save(case, tmp_path / "made")
    edited(tmp_path / "made", "model.safetensors", lambda tensors: tensors.__delitem__("t2d"))
    with pytest.raises(UserError, match="does not fit its format: missing t2d"):
        loaded(case, tmp_path / "made")
    edited(unrecorded(tmp_path / "made"), "model.safetensors", lambda tensors: tensors.__delitem__("d2t"))
    with pytest.raises(UserError, match="does not fit its format: missing d2t"):
        loaded(case, tmp_path / "made", case.format)


def published(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """FasterDecoding's heads with one block that is used twice, as its own code saves them."""
    case = next(case for case in CASES if case.format == "fasterdecoding_medusa")
    formats.save(case, folder)
    edited_config(unrecorded(folder), lambda config: config.update(medusa_num_layers=2))

    def repeat(tensors: dict[str, Tensor]) -> None:
        for head in range(4):
            tensors[f"{head}.2.weight"] = tensors.pop(f"{head}.1.weight")
            for part in ("weight", "bias"):
                tensors[f"{head}.1.linear.{part}"] = tensors[f"{head}.0.linear.{part}"].clone()
        change(tensors)

    edited(folder, "model.safetensors", repeat)
    return folder


def drop_copies(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if ".1.linear." in name]:
        del tensors[name]


@pytest.mark.parametrize("change", [lambda tensors: None, drop_copies], ids=["with copies", "without"])
def test_a_block_that_fasterdecoding_uses_twice(change: Callable[[dict[str, Tensor]], None], tmp_path: Path) -> None:
    """Their code (medusa_model.py) puts one block `medusa_num_layers` times into a head."""
    folder, target = published(tmp_path / "made", change), formats.target_of("four")
    loaded = detect(folder).load(folder, target)
    law, _ = drafted(loaded, target)
    tensors = load_file(folder / "model.safetensors")
    with torch.no_grad():
        state = target(torch.tensor([formats.IDS[:-1]])).last[0, -1]
    for head in range(4):
        x = state
        for _ in range(2):
            x = x + torch.nn.functional.silu(tensors[f"{head}.0.linear.weight"] @ x + tensors[f"{head}.0.linear.bias"])
        torch.testing.assert_close(law[head], tensors[f"{head}.2.weight"] @ x)


def test_blocks_that_fasterdecoding_does_not_tell_apart_are_refused(tmp_path: Path) -> None:
    folder = published(tmp_path / "made", lambda tensors: tensors["2.1.linear.weight"].add_(0.01))
    with pytest.raises(UserError, match=r"2\.1\.linear\.weight is not 2\.0\.linear\.weight, .*repeats one block"):
        detect(folder).load(folder, formats.target_of("four"))


REFUSED = [
    ("vllm_eagle", Case("", MEDUSA), "takes EagleDrafter, not MedusaDrafter"),
    ("vllm_eagle", Case("", EAGLE, {"feature_window": 3}), "feature_window is 3, not 1"),
    ("vllm_eagle", Case("", EAGLE, {"num_future": 2}), "num_future is 2, not 1"),
    ("vllm_eagle", Case("", EAGLE, {"fc_bias": True}), "fc has a bias"),
    ("safeailab_eagle", Case("", EAGLE, {"head_dim": 32}), "head_dim is 32"),
    ("vllm_eagle3", Case("", EAGLE), "takes Eagle3Drafter, not EagleDrafter"),
    ("vllm_eagle3", Case("", EAGLE3, {"num_layers": 2}), "num_layers is 2, not 1"),
    ("vllm_eagle3", Case("", EAGLE3, {"capture_layers": [1, 2, 4]}), "has 4, the state behind the target's final norm"),
    ("vllm_eagle3", Case("", EAGLE3, {"capture_layers": [2, 1, 3]}), r"\[2, 1, 3\] are not ascending"),
    ("sglang_eagle3", Case("", EAGLE3, {"capture_layers": [0, 1, 2]}), "has 0, the embedding"),
    ("sglang_eagle3", Case("", EAGLE3, {"norm_before_residual": True}), "norm_before_residual is true"),
    ("sglang_eagle3", Case("", EAGLE3, {"fc_norm": True}), "fc_norm is true"),
    ("speculators_eagle3", Case("", EAGLE3, {"capture_layers": [1, 2]}), "reads 2 of the target's states, not 3"),
    ("safeailab_eagle3", Case("", EAGLE3), r"reads the states \[1, 2, 3\], and that code \[2, 2, 1\]"),
    ("vllm_medusa", Case("", MEDUSA, reduced=True), "drafter.model.unembedding=shared"),
    ("fasterdecoding_medusa", Case("", MEDUSA, {"num_layers": 2}), "num_layers is 2, not 1"),
    ("fasterdecoding_medusa", Case("", MEDUSA, {"unembedding": "shared"}), "unembedding is shared"),
    ("hf_causal_lm", Case("", EAGLE), "takes DraftLM or DistilledLM, not EagleDrafter"),
    ("hf_causal_lm", Case("", formats.DRAFT_LM, reduced=True), "draft vocabulary is reduced"),
    ("deepseek_mtp", Case("", MTP), "hide_first is False, and engines do hide"),
    ("qwen3_next_mtp", Case("", MTP, {"hide_first": True}), "hide_first is True, and engines do not hide"),
    ("deepseek_mtp", Case("", MTP, {"hide_first": True, "num_blocks": 2}), "num_blocks is 2, not 1"),
    ("deepseek_mtp", Case("", MTP, {"hide_first": True, "intermediate_size": 32}), "its intermediate_size are not"),
    ("mimo_mtp", Case("", MTP, {"hide_first": True}), "before_norm is False, and engines read the state as it enters"),
    (
        "mimo_mtp",
        Case("", MTP, {"hide_first": True, "before_norm": True}),
        "the target is a llama, and this is a part of qwen2",
    ),
]


@pytest.mark.parametrize(("name", "case", "said"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_a_format_cannot_hold_is_refused(name: str, case: Case, said: str, tmp_path: Path) -> None:
    drafter, export = formats.drafter_of(case), formats.described(case)
    with pytest.raises(UserError, match=rf"Format {name} .*{said}"):
        format_of(name).save(drafter, formats.target_of("four"), export, tmp_path / "made", "")
    assert list(tmp_path.iterdir()) == []


def test_a_slip_in_a_writer_is_caught_on_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is no copy of the writer: what the writer leaves out, adds or turns round is named."""
    case = CASES[0]
    write = layout.write

    def slipping(*what: Any, **options: Any) -> None:
        tensors = dict(options.pop("tensors"))
        tensors["fc.bias"] = tensors["fc.weight"][:, 0].clone()
        tensors["layers.0.mlp.up_proj.weight"] = tensors["layers.0.mlp.up_proj.weight"].t()
        del tensors["layers.0.post_attention_layernorm.weight"], options["config"]["rope_theta"]
        write(*what, tensors=tensors, **options)

    monkeypatch.setattr(layout, "write", slipping)
    with pytest.raises(UserError) as error:
        formats.save(case, tmp_path / "made")
    for said in ("missing layers.0.post_attention_layernorm.weight", "unread fc.bias", "config.json lacks rope_theta",
                 "layers.0.mlp.up_proj.weight is (64, 128), not (128, 64)"):  # fmt: skip
        assert said in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_another_target_is_refused(tmp_path: Path) -> None:
    formats.save(CASES[0], tmp_path / "made")
    with pytest.raises(UserError, match=r"was trained for 'tiny-random'.*not for"):
        detect(tmp_path / "made").load(tmp_path / "made", formats.target_of("eight"))
    with pytest.raises(UserError, match=r"is not for 'other': vocab_size is 56, and the target's is 40"):
        other = formats.tiny_target(torch.float64, vocab_size=40)
        other.name = "other"
        detect(unrecorded(tmp_path / "made")).load(tmp_path / "made", other)


def test_an_embedding_that_is_not_the_targets_is_refused(tmp_path: Path) -> None:
    formats.save(CASES[0], tmp_path / "made")
    folder = unrecorded(tmp_path / "made")
    edited(folder, "model.safetensors", lambda tensors: tensors["embed_tokens.weight"][5].mul_(1.5))
    with pytest.raises(UserError, match=r"brings embed_tokens\.weight, which is not the target's embedding"):
        loaded(CASES[0], folder)


def test_a_published_half_precision_copy_of_the_embedding_is_the_targets(tmp_path: Path) -> None:
    drafter = formats.save(CASES[0], tmp_path / "made")

    def halve(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].half()

    edited(unrecorded(tmp_path / "made"), "model.safetensors", halve)
    ours, _ = drafted(drafter, formats.target_of("four"))
    theirs, _ = drafted(loaded(CASES[0], tmp_path / "made"), formats.target_of("four"))
    torch.testing.assert_close(theirs, ours, atol=0.2, rtol=0.02)
    assert not torch.equal(theirs, ours)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    formats.save(CASES[0], tmp_path / "made")
    folder = unrecorded(tmp_path / "made")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"weights in pytorch_model\.bin, which is pickled and so never read here"):
        detect(folder)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("attention_bias", True, "attention_bias is True, and only False is supported"),
        ("hidden_act", "gelu", "hidden_act is 'gelu', and only 'silu' is supported"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor is 0.5, but our layers turn whole heads"),
        ("num_hidden_layers", "one", "is senseless"),
    ],
)
def test_a_model_that_ours_is_not_is_refused(key: str, value: Any, said: str, tmp_path: Path) -> None:
    formats.save(CASES[0], tmp_path / "made")
    edited_config(unrecorded(tmp_path / "made"), lambda config: config.update({key: value}))
    with pytest.raises(UserError, match=said):
        loaded(CASES[0], tmp_path / "made", "vllm_eagle")


def test_a_config_that_lacks_a_size_is_refused(tmp_path: Path) -> None:
    formats.save(CASES[0], tmp_path / "made")
    edited_config(unrecorded(tmp_path / "made"), lambda config: config.pop("intermediate_size"))
    with pytest.raises(UserError, match=r"config\.json' lacks intermediate_size"):
        loaded(CASES[0], tmp_path / "made", "vllm_eagle")


def test_older_configs_say_rope_otherwise(tmp_path: Path) -> None:
    case = Case("vllm_eagle", EAGLE, {"rope_parameters": {"rope_type": "linear", "rope_theta": 77.0, "factor": 2.0}})
    drafter = formats.save(case, tmp_path / "made")
    scaling = json.loads((tmp_path / "made" / "config.json").read_text())["rope_scaling"]
    assert scaling == {"rope_type": "linear", "type": "linear", "factor": 2.0}

    def old(config: dict[str, Any]) -> None:
        del config["rope_parameters"], config["rope_scaling"]["rope_type"], config["head_dim"]

    edited_config(unrecorded(tmp_path / "made"), old)
    assert same(drafter, loaded(case, tmp_path / "made"), case)


def test_published_layers_of_a_small_target_are_not_guessed(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.format == "vllm_eagle3" and case.reduced)
    formats.save(case, tmp_path / "made")
    edited_config(unrecorded(tmp_path / "made"), lambda config: config.pop("eagle_config"))
    with pytest.raises(UserError, match="does not say which of the target's states it reads"):
        loaded(case, tmp_path / "made")


@pytest.mark.parametrize(("name", "meant"), [("vllm_eagle3", False), ("speculators_eagle3", True)])
def test_what_a_file_means_that_is_silent_on_norm_before_residual(name: str, meant: bool, tmp_path: Path) -> None:
    for stated in (False, True):
        case = Case(name, EAGLE3, {"norm_before_residual": stated})
        folder = tmp_path / f"made-{stated}"
        drafter = formats.save(case, folder)
        edited_config(unrecorded(folder), lambda config: config.pop("norm_before_residual"))
        assert same(drafter, loaded(case, folder, name), case) == (stated == meant)


def test_a_stitched_target_is_whole(tmp_path: Path) -> None:
    """transformers reads the target from the folder as if nothing were there beside it."""
    from transformers import AutoModelForCausalLM

    case = next(case for case in CASES if case.save and case.format == "deepseek_mtp")
    formats.save(case, tmp_path / "made")
    target = formats.target_of("four")
    text = torch.tensor([[3, 5, 7, 9]])
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float64)
    assert torch.equal(read(text).logits, target.model(text).logits)
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(load_file(tmp_path / "made" / "model.safetensors")) | set(
        load_file(tmp_path / "made" / "model-mtp.safetensors")
    )
    assert index["model.layers.4.eh_proj.weight"] == "model-mtp.safetensors"
    assert index["model.layers.3.input_layernorm.weight"] == "model.safetensors"


def test_an_unknown_format_is_named_with_its_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no format 'vllm_eagel'\. Did you mean 'vllm_eagle'\?"):
        format_of("vllm_eagel")
    with pytest.raises(UserError, match="is not an export"):
        detect(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"model\.safetensors' is missing"):
        detect(tmp_path)


def test_our_own_format_is_found(tmp_path: Path) -> None:
    case = CASES[0]
    drafter = formats.drafter_of(case)
    native.save(drafter, formats.described(case), drafter.vocab, tmp_path / "made", "")
    assert detect(tmp_path / "made") is native
