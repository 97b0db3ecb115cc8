"""Decoder layers of Llama's shape, as config.json and tensors of other engines have them.

D hidden size, F intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import LlamaConfig

from models.checkpoint.layout import Config, Shapes, dtype_keys
from models.target import Target

KEYS = (
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "vocab_size", "max_position_embeddings",
    "rope_parameters", "rope_theta", "rope_scaling", "attention_bias", "mlp_bias", "tie_word_embeddings", "dtype",
)  # fmt: skip
# What our layers compute; a checkpoint that says otherwise is another model.
ONLY = {"attention_bias": False, "mlp_bias": False, "qkv_bias": False, "hidden_act": "silu", "pretraining_tp": 1}
_DEFAULT_THETA = 10000.0


def config_of(layers: LlamaConfig, target: Target, dtype: torch.dtype, architecture: str) -> Config:
    """The config.json of a drafter with such layers."""
    tokens = {key: getattr(target.config, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": layers.hidden_size,
        "intermediate_size": layers.intermediate_size,
        "num_hidden_layers": layers.num_hidden_layers,
        "num_attention_heads": layers.num_attention_heads,
        "num_key_value_heads": layers.num_key_value_heads,
        "head_dim": layers.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layers.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_positions,
        **rope_keys(layers.rope_parameters or {}),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **{key: token for key, token in tokens.items() if token is not None},
        **dtype_keys(dtype),
    }


def rope_keys(parameters: Mapping[Any, Any]) -> Config:
    """RoPE twice: for transformers 5, and for older readers."""
    rope = dict(parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    scaled = scaling.get("rope_type", "default") != "default"
    return {
        "rope_parameters": rope,
        "rope_theta": rope.get("rope_theta", _DEFAULT_THETA),
        "rope_scaling": {**scaling, "type": scaling["rope_type"]} if scaled else None,
    }


def rope_of(config: Config) -> Config:
    """The RoPE of a config.json, old or new, as transformers 5 has it. Raises ValueError where a head turns in part."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    rope.setdefault("rope_theta", config.get("rope_theta") or _DEFAULT_THETA)
    share = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor is {share}, but our layers turn whole heads")
    return rope


def arguments(config: Config) -> dict[str, Any]:
    """The arguments that build a drafter with the layers of a config.json."""
    heads = config["num_attention_heads"]
    return {
        "intermediate_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rope_parameters": rope_of(config),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
    }


def shapes(config: Config, prefix: str, norms: Iterable[str], *, reads: int | None = None) -> Shapes:
    """The tensors of one layer: its projections and the named norms; queries, keys and values read `reads` numbers."""
    size, inner, sizes = config["hidden_size"], config["intermediate_size"], arguments(config)
    width, key_width = (sizes[key] * sizes["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    reads = size if reads is None else reads
    return {
        f"{prefix}self_attn.q_proj.weight": (width, reads),
        f"{prefix}self_attn.k_proj.weight": (key_width, reads),
        f"{prefix}self_attn.v_proj.weight": (key_width, reads),
        f"{prefix}self_attn.o_proj.weight": (size, width),
        f"{prefix}mlp.gate_proj.weight": (inner, size),
        f"{prefix}mlp.up_proj.weight": (inner, size),
        f"{prefix}mlp.down_proj.weight": (size, inner),
        **{f"{prefix}{norm}.weight": (size,) for norm in norms},
    }
