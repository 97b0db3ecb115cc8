"""Multi-token prediction under DeepSeek's names, as layer L = num_hidden_layers of the target (2412.19437).

model.layers.{L}.{enorm,hnorm,eh_proj,shared_head.norm,shared_head.head} and the layer's own. Ours is of Llama's shape,
so that DeepSeek's own loaders, which make latent attention and experts of it, do not take it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.checkpoint import mtp, native, snippets
from models.checkpoint.layout import Config
from models.checkpoint.mtp import Spelling
from models.target import Target

_SPELLING = Spelling(
    name="deepseek_mtp",
    prefix=lambda config: f"model.layers.{config['num_hidden_layers']}.",
    parts={
        "enorm.weight": "enorm.weight",
        "hnorm.weight": "hnorm.weight",
        "eh_proj.weight": "eh_proj.weight",
        "norm.weight": "shared_head.norm.weight",
    },
    layer="",
    hides_first=True,
    with_head="shared_head.head.weight",
)
USE = snippets.inside_the_target("No engine that we know runs a layer of Llama's shape under these names.")


def save(drafter: Any, target: Target, export: native.Export, folder: Path, card: str, *, stitch: bool = False) -> None:
    """Write the tensors, with `stitch` beside the target's own. Raises UserError for a drafter that differs."""
    mtp.save(_SPELLING, drafter, target, export, folder, card, stitch)


def read(folder: Path) -> native.Export:
    """What the folder says of itself."""
    return mtp.read(_SPELLING, folder)


def load(folder: Path, target: Target) -> Any:
    """The drafter in the folder, stitched or not. Raises UserError that names all that does not fit."""
    return mtp.load(_SPELLING, folder, target)


def recognises(config: Config, names: set[str]) -> bool:
    """The module's projection under DeepSeek's name."""
    return mtp.recognised(_SPELLING, config, names)
