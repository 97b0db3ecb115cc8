"""DFlash: a block of masks behind the last token becomes a whole draft in one pass (2602.06036); DSpark's additions.

The target's captured states go through fc and a norm, once, and every layer reads them as further keys and values. A
block is the last committed token, the anchor x_{t+1}, and masks at the positions behind it; its rows read one another
in both directions, and the states at x_0 .. x_t, which are strictly before the anchor. The target's head tells the law
of x_{t+1+j} at mask j = 1 .. `block_size` − 1. With `predict_at_anchor` every row tells the token behind it, the
anchor's too, so that a block drafts `block_size` tokens (DSpark, 2607.05147).

`markov_rank` r adds W₁[x]·W₂ to the logits behind token x, W₁ (V, r) and W₂ (r, Vd): the only thing that a drafted
token tells the next one. `confidence` adds a linear map of a row's state and W₁[x] that estimates the chance α = Σ
min(p, q) of its token to be accepted, known before that is drawn. Its logit is divided by the position's temperature,
which an export's calibration sets.

What rows tell is handed about as their states and W₁[x], side by side: (..., D + r).

B batch, S rows, R committed rows, A blocks, Q rows of a block, N tokens that a block drafts, L captured layers, D
hidden size, r rank, V target and Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from models.block_attention import BlockStack, KeysValues
from models.cache import KVCache
from models.errors import UserError
from models.law_drafting import DraftsTrees
from models.layers import LayerShape, RMSNorm, layer_config
from models.target import Target
from models.tree_drafting import Expander
from models.types import TargetFeatures
from models.vocab import DraftVocab

_PUBLISHED_STATES = 5


def published_layers(num_layers: int) -> tuple[int, ...]:
    """Five states evenly from that behind layer 1, counted from 0, to that behind layer n − 3.

    In targets of fewer than 8 layers these would not differ: there, up to five evenly of all that enter a layer but
    the first.
    """
    first, last = (2, num_layers - 2) if num_layers >= 8 else (min(1, num_layers), max(1, num_layers - 1))
    count = min(_PUBLISHED_STATES, last - first + 1)
    return tuple(1 + round(first - 1 + i * (last - first) / max(1, count - 1)) for i in range(count))


class MarkovHead(nn.Module):
    """W₁ and W₂ of the correction, under vLLM's names; at first it corrects nothing."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """Logits of acceptance, of rows (..., D + r): (...). `temperatures` (N,) are 1 until they are calibrated."""

    temperatures: Tensor

    def __init__(self, size: int, num_positions: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)
        self.register_buffer("temperatures", torch.ones(num_positions))

    def forward(self, told: Tensor) -> Tensor:
        return self.proj(told).squeeze(-1)


class DFlashDrafter(DraftsTrees, nn.Module):
    """`num_layers` layers over blocks of `block_size` rows. Sizes left at None are the target's.

    `capture_layers` at None are `published_layers`. The masks' embedding is the target's of `mask_token_id`, at None
    its last row. `rope_parameters` and `rms_norm_eps` are for checkpoints that were trained elsewhere. Raises UserError
    for senseless values.
    """

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        block_size: int = 8,
        num_layers: int = 3,
        capture_layers: Sequence[int] | None = None,
        mask_token_id: int | None = None,
        predict_at_anchor: bool = False,
        markov_rank: int = 0,
        confidence: bool = False,
        **sizes: Unpack[LayerShape],
    ) -> None:
        super().__init__()
        least = 1 if predict_at_anchor else 2
        if block_size < least:
            raise UserError(f"drafter.model.block_size is {block_size}: it must be at least {least}.")
        if markov_rank < 0:
            raise UserError(f"drafter.model.markov_rank is {markov_rank}: it must be 0 (off) or more.")
        embedding: Any = target.embedding
        known = embedding.weight.shape[0]
        self.mask_token_id = known - 1 if mask_token_id is None else mask_token_id
        if not 0 <= self.mask_token_id < known:
            raise UserError(f"drafter.model.mask_token_id is {mask_token_id}: the target embeds {known} tokens.")
        chosen = published_layers(target.num_layers) if capture_layers is None else capture_layers
        self.capture_layers = tuple(map(target.layer_index, chosen))
        if not self.capture_layers:
            raise UserError("drafter.model.capture_layers is empty: name at least one of the target's states.")
        self.config = layer_config(target, num_layers, **sizes)
        self.vocab, self.block_size, self.predict_at_anchor = vocab, block_size, predict_at_anchor
        self.max_depth = block_size if predict_at_anchor else block_size - 1
        self.size, self.markov_rank = target.hidden_size, markov_rank
        size, eps = self.size, self.config.rms_norm_eps
        self.fc = nn.Linear(len(self.capture_layers) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.stack = BlockStack(self.config)
        self.norm = RMSNorm(size, eps)
        self.markov_head = MarkovHead(known, vocab.size, markov_rank) if markov_rank else None
        self.confidence_head = ConfidenceHead(size + markov_rank, self.max_depth) if confidence else None
        self.head = target.head.rows(vocab.token_ids)  # the target's own
        self._embedding = (target.embedding,)  # in a tuple, so that it is neither trained nor saved with the drafter
        # Float32 at least, whatever the target's dtype: small steps of training would be rounded away.
        self.to(device=target.device, dtype=torch.promote_types(target.dtype, torch.float32))

    def condense(self, hidden: Tensor) -> Tensor:
        """The target's captured states (B, S, L·D) as what layers read of them: (B, S, D)."""
        return self.hidden_norm(self.fc(hidden.to(self.fc.weight.dtype)))

    def context(self, hidden: Tensor, positions: Tensor) -> list[KeysValues]:
        """Keys and values of captured states (B, S, L·D) at positions (B or 1, S), for every layer."""
        return self.stack.context(self.condense(hidden), positions)

    def draft_states(
        self, anchors: Tensor, positions: Tensor, context: list[KeysValues], allowed: Tensor | None
    ) -> Tensor:
        """States (B, A, N, D) that tell the tokens behind `anchors` (B, A), which stand at `positions` (B or 1, A).

        `allowed` (B or 1, A, W) says which rows of the context are before each anchor; None: all.
        """
        ids = torch.full((*anchors.shape, self.block_size), self.mask_token_id, device=anchors.device)
        ids[..., 0] = anchors
        places = positions[..., None] + torch.arange(self.block_size, device=positions.device)
        embedded = self._embedding[0](ids).to(self.fc.weight.dtype)
        states = self.norm(self.stack.blocks(embedded, places, context, allowed))
        return states[..., self.block_size - self.max_depth :, :]

    def beside(self, states: Tensor, before: Tensor) -> Tensor:
        """States (..., D) and what the Markov head keeps of the tokens before those that they tell: (..., D + r)."""
        if self.markov_head is None:
            return states
        return torch.cat([states, self.markov_head.markov_w1(before)], dim=-1)

    def told_behind(self, features: TargetFeatures, rows: Tensor) -> Tensor:
        """What blocks tell whose anchors follow the rows (B or 1, A): (B, A, N, D + r), N tokens behind each anchor.

        The token before the j-th of them is the text's own; where the text has ended it is the last one.
        """
        assert features.hidden is not None
        following = features.next_token_ids
        batch_size, num_rows = following.shape
        rows = rows.expand(batch_size, -1)
        position = torch.arange(num_rows, device=following.device)
        context = self.context(features.hidden, position[None])
        states = self.draft_states(following.gather(1, rows), rows + 1, context, position <= rows[..., None])
        ahead = torch.arange(self.max_depth, device=rows.device)
        index = (rows[..., None] + ahead).clamp(max=num_rows - 1)
        return self.beside(states, following.gather(1, index.flatten(1)).view_as(index))

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        """Yield what a block behind every row tells (B, S, D + r), token by token: row t of step s is about x_{t+2+s}.

        Raises UserError for more steps than a block drafts tokens.
        """
        if num_steps > self.max_depth:
            raise UserError(f"{num_steps} steps are asked of blocks that draft {self.max_depth} tokens.")
        rows = torch.arange(features.token_ids.shape[1], device=features.token_ids.device)[None]
        told = self.told_behind(features, rows)
        for step in range(num_steps):
            yield told[:, :, step]

    def logits(self, hidden: Tensor, step: int = 0, base: Tensor | None = None) -> Tensor:
        """Draft logits (..., Vd) of what rows tell (..., D + r): the target's head, and the Markov correction.

        `base` is what the head says, where that is known.
        """
        if base is None:
            base = self.head(hidden[..., : self.size].to(self.head.weight.dtype))
        if self.markov_head is None:
            return base
        correction: Tensor = self.markov_head.markov_w2(hidden[..., self.size :])
        return base + correction

    def logit_parameters(self, step: int = 0) -> list[nn.Parameter]:
        """Those of W₂, and of the target's head where that is trained too."""
        own = [] if self.markov_head is None else list(self.markov_head.markov_w2.parameters())
        return own + [p for p in self.head.linear.parameters() if p.requires_grad]

    def new_state(self, batch_size: int, max_len: int) -> DFlashState:
        """Memory for requests of at most `max_len` rows."""
        cache = KVCache(len(self.stack.layers), batch_size, max_len, self.fc.weight.device)
        return DFlashState(cache)

    def expander(self, state: DFlashState, committed: TargetFeatures) -> Expander:
        """Take in the confirmed rows (B, R), and tell a block behind them in one pass."""
        assert committed.hidden is not None
        cache, num_rows = state.cache, committed.token_ids.shape[1]
        device = committed.token_ids.device
        cache.begin(num_rows)
        positions = cache.lengths.to(device)[:, None] + torch.arange(num_rows, device=device)
        found = self.context(committed.hidden, positions)
        context = [cache.update(*rows, index) for index, rows in enumerate(found)]
        cache.commit(committed.lengths)
        lengths = cache.lengths.to(device)[:, None]
        allowed = None
        if not cache.uniform or cache.width > int(cache.lengths[0]):
            allowed = torch.arange(cache.width, device=device) < lengths[..., None]
        last = (committed.lengths.to(device)[:, None] - 1).clamp(min=0)
        anchors = committed.next_token_ids.gather(1, last)
        states = self.draft_states(anchors, lengths, context, allowed)[:, 0]
        return _DFlashExpander(self, anchors, states)


class DFlashState:
    """Keys and values of the states at committed rows; drafts leave nothing behind."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def select(self, rows: list[int]) -> None:
        """Keep the requests `rows`, in that order."""
        self.cache.select(rows)


class _DFlashExpander:
    """What a block's states (B, N, D) tell behind the anchors (B, 1); of a drafted token only the Markov head knows."""

    def __init__(self, drafter: DFlashDrafter, anchors: Tensor, states: Tensor) -> None:
        self.room = torch.full((len(states),), drafter.max_depth)
        self._drafter, self._anchors, self._states = drafter, anchors, states
        self._base = drafter.head(states.to(drafter.head.weight.dtype))  # (B, N, Vd), all in one product
        self._depth, self._told = -1, states

    def root(self) -> Tensor:
        return self._behind(self._anchors)

    def below(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        if self._drafter.markov_head is None:  # the same behind all nodes
            return self._behind(token_ids[:, :1]).expand(-1, token_ids.shape[1], -1)
        return self._behind(token_ids)

    def confidence(self) -> Tensor:
        """The estimated chances (B, Q) that the tokens behind the last nodes asked about are accepted."""
        head = self._drafter.confidence_head
        assert head is not None
        chances: Tensor = (head(self._told) / head.temperatures[self._depth]).sigmoid()
        return chances

    def _behind(self, token_ids: Tensor) -> Tensor:
        self._depth += 1
        level = slice(self._depth, self._depth + 1)
        states = self._states[:, level].expand(-1, token_ids.shape[1], -1)
        self._told = self._drafter.beside(states, token_ids)
        return self._drafter.logits(self._told, self._depth, self._base[:, level])
