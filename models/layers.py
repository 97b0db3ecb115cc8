"""Llama-shaped decoder layers for drafters.

The layer reads and writes keys through a memory with one method, `update(keys, values, layer) -> (keys, values)`. In
decoding the memory is the `KVCache`; in training it is `UnrolledMemory`. So both compute the same thing by the same
code.

B batch, Q query rows, W key rows, D hidden size, H heads.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from typing_extensions import TypedDict

from models import packing
from models.errors import UserError
from models.recompute import Recomputing
from models.target.target import Target


class Memory(Protocol):
    """Where a layer's keys and values go, and from where all that its queries may read comes back."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Store (B, H, Q, ·) and return everything stored for the layer: (B, H, W, ·)."""


class UnrolledMemory:
    """Keys of training-time steps 0, 1, ... side by side: after step s, (1 + s)·S rows."""

    def __init__(self) -> None:
        self._steps: dict[int, list[Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append this step's rows and return those of all steps."""
        steps = self.steps(layer_idx)
        steps += [key_states, value_states]
        if len(steps) == 2:
            return key_states, value_states
        return torch.cat(steps[::2], dim=2), torch.cat(steps[1::2], dim=2)

    def steps(self, layer_idx: int) -> list[Tensor]:
        """A layer's keys and values of step 0, 1, ..., in turn; what is appended is remembered."""
        return self._steps.setdefault(layer_idx, [])


def unrolled_mask(num_rows: int, step: int, device: torch.device, segments: Tensor | None = None) -> Tensor | None:
    """What row t reads at training-time step s: step-0 keys of rows ≤ t, and its own row's keys of steps 1 to s.

    That is what decoding sees when row t is the last committed one and s tokens were drafted behind it
    (EAGLE-3, 2503.01840, training-time test). With `segments` (B, S), rows ≤ t of its own text. Returns
    (B or 1, 1, S, (1 + s)·S) bool, or None for the causal step 0 of rows that hold one text.
    """
    if step == 0 and segments is None:
        return None
    causal = torch.ones(1, 1, num_rows, num_rows, dtype=torch.bool, device=device).tril()
    read = causal if segments is None else packing.attention_mask(segments)
    own = torch.eye(num_rows, dtype=torch.bool, device=device).expand_as(read)
    return torch.cat([read] + [own] * step, dim=-1)


class LayerSizes(TypedDict, total=False):
    """Sizes of decoder layers that any drafter lets its yaml choose; None, and those left out, are the target's."""

    intermediate_size: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None


class LayerShape(LayerSizes, total=False):
    """With these, layers are those of a checkpoint that was trained elsewhere, with another RoPE or norm."""

    rope_parameters: dict[str, Any] | None
    rms_norm_eps: float | None


def layer_config(target: Target, num_layers: int, **overrides: Any) -> LlamaConfig:
    """A Llama configuration for drafter layers shaped like the target's own, but for `overrides` that are not None.

    RoPE follows the target where it has one for full attention, so that exports can name the target's. It turns whole
    heads: where the target turns a part of each, LongRoPE's factors do not fit and are left out. Raises UserError for
    sizes below 1, or that do not go together, and TypeError for an override of something else.
    """
    own_rope = overrides.pop("rope_parameters", None)
    for name, size in {"num_layers": num_layers, **overrides}.items():
        if size is not None and size <= 0:
            raise UserError(f"drafter.model.{name} is {size}: it must be at least 1.")
    c = target.config
    rope = dict(own_rope or getattr(c, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    rope = dict(rope.get("full_attention", rope))  # Gemma 3 keeps one per kind of attention
    rope.pop("partial_rotary_factor", None)
    heads = overrides.get("num_attention_heads") or c.num_attention_heads
    shape = {
        "hidden_size": c.hidden_size,
        "intermediate_size": getattr(c, "intermediate_size", None) or 4 * c.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": min(heads, getattr(c, "num_key_value_heads", None) or heads),
        "head_dim": getattr(c, "head_dim", None) or c.hidden_size // heads,
        "rms_norm_eps": getattr(c, "rms_norm_eps", None) or 1e-5,
    }
    if unknown := overrides.keys() - shape.keys():
        raise TypeError(f"drafter layers have no {', '.join(unknown)}")
    shape |= {key: value for key, value in overrides.items() if value is not None}
    if rope["rope_type"] == "longrope" and len(rope["short_factor"]) != shape["head_dim"] // 2:
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    if heads % shape["num_key_value_heads"]:
        raise UserError(
            f"The drafter has {heads} attention heads, which its {shape['num_key_value_heads']} key-value heads cannot "
            "share evenly: set drafter.model.num_key_value_heads."
        )
    try:
        return LlamaConfig(
            vocab_size=target.vocab_size,
            num_hidden_layers=num_layers,
            max_position_embeddings=getattr(c, "max_position_embeddings", None) or target.max_positions,
            rope_parameters=rope,
            tie_word_embeddings=False,
            **shape,
        )
    except StrictDataclassError as error:
        raise UserError(f"The drafter's layers cannot be built: {str(error).splitlines()[-1].strip()}") from error


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, in float32 at least (1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with RoPE; `input_size` is the width that q, k and v read."""

    def __init__(self, config: LlamaConfig, layer_idx: int, input_size: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        heads, key_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        assert key_heads is not None and self.head_dim is not None  # `layer_config` sets both
        self.groups = heads // key_heads
        width, key_width = heads * self.head_dim, key_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=False)
        self.k_proj = nn.Linear(input_size, key_width, bias=False)
        self.v_proj = nn.Linear(input_size, key_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], memory: Memory, mask: Tensor | None) -> Tensor:
        batch_size, num_rows, _ = x.shape
        split = (batch_size, num_rows, -1, self.head_dim)
        query, key, value = (p(x).view(split).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        key, value = memory.update(key, value, self.layer_idx)
        out = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None and num_rows > 1,
            enable_gqa=self.groups > 1,
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch_size, num_rows, -1))


class MLP(nn.Module):
    """SwiGLU (2002.05202): down(silu(gate(x)) · up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then + mlp(norm(·)); without `input_norm` the first norm is left out, as EAGLE-1 does."""

    def __init__(self, config: LlamaConfig, layer_idx: int, *, input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps) if input_norm else nn.Identity()
        self.self_attn = Attention(config, layer_idx, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], memory: Memory, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, memory, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DecoderStack(Recomputing):
    """A few decoder layers and the RoPE they share; no norm behind the last.

    It recomputes with a memory that tells its `steps`, as `UnrolledMemory` does.
    """

    def __init__(self, config: LlamaConfig, *, first_input_norm: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, input_norm=first_input_norm or index > 0)
            for index in range(config.num_hidden_layers)
        )
        self._config = config
        self._rotary: tuple[LlamaRotaryEmbedding, ...] = ()  # no submodule: a change of dtype must not round its angles

    def rotary(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B or 1, Q, D of a head) of the positions, in x's dtype but from float32 angles."""
        if not self._rotary or self._rotary[0].inv_freq.device != x.device:
            self._rotary = (LlamaRotaryEmbedding(self._config).to(x.device),)
        cos, sin = self._rotary[0](x, positions)
        return cos, sin

    def forward(self, x: Tensor, positions: Tensor, memory: Memory, mask: Tensor | None) -> Tensor:
        """x (B, Q, D), positions (B or 1, Q), mask (B or 1, 1, Q, W) or None for causal → (B, Q, D)."""
        rotary = self.rotary(x, positions)
        twice = self.recompute and hasattr(memory, "steps")
        for layer in self.layers:
            x = self._remembering(layer, x, rotary, memory, mask) if twice else layer(x, rotary, memory, mask)
        return x

    def _remembering(
        self, layer: Any, x: Tensor, rotary: tuple[Tensor, Tensor], memory: Any, mask: Tensor | None
    ) -> Tensor:
        """layer(x, ...), which may be computed twice, but whose keys and values are remembered once."""
        index: int = layer.self_attn.layer_idx

        def run(x: Tensor, *before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            own = UnrolledMemory()
            own.steps(index).extend(before)
            out = layer(x, rotary, own, mask)
            keys, values = own.steps(index)[-2:]
            return out, keys, values

        steps: list[Tensor] = memory.steps(index)
        x, keys, values = self.recomputed(run, x, *steps)
        steps += [keys, values]
        return x


def moved_up(rows: Tensor) -> Tensor:
    """Row t gets what row t + 1 has, and the last row keeps its own: (B, S, ...) → (B, S, ...)."""
    return torch.cat([rows[:, 1:], rows[:, -1:]], dim=1)
