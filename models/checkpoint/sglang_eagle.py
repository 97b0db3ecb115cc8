"""EAGLE-1 for SGLang: --speculative-algorithm EAGLE. `fc` always has a bias there; ours is zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.checkpoint import eagle1, layout, native, snippets
from models.checkpoint.layout import Config, Manifest
from models.target import Target

_NAME = "sglang_eagle"
TAKES = eagle1.TAKES
USE = snippets.sglang("EAGLE")
WHOLE_VOCABULARY = True
_ARCHITECTURE = "LlamaForCausalLMEagle"


def manifest(config: Config, names: set[str]) -> Manifest:
    """What a folder with such a config.json must hold."""
    return eagle1.manifest(config, bias=True)


def save(drafter: Any, target: Target, export: native.Export, folder: Path, card: str) -> None:
    """Write the folder. Raises UserError for a drafter that SGLang would compute otherwise."""
    eagle1.save(
        _NAME, drafter, target, export, folder, card,
        foretell=manifest, architecture=_ARCHITECTURE, more={}, zero_bias=True,
        obstacles={"the target's logits are scaled": target.head.scale != 1},
    )  # fmt: skip


def read(folder: Path) -> native.Export:
    """What the folder says of itself."""
    return eagle1.read(layout.read(folder, manifest))


def load(folder: Path, target: Target) -> Any:
    """The drafter in the folder. Raises UserError that names all that does not fit."""
    return eagle1.load(layout.read(folder, manifest), target)


def recognises(config: Config, names: set[str]) -> bool:
    """EAGLE-1 tensors under SGLang's architecture."""
    return eagle1.recognised(config, names, _ARCHITECTURE)
