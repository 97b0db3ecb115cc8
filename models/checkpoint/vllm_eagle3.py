"""EAGLE-3 for vLLM: {"method": "eagle3", "model": FOLDER}. Its layer ids are those of the states that enter a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.checkpoint import eagle3, layout, llama, native, snippets
from models.checkpoint.layout import Config, Manifest
from models.target import Target

_NAME = "vllm_eagle3"
TAKES = eagle3.TAKES
USE = snippets.vllm("eagle3")
ARCHITECTURE = "LlamaForCausalLMEagle3"
_KEYS = (*llama.KEYS, "draft_vocab_size", "target_hidden_size", "norm_before_residual", "fc_norm", "norm_output",
         "eagle_config")  # fmt: skip


def manifest(config: Config, names: set[str]) -> Manifest:
    """What a folder with such a config.json must hold."""
    ids = config.get(eagle3.IDS) or (config.get("eagle_config") or {}).get(eagle3.IDS)
    return eagle3.manifest(config, names, _KEYS, len(ids) if ids else eagle3.NUM_STATES)


def save(drafter: Any, target: Target, export: native.Export, folder: Path, card: str) -> None:
    """Write the folder. Raises UserError for a drafter that vLLM would compute otherwise."""
    config = {
        **eagle3.llama_config(drafter, target, ARCHITECTURE),
        **eagle3.options_of(drafter, target),
        "eagle_config": {eagle3.IDS: list(drafter.capture_layers), "use_aux_hidden_state": True},
    }
    eagle3.save(_NAME, drafter, target, export, folder, card, foretell=manifest, config=config, more_obstacles={})


def _model_of(config: Config) -> Config:
    inner = config.get("eagle_config") or {}
    options = {key: inner[key] for key in ("norm_before_fc", "fc_norm", "norm_output") if key in inner}
    return eagle3.model_of({**options, **config}, config.get(eagle3.IDS) or inner.get(eagle3.IDS))


def read(folder: Path) -> native.Export:
    """What the folder says of itself."""
    contents = layout.read(folder, manifest)
    return eagle3.described(contents, _model_of(contents.config))


def load(folder: Path, target: Target) -> Any:
    """The drafter in the folder. Raises UserError that names all that does not fit."""
    contents = layout.read(folder, manifest)
    layout.refuse_values(contents, {"use_aux_hidden_state": True}, contents.config.get("eagle_config") or {})
    return eagle3.load(contents, contents.config, _model_of(contents.config), target)


def recognises(config: Config, names: set[str]) -> bool:
    """The architecture that vLLM and SGLang share; without layer ids, both read the same."""
    return ARCHITECTURE in (config.get("architectures") or ()) and "fc.weight" in names
