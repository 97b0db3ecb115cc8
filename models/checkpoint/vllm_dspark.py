"""DSpark for vLLM: {"method": "dspark", "model": FOLDER}."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.checkpoint import dflash, layout, native
from models.checkpoint.layout import Config, Manifest
from models.target import Target

_NAME = "vllm_dspark"
TAKES = dflash.TAKES
USE = dflash.use("dspark")
ARCHITECTURE = "Qwen3DSparkModel"
_KEYS = (*dflash.KEYS, "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head",
         "confidence_head_with_markov")  # fmt: skip
_ONLY = {"markov_head_type": "vanilla", "confidence_head_with_markov": True, "dspark_bonus_anchor": False}


def manifest(config: Config, names: set[str]) -> Manifest:
    """What a folder with such a config.json must hold."""
    return dflash.manifest(config, _KEYS)


def save(drafter: Any, target: Target, export: native.Export, folder: Path, card: str) -> None:
    """Write the folder. Raises UserError for a drafter that vLLM would compute otherwise."""
    layers, mask = getattr(drafter, "capture_layers", ()), getattr(drafter, "mask_token_id", None)
    more = {
        **_ONLY,
        "mask_token_id": mask,
        "target_layer_ids": [layer - 1 for layer in layers],
        "markov_rank": getattr(drafter, "markov_rank", 0),
        "enable_confidence_head": getattr(drafter, "confidence_head", None) is not None,
        **dflash.temperatures_of(drafter),
    }
    obstacles = {
        "predict_at_anchor is false: that is vllm_dflash's": not getattr(drafter, "predict_at_anchor", False),
        "markov_rank is 0": not getattr(drafter, "markov_rank", 0),
    }
    dflash.save(
        _NAME, drafter, target, export, folder, card,
        architecture=ARCHITECTURE, foretell=manifest, more_config=more, more_obstacles=obstacles,
    )  # fmt: skip


def read(folder: Path) -> native.Export:
    """What the folder says of itself."""
    contents = layout.read(folder, manifest)
    return dflash.described(contents, dflash.model_of(contents.config, predict_at_anchor=True))


def num_tokens(export: native.Export) -> int:
    """How many tokens vLLM is to be asked for: as many as a block has rows."""
    count: int = export.model["block_size"]
    return count


def load(folder: Path, target: Target) -> Any:
    """The drafter in the folder. Raises UserError that names all that does not fit."""
    contents = layout.read(folder, manifest)
    layout.refuse_values(contents, _ONLY)
    return dflash.load(contents, dflash.model_of(contents.config, predict_at_anchor=True), target)


def recognises(config: Config, names: set[str]) -> bool:
    """The architecture of published checkpoints."""
    return ARCHITECTURE in (config.get("architectures") or ())
