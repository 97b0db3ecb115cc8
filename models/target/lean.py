"""The decoder of a Llama-shaped target with few, large operations per layer, for inference.

Hugging Face's forward pass makes some sixty small calls in every layer. At a few rows they take as long as the products
do. Here a layer is four products (q, k and v in one, gate and up in one) and about fifteen other calls. The weights
are the model's own: fused ones take the place of the parts, which become views of them, so nothing is held twice.

B batch, Q new rows, W key slots, D hidden size, H query heads in Hk groups of G, E size of a head.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from models.cache import KVCache

_NORMS = {"input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}


class LeanDecoder:
    """Embedding, layers and final norm of `decoder`; `of` says which decoders it computes.

    Norms are computed in float32 at least, as the model's own are, but rounded once instead of twice.
    """

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._layers = [_LeanLayer(layer) for layer in decoder.layers]
        self._norm = _RmsNorm(decoder.norm)

    @classmethod
    def of(cls, decoder: Any) -> LeanDecoder | None:
        """The lean form of a decoder, or None where its parts are not those of a Llama, Qwen 2, Qwen 3 or Mistral.

        What the parts compute is not looked at: `Target.check` compares the results.
        """
        return cls(decoder) if llama_shaped(decoder) else None

    @property
    def linears(self) -> list[nn.Linear]:
        """The products of all layers."""
        return [linear for layer in self._layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]

    def __call__(
        self,
        token_ids: Tensor,
        *,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        cache: KVCache | None,
        wanted: Collection[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Final states (B, Q, D), and those entering the layers `wanted`. Arguments as `Target.forward` takes them."""
        x, captured = self._run(self._layers, token_ids, position_ids, attention_mask, cache, wanted)
        return self._norm(x), captured

    def entering(
        self, token_ids: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None, wanted: Collection[int]
    ) -> dict[int, Tensor]:
        """States of whole texts (B, S) that enter the layers `wanted`; the deepest of these is the first not run."""
        deepest = max(wanted)
        x, captured = self._run(self._layers[:deepest], token_ids, position_ids, attention_mask, None, wanted)
        return {**captured, deepest: x}

    def _run(
        self,
        layers: list[_LeanLayer],
        token_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        cache: KVCache | None,
        wanted: Collection[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """What the last of the first `layers` gives (B, Q, D), and what enters those of them that are `wanted`."""
        x = self._decoder.embed_tokens(token_ids)
        if position_ids is None:
            position_ids = torch.arange(token_ids.shape[1], device=x.device)[None]
        cos, signed_sin = self._rotary(x, position_ids)
        mask = None if attention_mask is None else self._grouped(attention_mask, x.dtype)
        captured: dict[int, Tensor] = {}
        for index, layer in enumerate(layers):
            if index in wanted:
                captured[index] = x
            x = layer(x, cos, signed_sin, mask, cache, index)
        return x, captured

    def _grouped(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """The mask (B, 1, Q, W) as one to be added, with a row for each of the G heads that share a key."""
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))
        return mask.repeat(1, 1, self._layers[0].group, 1)

    def _rotary(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (B or 1, Q, 1, E); the first half of sin is negative: x·cos + swapped(x)·sin turns x."""
        cos, sin = self._decoder.rotary_emb(x, position_ids)
        half = sin.shape[-1] // 2
        return cos.unsqueeze(2), torch.cat([-sin[..., :half], sin[..., half:]], dim=-1).unsqueeze(2)


def llama_shaped(decoder: nn.Module) -> bool:
    """Whether a decoder's parts have the names of those of a Llama, Qwen 2, Qwen 3 or Mistral."""
    wanted = {"embed_tokens", "layers", "norm", "rotary_emb"}
    children = dict(decoder.named_children())
    return set(children) == wanted and all(map(_fits, children["layers"].children()))


class _LeanLayer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim: int = attention.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_key_heads = attention.k_proj.out_features // self.head_dim
        self.group = self.num_heads // self.num_key_heads
        self.scaling: float = attention.scaling
        self.head_norms = [_RmsNorm(getattr(attention, n)) for n in ("q_norm", "k_norm") if hasattr(attention, n)]
        self.input_norm, self.mlp_norm = _RmsNorm(layer.input_layernorm), _RmsNorm(layer.post_attention_layernorm)
        self.activation = mlp.act_fn
        self.qkv = _fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = _fuse([attention.o_proj])
        self.gate_up = _fuse([mlp.gate_proj, mlp.up_proj])
        self.down = _fuse([mlp.down_proj])

    def __call__(
        self, x: Tensor, cos: Tensor, signed_sin: Tensor, mask: Tensor | None, cache: KVCache | None, index: int
    ) -> Tensor:
        x = x + self.out(self._attend(self.qkv(self.input_norm(x)), cos, signed_sin, mask, cache, index))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(self.activation(gate) * up)

    def _attend(
        self, qkv: Tensor, cos: Tensor, signed_sin: Tensor, mask: Tensor | None, cache: KVCache | None, index: int
    ) -> Tensor:
        batch_size, num_rows, _ = qkv.shape
        heads, key_heads, size = self.num_heads, self.num_key_heads, self.head_dim
        qkv = qkv.view(batch_size, num_rows, heads + 2 * key_heads, size)
        turned = qkv[:, :, : heads + key_heads]
        if self.head_norms:
            parts = turned.split([heads, key_heads], dim=2)
            turned = torch.cat([norm(part) for part, norm in zip(parts, self.head_norms, strict=True)], dim=2)
        halves = turned.unflatten(-1, (2, size // 2)).flip(-2).flatten(-2)
        turned = torch.addcmul(turned * cos, halves, signed_sin)
        query = turned[:, :, :heads].transpose(1, 2)  # (B, H, Q, E)
        key, value = turned[:, :, heads:].transpose(1, 2), qkv[:, :, heads + key_heads :].transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, index)
        if mask is None and num_rows > 1:
            out = _attention(query, key, value, scale=self.scaling, is_causal=True, enable_gqa=self.group > 1)
        else:  # the heads that share a key become rows of one head, so that no key is copied
            query = query.reshape(batch_size, key_heads, -1, size)
            out = _attention(query, key, value, attn_mask=mask, scale=self.scaling)
            out = out.reshape(batch_size, heads, num_rows, size)
        return out.transpose(1, 2).reshape(batch_size, num_rows, -1)


_attention = nn.functional.scaled_dot_product_attention


class _RmsNorm:
    """x / sqrt(mean(x²) + ε) · weight over the last dimension, in the fewest calls."""

    def __init__(self, norm: Any) -> None:
        self.weight = norm.weight.data
        self._share = 1 / self.weight.numel()
        self._dtype = torch.promote_types(self.weight.dtype, torch.float32)
        self._epsilon = torch.tensor(norm.variance_epsilon, device=self.weight.device, dtype=self._dtype)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(self._dtype)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self._epsilon, length, length, value=self._share).rsqrt_()
        return (wide * scale * self.weight).to(x.dtype)


def _fuse(parts: list[nn.Linear]) -> nn.Linear:
    """One linear layer that gives the outputs of all parts side by side; the parts' weights become views of its own."""
    weight = torch.cat([part.weight.data for part in parts]) if len(parts) > 1 else parts[0].weight.data
    fused = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    fused.weight = nn.Parameter(weight, requires_grad=False)
    if parts[0].bias is not None:
        fused.bias = nn.Parameter(torch.cat([part.bias.data for part in parts]), requires_grad=False)
    for part, rows in zip(parts, weight.split([part.out_features for part in parts]), strict=True):
        part.weight.data = rows
    return fused


def _fits(layer: Any) -> bool:
    """Whether a layer consists of just the parts that `_LeanLayer` computes."""
    children = dict(layer.named_children())
    if set(children) != _NORMS | {"self_attn", "mlp"}:
        return False
    attention, mlp = dict(layer.self_attn.named_children()), dict(layer.mlp.named_children())
    norms = [children[name] for name in _NORMS] + [attention[name] for name in _HEAD_NORMS & set(attention)]
    linears = [attention.get(name) for name in _PROJECTIONS]
    linears += [mlp.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    return (
        set(attention) - _HEAD_NORMS == _PROJECTIONS
        and set(mlp) == {"gate_proj", "up_proj", "down_proj", "act_fn"}
        and all(type(linear) is nn.Linear for linear in linears)
        and all(isinstance(getattr(norm, "variance_epsilon", None), float) for norm in norms)
        and all([name for name, _ in norm.named_parameters()] == ["weight"] for norm in norms)
        and all(hasattr(layer.self_attn, name) for name in ("head_dim", "scaling"))
        and not list(layer.self_attn.parameters(recurse=False))  # such as attention sinks
        and (layer.self_attn.q_proj.bias is None) == (layer.self_attn.v_proj.bias is None)
    )
