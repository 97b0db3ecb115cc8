"""Medusa under FasterDecoding's names, which vLLM reads as well: one file serves both.

{i}.{j}.linear.weight (D, D) and .bias (D,), {i}.{layers}.weight (V, D). Their code repeats one block `num_layers`
times, with one set of weights, so that only heads of one block mean the same in both: others we read where the blocks
are the same ones, or a file has the first alone (safetensors may leave such copies out), and never write. It unpickles
medusa_lm_head.pt: we write the same tensors as safetensors, and the card says how to convert them.

D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint import layout, native, snippets, vllm_medusa
from models.checkpoint.layout import Config, Contents, Manifest, Shapes, dtype_keys
from models.drafter.medusa import MedusaDrafter
from models.errors import UserError
from models.target import Target

_NAME = "fasterdecoding_medusa"
_PARTS = ("weight", "bias")
TAKES = (MedusaDrafter,)
USE = f"{snippets.vllm('medusa')}\n{snippets.FASTERDECODING}"
_KEYS = ("model_type", "architectures", "medusa_num_heads", "medusa_num_layers", "medusa_fc_bias",
         "base_model_name_or_path", "hidden_size", "vocab_size", "dtype")  # fmt: skip


def manifest(config: Config, names: set[str]) -> Manifest:
    """What a folder with such a config.json must hold; older ones tell sizes by their tensors alone."""
    layers, shapes, repeated = config.get("medusa_num_layers", 1), Shapes(), set()
    size, vocab_size = config["hidden_size"], config["vocab_size"]
    for head in range(config["medusa_num_heads"]):
        for layer in range(layers):
            shapes[f"{head}.{layer}.linear.weight"] = (size, size)
            shapes[f"{head}.{layer}.linear.bias"] = (size,)
            if layer > 0:
                repeated |= {f"{head}.{layer}.linear.{part}" for part in _PARTS}
        shapes[f"{head}.{layers}.weight"] = (vocab_size, size)
    return Manifest(shapes, _KEYS, optional=frozenset(repeated))


def save(drafter: Any, target: Target, export: native.Export, folder: Path, card: str) -> None:
    """Write the folder. Raises UserError for a drafter that FasterDecoding's code would compute otherwise."""
    layout.require(_NAME, drafter, TAKES, lambda: _obstacles(drafter, target))
    layers = len(drafter.blocks[0].layers)
    tensors = {_name_of(name, layers): tensor for name, tensor in drafter.state_dict().items()}
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "medusa_num_heads": drafter.max_depth,
        "medusa_num_layers": layers,
        "medusa_fc_bias": True,
        "base_model_name_or_path": target.name,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        **dtype_keys(next(iter(tensors.values())).dtype),
    }
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


def _obstacles(drafter: Any, target: Target) -> dict[str, bool]:
    layers = len(drafter.blocks[0].layers)
    return {
        "unembedding is shared": not hasattr(drafter, "lm_heads"),
        "its draft vocabulary is reduced (train with draft_vocab_size=null)": drafter.vocab.reduced,
        f"num_layers is {layers}, not 1": layers != 1,
        "the target's logits are scaled": target.head.scale != 1,
        **layout.obstacles_of_target(target, embedding=False),
    }


def _name_of(name: str, layers: int) -> str:
    """blocks.{i}.layers.{j}.weight and lm_heads.{i}.weight under FasterDecoding's names."""
    kind, head, *rest = name.split(".")
    return f"{head}.{rest[1]}.linear.{rest[2]}" if kind == "blocks" else f"{head}.{layers}.{rest[0]}"


def _own_name(name: str) -> str:
    head, layer, *rest = name.split(".")
    return f"blocks.{head}.layers.{layer}.{rest[1]}" if rest[0] == "linear" else f"lm_heads.{head}.{rest[0]}"


def _model_of(config: Config) -> Config:
    return {
        "_target_": vllm_medusa.MODEL,
        "num_heads": config["medusa_num_heads"],
        "num_layers": config.get("medusa_num_layers", 1),
        "unembedding": "full",
    }


def read(folder: Path) -> native.Export:
    """What the folder says of itself."""
    contents = _contents(folder)
    return layout.described(contents, _model_of(contents.config), contents.config["medusa_num_heads"])


def load(folder: Path, target: Target) -> Any:
    """The drafter in the folder. Raises UserError that names all that does not fit."""
    contents = _contents(folder)
    renamed = {_own_name(name): tensor for name, tensor in _repeated(contents).items()}
    return vllm_medusa.build(replace(contents, tensors=renamed), _model_of(contents.config), target)


def _repeated(contents: Contents) -> dict[str, Tensor]:
    """All blocks of all heads, copies of the first included. Raises UserError that names a block that is another."""
    config, found = contents.config, dict(contents.tensors)
    for head in range(config["medusa_num_heads"]):
        for layer in range(1, config.get("medusa_num_layers", 1)):
            for part in _PARTS:
                first, name = found[f"{head}.0.linear.{part}"], f"{head}.{layer}.linear.{part}"
                if not torch.equal(found.setdefault(name, first), first):
                    raise UserError(
                        f"{str(contents.folder)!r}: {name} is not {head}.0.linear.{part}, but FasterDecoding's code "
                        "repeats one block: engines compute different things of this file."
                    )
    return found


def _contents(folder: Path) -> Contents:
    """What is in the folder. FasterDecoding's own config.json does not tell sizes: the head's rows do."""

    def foretell(config: Config, names: set[str]) -> Manifest:
        if "hidden_size" in config or not names:
            return manifest(config, names)
        head = layout.read_tensors(folder).get(f"0.{config.get('medusa_num_layers', 1)}.weight")
        if head is None:
            raise KeyError("hidden_size")
        return manifest({**config, "vocab_size": head.shape[0], "hidden_size": head.shape[1]}, names)

    return layout.read(folder, foretell)


def recognises(config: Config, names: set[str]) -> bool:
    """Medusa heads under FasterDecoding's names."""
    return "0.0.linear.weight" in names and "medusa_num_heads" in config
