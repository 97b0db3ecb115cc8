"""Medusa for vLLM: {"method": "medusa", "model": FOLDER}. The biases count only where medusa_fc_bias says so.

blocks.{i}.layers.{j}.weight (D, D) and .bias (D,), lm_heads.{i}.weight (Vd, D); where the draft vocabulary is reduced,
token_map (Vd,) holds the target's tokens. With original_lm_head all heads share lm_heads.0. vLLM renames every key of
config.json that has "num" and "heads" or "layers" in it: there are no others of that kind.

vLLM 0.32 loads a reduced vocabulary with original_lm_head only: it makes other heads as large as the whole one.

D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from models.checkpoint import layout, native, snippets
from models.checkpoint.layout import Config, Contents, Manifest, Shapes, dtype_keys
from models.drafter.medusa import MedusaDrafter
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab

_NAME = "vllm_medusa"
TAKES = (MedusaDrafter,)
USE = snippets.vllm("medusa")
_KEYS = ("architectures", "model_type", "hidden_size", "vocab_size", "num_heads", "num_hidden_layers",
         "truncated_vocab_size", "medusa_fc_bias", "original_lm_head", "dtype")  # fmt: skip
_MAP, _SHARED = "token_map", "lm_heads.0.weight"
MODEL = f"{MedusaDrafter.__module__}.{MedusaDrafter.__name__}"


def manifest(config: Config, names: set[str]) -> Manifest:
    """What a folder with such a config.json must hold."""
    size, vocab_size, heads = config["hidden_size"], config["vocab_size"], config["num_heads"]
    draft_size = config.get("truncated_vocab_size") or vocab_size
    shared, biased = config.get("original_lm_head", False), config.get("medusa_fc_bias", False)
    shapes: Shapes = {}
    for head in range(heads):
        if head == 0 or not shared:
            shapes[f"lm_heads.{head}.weight"] = (draft_size, size)
        for layer in range(config["num_hidden_layers"]):
            shapes[f"blocks.{head}.layers.{layer}.weight"] = (size, size)
            if biased:
                shapes[f"blocks.{head}.layers.{layer}.bias"] = (size,)
    if draft_size != vocab_size:
        shapes[_MAP] = (draft_size,)
    return Manifest(shapes, _KEYS, {_MAP: torch.int64})


def save(drafter: Any, target: Target, export: native.Export, folder: Path, card: str) -> None:
    """Write the folder. Raises UserError for a drafter that vLLM would compute otherwise."""
    shared = not hasattr(drafter, "lm_heads")
    unloadable = {
        "vLLM loads heads of their own only with the whole vocabulary (use drafter.model.unembedding=shared, or "
        "draft_vocab_size=null)": drafter.vocab.reduced and not shared
    }
    obstacles = {**layout.obstacles_of_target(target, embedding=False), **unloadable}
    layout.require(_NAME, drafter, TAKES, lambda: obstacles)
    tensors = dict(drafter.state_dict())
    dtype = next(iter(tensors.values())).dtype
    if shared:
        tensors[_SHARED] = target.head.rows(drafter.vocab.token_ids).weight.to(dtype)
    if drafter.vocab.reduced:
        tensors[_MAP] = drafter.vocab.token_ids
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_heads": drafter.max_depth,
        "num_hidden_layers": len(drafter.blocks[0].layers),
        "truncated_vocab_size": drafter.vocab.size,
        "medusa_fc_bias": True,
        "original_lm_head": shared,
        **dtype_keys(dtype),
    }
    if target.head.scale != 1:
        config["logit_scale"] = target.head.scale
    layout.write(
        folder,
        _NAME,
        drafter,
        export,
        tensors=tensors,
        config=config,
        foretell=manifest,
        card=card,
    )


def _model_of(config: Config) -> Config:
    return {
        "_target_": MODEL,
        "num_heads": config["num_heads"],
        "num_layers": config["num_hidden_layers"],
        "unembedding": "shared" if config.get("original_lm_head") else "full",
    }


def read(folder: Path) -> native.Export:
    """What the folder says of itself."""
    contents = layout.read(folder, manifest)
    return layout.described(contents, _model_of(contents.config), contents.config["num_heads"])


def load(folder: Path, target: Target) -> Any:
    """The drafter in the folder. Raises UserError that names all that does not fit."""
    contents = layout.read(folder, manifest)
    return build(contents, _model_of(contents.config), target)


def build(contents: Contents, model: Config, target: Target) -> Any:
    """The drafter of what was read under vLLM's names."""
    config, tensors = contents.config, dict(contents.tensors)
    layout.refuse_values(contents, {"logit_scale": target.head.scale})
    layout.refuse_other_sizes(
        contents,
        target,
        hidden_size=(config.get("hidden_size", target.hidden_size), target.hidden_size),
        vocab_size=(config.get("vocab_size", target.vocab_size), target.vocab_size),
    )
    try:
        vocab = DraftVocab(target.vocab_size, tensors.pop(_MAP, None))
    except UserError as error:
        raise UserError(f"{str(contents.folder)!r}: {_MAP} is wrong. {error}") from error
    if model["unembedding"] == "shared":
        rows = target.head.rows(vocab.token_ids).weight
        layout.refuse_own_copy(contents, _SHARED, rows, "head")
        del tensors[_SHARED]
    drafter = native.build(model, target, vocab)
    for name, tensor in drafter.state_dict().items():  # a checkpoint without biases has ones of zeros
        if name.endswith(".bias") and not config.get("medusa_fc_bias", True):
            tensors[name] = torch.zeros_like(tensor)
    return layout.fill(drafter, contents, tensors)


def recognises(config: Config, names: set[str]) -> bool:
    """Medusa heads under vLLM's names."""
    return "blocks.0.layers.0.weight" in names and "lm_heads.0.weight" in names
