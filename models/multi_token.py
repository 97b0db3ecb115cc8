"""What drafters share that tell several tokens ahead from one state of the target (multi-token prediction).

They read the target's state at x_t and the token x_{t+1}, and tell the laws of x_{t+2}, x_{t+3}, .. by the target's own
head. A subclass says what follows the confirmed rows node by node (`expander`); chains and trees are then
drafted as any drafter's are.

B batch, S rows, R committed rows, N drafted tokens, L captured layers, K blocks or heads, D hidden size, V target and
Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from models import tree
from models.cache import KVCache
from models.law_drafting import DraftsTrees
from models.layers import MLP, Attention, Memory, RMSNorm, UnrolledMemory
from models.target import Target
from models.tree_drafting import Expander
from models.types import TargetFeatures
from models.vocab import DraftVocab


class InputFusion(nn.Module):
    """eh_proj([norm(emb); norm(h)]), under DeepSeek's names and in the order of its checkpoints (2412.19437, §2.2).

    At first it hands the state on, with little of the token in it.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():
            self.eh_proj.weight[:, size:].copy_(torch.eye(size))

    def inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What the projection reads: (..., 2·D)."""
        return torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self.eh_proj(self.inputs(embedded, hidden))


class ScaleFusion(nn.Linear):
    """Several captured layers (..., L·D) to one state (..., D); at first the last of them alone."""

    def __init__(self, num_layers: int, size: int) -> None:
        super().__init__(num_layers * size, size, bias=False)
        with torch.no_grad():
            self.weight.zero_()[:, -size:].copy_(torch.eye(size))


class LayersFrom:
    """The layers of a memory from `first` on, for a block that counts its own from 0."""

    def __init__(self, memory: Memory, first: int) -> None:
        self._memory, self._first = memory, first
        if isinstance(memory, UnrolledMemory):
            self.steps = lambda layer_idx: memory.steps(first + layer_idx)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """As the memory's own."""
        return self._memory.update(key_states, value_states, self._first + layer_idx)


class MultiTokenState:
    """Keys of the committed rows, and what the blocks made of the last one: (B, K, D)."""

    def __init__(self, cache: KVCache, last: Tensor) -> None:
        self.cache, self.last = cache, last
        self.committed = cache.lengths  # (B,) rows that are confirmed

    def select(self, rows: list[int]) -> None:
        """Keep the requests `rows`, in that order."""
        self.cache.select(rows)
        self.committed, self.last = self.committed[rows], self.last[rows]

    def open(self, num_rows: int) -> tuple[Tensor, Tensor | None]:
        """Drop the old draft and announce `num_rows` confirmed rows: their positions (B, R) and mask."""
        cache = self.cache
        cache.truncate(self.committed)
        cache.begin(num_rows)
        lengths = cache.lengths.to(self.last.device)
        positions = lengths[:, None] + torch.arange(num_rows, device=lengths.device)
        if num_rows == 1 and cache.uniform:
            return positions, None
        return positions, tree.attention_mask(lengths, num_rows, longest=cache.width - num_rows)

    def close(self, lengths: Tensor, outputs: list[Tensor]) -> None:
        """Keep the first `lengths` (B,) of the announced rows, of which the K blocks made `outputs`, each (B, R, D)."""
        self.cache.commit(lengths)
        self.committed = self.cache.lengths
        known = lengths.to(self.last.device)
        row = torch.arange(len(known), device=known.device)
        last = torch.stack([hidden[row, (known - 1).clamp(min=0)] for hidden in outputs], dim=1)
        self.last = torch.where((known > 0)[:, None, None], last, self.last.to(last.dtype))


class MultiTokenDrafter(DraftsTrees, nn.Module):
    """Reads `capture_layers` of the target (None: the state that its head reads), several through one projection.

    `max_depth` is how many tokens ahead it can tell; None: any number. A chain that is asked to be longer stays that
    short.
    """

    max_depth: int | None = None

    def __init__(
        self, target: Target, vocab: DraftVocab, config: LlamaConfig, capture_layers: Sequence[int] | None
    ) -> None:
        super().__init__()
        self.config, self.vocab = config, vocab
        self.capture_layers = tuple(target.layer_index(layer) for layer in capture_layers or [target.num_layers])
        count = len(self.capture_layers)
        self.scales = ScaleFusion(count, target.hidden_size) if count > 1 else nn.Identity()
        self.head = target.head.rows(vocab.token_ids)  # the target's own
        self._embedding = (target.embedding,)  # in a tuple, so that it is neither trained nor saved with the drafter

    def settle(self, target: Target) -> None:
        """Move to the target's device, in float32 at least: small steps of training would be rounded away."""
        self.to(device=target.device, dtype=torch.promote_types(target.dtype, torch.float32))

    def linear_inputs(self, features: TargetFeatures) -> Tensor:
        """What the first projection reads in every row: (B, S, 2·D)."""
        fusion = next(module for module in self.modules() if isinstance(module, InputFusion))
        return fusion.inputs(self.embed(features.next_token_ids), self.read(features.hidden))

    @torch.no_grad()
    def start_linear(self, weight: Tensor, scale: Tensor) -> None:
        """Begin with states norm(weight · inputs) · scale, weight (D, 2·D) and scale (D,): layers add nothing yet."""
        for module in self.modules():
            if isinstance(module, InputFusion):
                module.eh_proj.weight.copy_(weight)
            if isinstance(module, Attention):
                module.o_proj.weight.zero_()
            if isinstance(module, MLP):
                module.down_proj.weight.zero_()
            if isinstance(own := getattr(module, "norm", None), RMSNorm):
                own.weight.copy_(scale)

    @property
    def _parameter(self) -> nn.Parameter:
        return next(self.parameters())

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's embeddings of tokens, any shape, in the drafter's dtype: (..., D)."""
        embedded: Tensor = self._embedding[0](token_ids)
        return embedded.to(self._parameter.dtype)

    def read(self, hidden: Tensor | None) -> Tensor:
        """Captured states (B, S, L·D) as the one state (B, S, D) that the first block reads."""
        assert hidden is not None
        return self.scales(hidden.to(self._parameter.dtype))

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Draft logits (..., Vd) of estimated states (..., D), by the target's head."""
        return self.head(hidden.to(self.head.weight.dtype))

    def logit_parameters(self, step: int = 0) -> list[nn.Parameter]:
        """None, or those of the target's head where that is trained too."""
        return [p for p in self.head.linear.parameters() if p.requires_grad]

    def start_state(self, num_layers: int, num_blocks: int, batch_size: int, max_len: int) -> MultiTokenState:
        """An empty memory of `num_layers` layers in `num_blocks` blocks."""
        like = self._parameter
        cache = KVCache(num_layers, batch_size, max_len, like.device)
        return MultiTokenState(cache, like.new_zeros(batch_size, num_blocks, self.config.hidden_size).detach())

    def expander(self, state: MultiTokenState, committed: TargetFeatures) -> Expander:
        """Take in the confirmed rows (B, R); what follows them is then told node by node."""
        raise NotImplementedError

    def room(self, batch_size: int) -> Tensor | None:
        """How long a request's chain may be: (B,); None: any length."""
        return None if self.max_depth is None else torch.full((batch_size,), self.max_depth)
