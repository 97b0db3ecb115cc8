"""Files that are wrong in a way that no load can see fail the parity check, which names the position and the cause."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eval.parity import run
from models.checkpoint import format_of, layout, native
from models.errors import UserError
from models.target import Target, load_target
from models.vocab import DraftVocab
from tests.eval.test_parity import options
from tests.helpers.characters import with_characters
from tests.helpers.drafters import build_shaken, tiny_target
from tests.helpers.formats import EAGLE, EAGLE3, MEDUSA, edited, edited_config

VOCAB_SIZE = 12
SOME = torch.tensor([0, 1, 3, 4, 6, 7, 9, 11])
TEXTS = ['{"a:', "a,a:[", ": {]", '"}{}', "[] a"]
LAYER = "layer, norm, RoPE, mask, captured layers or vocabulary map"
UNCERTAIN = ""  # random drafters have too little accepted behind their first token to tell where it parts
FED_BACK = "what is fed back from token to token"


@dataclass(frozen=True)
class Bench:
    """A target of few tokens, of which random drafters hit some, with a prompt for each of `TEXTS`."""

    target: Target
    load: dict[str, Any]
    prompts: Path


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("target")
    made = with_characters(
        tiny_target(vocab_size=VOCAB_SIZE, num_hidden_layers=4, max_position_embeddings=160, sharpness=2.0)
    )
    made.model.save_pretrained(folder / "model")
    assert made.tokenizer is not None
    made.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    made.tokenizer.save_pretrained(folder / "model")
    lines = [json.dumps({"id": str(i), "prompt": text}) for i, text in enumerate(TEXTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    load = {"source": "hf", "name_or_path": str(folder / "model")}
    return Bench(load_target(**load, device="cpu"), load, folder / "prompts.jsonl")


def rope(config: dict[str, Any]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 20.0


def layers(config: dict[str, Any]) -> None:
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 2, 3]


def set_to(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update({key: value})


def halves(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(2, dim=1)[::-1], dim=1)


def transposed(tensors: dict[str, Tensor]) -> None:
    tensors["layers.0.self_attn.o_proj.weight"] = tensors["layers.0.self_attn.o_proj.weight"].t()


def swapped(one: str, other: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return change


def stale_map(tensors: dict[str, Tensor]) -> None:
    """Both maps of another vocabulary of that size."""
    ids = torch.tensor([0, 2, 3, 5, 6, 8, 9, 10])
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, ids, True)


ALTERED: dict[str, tuple[str, str, torch.Tensor | None, Any, Any, str]] = {
    "another RoPE base": ("vllm_eagle", EAGLE, None, rope, None, LAYER),
    "state before embedding": ("vllm_eagle", EAGLE, None, None, halves, LAYER),
    "a transposed square": ("vllm_eagle", EAGLE, None, None, transposed, LAYER),
    "two names exchanged": (
        "vllm_eagle", EAGLE, None, None,
        swapped("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"), LAYER,
    ),
    "other captured layers": ("vllm_eagle3", EAGLE3, None, layers, None, LAYER),
    "a stale vocabulary map": ("vllm_eagle3", EAGLE3, SOME, None, stale_map, LAYER),
    "the other residual": ("vllm_eagle3", EAGLE3, None, set_to("norm_before_residual", True), None, LAYER),
    "another state fed back": ("vllm_eagle3", EAGLE3, None, set_to("norm_output", True), None, UNCERTAIN),
    "two heads exchanged": (
        "vllm_medusa", MEDUSA, None, None, swapped("lm_heads.1.weight", "lm_heads.2.weight"), FED_BACK,
    ),
}  # fmt: skip


def written(bench: Bench, folder: Path, name: str, drafter: str, kept: Tensor | None) -> tuple[Path, Path]:
    """Our export of a random drafter, and the same in format `name`, without our record of it."""
    model = {"_target_": drafter, **({"num_heads": 3} if drafter == MEDUSA else {})}
    made = build_shaken(model, bench.target, DraftVocab(VOCAB_SIZE, kept))
    place = {"name": bench.target.name, "fingerprint": bench.target.fingerprint, "load": bench.load}
    described = native.Export("mine", model, place, 3, {})
    native.save(made, described, made.vocab, folder / "export", "")
    format_of(name).save(made, bench.target, described, folder / "files", "")
    (folder / "files" / layout.RECORD).unlink()
    return folder / "export", folder / "files"


def asked(bench: Bench, export: Path, files: Path, name: str, tokens: int = 32) -> dict[str, Any]:
    return options(
        export=str(export), files=str(files), format=name, engine="reference", prompts=str(bench.prompts),
        num_prompts=len(TEXTS), max_new_tokens=tokens, output=str(files.parent / "out"),
    )  # fmt: skip


@pytest.mark.parametrize("what", ALTERED)
def test_the_check_finds_it_and_names_the_likely_cause(what: str, bench: Bench, tmp_path: Path) -> None:
    name, drafter, kept, config, tensors, cause = ALTERED[what]
    export, files = written(bench, tmp_path, name, drafter, kept)
    if config is not None:
        edited_config(files, config)
    if tensors is not None:
        edited(files, "model.safetensors", tensors)
    format_of(name).load(files, bench.target)  # nothing is to be seen
    assert not run(asked(bench, export, files, name, 96 if cause is UNCERTAIN else 32))
    (case,) = json.loads((tmp_path / "out" / "parity.json").read_text())["cases"]
    assert case["same_answers"] == len(TEXTS) and case["unequal"]
    assert case["cause"] and cause in case["cause"]


def test_what_was_not_altered_passes(bench: Bench, tmp_path: Path) -> None:
    export, files = written(bench, tmp_path, "vllm_eagle3", EAGLE3, SOME)
    assert run(asked(bench, export, files, "vllm_eagle3"))


def test_what_a_load_sees_stops_the_check_with_its_name(bench: Bench, tmp_path: Path) -> None:
    export, files = written(bench, tmp_path, "vllm_eagle", EAGLE, None)
    edited(files, "model.safetensors", lambda tensors: tensors.__delitem__("fc.weight"))
    with pytest.raises(UserError, match=r"missing fc\.weight"):
        run(asked(bench, export, files, "vllm_eagle"))
