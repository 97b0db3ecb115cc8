"""Decoder layers for blocks of rows that read one another, and a context that is given (DFlash, 2602.06036, §3).

A layer makes keys and values of the context by the projections that its own rows have, and computes nothing else there.
Every row of a block reads the context as far as it is allowed to, and all rows of its own block, those after it too.
Queries and keys are normalised head by head, as Qwen3 does it.

B batch, A blocks, Q rows of a block, W context rows, D hidden size, H heads, K key heads, G heads of a key head, E
their size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import rotate_half

from models.layers import MLP, DecoderStack, RMSNorm

Rotary = tuple[Tensor, Tensor]  # cosines and sines, each (B or 1, rows, E)
KeysValues = tuple[Tensor, Tensor]  # each (B, K, rows, E)


def attend(query: Tensor, context: KeysValues, own: KeysValues, allowed: Tensor | None) -> Tensor:
    """Softmax attention of queries (B, H, A, Q, E) over the context's W rows and the A·Q own ones: (B, H, A, Q, E).

    `allowed` (B or 1, A, W) bool says which context rows a block reads; None: all. Of the own rows, each reads those of
    its block.
    """
    keys, values = context
    count, shape = keys.shape[1], query.shape[2:4]
    own_keys, own_values = (rows.unflatten(2, shape)[:, :, None] for rows in own)  # (B, K, 1, A, Q, E)
    query = query.unflatten(1, (count, -1)) * query.shape[-1] ** -0.5  # (B, K, G, A, Q, E)
    layout = query.shape[2:5]
    before = (query.flatten(2, 4) @ keys.transpose(-1, -2)).unflatten(2, layout)  # (B, K, G, A, Q, W)
    if allowed is not None:
        before = before.masked_fill(~allowed[:, None, None, :, None], float("-inf"))
    inside = query @ own_keys.transpose(-1, -2)  # (B, K, G, A, Q, Q)
    weights = torch.cat([before, inside], dim=-1).softmax(-1)
    outer, inner = weights.split([keys.shape[2], shape[1]], dim=-1)
    out = (outer.flatten(2, 4) @ values).unflatten(2, layout) + inner @ own_values
    return out.flatten(1, 2)


class BlockAttention(nn.Module):
    """Grouped-query attention with RoPE and a norm on every head's queries and keys."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        heads, key_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        assert key_heads is not None and self.head_dim is not None  # `layer_config` sets both
        size, width, key_width = config.hidden_size, heads * self.head_dim, key_heads * self.head_dim
        self.q_proj = nn.Linear(size, width, bias=False)
        self.k_proj = nn.Linear(size, key_width, bias=False)
        self.v_proj = nn.Linear(size, key_width, bias=False)
        self.o_proj = nn.Linear(width, size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rotary: Rotary) -> KeysValues:
        """Of rows (B, S, D): each (B, K, S, E)."""
        keys = _turned(self.k_norm(self._heads(self.k_proj(x))), rotary)
        return keys, self._heads(self.v_proj(x))

    def forward(self, x: Tensor, rotary: Rotary, context: KeysValues, allowed: Tensor | None) -> Tensor:
        rows = x.flatten(1, 2)  # (B, A·Q, D)
        query = _turned(self.q_norm(self._heads(self.q_proj(rows))), rotary).unflatten(2, x.shape[1:3])
        out = attend(query, context, self.keys_values(rows, rotary), allowed)  # (B, H, A, Q, E)
        return self.o_proj(out.permute(0, 2, 3, 1, 4).flatten(3))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _turned(x: Tensor, rotary: Rotary) -> Tensor:
    """RoPE on (B, heads, rows, E)."""
    cos, sin = (part[:, None] for part in rotary)
    return x * cos + rotate_half(x) * sin


class BlockLayer(nn.Module):
    """x + attention(norm(x)), then + mlp(norm(·)); the context comes normalised."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: Rotary, context: KeysValues, allowed: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, context, allowed)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockStack(DecoderStack):
    """A few such layers and the RoPE they share; no norm behind the last."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))

    def context(self, states: Tensor, positions: Tensor) -> list[KeysValues]:
        """What every layer reads of the context's rows (B, S, D) at positions (B or 1, S)."""
        rotary = self.rotary(states, positions)
        return [layer.self_attn.keys_values(states, rotary) for layer in self.layers]  # type: ignore[union-attr, operator]

    def blocks(self, x: Tensor, positions: Tensor, context: list[KeysValues], allowed: Tensor | None) -> Tensor:
        """Rows (B, A, Q, D) at positions (B or 1, A, Q) → (B, A, Q, D); `allowed` as `attend` has it."""
        rotary = self.rotary(x, positions.flatten(1))
        for layer, rows in zip(self.layers, context, strict=True):
            x = self.recomputed(layer, x, rotary, rows, allowed)
        return x
