"""Every format's files, read by the plain re-implementation, draft what our engine drafts; altered ones do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.settings import DecodeSettings
from eval import reference
from eval.rounds import Round, trace
from models.checkpoint import format_of, formats, native, widened
from models.drafter.prompt_lookup import PromptLookupDrafter
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.characters import with_characters
from tests.helpers.drafters import build_shaken, prompts, tiny_target

EAGLE = {"_target_": "models.drafter.eagle.EagleDrafter", "num_layers": 2, "num_key_value_heads": 4}
EAGLE3 = {"_target_": "models.drafter.eagle3.Eagle3Drafter"}
MEDUSA = {"_target_": "models.drafter.medusa.MedusaDrafter", "num_heads": 3, "num_layers": 2}
MTP = {"_target_": "models.drafter.mtp.SequentialMTP"}
DFLASH = {"_target_": "models.drafter.dflash.DFlashDrafter", "block_size": 4, "num_layers": 2}
DSPARK = DFLASH | {"predict_at_anchor": True, "markov_rank": 6, "confidence": True}
DRAFT_LM = {"_target_": "models.drafter.draft_lm.DraftLM", "num_layers": 1}
SOME = torch.arange(1, 64, 2)
KINDS: dict[str, tuple[str, dict[str, Any], torch.Tensor | None]] = {
    "vllm_eagle": ("vllm_eagle", EAGLE, None),
    "vllm_eagle_reduced": ("vllm_eagle", EAGLE, SOME),
    "safeailab_eagle": ("safeailab_eagle", EAGLE, None),
    "safeailab_eagle_bias": ("safeailab_eagle", EAGLE | {"fc_bias": True}, None),
    "sglang_eagle": ("sglang_eagle", EAGLE, None),
    "vllm_eagle3": ("vllm_eagle3", EAGLE3, None),
    "vllm_eagle3_reduced": ("vllm_eagle3", EAGLE3, SOME),
    "vllm_eagle3_options": (
        "vllm_eagle3",
        EAGLE3 | {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "capture_layers": [0, 3, 7]},
        SOME,
    ),
    "speculators_eagle3": ("speculators_eagle3", EAGLE3, None),
    "speculators_eagle3_reduced": ("speculators_eagle3", EAGLE3 | {"norm_before_residual": True}, SOME),
    "sglang_eagle3": ("sglang_eagle3", EAGLE3, SOME),
    "safeailab_eagle3": ("safeailab_eagle3", EAGLE3, SOME),
    "vllm_dflash": ("vllm_dflash", DFLASH, None),
    "vllm_dflash_reduced": ("vllm_dflash", DFLASH | {"num_key_value_heads": 4, "mask_token_id": 5}, SOME),
    "vllm_dspark": ("vllm_dspark", DSPARK, None),
    "vllm_dspark_reduced": ("vllm_dspark", DSPARK | {"block_size": 3, "confidence": False}, SOME),
    "vllm_medusa": ("vllm_medusa", MEDUSA, None),
    "vllm_medusa_shared": ("vllm_medusa", MEDUSA | {"unembedding": "shared"}, SOME),
    "fasterdecoding_medusa": ("fasterdecoding_medusa", MEDUSA | {"num_layers": 1}, None),
    "hf_causal_lm": ("hf_causal_lm", DRAFT_LM, None),
    "deepseek_mtp": ("deepseek_mtp", MTP | {"hide_first": True}, None),
    "deepseek_mtp_reduced": ("deepseek_mtp", MTP | {"hide_first": True}, SOME),
    "qwen3_next_mtp": ("qwen3_next_mtp", MTP, None),
}
SIZE, LENGTH = 3, 12
NONE = reference.States([], torch.empty(0))  # look-up reads none


@dataclass
class Written:
    """A drafter, and the folder that it was written to."""

    target: Target
    drafter: Any
    folder: Path
    format: str
    model: dict[str, Any]

    @property
    def wide(self) -> Any:
        return widened(self.format, self.drafter, self.model, self.target)

    def check_drafts(self, same: bool) -> None:
        propose = reference.proposer(self.folder, self.format, self.target, SIZE)
        equal = []
        for context in prompts([9, 4], 64):
            ours, plain = rounds(self.target, self.wide, propose, context)
            equal.append(ours[: len(plain)] == plain)
        assert all(equal) is same, equal


def rounds(
    target: Target, drafter: Any, propose: reference.Propose, context: list[int]
) -> tuple[list[Round], list[Round]]:
    ours = trace(target, drafter, context, DecodeSettings(LENGTH, SIZE))
    with torch.inference_mode():
        plain = reference.decode(target, propose, context, LENGTH)
    assert ours.token_ids[:LENGTH] == plain.token_ids[:LENGTH]
    return ours.rounds, plain.rounds


@pytest.fixture(scope="module")
def target() -> Target:
    return with_characters(tiny_target(torch.float64, num_hidden_layers=8, max_position_embeddings=64))


@pytest.fixture
def written(target: Target, tmp_path: Path) -> Callable[[str], Written]:
    def write(kind: str) -> Written:
        name, model, kept = KINDS[kind]
        drafter = build_shaken(model, target, DraftVocab(64, kept))
        place = {"name": target.name, "fingerprint": target.fingerprint, "load": {}}
        export = native.Export("mine", model, place, SIZE, {})
        format_of(name).save(drafter, target, export, tmp_path / kind, "")
        return Written(target, drafter, tmp_path / kind, name, model)

    return write


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_draft_what_we_draft(kind: str, written: Callable[[str], Written]) -> None:
    written(kind).check_drafts(same=True)


def config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    found = load_file(path)
    found[name] = change(found[name]).contiguous()
    save_file(found, path)


def test_every_format_is_re_implemented() -> None:
    """MiMo's, which needs another target, is among tests/models/checkpoint/test_forwards.py's."""
    assert set(reference.FORMATS) == {name for name, _, _ in KINDS.values()} | {"mimo_mtp"} == set(formats())


MUTATIONS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "another RoPE base": (
        "vllm_eagle",
        lambda f: config(f, lambda c: c["rope_parameters"].update(rope_theta=11.0)),
    ),
    "state before embedding": ("vllm_eagle", lambda f: tensor(f, "fc.weight", lambda t: t.roll(64, 1))),
    "transposed output": ("vllm_eagle", lambda f: tensor(f, "layers.0.self_attn.o_proj.weight", lambda t: t.t())),
    "captured layers of another convention": (
        "vllm_eagle3",
        lambda f: config(f, lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 3, 4])),
    ),
    "a stale vocabulary map": ("vllm_eagle3_reduced", lambda f: tensor(f, "d2t", lambda t: t - 1)),
    "the other residual": (
        "speculators_eagle3",
        lambda f: config(f, lambda c: c.update(norm_before_residual=True)),
    ),
    "captured layers of a block one further": (
        "vllm_dflash",
        lambda f: config(f, lambda c: c["dflash_config"].update(target_layer_ids=[2, 3, 4, 5, 6])),
    ),
    "another mask": ("vllm_dflash", lambda f: config(f, lambda c: c["dflash_config"].update(mask_token_id=9))),
    "a correction by other tokens": (
        "vllm_dspark",
        lambda f: tensor(f, "markov_head.markov_w1.weight", lambda t: t.roll(1, 0)),
    ),
    "no biases": ("vllm_medusa", lambda f: config(f, lambda c: c.update(medusa_fc_bias=False))),
    "another norm": ("hf_causal_lm", lambda f: tensor(f, "model.norm.weight", lambda t: t.flip(0))),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_an_altered_file_drafts_something_else(what: str, written: Callable[[str], Written]) -> None:
    kind, change = MUTATIONS[what]
    found = written(kind)
    change(found.folder)
    found.check_drafts(same=False)


def test_look_up_copies_from_the_earliest_place_of_the_longest_match(target: Target) -> None:
    drafter = PromptLookupDrafter(target, DraftVocab(64), max_ngram=3, min_ngram=2, prefer="earliest")
    options = drafter.vllm_options(SIZE)
    assert (options["prompt_lookup_max"], options["prompt_lookup_min"]) == (3, 2)
    propose = reference.look_up(3, 2, SIZE)
    assert propose([1, 2, 3, 4, 2, 3, 5, 6, 7, 1, 2, 3], NONE) == [4, 2, 3]
    assert propose([9, 2, 3, 4, 2, 3, 5, 2, 3], NONE) == [4, 2, 3]
    assert propose([1, 2, 3, 4], NONE) == [] == propose([4, 1, 4], NONE)
    drafted = 0
    for context in ([5, 6, 7, 8, 5, 6, 7, 9, 5, 6], [3, 3, 3, 3]):
        ours, plain = rounds(target, drafter, propose, context)
        assert ours[: len(plain)] == plain
        drafted += sum(len(r.draft) for r in plain)
    assert drafted > 0


@pytest.mark.parametrize(
    "kind", ["vllm_eagle", "vllm_eagle3_reduced", "vllm_medusa_shared", "hf_causal_lm", "qwen3_next_mtp"]
)
def test_what_it_makes_lies_where_the_target_does(kind: str, written: Callable[[str], Written]) -> None:
    """On this machine that is not where tensors are made without a word, as with a target on a GPU."""
    found = written(kind)
    propose = reference.proposer(found.folder, found.format, found.target, SIZE)
    (context,) = prompts([9], 64)
    with torch.inference_mode():
        here = reference.decode(found.target, propose, context, LENGTH)
        with torch.device("meta"):
            there = reference.decode(found.target, propose, context, LENGTH)
    assert here == there
