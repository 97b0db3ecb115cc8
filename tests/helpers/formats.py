"""Drafters in every format that they go into, as files in a folder.

V target vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint import format_of, native
from models.sampling import SamplingParams
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.characters import with_characters
from tests.helpers.drafters import ReplayedRandom, build_shaken, prompts, recorded_logits, stacked, tiny_target
from tests.helpers.models import random_model

VOCAB_SIZE = 56
TOKENS = 4
IDS = prompts([13], VOCAB_SIZE, seed=3)[0]
EAGLE, EAGLE3 = "models.drafter.eagle.EagleDrafter", "models.drafter.eagle3.Eagle3Drafter"
MEDUSA, MTP = "models.drafter.medusa.MedusaDrafter", "models.drafter.mtp.SequentialMTP"
DRAFT_LM, DISTILLED = "models.drafter.draft_lm.DraftLM", "models.drafter.distilled_lm.DistilledLM"
DFLASH = "models.drafter.dflash.DFlashDrafter"
DSPARK = {"block_size": 5, "num_layers": 2, "predict_at_anchor": True, "markov_rank": 6, "confidence": True}
LOW_RANK = {"rank": 8, "share": "layers", "train_shared": True}
ALL_OF_EAGLE31 = {"fc_norm": True, "norm_output": True, "norm_before_residual": True}


@dataclass(frozen=True)
class Case:
    """A drafter that goes into a format, by its class and arguments; `reduced`: half of the vocabulary."""

    format: str
    drafter: str
    arguments: dict[str, Any] = field(default_factory=dict)
    reduced: bool = False
    target: str = "four"
    save: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> dict[str, Any]:
        return {"_target_": self.drafter, **self.arguments}

    def __str__(self) -> str:
        about = "-".join([self.drafter.rpartition(".")[2], *map(str, self.arguments), *self.save])
        return f"{self.format}-{about}{'-reduced' if self.reduced else ''}"


CASES = [
    Case("vllm_eagle", EAGLE),
    Case("vllm_eagle", EAGLE, {"num_layers": 2, "num_key_value_heads": 4, "intermediate_size": 40}),
    Case("safeailab_eagle", EAGLE),
    Case("safeailab_eagle", EAGLE, {"fc_bias": True}),
    Case("sglang_eagle", EAGLE),
    Case("sglang_eagle", EAGLE, {"fc_bias": True}),
    Case("vllm_eagle3", EAGLE3, reduced=True),
    Case("vllm_eagle3", EAGLE3, {**ALL_OF_EAGLE31, "capture_layers": [0, 1, 2, 3]}),
    Case("sglang_eagle3", EAGLE3, {"head_dim": 32}, reduced=True),
    Case("safeailab_eagle3", EAGLE3, reduced=True, target="eight"),
    Case("speculators_eagle3", EAGLE3, reduced=True),
    Case("speculators_eagle3", EAGLE3, ALL_OF_EAGLE31),
    Case("vllm_dflash", DFLASH, {"block_size": 5, "num_layers": 2}),
    Case("vllm_dflash", DFLASH, {"block_size": 6, "capture_layers": [2, 3], "num_key_value_heads": 4}, reduced=True),
    Case("vllm_dspark", DFLASH, DSPARK),
    Case("vllm_dspark", DFLASH, {**DSPARK, "confidence": False, "mask_token_id": 3}, reduced=True),
    Case("vllm_medusa", MEDUSA, {"num_heads": 4, "num_layers": 2}),
    Case("vllm_medusa", MEDUSA, {"num_heads": 4, "unembedding": "shared"}, reduced=True),
    Case("fasterdecoding_medusa", MEDUSA, {"num_heads": 4}),
    Case("hf_causal_lm", DRAFT_LM, {"num_layers": 1}),
    Case("hf_causal_lm", DISTILLED, {"start": "first_layers", "num_layers": 2, "embeddings": "shared"}),
    Case("hf_causal_lm", DISTILLED, {"num_layers": 1, "hidden_size": 32, "head_dim": 16, "embeddings": "shared"}),
    Case("hf_causal_lm", DISTILLED, {"num_layers": 2, "low_rank": LOW_RANK}),
    Case("deepseek_mtp", MTP, {"hide_first": True}),
    Case("deepseek_mtp", MTP, {"hide_first": True}, save={"stitch": True}),
    Case("qwen3_next_mtp", MTP),
    Case("mimo_mtp", MTP, {"hide_first": True, "before_norm": True}, target="qwen2"),
    Case("mimo_mtp", MTP, {"hide_first": True, "before_norm": True}, target="qwen2", save={"stitch": True}),
]


@cache
def target_of(name: str) -> Target:
    """A random target in float64 with a tokenizer: `four` or `eight` layers, or one of Qwen2's shape."""
    if name == "qwen2":
        model = random_model("qwen2", vocab_size=VOCAB_SIZE, num_hidden_layers=2, hidden_size=64)
        return with_characters(Target(model, name="qwen2"))
    layers = {"four": 4, "eight": 8}[name]
    return with_characters(tiny_target(torch.float64, vocab_size=VOCAB_SIZE, num_hidden_layers=layers))


def drafter_of(case: Case) -> Any:
    """The drafter with random weights."""
    ids = torch.arange(0, VOCAB_SIZE, 2) if case.reduced else None
    return build_shaken(case.model, target_of(case.target), DraftVocab(VOCAB_SIZE, ids))


def described(case: Case) -> native.Export:
    """What its export says of itself."""
    target = target_of(case.target)
    place = {"name": target.name, "fingerprint": target.fingerprint, "load": {"source": "tiny"}}
    return native.Export("mine", case.model, place, 3, {"data": None})


def save(case: Case, folder: Path) -> Any:
    """Write the drafter to `folder`; returns it."""
    drafter = drafter_of(case)
    format_of(case.format).save(drafter, target_of(case.target), described(case), folder, "# a card\n", **case.save)
    return drafter


def tensor_file(case: Case) -> str:
    """The file that holds the drafter's tensors."""
    return "model-mtp.safetensors" if case.save else "model.safetensors"


def edited(folder: Path, file: str, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a file in place."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)


def edited_config(folder: Path, change: Callable[[dict[str, Any]], Any], name: str = "config.json") -> None:
    """Change a JSON file in place."""
    config = json.loads((folder / name).read_text())
    change(config)
    (folder / name).write_text(json.dumps(config))


def drafted(drafter: Any, target: Target, ids: list[int] = IDS) -> tuple[Tensor, list[int]]:
    """Greedy draft logits (TOKENS, V), −inf outside the draft vocabulary, and tokens behind `ids`."""
    text = torch.tensor([ids])
    with torch.no_grad(), recorded_logits(drafter) as logits:
        hidden = target(text[:, :-1], capture_layers=drafter.capture_layers).hidden
        features = TargetFeatures(text[:, :-1], text[:, 1:], hidden, torch.tensor([len(ids) - 1]))
        draft = drafter.propose(
            drafter.new_state(1, 32),
            features,
            num_speculative_tokens=TOKENS,
            sampling=SamplingParams(0.0),
            random=ReplayedRandom([]),
        )
    law = torch.full((TOKENS, target.vocab_size), float("-inf"), dtype=target.dtype)
    law[:, drafter.vocab.to_target(torch.arange(drafter.vocab.size))] = stacked(logits, draft)[0]
    return law, draft.token_ids[0].tolist()
