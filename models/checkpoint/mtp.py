"""Sequential multi-token prediction as a part of the target's own checkpoint.

There are several spellings (`Spelling`) of one module: two norms, a projection of [norm(emb); norm(state)], a decoder
layer of the target's sizes, and a last norm. The head is the target's, so that engines propose all of its tokens
whatever a drafter was limited to. A folder holds its tensors alone, beside the target's config.json; or,
stitched, all of the target's files too, with the module's in model-mtp.safetensors and an index over both.

D hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.checkpoint import layout, llama, native
from models.checkpoint.layout import Config, Contents, Manifest, Shapes, dtype_keys
from models.drafter.mtp import SequentialMTP
from models.errors import UserError
from models.layers import layer_config
from models.target import Target
from models.vocab import DraftVocab

_BLOCK, _LAYER = "blocks.0.", "blocks.0.stack.layers.0."
_NORMS = ("input_layernorm", "post_attention_layernorm")
_FILE, _INDEX = "model-mtp.safetensors", f"{layout.TENSORS}.index.json"
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
          "rope_parameters")  # fmt: skip
_DEFAULT_DEPTH = 1
TAKES = (SequentialMTP,)
_TARGET = f"{SequentialMTP.__module__}.{SequentialMTP.__name__}"


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a family of models names and stores the module."""

    name: str  # of the format
    prefix: Callable[[Config], str]  # of all of the module's tensors
    parts: dict[str, str]  # our names of a block's parts to theirs
    layer: str  # what the decoder layer's tensors begin with
    hides_first: bool  # whether the first row's token is hidden
    before_norm: bool = False  # whether it reads the state that enters the target's final norm
    state_first: bool = False  # whether the projection reads [state; emb]
    centred_norms: bool = False  # whether norms multiply by 1 + weight, of which files hold weight
    biased: bool = False  # whether queries, keys and values have biases; ours are zeros
    with_head: str | None = None  # the name of a copy of the target's head
    model_types: tuple[str, ...] = ()  # of targets that it goes with; empty: any
    config: Config | None = None  # keys that the target's config.json gets


class Functions(NamedTuple):
    """What the module of a format offers."""

    save: Callable[..., None]
    read: Callable[[Path], native.Export]
    load: Callable[[Path, Target], Any]
    recognises: Callable[[Config, set[str]], bool]


def functions(spelling: Spelling) -> Functions:
    """Those of the format that spells the module so."""
    return Functions(
        partial(save, spelling), partial(read, spelling), partial(load, spelling), partial(recognised, spelling)
    )


def manifest(spelling: Spelling, config: Config) -> Manifest:
    """The module's tensors in a checkpoint with such a config.json."""
    size, prefix = config["hidden_size"], spelling.prefix(config)
    shapes: Shapes = {f"{prefix}{theirs}": (size,) for ours, theirs in spelling.parts.items() if "norm" in ours}
    shapes[f"{prefix}{spelling.parts['eh_proj.weight']}"] = (size, 2 * size)
    layer = f"{prefix}{spelling.layer}"
    shapes |= llama.shapes(config, layer, _NORMS)
    if spelling.biased:
        shapes |= {
            f"{layer}self_attn.{part}_proj.bias": shapes[f"{layer}self_attn.{part}_proj.weight"][:1] for part in "qkv"
        }
    optional = set()
    if spelling.with_head is not None:
        shapes[f"{prefix}{spelling.with_head}"] = (config["vocab_size"], size)
        optional.add(f"{prefix}{spelling.with_head}")
    keys = ("model_type", "hidden_size", "num_hidden_layers", "num_nextn_predict_layers")
    wider = {name for name in shapes if "norm" in name} if spelling.centred_norms else set()
    return Manifest(shapes, keys, optional=frozenset(optional), wider=frozenset(wider))


def save(
    spelling: Spelling,
    drafter: Any,
    target: Target,
    export: native.Export,
    folder: Path,
    card: str,
    *,
    stitch: bool = False,
) -> None:
    """Write the tensors alone, or with `stitch` the target's files with them.

    Raises UserError for a drafter that engines would compute otherwise.
    """
    layout.require(spelling.name, drafter, TAKES, lambda: _obstacles(spelling, drafter, target))
    dtype = target.dtype if stitch else next(drafter.parameters()).dtype
    config = json.loads(target.model.config.to_json_string(use_diff=False))
    config = {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
    config["architectures"] = [type(target.model).__name__]
    if "rope_theta" in (config.get("rope_parameters") or {}):
        config |= llama.rope_keys(config["rope_parameters"])
    config |= {**(spelling.config or {}), "num_nextn_predict_layers": 1, **dtype_keys(dtype)}
    tensors = _theirs(spelling, drafter, target, config, dtype)
    layout.write(
        folder,
        spelling.name,
        drafter,
        export,
        tensors=tensors,
        config=config,
        foretell=lambda found, names: manifest(spelling, found),
        card=card,
        more_record={"draft_vocab_size": target.vocab_size},
        file=_FILE if stitch else layout.TENSORS,
        mine=lambda found, name: name.startswith(spelling.prefix(found)),
        also=(lambda temporary: _write_target(target, tensors, temporary)) if stitch else None,
    )


def _write_target(target: Target, tensors: dict[str, Tensor], folder: Path) -> None:
    """The target's own files, and an index over its tensors and the module's."""
    target.model.save_pretrained(folder)
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(folder)
    index = folder / _INDEX
    found = layout.read_json(index, folder) if index.exists() else {"metadata": {}}
    known = found.get("weight_map") or dict.fromkeys(layout.tensor_names(folder), layout.TENSORS)
    found["weight_map"] = {**known, **dict.fromkeys(tensors, _FILE)}
    index.write_text(json.dumps(found, indent=2) + "\n")


def _obstacles(spelling: Spelling, drafter: SequentialMTP, target: Target) -> dict[str, bool]:
    own, wanted = drafter.config, layer_config(target, 1)
    other = [key for key in _SIZES if getattr(own, key) != getattr(wanted, key)]
    layers, kind = own.num_hidden_layers, target.config.model_type
    found, where = drafter.before_norm, "as it enters" if spelling.before_norm else "behind"
    return {
        f"num_blocks is {len(drafter.blocks)}, not 1": len(drafter.blocks) != 1,
        f"num_layers is {layers}, not 1": layers != 1,
        f"capture_layers is {list(drafter.capture_layers)}, not the last state alone": drafter.capture_layers
        != (target.num_layers,),
        f"hide_first is {drafter.hide_first}, and engines do{'' if spelling.hides_first else ' not'} hide the first "
        "row's token there": drafter.hide_first != spelling.hides_first,
        f"before_norm is {found}, and engines read the state {where} the target's final norm": found
        != spelling.before_norm,
        f"its {', '.join(other)} are not the target's, from which engines take them": bool(other),
        f"the target is a {kind}, and this is a part of {' or '.join(spelling.model_types)}": bool(spelling.model_types)
        and kind not in spelling.model_types,
        **layout.obstacles_of_target(target),
    }


def _theirs(
    spelling: Spelling, drafter: SequentialMTP, target: Target, config: Config, dtype: torch.dtype
) -> dict[str, Tensor]:
    prefix, found = spelling.prefix(config), {}
    for ours, whole in drafter.state_dict().items():
        tensor = whole.to(dtype)
        if spelling.centred_norms and "norm" in ours:
            tensor = _centred(spelling, ours, tensor)
        if ours.startswith(_LAYER):
            found[f"{prefix}{spelling.layer}{ours.removeprefix(_LAYER)}"] = tensor
        else:
            part = ours.removeprefix(_BLOCK)
            found[f"{prefix}{spelling.parts[part]}"] = _turned(spelling, tensor) if part == "eh_proj.weight" else tensor
    if spelling.biased:
        for part in "qkv":
            weight = found[f"{prefix}{spelling.layer}self_attn.{part}_proj.weight"]
            found[f"{prefix}{spelling.layer}self_attn.{part}_proj.bias"] = weight.new_zeros(len(weight))
    if spelling.with_head is not None:
        found[f"{prefix}{spelling.with_head}"] = target.head.weight.to(dtype)
    return found


def _centred(spelling: Spelling, name: str, weight: Tensor) -> Tensor:
    """A norm's weight − 1, in float64 where its own dtype has no number to which adding 1 gives the weight back.

    That dtype has one for all weights from 0.5 on. Raises UserError where float64 has none either, as for float64
    weights that are small or negative.
    """
    for dtype in (weight.dtype, torch.float64):
        stored = (weight.double() - 1).to(dtype)
        if torch.equal(_uncentred(stored).to(weight.dtype), weight):
            return stored
    raise UserError(
        f"Format {spelling.name} cannot hold {name}: it stores weight − 1, from which float64 does not give back each "
        "of these weights exactly."
    )


def _uncentred(stored: Tensor) -> Tensor:
    """A norm's weight, not rounded yet: bfloat16 is too coarse near 1."""
    return stored.double() + 1


def _turned(spelling: Spelling, weight: Tensor) -> Tensor:
    """The projection (D, 2·D) with its halves in the other order, where the spelling reads the state first."""
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1) if spelling.state_first else weight


def contents(spelling: Spelling, folder: Path) -> Contents:
    """The module's part of what is in a folder."""
    return layout.read(
        folder,
        lambda config, names: manifest(spelling, config),
        mine=lambda config, name: name.startswith(spelling.prefix(config)),
    )


def _model_of(spelling: Spelling, config: Config) -> Config:
    return {
        "_target_": _TARGET,
        "num_blocks": 1,
        "num_layers": 1,
        "hide_first": spelling.hides_first,
        "before_norm": spelling.before_norm,
        **llama.arguments(config),
    }


def read(spelling: Spelling, folder: Path) -> native.Export:
    """What a folder says of itself."""
    found = contents(spelling, folder)
    return layout.described(found, _model_of(spelling, found.config), _DEFAULT_DEPTH)


def load(spelling: Spelling, folder: Path, target: Target) -> Any:
    """The drafter in a folder, stitched or not. Raises UserError that names all that does not fit."""
    found = contents(spelling, folder)
    config, prefix, tensors = found.config, spelling.prefix(found.config), dict(found.tensors)
    layout.refuse_values(found, {"num_nextn_predict_layers": 1})
    layout.refuse_other_sizes(
        found,
        target,
        hidden_size=(config["hidden_size"], target.hidden_size),
        vocab_size=(config["vocab_size"], target.vocab_size),
        num_hidden_layers=(config["num_hidden_layers"], target.num_layers),
    )
    if spelling.with_head is not None:
        layout.refuse_own_copy(found, f"{prefix}{spelling.with_head}", target.head.weight, "head")
        tensors.pop(f"{prefix}{spelling.with_head}", None)
    ours = {theirs: part for part, theirs in spelling.parts.items()}
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part = name.removeprefix(prefix)
        if spelling.biased and part.endswith("_proj.bias") and not tensor.any():
            continue  # our layers have none
        key = f"{_BLOCK}{ours[part]}" if part in ours else f"{_LAYER}{part.removeprefix(spelling.layer)}"
        value = _turned(spelling, tensor) if key.endswith("eh_proj.weight") else tensor
        own[key] = _uncentred(value) if spelling.centred_norms and "norm" in key else value
    drafter = native.build(_model_of(spelling, config), target, DraftVocab(target.vocab_size))
    return layout.fill(drafter, found, own)


def recognised(spelling: Spelling, config: Config, names: set[str]) -> bool:
    """Whether a folder holds such a module."""
    if not isinstance(config.get("num_hidden_layers"), int):
        return False
    return f"{spelling.prefix(config)}{spelling.parts['eh_proj.weight']}" in names
