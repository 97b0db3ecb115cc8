"""EAGLE-1 for SafeAILab's own code: `bias` in config.json says whether `fc` has one, and true is its default.

That code unpickles pytorch_model.bin. We write the same tensors as safetensors; the card says how to convert them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.checkpoint import eagle1, layout, native, snippets
from models.checkpoint.layout import Config, Manifest
from models.target import Target

_NAME = "safeailab_eagle"
TAKES = eagle1.TAKES
USE = snippets.safeailab(", use_eagle3=False")
WHOLE_VOCABULARY = True
_ARCHITECTURE = "LlamaForCausalLM"
SCALINGS = ("default", "linear", "dynamic")  # of RoPE, that SafeAILab's layers know


def manifest(config: Config, names: set[str]) -> Manifest:
    """What a folder with such a config.json must hold."""
    return eagle1.manifest(config, bias=config.get("bias", True))


def save(drafter: Any, target: Target, export: native.Export, folder: Path, card: str) -> None:
    """Write the folder. Raises UserError for a drafter that SafeAILab's code would compute otherwise."""
    eagle1.save(
        _NAME, drafter, target, export, folder, card,
        foretell=manifest, architecture=_ARCHITECTURE, more={"bias": eagle1.has_bias(drafter)},
        obstacles=obstacles(getattr(drafter, "config", None), target),
    )  # fmt: skip


def obstacles(layers: Any, target: Target) -> dict[str, bool]:
    """What SafeAILab's layers do not do, of the layers with that config."""
    if layers is None:
        return {}
    rope = layers.rope_parameters["rope_type"]
    return {
        f"its RoPE is of the kind {rope}, not {', '.join(SCALINGS)}": rope not in SCALINGS,
        f"head_dim is {layers.head_dim}, not hidden_size over heads": layers.head_dim * layers.num_attention_heads
        != layers.hidden_size,
        "the target's logits are scaled": target.head.scale != 1,
    }


def read(folder: Path) -> native.Export:
    """What the folder says of itself."""
    return eagle1.read(layout.read(folder, manifest))


def load(folder: Path, target: Target) -> Any:
    """The drafter in the folder. Raises UserError that names all that does not fit."""
    return eagle1.load(layout.read(folder, manifest), target)


def recognises(config: Config, names: set[str]) -> bool:
    """EAGLE-1 tensors with a bias, or with a word of one."""
    return eagle1.recognised(config, names, _ARCHITECTURE) and ("fc.bias" in names or "bias" in config)
