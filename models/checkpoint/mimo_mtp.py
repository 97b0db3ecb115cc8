"""Multi-token prediction under MiMo's names, for targets of Qwen2's shape: vLLM loads it, {"method": "mtp"}.

model.mtp_layers.0.{token_layernorm,hidden_layernorm,input_proj,final_layernorm} and the layer's own, with biases of
queries, keys and values, which are zeros here. The projection reads [state; emb], and the state is the target's as it
enters the final norm: vLLM's MiMo hands it over so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.checkpoint import mtp, native, snippets
from models.checkpoint.layout import Config
from models.checkpoint.mtp import Spelling
from models.target import Target

_SPELLING = Spelling(
    name="mimo_mtp",
    prefix=lambda config: "model.mtp_layers.0.",
    parts={
        "enorm.weight": "token_layernorm.weight",
        "hnorm.weight": "hidden_layernorm.weight",
        "eh_proj.weight": "input_proj.weight",
        "norm.weight": "final_layernorm.weight",
    },
    layer="",
    hides_first=True,
    before_norm=True,
    state_first=True,
    biased=True,
    model_types=("qwen2",),
    config={"architectures": ["MiMoForCausalLM"]},  # and the model type stays qwen2: transformers knows no mimo
)
USE = snippets.inside_the_target(
    'vLLM: `LLM(model=FOLDER, speculative_config={"method": "mtp", "num_speculative_tokens": 1})`.'
)


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
    """The module's projection under MiMo's name."""
    return mtp.recognised(_SPELLING, config, names)
