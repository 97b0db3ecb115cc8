"""Cascaded multi-token prediction: light heads on one trunk state, which read the tokens drafted before them.

The trunk is one decoder layer over the target's state at x_t fused with the embedding of x_{t+1}. Head s asks the
trunk's row t, by an attention of a few numbers a token, which of x_{t+1} .. x_{t+1+s} matter, and tells x_{t+2+s}. So
drafting costs one pass of the trunk a round, and a few small products a token.

B batch, S rows, R committed rows, Q new nodes, P tokens read by a head, A attention size, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from typing_extensions import Unpack

from models.errors import UserError
from models.layers import (
    MLP,
    DecoderStack,
    LayerSizes,
    RMSNorm,
    UnrolledMemory,
    layer_config,
    moved_up,
    unrolled_mask,
)
from models.multi_token import InputFusion, MultiTokenDrafter, MultiTokenState
from models.target import Target
from models.tree_drafting import Expander
from models.types import TargetFeatures
from models.vocab import DraftVocab


class CascadeHead(nn.Module):
    """x + attention over P tokens, then + mlp(norm(·)).

    Keys know how far back from the last token they stand. One more key stands for nothing, so that a token can be left
    unread.
    """

    def __init__(self, config: LlamaConfig, step: int, attention_size: int, num_attention_heads: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm, self.token_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.q_proj = nn.Linear(size, attention_size, bias=False)
        self.k_proj = nn.Linear(size, attention_size, bias=False)
        self.v_proj = nn.Linear(size, attention_size, bias=False)
        self.o_proj = nn.Linear(attention_size, size, bias=False)
        nn.init.zeros_(self.o_proj.weight)  # at first the trunk's own state
        self.distance = nn.Parameter(torch.zeros(step + 1, attention_size))
        self.nothing = nn.Parameter(torch.zeros(attention_size))
        self.post_norm = RMSNorm(size, eps)
        self.mlp = MLP(config)
        self._split = (num_attention_heads, attention_size // num_attention_heads)

    def tokens(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (..., A) of embeddings (..., D)."""
        read = self.token_norm(embedded)
        return self.k_proj(read), self.v_proj(read)

    def forward(self, trunk: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Trunk states (B, S, D), and keys and values (B, S, P, A) of the tokens in order → (B, S, D)."""
        query = self.q_proj(self.input_norm(trunk)).unflatten(-1, self._split)  # (B, S, heads, ·)
        nothing = self.nothing.expand_as(keys[..., :1, :])
        keys = torch.cat([keys + self.distance.flip(0), nothing], dim=-2).unflatten(-1, self._split)
        scores = torch.einsum("bshd,bsphd->bshp", query, keys) / self._split[1] ** 0.5
        read = torch.einsum("bshp,bsphd->bshd", scores.softmax(-1)[..., :-1], values.unflatten(-1, self._split))
        x = trunk + self.o_proj(read.flatten(-2))
        return x + self.mlp(self.post_norm(x))


class CascadedMTP(MultiTokenDrafter):
    """A trunk of `num_layers` decoder layers and `num_heads` heads. Sizes left at None are the target's.

    A head's attention has `attention_heads` heads and `attention_size` numbers, its MLP `head_intermediate_size`.
    """

    packs = True

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        num_heads: int = 4,
        num_layers: int = 1,
        attention_size: int = 64,
        attention_heads: int = 4,
        head_intermediate_size: int | None = None,
        capture_layers: Sequence[int] | None = None,
        **sizes: Unpack[LayerSizes],
    ) -> None:
        config = layer_config(target, num_layers, **sizes)
        super().__init__(target, vocab, config, capture_layers)
        if num_heads < 1:
            raise UserError(f"drafter.model.num_heads is {num_heads}: it must be at least 1.")
        if attention_heads < 1 or attention_size % attention_heads:
            raise UserError(
                f"drafter.model.attention_size is {attention_size}, which {attention_heads} attention_heads cannot "
                "share evenly."
            )
        self.max_depth = num_heads
        self.fusion = InputFusion(config)
        self.stack = DecoderStack(config)
        light = layer_config(target, 1, intermediate_size=head_intermediate_size or config.hidden_size)
        self.heads = nn.ModuleList(CascadeHead(light, s, attention_size, attention_heads) for s in range(num_heads))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.settle(target)

    def trunk(self, features: TargetFeatures) -> Tensor:
        """What all heads read: (B, S, D)."""
        mask = unrolled_mask(features.token_ids.shape[1], 0, features.token_ids.device, features.segments)
        return self.stack(self._fused(features), features.positions, UnrolledMemory(), mask)

    def ahead(self, trunk: Tensor, features: TargetFeatures, step: int) -> Tensor:
        """The states (B, S, D) of head `step`, the last one for all that come after it.

        The last `step` rows have not all the tokens that the head reads, and repeat the last one.
        """
        head = self._head(step)
        text = features.next_token_ids
        windows: list[tuple[Tensor, Tensor]] = []
        keys, values = head.tokens(self.embed(text))
        for _ in range(len(head.distance)):
            windows.append((keys, values))
            keys, values = (moved_up(x) for x in (keys, values))
        return self.norm(head(trunk, *(torch.stack(side, dim=2) for side in zip(*windows, strict=True))))

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        """Yield the states (B, S, D) of head 0, 1, ..: row t of head s is about x_{t+2+s}."""
        trunk = self.trunk(features)
        for step in range(num_steps):
            yield self.ahead(trunk, features, step)

    def new_state(self, batch_size: int, max_len: int) -> MultiTokenState:
        """Memory for requests of at most `max_len` rows."""
        return self.start_state(self.config.num_hidden_layers, 1, batch_size, max_len)

    def expander(self, state: MultiTokenState, committed: TargetFeatures) -> Expander:
        """Take in the confirmed rows (B, R) with the trunk; the heads then say what follows node by node."""
        positions, mask = state.open(committed.token_ids.shape[1])
        state.close(committed.lengths, [self.stack(self._fused(committed), positions, state.cache, mask)])
        row = (committed.lengths.to(positions.device) - 1).clamp(min=0)
        return _CascadedExpander(self, state, committed.next_token_ids.gather(1, row[:, None]))

    def _head(self, step: int) -> CascadeHead:
        found: CascadeHead = self.heads[min(step, len(self.heads) - 1)]  # type: ignore[assignment]
        return found

    def _fused(self, features: TargetFeatures) -> Tensor:
        return self.fusion(self.embed(features.next_token_ids), self.read(features.hidden))


class _CascadedExpander:
    """States behind the nodes of a tree, each told from the trunk's last row and the tokens on the node's path."""

    def __init__(self, drafter: CascadedMTP, state: MultiTokenState, token_ids: Tensor) -> None:
        self._drafter, self._trunk = drafter, state.last  # (B, 1, D)
        self._paths = token_ids[:, None]  # (B, Q, P)
        self._level = 0
        self.room = drafter.room(len(token_ids))

    def root(self) -> Tensor:
        return self._told()

    def below(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        above = self._paths.gather(1, parents[..., None].expand(-1, -1, self._paths.shape[-1]))
        self._paths = torch.cat([above, token_ids[..., None]], dim=-1)
        self._level += 1
        return self._told()

    def _told(self) -> Tensor:
        head = self._drafter._head(self._level)
        keys, values = head.tokens(self._drafter.embed(self._paths[..., : len(head.distance)]))
        trunk = self._trunk.expand(-1, self._paths.shape[1], -1)
        return self._drafter.logits(self._drafter.norm(head(trunk, keys, values)))
