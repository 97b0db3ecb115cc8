"""A smaller model cut out of a target: some of its layers, key-value groups and MLP channels, with their weights.

A group is a key-value head with the query heads that read it; a channel is a row of the gate and up projections with
its column of the down projection. Every kept layer keeps equally many, but not the same ones.

n layers of the target, H key-value groups of a layer, G query heads in each, E size of a head, F channels of a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.errors import UserError
from models.target import Target
from models.target.lean import llama_shaped

UNITS = ("layers", "groups", "channels")
_PER_LAYER = ("layer_types", "no_rope_layers")  # config keys that hold a value for every layer
# Parameters of a layer that belong to units, and the dimension along which they do; the others are kept whole.
_OWNED = {f"self_attn.{name}_proj.{part}": ("groups", 0) for name in "qkv" for part in ("weight", "bias")}
_OWNED |= {f"mlp.{name}_proj.{part}": ("channels", 0) for name in ("gate", "up") for part in ("weight", "bias")}
_OWNED |= {"self_attn.o_proj.weight": ("groups", 1), "mlp.down_proj.weight": ("channels", 1)}


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a target: layers in ascending order, and in each of them groups and channels."""

    layers: tuple[int, ...]
    groups: Tensor  # (layers, kept groups)
    channels: Tensor  # (layers, kept channels)


Scores = Mapping[str, Tensor]  # "layers" (n,), "groups" (n, H), "channels" (n, F)


def check_shape(target: Target) -> None:
    """Raise UserError for a target whose layers are not those of a Llama, Qwen 2, Qwen 3 or Mistral."""
    if not llama_shaped(target.model.get_decoder()):
        raise UserError(
            f"The layers of target {target.name!r} ({target.config.model_type}) cannot be cut: this knows those that "
            "are shaped like a Llama's, Qwen 2's, Qwen 3's or Mistral's. Use drafter.model.start=random."
        )


def unit_counts(target: Target) -> dict[str, int]:
    """How many layers the target has, and how many groups and channels each of them."""
    layer: Any = target.model.get_decoder().layers[0]
    groups = layer.self_attn.k_proj.out_features // layer.self_attn.head_dim
    return {"layers": target.num_layers, "groups": groups, "channels": layer.mlp.gate_proj.out_features}


def even_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` of the layers 0 to `num_layers` − 1 at even distances, the first and the last among them."""
    return tuple(round(i * (num_layers - 1) / max(1, count - 1)) for i in range(count))


def whole_layers(target: Target, layers: tuple[int, ...]) -> Kept:
    """These layers with all that they hold."""
    counts = unit_counts(target)
    groups, channels = (torch.arange(counts[kind]).expand(len(layers), -1) for kind in ("groups", "channels"))
    return Kept(layers, groups, channels)


def best_units(scores: Scores, counts: Mapping[str, int], layers: tuple[int, ...] | None = None) -> Kept:
    """The units with the highest scores, as many of a kind as `counts` says; the layers may be given instead."""
    if layers is None:
        layers = tuple(scores["layers"].topk(counts["layers"]).indices.sort().values.tolist())
    chosen = [scores[kind][list(layers)].topk(counts[kind]).indices.sort().values for kind in ("groups", "channels")]
    return Kept(layers, *chosen)


def cut_config(target: Target, kept: Kept) -> Any:
    """The config of the model that `kept` makes."""
    config, attention = copy.deepcopy(target.config), target.model.get_decoder().layers[0].self_attn
    per_group = config.num_attention_heads // unit_counts(target)["groups"]
    for key in _PER_LAYER:
        if getattr(config, key, None):
            setattr(config, key, [getattr(config, key)[layer] for layer in kept.layers])
    config.num_hidden_layers = len(kept.layers)
    config.num_key_value_heads = kept.groups.shape[1]
    config.num_attention_heads = kept.groups.shape[1] * per_group
    config.head_dim = attention.head_dim
    config.intermediate_size = kept.channels.shape[1]
    return config


@torch.no_grad()
def copy_kept(target: Target, lm: Target, kept: Kept) -> None:
    """Give `lm`, a model of `cut_config`, the target's weights of what is kept, and its final norm."""
    theirs, ours = target.model.get_decoder(), lm.model.get_decoder()
    counts = unit_counts(target)
    for place, layer in enumerate(kept.layers):
        source = dict(theirs.layers[layer].named_parameters())
        chosen = {"groups": kept.groups[place], "channels": kept.channels[place]}
        for name, parameter in ours.layers[place].named_parameters():
            value = source[name]
            if name in _OWNED:
                kind, dim = _OWNED[name]
                by_unit = value.movedim(dim, 0).unflatten(0, (counts[kind], -1))
                value = by_unit[chosen[kind].to(value.device)].flatten(0, 1).movedim(0, dim)
            parameter.copy_(value)
    ours.norm.load_state_dict(theirs.norm.state_dict())


@torch.no_grad()
def copy_embeddings(target: Target, lm: Target) -> None:
    """Give `lm`, a model of the target's width and vocabulary, the target's embedding and head."""
    lm.embedding.load_state_dict(target.embedding.state_dict())
    lm.head.linear.load_state_dict(target.head.linear.state_dict())


def unit_sums(name: str, values: Tensor, counts: Mapping[str, int]) -> dict[str, Tensor]:
    """Sums of `values`, which are of the shape of a layer's parameter `name`, over each unit that it belongs to.

    Always "layers" (), and "groups" (H,) or "channels" (F,) where the parameter is divided among those.
    """
    values = values.double()
    sums = {"layers": values.sum()}
    if name in _OWNED:
        kind, dim = _OWNED[name]
        sums[kind] = values.movedim(dim, 0).reshape(counts[kind], -1).sum(-1)
    return sums


def empty_scores(counts: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
    """Zeros for every unit, in float64."""
    n = counts["layers"]
    shapes = {"layers": (n,), "groups": (n, counts["groups"]), "channels": (n, counts["channels"])}
    return {kind: torch.zeros(shape, dtype=torch.float64, device=device) for kind, shape in shapes.items()}


def squared_norms(target: Target) -> dict[str, Tensor]:
    """‖W‖² of every unit of the target."""
    counts = unit_counts(target)
    result = empty_scores(counts, target.device)
    layers: Any = target.model.get_decoder().layers
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            for kind, sums in unit_sums(name, parameter.detach().square(), counts).items():
                result[kind][index] += sums
    return result
