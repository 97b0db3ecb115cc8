"""Parallel multi-token prediction: heads of a decoder layer each, on one trunk state (2404.19737).

The trunk's row t is the target's state at x_t, fused with the embedding of x_{t+1}, which is known when drafting
begins. Head s makes of it a state from which the target's head tells the law of x_{t+2+s}, whatever was drafted before.
So all of a chain's laws come from one pass, and all children of a level have the same law.

B batch, S rows, R committed rows, Q new nodes, K heads, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from transformers import LlamaConfig
from typing_extensions import Unpack

from models.errors import UserError
from models.layers import DecoderStack, LayerSizes, Memory, RMSNorm, UnrolledMemory, layer_config, unrolled_mask
from models.multi_token import InputFusion, LayersFrom, MultiTokenDrafter, MultiTokenState
from models.target import Target
from models.tree_drafting import Expander
from models.types import TargetFeatures
from models.vocab import DraftVocab


class ParallelHead(nn.Module):
    """Decoder layers over the trunk's rows and a norm. `index` is its place among the heads of a shared memory."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.stack = DecoderStack(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._first_layer = index * config.num_hidden_layers

    def forward(self, trunk: Tensor, positions: Tensor, memory: Memory, mask: Tensor | None) -> Tensor:
        return self.norm(self.stack(trunk, positions, LayersFrom(memory, self._first_layer), mask))


class ParallelMTP(MultiTokenDrafter):
    """`num_heads` heads of `num_layers` decoder layers each. Sizes left at None are the target's."""

    packs = True

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        num_heads: int = 4,
        num_layers: int = 1,
        capture_layers: Sequence[int] | None = None,
        **sizes: Unpack[LayerSizes],
    ) -> None:
        config = layer_config(target, num_layers, **sizes)
        super().__init__(target, vocab, config, capture_layers)
        if num_heads < 1:
            raise UserError(f"drafter.model.num_heads is {num_heads}: it must be at least 1.")
        self.max_depth = num_heads
        self.fusion = InputFusion(config)
        self.heads = nn.ModuleList(ParallelHead(config, index) for index in range(num_heads))
        self.settle(target)

    def trunk(self, features: TargetFeatures) -> Tensor:
        """What all heads read: (B, S, D)."""
        return self.fusion(self.embed(features.next_token_ids), self.read(features.hidden))

    def ahead(self, trunk: Tensor, features: TargetFeatures, step: int) -> Tensor:
        """The states (B, S, D) of head `step`, the last one for all that come after it."""
        mask = unrolled_mask(trunk.shape[1], 0, trunk.device, features.segments)
        return self.heads[min(step, len(self.heads) - 1)](trunk, features.positions, UnrolledMemory(), mask)

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        """Yield the states (B, S, D) of head 0, 1, ..: row t of head s is about x_{t+2+s}."""
        trunk = self.trunk(features)
        for step in range(num_steps):
            yield self.ahead(trunk, features, step)

    def new_state(self, batch_size: int, max_len: int) -> MultiTokenState:
        """Memory for requests of at most `max_len` rows."""
        num_heads = len(self.heads)
        return self.start_state(num_heads * self.config.num_hidden_layers, num_heads, batch_size, max_len)

    def expander(self, state: MultiTokenState, committed: TargetFeatures) -> Expander:
        """Take in the confirmed rows (B, R) with all heads; nothing more is computed but logits."""
        positions, mask = state.open(committed.token_ids.shape[1])
        trunk = self.trunk(committed)
        state.close(committed.lengths, [head(trunk, positions, state.cache, mask) for head in self.heads])
        return _ParallelExpander(self, state)


class _ParallelExpander:
    """Every node of a level is followed by the same law, that of the level's head."""

    def __init__(self, drafter: ParallelMTP, state: MultiTokenState) -> None:
        self._drafter, self._last, self._level = drafter, state.last, 0
        self.room = drafter.room(len(state.last))

    def root(self) -> Tensor:
        return self._drafter.logits(self._last[:, :1])

    def below(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        self._level = min(self._level + 1, self._last.shape[1] - 1)
        logits = self._drafter.logits(self._last[:, self._level : self._level + 1])
        return logits.expand(-1, token_ids.shape[1], -1)
