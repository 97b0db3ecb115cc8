"""EAGLE-3 as vLLM, SGLang, SafeAILab's code and speculators read it: one set of tensors, and four ways to describe it.

fc.weight (D, 3·D), one layer whose queries, keys and values read (·, 2·D), norm.weight, lm_head.weight (Vd, D); where
the draft vocabulary is reduced, d2t (Vd,) holds offsets, and t2d (V,) says which of the target's tokens it has. The
layer's tensors begin with midlayer., or with layers.0. in speculators' files; both are read.

Captured layers are the states that enter them for vLLM and speculators; SGLang's ids are one less.

D hidden size, V target and Vd draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint import layout, llama, native
from models.checkpoint.layout import Config, Contents, Foretell, Manifest, Shapes
from models.drafter.eagle3 import Eagle3Drafter, FusedLayer
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab

NUM_STATES = 3
IDS = "eagle_aux_hidden_state_layer_ids"
LAYER, MIDLAYER, _OURS = "layers.0.", "midlayer.", "stack.layers.0."
_EMBEDDING = "embed_tokens.weight"
_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
_ONLY = {**llama.ONLY, "norm_before_fc": False, "bias": False, "num_hidden_layers": 1}
TAKES = (Eagle3Drafter,)
_TARGET = f"{Eagle3Drafter.__module__}.{Eagle3Drafter.__name__}"
_DEFAULT_DEPTH = 4


def obstacles(drafter: Any, target: Target) -> dict[str, bool]:
    """What no engine does, of a drafter and its target."""
    if not isinstance(drafter, Eagle3Drafter):
        return {}  # another drafter is refused as such
    layers, num_layers = drafter.capture_layers, len(drafter.stack.layers)
    return {
        f"num_layers is {num_layers}, not 1": num_layers != 1,
        f"capture_layers {list(layers)} are not ascending, as engines collect them": list(layers)
        != sorted(set(layers)),
        f"capture_layers has {target.num_layers}, the state behind the target's final norm": target.num_layers
        in layers,
        **layout.obstacles_of_target(target, head=False),
    }


def other_count(drafter: Any) -> dict[str, bool]:
    """A number of captured states that only vLLM's own format can tell."""
    count = len(drafter.capture_layers)
    return {f"it reads {count} of the target's states, not {NUM_STATES}": count != NUM_STATES}


def beyond_the_paper(drafter: Any) -> dict[str, bool]:
    """Options and sizes that only vLLM knows, and speculators in part."""
    options = {f"{name} is true": bool(getattr(drafter, name, False)) for name in ("fc_norm", "norm_output")}
    return {**options, "norm_before_residual is true": _norm_before_residual(drafter), **other_count(drafter)}


def _norm_before_residual(drafter: Any) -> bool:
    layer = drafter.stack.layers[0] if isinstance(drafter, Eagle3Drafter) else None
    return isinstance(layer, FusedLayer) and layer.norm_before_residual


def save(
    name: str,
    drafter: Any,
    target: Target,
    export: native.Export,
    folder: Path,
    card: str,
    *,
    foretell: Foretell,
    config: Config,
    more_obstacles: dict[str, bool],
    layer: str = MIDLAYER,
) -> None:
    """Write an EAGLE-3 drafter for one engine, whose config.json is `config`."""
    layout.require(name, drafter, TAKES, lambda: {**obstacles(drafter, target), **more_obstacles})
    tensors: dict[str, Tensor] = {}
    for key, tensor in drafter.state_dict().items():
        tensors[layer + key.removeprefix(_OURS) if key.startswith(_OURS) else key] = tensor
    if drafter.vocab.reduced:
        tensors |= vocabulary_maps(drafter.vocab)
    layout.write(
        folder,
        name,
        drafter,
        export,
        tensors=tensors,
        config=config,
        foretell=foretell,
        card=card,
    )


def vocabulary_maps(vocab: DraftVocab) -> dict[str, Tensor]:
    """d2t (Vd,), offsets to the target's tokens, and t2d (V,), which of those there are."""
    known = torch.zeros(vocab.vocab_size, dtype=torch.bool)
    known[vocab.to_target(torch.arange(vocab.size))] = True
    return {"d2t": vocab.offsets(), "t2d": known}


def options_of(drafter: Any, target: Target) -> Config:
    """Keys of config.json that EAGLE-3 has beside a Llama's."""
    if not isinstance(drafter, Eagle3Drafter):
        return {}
    return {
        "draft_vocab_size": drafter.vocab.size,
        "target_hidden_size": target.hidden_size,
        "norm_before_residual": _norm_before_residual(drafter),
        "norm_before_fc": False,
        "fc_norm": drafter.fc_norm is not None,
        "norm_output": drafter.norm_output,
    }


def llama_config(drafter: Any, target: Target, architecture: str) -> Config:
    """The Llama's part of config.json."""
    if not isinstance(drafter, Eagle3Drafter):
        return {}
    return llama.config_of(drafter.config, target, drafter.fc.weight.dtype, architecture)


def manifest(config: Config, names: set[str], keys: tuple[str, ...], num_states: int = NUM_STATES) -> Manifest:
    """The tensors of an EAGLE-3 drafter, whose keys `config` has side by side; `names` spell its layer's name."""
    layer = LAYER if any(name.startswith(LAYER) for name in names) else MIDLAYER
    size, vocab_size = config["hidden_size"], config["vocab_size"]
    draft_size = config.get("draft_vocab_size") or vocab_size
    read = config.get("target_hidden_size") or size
    shapes: Shapes = {
        "fc.weight": (size, num_states * read),
        "norm.weight": (size,),
        "lm_head.weight": (draft_size, size),
        "d2t": (draft_size,),
        "t2d": (vocab_size,),
        _EMBEDDING: (vocab_size, size),
        **llama.shapes(config, layer, _NORMS, reads=2 * size),
    }
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (read,) for index in range(num_states)}
    optional = {"t2d", _EMBEDDING} | ({"d2t"} if draft_size == vocab_size else set())
    return Manifest(shapes, keys, {"d2t": torch.int64, "t2d": torch.bool}, frozenset(optional))


def model_of(config: Config, layer_ids: list[int] | None) -> Config:
    """The drafter that a config of that kind describes; without `layer_ids`, it reads the published layers."""
    return {
        "_target_": _TARGET,
        "num_layers": 1,
        "capture_layers": layer_ids,
        "head": "random",
        "fc_norm": bool(config.get("fc_norm")),
        "norm_output": bool(config.get("norm_output")),
        "norm_before_residual": bool(config.get("norm_before_residual")),
        **llama.arguments(config),
    }


def described(contents: Contents, model: Config, num_speculative_tokens: int = _DEFAULT_DEPTH) -> native.Export:
    """What a checkpoint says of itself."""
    return layout.described(contents, model, num_speculative_tokens)


def load(contents: Contents, config: Config, model: Config, target: Target) -> Any:
    """The drafter `model` of a checkpoint, with the target's embedding; `config` has its keys side by side."""
    layout.refuse_values(contents, _ONLY, config)
    size, read = config["hidden_size"], config.get("target_hidden_size") or config["hidden_size"]
    layout.refuse_other_sizes(
        contents,
        target,
        hidden_size=(size, target.hidden_size),
        target_hidden_size=(read, target.hidden_size),
        vocab_size=(config["vocab_size"], target.vocab_size),
    )
    if model["capture_layers"] is None and target.num_layers < 7:
        raise UserError(
            f"{str(contents.folder)!r} does not say which of the target's states it reads, and the published choice, "
            f"2, n // 2 and n - 3, does not fit a target of {target.num_layers} layers: config.json lacks {IDS}."
        )
    embedding: Any = target.embedding
    layout.refuse_own_copy(contents, _EMBEDDING, embedding.weight, "embedding")
    tensors = {_own_name(key): tensor for key, tensor in contents.tensors.items() if key != _EMBEDDING}
    vocab = _vocab(tensors.pop("d2t", None), tensors.pop("t2d", None), target, contents)
    return layout.fill(native.build(model, target, vocab), contents, tensors)


def _vocab(d2t: Tensor | None, t2d: Tensor | None, target: Target, contents: Contents) -> DraftVocab:
    if d2t is None or len(d2t) == target.vocab_size:
        return DraftVocab(target.vocab_size)
    try:
        vocab = DraftVocab.from_offsets(target.vocab_size, d2t)
    except UserError as error:
        raise UserError(f"{str(contents.folder)!r}: d2t is wrong. {error}") from error
    if t2d is not None and not torch.equal(t2d, vocabulary_maps(vocab)["t2d"]):
        raise UserError(f"{str(contents.folder)!r}: d2t and t2d name different tokens: one of them is stale.")
    return vocab


def _own_name(name: str) -> str:
    for prefix in (MIDLAYER, LAYER):
        if name.startswith(prefix):
            return _OURS + name.removeprefix(prefix)
    return name
