"""EAGLE-1 for vLLM: {"method": "eagle", "model": FOLDER}. `fc` has no bias there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.checkpoint import eagle1, layout, native, snippets
from models.checkpoint.layout import Config, Manifest
from models.target import Target

_NAME = "vllm_eagle"
TAKES = eagle1.TAKES
USE = snippets.vllm("eagle")
WHOLE_VOCABULARY = True
_ARCHITECTURE = "LlamaForCausalLM"  # vLLM puts Eagle in front of it


def manifest(config: Config, names: set[str]) -> Manifest:
    """What a folder with such a config.json must hold."""
    return eagle1.manifest(config, bias=False)


def save(drafter: Any, target: Target, export: native.Export, folder: Path, card: str) -> None:
    """Write the folder. Raises UserError for a drafter that vLLM would compute otherwise."""
    eagle1.save(
        _NAME, drafter, target, export, folder, card,
        foretell=manifest, architecture=_ARCHITECTURE, more={},
        obstacles={"fc has a bias, which vLLM does not add": eagle1.has_bias(drafter)},
    )  # fmt: skip


def read(folder: Path) -> native.Export:
    """What the folder says of itself."""
    return eagle1.read(layout.read(folder, manifest))


def load(folder: Path, target: Target) -> Any:
    """The drafter in the folder. Raises UserError that names all that does not fit."""
    return eagle1.load(layout.read(folder, manifest), target)


def recognises(config: Config, names: set[str]) -> bool:
    """EAGLE-1 tensors without a bias, and no word of one."""
    return eagle1.recognised(config, names, _ARCHITECTURE) and "fc.bias" not in names and "bias" not in config
