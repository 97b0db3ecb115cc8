"""DFlash for vLLM: {"method": "dflash", "model": FOLDER}."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.checkpoint import dflash, layout, native
from models.checkpoint.layout import Config, Manifest
from models.target import Target

_NAME = "vllm_dflash"
TAKES = dflash.TAKES
USE = dflash.use("dflash")
ARCHITECTURE = "DFlashDraftModel"


def manifest(config: Config, names: set[str]) -> Manifest:
    """What a folder with such a config.json must hold."""
    return dflash.manifest(config, dflash.KEYS)


def save(drafter: Any, target: Target, export: native.Export, folder: Path, card: str) -> None:
    """Write the folder. Raises UserError for a drafter that vLLM would compute otherwise."""
    additions = {
        f"{name} is {getattr(drafter, name, None)}: that is vllm_dspark's": bool(getattr(drafter, name, None))
        for name in ("predict_at_anchor", "markov_rank")
    }
    head = {"it has a confidence head: that is vllm_dspark's": getattr(drafter, "confidence_head", None) is not None}
    dflash.save(
        _NAME, drafter, target, export, folder, card,
        architecture=ARCHITECTURE, foretell=manifest, more_config={}, more_obstacles={**additions, **head},
    )  # fmt: skip


def read(folder: Path) -> native.Export:
    """What the folder says of itself."""
    contents = layout.read(folder, manifest)
    return dflash.described(contents, dflash.model_of(contents.config, predict_at_anchor=False))


def num_tokens(export: native.Export) -> int:
    """How many tokens vLLM is to be asked for: as many as a block has masks."""
    count: int = export.model["block_size"] - 1
    return count


def load(folder: Path, target: Target) -> Any:
    """The drafter in the folder. Raises UserError that names all that does not fit."""
    contents = layout.read(folder, manifest)
    inner = contents.config.get("dflash_config") or {}
    layout.refuse_values(contents, {"use_swa": False, "causal": False, "use_aux_hidden_state": True}, inner)
    return dflash.load(contents, dflash.model_of(contents.config, predict_at_anchor=False), target)


def recognises(config: Config, names: set[str]) -> bool:
    """The architecture of published checkpoints."""
    return ARCHITECTURE in (config.get("architectures") or ())
