"""Llama-shaped decoder layers written out for one request, one row and one head at a time.

D hidden size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LlamaConfig


def rotated(x: Tensor, position: int, theta: float) -> Tensor:
    """RoPE of one head's vector: the pairs (i, i + half) turn by position · theta^(−i / half)."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * theta ** (-i / half)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def rms_normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean() + eps).sqrt() * weight


class LoopedLayers:
    """Layers named `layers.{i}.…` in `weights`. Each keeps a list of the keys and values that its next row may read."""

    def __init__(self, weights: dict[str, Tensor], config: LlamaConfig) -> None:
        self.weights, self.theta, self.eps = weights, config.rope_parameters["rope_theta"], config.rms_norm_eps
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(config.num_hidden_layers)]

    def row(self, x: Tensor, position: int) -> Tensor:
        """Take in one more row (D,) and return what the last layer makes of it.

        A norm without weights is left out. A first layer with two of them is EAGLE-3's, and reads [emb; h] (2·D,).
        """
        for index, known in enumerate(self.rows):
            x = self._layer(x, index, known, position)
        return x

    def forget(self, count: int) -> None:
        """Drop the last `count` rows."""
        self.rows = [known[: len(known) - count] for known in self.rows]

    def _layer(self, x: Tensor, index: int, known: list[tuple[Tensor, Tensor]], position: int) -> Tensor:
        w = {k.removeprefix(f"layers.{index}."): t for k, t in self.weights.items() if f"layers.{index}." in k}
        norm = w.get("input_layernorm.weight")
        if "hidden_norm.weight" in w:
            embedded, x = x[: len(x) // 2], x[len(x) // 2 :]
            parts = (rms_normed(embedded, norm, self.eps), rms_normed(x, w["hidden_norm.weight"], self.eps))
            read = torch.cat(parts)
        else:
            read = x if norm is None else rms_normed(x, norm, self.eps)
        q, k, v = ((w[f"self_attn.{name}_proj.weight"] @ read).view(-1, self.head_dim) for name in ("q", "k", "v"))
        known.append((torch.stack([rotated(head, position, self.theta) for head in k]), v))
        out = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            query = rotated(q[head], position, self.theta)
            scores = torch.stack([query @ keys[group] for keys, _ in known]) / math.sqrt(self.head_dim)
            out.append(sum(p * values[group] for p, (_, values) in zip(scores.softmax(0), known, strict=True)))
        x = x + w["self_attn.o_proj.weight"] @ torch.cat(out)
        read = rms_normed(x, w["post_attention_layernorm.weight"], self.eps)
        gate, up = w["mlp.gate_proj.weight"] @ read, w["mlp.up_proj.weight"] @ read
        return x + w["mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)


def fused(weights: dict[str, Tensor], prefix: str, embedded: Tensor, state: Tensor, eps: float) -> Tensor:
    """eh_proj([norm(emb); norm(h)]) of one row (D,), from the tensors named `prefix`…"""
    read = [
        rms_normed(embedded, weights[f"{prefix}enorm.weight"], eps),
        rms_normed(state, weights[f"{prefix}hnorm.weight"], eps),
    ]
    return weights[f"{prefix}eh_proj.weight"] @ torch.cat(read)


def under(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors named `prefix`…, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
