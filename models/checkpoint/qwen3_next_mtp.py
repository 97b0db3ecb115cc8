"""Multi-token prediction under Qwen3-Next's names, whose norms multiply by 1 + weight.

mtp.{fc,norm,pre_fc_norm_hidden,pre_fc_norm_embedding} and mtp.layers.0. Ours is of Llama's shape, so that Qwen3-Next's
own loaders, which gate the attention and make experts, do not take it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.checkpoint import mtp, native, snippets
from models.checkpoint.layout import Config
from models.checkpoint.mtp import Spelling
from models.target import Target

_SPELLING = Spelling(
    name="qwen3_next_mtp",
    prefix=lambda config: "mtp.",
    parts={
        "enorm.weight": "pre_fc_norm_embedding.weight",
        "hnorm.weight": "pre_fc_norm_hidden.weight",
        "eh_proj.weight": "fc.weight",
        "norm.weight": "norm.weight",
    },
    layer="layers.0.",
    hides_first=False,
    centred_norms=True,
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
    """The module's projection under Qwen3-Next's name."""
    return mtp.recognised(_SPELLING, config, names)
