"""EAGLE-3: reads a low, a middle and a high state of the target, and learns the laws alone (2503.01840).

Row t condenses the captured states at x_t to h_t = fc([low; middle; high]), and reads [norm(emb(x_{t+1})); norm(h_t)]
with queries, keys and values twice as wide; the residual stream is h. Its output, through a norm and a head of the
drafter's own, is a law of x_{t+2} over the draft vocabulary, and stands in for h_{t+1} where the text ends. Nothing is
regressed. Names and shapes are those of published checkpoints, in front of which stands `stack.`.

B batch, S rows, L captured layers, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from typing_extensions import Unpack

from models.errors import UserError
from models.layers import MLP, Attention, DecoderStack, LayerShape, Memory, RMSNorm, layer_config
from models.state_feedback import FeedbackDrafter
from models.target import Target
from models.vocab import DraftVocab

_SHARPNESS = 8.0  # a row's mean score for itself at the start, over sqrt(head_dim): the other rows' are some 0


def published_layers(num_layers: int) -> tuple[int, ...]:
    """The states that enter layers 2, n // 2 and n − 3; for fewer than 7 layers, 1, n // 2 and n − 1, each once."""
    if num_layers < 7:
        return tuple(sorted({min(1, num_layers), num_layers // 2, num_layers - 1}))
    return (2, num_layers // 2, num_layers - 3)


class FusedLayer(nn.Module):
    """A decoder layer that reads [norm(emb); norm(h)] and adds to h; x is [emb; h] side by side.

    With `norm_before_residual` it adds to norm(h).
    """

    def __init__(self, config: LlamaConfig, *, norm_before_residual: bool = False) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config, 0, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config)

    def read(self, x: Tensor) -> Tensor:
        """What queries, keys and values are made of: [norm(emb); norm(h)]."""
        embedded, hidden = x.chunk(2, dim=-1)
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], memory: Memory, mask: Tensor | None) -> Tensor:
        read = self.read(x)
        residual = (read if self.norm_before_residual else x).chunk(2, dim=-1)[1]
        hidden = residual + self.self_attn(read, rotary, memory, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Drafter(FeedbackDrafter):
    """`num_layers` decoder layers, the first of which fuses states and tokens, a norm and a head of Vd rows.

    Sizes left at None are the target's, and `capture_layers` at None `published_layers`. `head` is what the head starts
    from: the target's rows, or random ones, as published. `fc_norm` normalises each captured state by itself, and
    `norm_output` feeds outputs back through the final norm; both are EAGLE-3.1's. `norm_before_residual`,
    `rope_parameters` and `rms_norm_eps` are for checkpoints that were trained elsewhere. Raises UserError for unknown
    values.
    """

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        num_layers: int = 1,
        capture_layers: list[int] | None = None,
        head: str = "target",
        fc_norm: bool = False,
        norm_output: bool = False,
        norm_before_residual: bool = False,
        **sizes: Unpack[LayerShape],
    ) -> None:
        super().__init__(target, vocab)
        if head not in ("target", "random"):
            raise UserError(f"drafter.model.head is {head!r}: choose target or random.")
        self.config = layer_config(target, num_layers, **sizes)
        chosen = published_layers(target.num_layers) if capture_layers is None else capture_layers
        self.capture_layers = tuple(map(target.layer_index, chosen))
        if not self.capture_layers:
            raise UserError("drafter.model.capture_layers is empty: name at least one of the target's states.")
        size, eps = target.hidden_size, self.config.rms_norm_eps
        self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in self.capture_layers) if fc_norm else None
        self.fc = nn.Linear(len(self.capture_layers) * size, size, bias=False)
        self.stack = DecoderStack(self.config)
        self.stack.layers[0] = FusedLayer(self.config, norm_before_residual=norm_before_residual)
        self.norm = RMSNorm(size, eps)
        self.norm_output = norm_output
        self.lm_head = nn.Linear(size, vocab.size, bias=False)
        self._settle(target)
        if head == "target":
            rows = target.head.rows(vocab.token_ids)
            with torch.no_grad():
                self.lm_head.weight.copy_(rows.scale * rows.weight)

    def condense(self, hidden: Tensor) -> Tensor:
        """fc of the captured states (B, S, L·D), each normalised before where `fc_norm` says so: (B, S, D)."""
        return self.fc(self.captured(hidden))

    def captured(self, hidden: Tensor) -> Tensor:
        """What fc reads of the captured states (B, S, L·D): the same, or each normalised."""
        hidden = hidden.to(self.fc.weight.dtype)
        if self.fc_norm is None:
            return hidden
        parts = hidden.chunk(len(self.fc_norm), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)

    def fuse(self, token_ids: Tensor, past: Tensor) -> Tensor:
        """Tokens (B, S) beside the states before them (B, S, D): (B, S, 2·D)."""
        return self.window(token_ids, past)

    @torch.no_grad()
    def start_states(self, weight: Tensor, scale: Tensor) -> None:
        """Begin with h = `weight` (D, L·D) · captured / `scale` (D,), which the final norm multiplies by again."""
        self.fc.weight.copy_(weight / scale[:, None])
        self.norm.weight.copy_(scale)

    @torch.no_grad()
    def start_layers(self, weight: Tensor, read: Tensor) -> None:
        """Begin by adding to h nearly `weight` (D, 2·D) · what the row reads; `read` (2·D, 2·D) are its second moments.

        The first query head of each key head attends to its own row: its queries, and the keys, start as one random
        projection of what is read, made white. Values are the linear map, or its largest principal components where
        they are fewer than D. The other query heads are left as they were made, since heads that start alike stay
        alike, and nothing else adds anything yet.
        """
        size, attention = len(weight), self.stack.layers[0].self_attn
        assert isinstance(attention, Attention) and attention.head_dim is not None
        width, groups = attention.k_proj.weight.shape[0], attention.groups
        components = torch.linalg.eigh(weight @ read @ weight.t()).eigenvectors.flip(1)  # (D, D), the largest first
        kept = nn.functional.pad(components, (0, max(0, width - size)))[:, :width]  # (D, keys' width)
        values, vectors = torch.linalg.eigh(read)
        white = vectors @ torch.diag((values + 1e-3 * values.mean()).rsqrt()) @ vectors.t()
        generator = torch.Generator().manual_seed(0)
        random = torch.randn(width, 2 * size, generator=generator, dtype=torch.float64).to(read) / (2 * size) ** 0.5
        keys = _SHARPNESS**0.5 * random @ white
        for layer in self.stack.layers:
            layer.self_attn.o_proj.weight.zero_()  # type: ignore[union-attr, operator]
            layer.mlp.down_proj.weight.zero_()  # type: ignore[union-attr, operator]
        heads = torch.arange(groups * width).view(-1, groups, attention.head_dim)  # rows of queries by key head
        first = heads[:, 0].flatten()
        attention.k_proj.weight.copy_(keys)
        attention.v_proj.weight.copy_(kept.t() @ weight)
        attention.q_proj.weight[first] = keys.to(attention.q_proj.weight)
        attention.o_proj.weight[:, first] = kept.to(attention.o_proj.weight)

    def feed_back(self, hidden: Tensor) -> Tensor:
        """The output itself, as published, or what the head reads of it."""
        return self.norm(hidden) if self.norm_output else hidden

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Draft logits (..., Vd) of outputs (..., D), by the drafter's own norm and head."""
        return self.lm_head(self.norm(hidden.to(self.norm.weight.dtype)))

    def logit_parameters(self, step: int = 0) -> list[nn.Parameter]:
        """The final norm and the head."""
        return [*self.norm.parameters(), *self.lm_head.parameters()]
