"""DFlash and DSpark as vLLM reads them: layers of Qwen3's shape over blocks of masks.

fc.weight (D, L·D), hidden_norm.weight and norm.weight (D,), and layers.{i}. with Llama's tensors and
self_attn.{q,k}_norm.weight (E,). The target's embedding and head are not there, but for a reduced vocabulary, which has
lm_head.weight (Vd, D), rows of the target's, and offsets d2t (Vd,). DSpark adds markov_head.markov_w1.weight (V, r),
markov_head.markov_w2.weight (Vd, r) and confidence_head.proj.{weight (1, D + r), bias (1,)}; the temperatures of our
confidences are in config.json, and no engine reads them.

`target_layer_ids` are those of the layers that the states leave, one less than ours. vLLM fills a block with as many
masks as tokens are asked for: it drafts as we do where these are all that a block drafts.

D hidden size, L captured states, E size of a head, r rank, V target and Vd draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint import layout, llama, native, snippets
from models.checkpoint.eagle3 import vocabulary_maps
from models.checkpoint.layout import Config, Contents, Foretell, Manifest, Shapes
from models.drafter.dflash import DFlashDrafter
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab

TAKES = (DFlashDrafter,)
_TARGET = f"{DFlashDrafter.__module__}.{DFlashDrafter.__name__}"
_NORMS = ("input_layernorm", "post_attention_layernorm")
_EMBEDDING, _HEAD, _TEMPERATURES = "embed_tokens.weight", "lm_head.weight", "confidence_temperatures"
_OURS = {"stack.layers.": "layers."}
_ONLY = {**llama.ONLY, "use_sliding_window": False}
KEYS = (*llama.KEYS, "block_size", "dflash_config", "draft_vocab_size")


def use(method: str) -> str:
    """How vLLM is told to use a folder."""
    return (
        snippets.vllm(method) + "\nAsk for as many tokens as a block drafts: with fewer masks, vLLM drafts otherwise.\n"
    )


def save(
    name: str,
    drafter: Any,
    target: Target,
    export: native.Export,
    folder: Path,
    card: str,
    *,
    architecture: str,
    foretell: Foretell,
    more_config: Config,
    more_obstacles: dict[str, bool],
) -> None:
    """Write a block-parallel drafter for vLLM. Raises UserError for one that it would compute otherwise."""
    layout.require(name, drafter, TAKES, lambda: {**_obstacles(drafter, target), **more_obstacles})
    tensors: dict[str, Tensor] = {}
    for key, tensor in drafter.state_dict().items():
        if not key.endswith(".temperatures"):
            tensors[_renamed(key, _OURS)] = tensor
    if drafter.vocab.reduced:
        rows = drafter.head.weight.to(drafter.fc.weight.dtype)
        tensors |= {_HEAD: rows, "d2t": vocabulary_maps(drafter.vocab)["d2t"]}
    masks = {"mask_token_id": drafter.mask_token_id, "target_layer_ids": [j - 1 for j in drafter.capture_layers]}
    config = {
        **llama.config_of(drafter.config, target, drafter.fc.weight.dtype, architecture),
        "model_type": "qwen3",
        "use_sliding_window": False,
        "block_size": drafter.block_size,
        "num_target_layers": target.num_layers,
        "dflash_config": masks,
        "draft_vocab_size": drafter.vocab.size,
        **more_config,
    }
    layout.write(folder, name, drafter, export, tensors=tensors, config=config, foretell=foretell, card=card)


def _obstacles(drafter: DFlashDrafter, target: Target) -> dict[str, bool]:
    embedding: Any = target.embedding
    layers, rows = drafter.capture_layers, embedding.weight.shape[0]
    return {
        f"capture_layers {list(layers)} are not ascending, as engines collect them": list(layers)
        != sorted(set(layers)),
        "capture_layers has 0, the embedding": 0 in layers,
        f"capture_layers has {target.num_layers}, the state behind the target's final norm": target.num_layers
        in layers,
        f"the target embeds {rows} tokens, and tells {target.vocab_size}": rows != target.vocab_size,
        "the target's logits are scaled": target.head.scale != 1,
        **layout.obstacles_of_target(target),
    }


def manifest(config: Config, keys: tuple[str, ...]) -> Manifest:
    """The tensors of a drafter, whose keys `config` has side by side."""
    size, vocab_size = config["hidden_size"], config["vocab_size"]
    draft_size = config.get("draft_vocab_size") or vocab_size
    head_dim = llama.arguments(config)["head_dim"]
    shapes: Shapes = {
        "fc.weight": (size, len(layer_ids(config)) * size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
        _HEAD: (draft_size, size),
        "d2t": (draft_size,),
        _EMBEDDING: (vocab_size, size),
    }
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        shapes |= llama.shapes(config, prefix, _NORMS)
        shapes |= {f"{prefix}self_attn.{part}_norm.weight": (head_dim,) for part in "qk"}
    rank = config.get("markov_rank") or 0
    if rank:
        shapes |= {
            "markov_head.markov_w1.weight": (vocab_size, rank),
            "markov_head.markov_w2.weight": (draft_size, rank),
        }
    if config.get("enable_confidence_head"):
        shapes |= {"confidence_head.proj.weight": (1, size + rank), "confidence_head.proj.bias": (1,)}
    optional = {_EMBEDDING} | ({_HEAD, "d2t"} if draft_size == vocab_size else set())
    return Manifest(shapes, keys, {"d2t": torch.int64}, frozenset(optional))


def layer_ids(config: Config) -> list[int]:
    """`target_layer_ids`, inside dflash_config or beside it. Raises KeyError where they are nowhere."""
    ids: list[int] = {**config, **(config.get("dflash_config") or {})}["target_layer_ids"]
    return ids


def model_of(config: Config, *, predict_at_anchor: bool) -> Config:
    """The drafter that a config.json describes."""
    return {
        "_target_": _TARGET,
        "block_size": config["block_size"],
        "num_layers": config["num_hidden_layers"],
        "capture_layers": [index + 1 for index in layer_ids(config)],
        "mask_token_id": {**config, **(config.get("dflash_config") or {})}["mask_token_id"],
        "predict_at_anchor": predict_at_anchor,
        "markov_rank": config.get("markov_rank") or 0,
        "confidence": bool(config.get("enable_confidence_head")),
        **llama.arguments(config),
    }


def described(contents: Contents, model: Config) -> native.Export:
    """What a checkpoint says of itself."""
    block = contents.config["block_size"]
    return layout.described(contents, model, block if model["predict_at_anchor"] else block - 1)


def load(contents: Contents, model: Config, target: Target) -> Any:
    """The drafter `model` of a checkpoint, with the target's embedding and head."""
    config = contents.config
    layout.refuse_values(contents, _ONLY)
    sizes = {"hidden_size": (config["hidden_size"], target.hidden_size)}
    layout.refuse_other_sizes(contents, target, **sizes, vocab_size=(config["vocab_size"], target.vocab_size))
    tensors = {_renamed(key, {new: old for old, new in _OURS.items()}): t for key, t in contents.tensors.items()}
    vocab = _vocab(tensors.pop("d2t", None), target, contents)
    embedding: Any = target.embedding
    layout.refuse_own_copy(contents, _EMBEDDING, embedding.weight, "embedding")
    layout.refuse_own_copy(contents, _HEAD, target.head.rows(vocab.token_ids).weight, "head")
    for copy in (_EMBEDDING, _HEAD):
        tensors.pop(copy, None)
    drafter = native.build(model, target, vocab)
    if drafter.confidence_head is not None:
        known = drafter.confidence_head.temperatures
        tensors["confidence_head.temperatures"] = torch.tensor(config.get(_TEMPERATURES) or known.tolist()).to(known)
    return layout.fill(drafter, contents, tensors)


def temperatures_of(drafter: Any) -> Config:
    """What config.json keeps of a confidence head's calibration."""
    head = getattr(drafter, "confidence_head", None)
    return {} if head is None else {_TEMPERATURES: head.temperatures.tolist()}


def _vocab(d2t: Tensor | None, target: Target, contents: Contents) -> DraftVocab:
    if d2t is None or len(d2t) == target.vocab_size:
        return DraftVocab(target.vocab_size)
    try:
        return DraftVocab.from_offsets(target.vocab_size, d2t)
    except UserError as error:
        raise UserError(f"{str(contents.folder)!r}: d2t is wrong. {error}") from error


def _renamed(name: str, prefixes: dict[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
