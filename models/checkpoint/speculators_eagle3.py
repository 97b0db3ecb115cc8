"""EAGLE-3 in the wrapper of the speculators library, which vLLM also serves by itself: LLM(model=FOLDER).

The layer's tensors begin with layers.0.; a file that does not say norm_before_residual means true.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.checkpoint import eagle3, layout, llama, native, snippets
from models.checkpoint.layout import Config, Manifest
from models.target import Target

_NAME = "speculators_eagle3"
_KIND = "eagle3"
TAKES = eagle3.TAKES
USE = f"{snippets.vllm(_KIND)}\n{snippets.SPECULATORS}"
_KEYS = ("architectures", "speculators_model_type", "transformer_layer_config", "speculators_config",
         "draft_vocab_size", "target_hidden_size", "norm_before_residual", eagle3.IDS, "dtype",
         "tie_word_embeddings")  # fmt: skip
_LAYER_KEYS = tuple(key for key in llama.KEYS if key not in ("architectures", "dtype"))


def _flat(config: Config) -> Config:
    """The keys of the wrapper and of the layer side by side."""
    inner = config["transformer_layer_config"]
    return {**inner, "norm_before_residual": True, **{key: value for key, value in config.items() if key != "dtype"}}


def manifest(config: Config, names: set[str]) -> Manifest:
    """What a folder with such a config.json must hold."""
    return eagle3.manifest(_flat(config), names, _KEYS)


def save(drafter: Any, target: Target, export: native.Export, folder: Path, card: str) -> None:
    """Write the folder. Raises UserError for a drafter that speculators or vLLM would compute otherwise."""
    inner = eagle3.llama_config(drafter, target, "")
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": export.num_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": _KIND,
        "speculators_version": "0.9.0",
        **eagle3.options_of(drafter, target),
        eagle3.IDS: list(drafter.capture_layers),
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": _KIND,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": _verifier(target),
                "architectures": list(target.model.config.architectures or [type(target.model).__name__]),
            },
        },
        "transformer_layer_config": {key: value for key, value in inner.items() if key in _LAYER_KEYS},
        **{key: value for key, value in inner.items() if key in ("dtype", "torch_dtype")},
    }
    eagle3.save(
        _NAME, drafter, target, export, folder, card,
        foretell=manifest, config=config, more_obstacles=eagle3.other_count(drafter), layer=eagle3.LAYER,
    )  # fmt: skip


def _verifier(target: Target) -> str:
    """Where the target is: its folder as an absolute path, since engines start elsewhere, or its name on the hub."""
    place = target.model.config._name_or_path or target.name
    return str(Path(place).resolve()) if Path(place).expanduser().is_dir() else place


def _model_of(config: Config) -> Config:
    flat = _flat(config)
    return eagle3.model_of(flat, flat.get(eagle3.IDS))


def read(folder: Path) -> native.Export:
    """What the folder says of itself."""
    contents = layout.read(folder, manifest)
    methods = (contents.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return eagle3.described(contents, _model_of(contents.config), methods[0].get("speculative_tokens") or 4)


def load(folder: Path, target: Target) -> Any:
    """The drafter in the folder. Raises UserError that names all that does not fit."""
    contents = layout.read(folder, manifest)
    return eagle3.load(contents, _flat(contents.config), _model_of(contents.config), target)


def recognises(config: Config, names: set[str]) -> bool:
    """What a speculators file calls itself."""
    return config.get("speculators_model_type") == _KIND
