"""EAGLE-1 as vLLM, SafeAILab's code and SGLang read it: one layout, which differs in the bias of `fc` alone.

fc.weight (D, 2·D) reads [emb; state]; layers.0 has no input norm, and nothing is normalised at the end: the target's
head reads what comes out. embed_tokens.weight is the target's own, as published checkpoints have it.

The head being the target's, no tensor depends on the draft vocabulary, and engines propose all of the target's tokens
whatever a drafter was limited to (`WHOLE_VOCABULARY`).

D hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.checkpoint import layout, llama, native
from models.checkpoint.layout import Config, Contents, Foretell, Manifest, Shapes
from models.drafter.eagle import EagleDrafter
from models.target import Target
from models.vocab import DraftVocab

_STACK, _EMBEDDING = "stack.", "embed_tokens.weight"
_ONLY = {**llama.ONLY, "add_para_norm": False, "norm_before_fc": False}
TAKES = (EagleDrafter,)
_TARGET = f"{EagleDrafter.__module__}.{EagleDrafter.__name__}"
_DEFAULT_DEPTH = 4


def save(
    name: str,
    drafter: Any,
    target: Target,
    export: native.Export,
    folder: Path,
    card: str,
    *,
    foretell: Foretell,
    architecture: str,
    more: Config,
    zero_bias: bool = False,
    obstacles: dict[str, bool] | None = None,
) -> None:
    """Write an EAGLE-1 drafter for one engine; with `zero_bias`, `fc` gets one of zeros where it has none."""
    layout.require(name, drafter, TAKES, lambda: {**_obstacles(drafter, target), **(obstacles or {})})
    tensors = {key.removeprefix(_STACK): tensor for key, tensor in drafter.state_dict().items()}
    weight = drafter.fc.weight
    if zero_bias and drafter.fc.bias is None:
        tensors["fc.bias"] = weight.new_zeros(len(weight))
    embedding: Any = target.embedding
    tensors[_EMBEDDING] = embedding.weight.to(weight.dtype)
    config = {**llama.config_of(drafter.config, target, weight.dtype, architecture), **more}
    if target.head.scale != 1:
        config["logit_scale"] = target.head.scale
    layout.write(
        folder,
        name,
        drafter,
        export,
        tensors=tensors,
        config=config,
        foretell=foretell,
        card=card,
        more_record={"draft_vocab_size": target.vocab_size},
    )


def has_bias(drafter: Any) -> bool:
    """Whether it is an EAGLE-1 drafter whose `fc` has a bias."""
    return isinstance(drafter, EagleDrafter) and drafter.fc.bias is not None


def _obstacles(drafter: EagleDrafter, target: Target) -> dict[str, bool]:
    return {
        f"feature_window is {drafter.feature_window}, not 1": drafter.feature_window != 1,
        f"num_future is {drafter.num_future}, not 1": drafter.num_future != 1,
        **layout.obstacles_of_target(target),
    }


def manifest(config: Config, *, bias: bool) -> Manifest:
    """The tensors of an EAGLE-1 drafter with such a config.json, with or without a bias of `fc`."""
    size = config["hidden_size"]
    found: Shapes = {"fc.weight": (size, 2 * size), _EMBEDDING: (config["vocab_size"], size)}
    if bias:
        found["fc.bias"] = (size,)
    for index in range(config["num_hidden_layers"]):
        norms = ("post_attention_layernorm",) if index == 0 else ("input_layernorm", "post_attention_layernorm")
        found |= llama.shapes(config, f"layers.{index}.", norms)
    return Manifest(found, llama.KEYS, optional=frozenset({_EMBEDDING}))


def model_of(contents: Contents) -> Config:
    """The drafter that a checkpoint describes. A bias of zeros is none."""
    config, bias = contents.config, contents.tensors.get("fc.bias")
    return {
        "_target_": _TARGET,
        "num_layers": config["num_hidden_layers"],
        **llama.arguments(config),
        "fc_bias": bias is not None and bool(bias.any()),
    }


def read(contents: Contents) -> native.Export:
    """What a checkpoint says of itself."""
    return layout.described(contents, model_of(contents), _DEFAULT_DEPTH)


def load(contents: Contents, target: Target) -> Any:
    """The drafter of a checkpoint, with the target's embedding and head."""
    config = contents.config
    layout.refuse_values(contents, {**_ONLY, "logit_scale": target.head.scale})
    layout.refuse_other_sizes(
        contents,
        target,
        hidden_size=(config["hidden_size"], target.hidden_size),
        vocab_size=(config["vocab_size"], target.vocab_size),
    )
    embedding: Any = target.embedding
    layout.refuse_own_copy(contents, _EMBEDDING, embedding.weight, "embedding")
    model = model_of(contents)
    dropped = {_EMBEDDING} if model["fc_bias"] else {_EMBEDDING, "fc.bias"}
    drafter = native.build(model, target, DraftVocab(target.vocab_size))
    own = {key: tensor for key, tensor in contents.tensors.items() if key not in dropped}
    return layout.fill(drafter, contents, {_own_name(key): tensor for key, tensor in own.items()})


def _own_name(name: str) -> str:
    return f"{_STACK}{name}" if name.startswith("layers.") else name


def recognised(config: Config, names: set[str], architecture: str) -> bool:
    """Whether a folder holds EAGLE-1 drafters' tensors, under that architecture's name."""
    named = config.get("architectures") or ["LlamaForCausalLM"]
    return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names and architecture in named
