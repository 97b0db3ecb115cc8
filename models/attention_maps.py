"""What a language model attends to: the probabilities of its attention, which fast implementations never hold.

B batch, S rows, H heads, G groups of heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.errors import UserError
from models.target import Target


def states_and_maps(lm: Target, token_ids: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """States (B, S, D) entering every layer and the last of all, and every layer's attention (B, H, S, S).

    A pass over token_ids (B, S) by the model's own code with eager attention, which holds all maps at once; row t of
    a map tells how much each row up to t weighs for row t.
    """
    usual = lm.config._attn_implementation
    lm.model.set_attn_implementation("eager")
    try:
        out = lm.model.base_model(
            input_ids=token_ids, use_cache=False, output_hidden_states=True, output_attentions=True
        )
    finally:
        lm.model.set_attn_implementation(usual)
    return out.hidden_states, out.attentions


def check_maps(lm: Target, where: str) -> None:
    """Raise UserError, which names the setting `where`, for a model that does not tell what it attends to."""
    refusal = f"{where}: {lm.name!r} ({lm.config.model_type}) does not tell what it attends to"
    ids = torch.zeros(1, 4, dtype=torch.int64, device=lm.device)
    try:
        with torch.no_grad():
            maps = states_and_maps(lm, ids)[1]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{refusal} ({reason}): set it to 0.") from error
    if maps is None or len(maps) != lm.num_layers or any(m is None or m.shape[2:] != (4, 4) for m in maps):
        raise UserError(f"{refusal}: set it to 0.")
    if any(not torch.allclose(m.double().sum(-1), torch.ones(()).to(m).double(), atol=0.02) for m in maps):
        raise UserError(f"{refusal} (its weights do not sum to 1): set it to 0.")


def common_groups(*models: Target) -> int:
    """Into how many groups of heads all models' maps can be averaged: what divides their numbers of key-value heads."""
    heads = (getattr(m.config, "num_key_value_heads", None) or m.config.num_attention_heads for m in models)
    return math.gcd(*heads)


def grouped(maps: Tensor, groups: int) -> Tensor:
    """Means over consecutive heads: (B, H, S, S) → (B, G, S, S)."""
    return maps.unflatten(1, (groups, -1)).mean(2)
