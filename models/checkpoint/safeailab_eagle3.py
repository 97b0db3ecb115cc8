"""EAGLE-3 for SafeAILab's own code, which always reads the states that enter layers 2, n // 2 and n − 3.

That code unpickles pytorch_model.bin. We write the same tensors as safetensors; the card says how to convert them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.checkpoint import eagle3, layout, llama, native, snippets
from models.checkpoint.layout import Config, Manifest
from models.checkpoint.safeailab_eagle import SCALINGS
from models.target import Target

_NAME = "safeailab_eagle3"
TAKES = eagle3.TAKES
USE = snippets.safeailab(", use_eagle3=True")
_ARCHITECTURE = "LlamaForCausalLM"
_KEYS = (*llama.KEYS, "draft_vocab_size")


def manifest(config: Config, names: set[str]) -> Manifest:
    """What a folder with such a config.json must hold."""
    return eagle3.manifest(config, names, _KEYS)


def save(drafter: Any, target: Target, export: native.Export, folder: Path, card: str) -> None:
    """Write the folder. Raises UserError for a drafter that SafeAILab's code would compute otherwise."""
    config = {**eagle3.llama_config(drafter, target, _ARCHITECTURE), **eagle3.options_of(drafter, target)}
    rope = config.get("rope_parameters", {}).get("rope_type", "default")
    fixed = (2, target.num_layers // 2, target.num_layers - 3)
    obstacles = {
        f"it reads the states {list(drafter.capture_layers)}, and that code {list(fixed)}": drafter.capture_layers
        != fixed,
        f"its RoPE is of the kind {rope}, not {', '.join(SCALINGS)}": rope not in SCALINGS,
    }
    eagle3.save(
        _NAME, drafter, target, export, folder, card,
        foretell=manifest, config=config, more_obstacles={**eagle3.beyond_the_paper(drafter), **obstacles},
    )  # fmt: skip


def read(folder: Path) -> native.Export:
    """What the folder says of itself."""
    contents = layout.read(folder, manifest)
    return eagle3.described(contents, eagle3.model_of(contents.config, None))


def load(folder: Path, target: Target) -> Any:
    """The drafter in the folder. Raises UserError that names all that does not fit."""
    contents = layout.read(folder, manifest)
    return eagle3.load(contents, contents.config, eagle3.model_of(contents.config, None), target)


def recognises(config: Config, names: set[str]) -> bool:
    """EAGLE-3's layer under a plain Llama's name."""
    fused = any(name.endswith(".hidden_norm.weight") for name in names)
    return _ARCHITECTURE in (config.get("architectures") or [_ARCHITECTURE]) and "fc.weight" in names and fused
