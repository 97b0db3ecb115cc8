"""A light drafter whose rows are mixed by linear attention (2006.16236).

y_t = φ(q_t)·S_t / φ(q_t)·z_t with S_t = Σ_{s ≤ t} φ(k_s) v_sᵀ, z_t = Σ_{s ≤ t} φ(k_s) and φ(x) = elu(x) + 1, head by
head. S and z are what is remembered, however long the text.

B batch, S rows, H heads, E their size, C rows of a part.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from models.layers import layer_config
from models.light import LightDrafter, MixingLayer
from models.target import Target
from models.vocab import DraftVocab

_PART = 64  # rows


class LinearAttentionLayer(MixingLayer):
    """Linear attention, and an MLP behind it."""

    def __init__(self, config: LlamaConfig, active: int) -> None:
        super().__init__(config, active)
        assert config.head_dim is not None  # `layer_config` sets it
        size, heads, self.head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.state_shape = (heads, self.head_dim, self.head_dim + 1)  # S, and z as its last column
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, heads * self.head_dim, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(heads * self.head_dim, size, bias=False)

    def mix(self, x: Tensor, state: Tensor, each: bool) -> tuple[Tensor, Tensor]:
        query, key, value = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        query, key = _phi(query), _phi(key)  # (B, S, H, E)
        value = nn.functional.pad(value, (0, 1), value=1.0)
        if each:
            states = state[:, None] + (key[..., :, None] * value[..., None, :]).cumsum(1)  # (B, S, H, E, E + 1)
            read = (query[..., None, :] @ states)[..., 0, :]  # (B, S, H, E + 1)
        else:
            read, last = _in_parts(query, key, value, state)
            states = last[:, None]
        return self.o_proj((read[..., :-1] / read[..., -1:]).flatten(2)), states

    def outputs(self) -> list[nn.Linear]:
        return [self.o_proj, self.mlp.down_proj]


def _phi(x: Tensor) -> Tensor:
    """elu(x) + 1, which does not round to 0 where x is far below it."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def _in_parts(query: Tensor, key: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """What the rows read (B, S, H, E + 1), and the state behind the last (B, H, E, E + 1).

    Within a part of C rows by pairs of them, and from before it by the state: no row's own state is made.
    """
    parts = []
    for start in range(0, query.shape[1], _PART):
        q, k, v = (rows[:, start : start + _PART].transpose(1, 2) for rows in (query, key, value))  # (B, H, C, ·)
        parts.append((q @ k.transpose(-1, -2)).tril() @ v + q @ state)
        state = state + k.transpose(-1, -2) @ v
    return torch.cat(parts, dim=2).transpose(1, 2), state


class LinearAttentionDrafter(LightDrafter):
    """`num_layers` layers; sizes left at None are the target's, `active` is `SparseMLP`'s."""

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        num_layers: int = 1,
        num_attention_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        active: int = 0,
    ) -> None:
        sizes = {"num_attention_heads": num_attention_heads, "head_dim": head_dim}
        if num_attention_heads is not None:
            sizes["num_key_value_heads"] = num_attention_heads  # they do not share keys here
        config = layer_config(target, num_layers, **sizes, intermediate_size=intermediate_size)
        super().__init__(target, vocab, [LinearAttentionLayer(config, active) for _ in range(num_layers)])
