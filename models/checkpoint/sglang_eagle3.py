"""EAGLE-3 for SGLang: --speculative-algorithm EAGLE3. Its layer ids are those of the layers whose output is captured.

So id j there is the state that enters layer j + 1: one less than vLLM's. The same file therefore does not serve both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.checkpoint import eagle3, layout, llama, native, snippets
from models.checkpoint.layout import Config, Manifest
from models.target import Target

_NAME = "sglang_eagle3"
TAKES = eagle3.TAKES
USE = snippets.sglang("EAGLE3")
_ARCHITECTURE = "LlamaForCausalLMEagle3"
_KEYS = (*llama.KEYS, "draft_vocab_size", "target_hidden_size", "eagle_config")


def manifest(config: Config, names: set[str]) -> Manifest:
    """What a folder with such a config.json must hold."""
    return eagle3.manifest(config, names, _KEYS)


def save(drafter: Any, target: Target, export: native.Export, folder: Path, card: str) -> None:
    """Write the folder. Raises UserError for a drafter that SGLang would compute otherwise."""
    config = {
        **eagle3.llama_config(drafter, target, _ARCHITECTURE),
        **eagle3.options_of(drafter, target),
        "eagle_config": {eagle3.IDS: [layer - 1 for layer in drafter.capture_layers], "use_aux_hidden_state": True},
    }
    lowest = {"capture_layers has 0, the embedding, which SGLang does not capture": 0 in drafter.capture_layers}
    eagle3.save(
        _NAME, drafter, target, export, folder, card,
        foretell=manifest, config=config, more_obstacles={**eagle3.beyond_the_paper(drafter), **lowest},
    )  # fmt: skip


def _model_of(config: Config) -> Config:
    ids = (config.get("eagle_config") or {}).get(eagle3.IDS)
    return eagle3.model_of(config, None if ids is None else [index + 1 for index in ids])


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
    """The architecture that vLLM and SGLang share, with layer ids, which they read differently."""
    ids = (config.get("eagle_config") or {}).get(eagle3.IDS)
    return _ARCHITECTURE in (config.get("architectures") or ()) and "fc.weight" in names and ids is not None
