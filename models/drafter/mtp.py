"""Sequential multi-token prediction, as DeepSeek-V3's (2412.19437, §2.2): blocks that hand a state on, one a token.

Step s reads the state of step s − 1 (the target's own before step 0) and the token x_{t+1+s}:
h_s = norm(block_s(eh_proj([norm(emb(x_{t+1+s})); norm(h_{s−1})]))), and the target's head makes of it the law of
x_{t+2+s}. Block s attends causally to its own rows. There are `num_blocks` blocks. Beyond them, the last one goes on
by itself: it then reads its keys of the step before that, and those of its own draft. So a single block is applied
recursively (FastMTP, 2509.18362), and drafts any number of tokens.

What is handed on went through the norm, as engines do it for Qwen3-Next's, MiMo's and DeepSeek's modules. vLLM hides
the token of the first row of all from DeepSeek's and MiMo's: `hide_first` does so too. MiMo's module reads the target's
state as it enters the final norm; `before_norm` reads it so but for its length, which the block's own norm removes.

B batch, S rows, R committed rows, Q new nodes, n nodes so far, K blocks, D hidden size, Vd draft vocabulary, W slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from typing_extensions import Unpack

from models import tree
from models.errors import UserError
from models.layers import (
    DecoderStack,
    LayerShape,
    Memory,
    RMSNorm,
    UnrolledMemory,
    layer_config,
    moved_up,
    unrolled_mask,
)
from models.multi_token import InputFusion, LayersFrom, MultiTokenDrafter, MultiTokenState
from models.target import Target
from models.tree_drafting import Expander
from models.types import TargetFeatures
from models.vocab import DraftVocab


class MTPBlock(InputFusion):
    """One module: fuse, run the decoder layers, normalise. `index` is its place among the blocks of a shared memory."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__(config)
        self.stack = DecoderStack(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._first_layer = index * config.num_hidden_layers

    def step(self, embedded: Tensor, hidden: Tensor, positions: Tensor, memory: Memory, mask: Tensor | None) -> Tensor:
        """Embeddings and states (B, S, D) of rows at `positions` → the states (B, S, D) that are handed on."""
        layers = LayersFrom(memory, self._first_layer)
        return self.norm(self.stack(self(embedded, hidden), positions, layers, mask))


class SequentialMTP(MultiTokenDrafter):
    """`num_blocks` modules of `num_layers` decoder layers each. Sizes left at None are the target's.

    `rope_parameters` and `rms_norm_eps` are for checkpoints that were trained elsewhere.
    """

    packs = True
    feeds_back = True

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        num_blocks: int = 1,
        num_layers: int = 1,
        capture_layers: Sequence[int] | None = None,
        hide_first: bool = False,
        before_norm: bool = False,
        **sizes: Unpack[LayerShape],
    ) -> None:
        config = layer_config(target, num_layers, **sizes)
        super().__init__(target, vocab, config, capture_layers)
        self.hide_first = hide_first
        self._final_norm = (_final_norm(target),) if before_norm else ()  # in a tuple: the target's, and frozen
        if num_blocks < 1:
            raise UserError(f"drafter.model.num_blocks is {num_blocks}: it must be at least 1.")
        self.own_steps = num_blocks
        self.blocks = nn.ModuleList(MTPBlock(config, index) for index in range(num_blocks))
        self.settle(target)

    def block(self, step: int) -> MTPBlock:
        """The block of a step: the last one for all that come after it."""
        found: MTPBlock = self.blocks[min(step, len(self.blocks) - 1)]  # type: ignore[assignment]
        return found

    @property
    def before_norm(self) -> bool:
        """Whether the target's state is read as it enters the final norm."""
        return bool(self._final_norm)

    def read(self, hidden: Tensor | None) -> Tensor:
        """As `MultiTokenDrafter` does, without the factors of the target's final norm where `before_norm` says so."""
        assert hidden is not None
        for norm in self._final_norm:
            hidden = hidden / norm.weight
        return super().read(hidden)

    def embed_rows(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Embeddings of tokens (B, S) of rows at `positions` (B or 1, S); zeros for the first, where it is hidden."""
        embedded = self.embed(token_ids)
        return embedded.masked_fill((positions == 0)[..., None], 0) if self.hide_first else embedded

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        """Yield the states (B, S, D) of step 0, 1, ..: row t of step s is about x_{t+2+s}.

        The last s rows of step s have no token x_{t+1+s}, and repeat the last one.
        """
        hidden, token_ids = self.read(features.hidden), features.next_token_ids
        positions = features.positions
        for step in range(num_steps):
            again = max(0, step - len(self.blocks) + 1)  # how often the last block was applied before
            if again == 0:
                memory = UnrolledMemory()
            mask = unrolled_mask(token_ids.shape[1], again, token_ids.device, features.segments)
            embedded = self.embed_rows(token_ids, positions + step)
            hidden = self.block(step).step(embedded, hidden, positions + step, memory, mask)
            yield hidden
            token_ids = moved_up(token_ids)

    def new_state(self, batch_size: int, max_len: int) -> MultiTokenState:
        """Memory for requests of at most `max_len` rows, those of a draft included."""
        num_blocks = len(self.blocks)
        return self.start_state(num_blocks * self.config.num_hidden_layers, num_blocks, batch_size, max_len)

    def expander(self, state: MultiTokenState, committed: TargetFeatures) -> Expander:
        """Take in the confirmed rows (B, R); what follows them is then told node by node."""
        self._ingest(state, committed)
        return _SequentialExpander(self, state)

    def _ingest(self, state: MultiTokenState, committed: TargetFeatures) -> None:
        """Run every block over the confirmed rows.

        Slot j of all blocks belongs to the token x_{j+1}. There, block s holds the row t = j − s, which reads what
        block s − 1 made of it at slot j − 1; its slots before s belong to no row.
        """
        positions, mask = state.open(committed.token_ids.shape[1])
        embedded, hidden = self.embed_rows(committed.next_token_ids, positions), self.read(committed.hidden)
        outputs: list[Tensor] = []
        for index in range(len(self.blocks)):
            if index > 0:
                hidden = torch.cat([state.last[:, index - 1 : index], hidden[:, :-1]], dim=1)
                mask = _without_first(mask, positions, state.cache.width, index)
            hidden = self.block(index).step(embedded, hidden, positions, state.cache, mask)
            outputs.append(hidden)
        state.close(committed.lengths, outputs)


def _final_norm(target: Target) -> Any:
    """The target's last norm. Raises UserError for one that is no x / rms(x) · weight."""
    norm = getattr(target.model.base_model, "norm", None)
    weight = getattr(norm, "weight", None)
    plain = isinstance(weight, Tensor) and getattr(norm, "bias", None) is None and hasattr(norm, "variance_epsilon")
    if not plain:
        raise UserError(f"drafter.model.before_norm: the final norm of target {target.name!r} is no plain RMSNorm.")
    return norm


def _without_first(mask: Tensor | None, positions: Tensor, width: int, count: int) -> Tensor:
    """`mask` (B, 1, R, W), or one that allows all, without the first `count` slots; a row always reads itself."""
    slot = torch.arange(width, device=positions.device)
    allowed = ((slot >= count) | (slot == positions[..., None]))[:, None]
    return allowed if mask is None else allowed & mask


class _SequentialExpander:
    """States behind the nodes of a tree, each read behind its parent's.

    At level s < K, block s runs over all nodes so far, whose states block s − 1 has just told: those of the levels
    before s are the keys that training's rows t − 1, t − 2, .. give. From then on, the last block runs over new nodes.
    """

    room = None

    def __init__(self, drafter: SequentialMTP, state: MultiTokenState) -> None:
        self._drafter, self._state = drafter, state
        self._lengths = state.committed.to(state.last.device)
        self._longest = int(state.committed.max())  # on the host
        self._states = state.last[:, :1]  # (B, 1 + n, D) of the last block run: the last confirmed row's, the nodes'
        self._token_ids = self._parents = self._depths = torch.zeros(
            len(self._lengths), 0, dtype=torch.int64, device=self._lengths.device
        )
        self._level, self._first = 0, -1  # of the last call: its level, and its first node

    def root(self) -> Tensor:
        return self._drafter.logits(self._states)

    def below(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        before, above = self._token_ids.shape[1], parents + self._first
        self._level, self._first = self._level + 1, before
        self._token_ids = torch.cat([self._token_ids, token_ids], dim=1)
        self._parents = torch.cat([self._parents, above], dim=1)
        self._depths = torch.cat([self._depths, torch.full_like(above, self._level - 1)], dim=1)
        drafter, cache, state = self._drafter, self._state.cache, self._state
        own_block = self._level < len(drafter.blocks)
        start = 0 if own_block else before
        if own_block:
            cache.truncate(state.committed)
        count = self._token_ids.shape[1] - start
        cache.begin(count)
        read = self._parents[:, start:] + 1
        hidden = drafter.block(self._level).step(
            drafter.embed(self._token_ids[:, start:]),
            self._states.gather(1, read[..., None].expand(-1, -1, self._states.shape[-1])),
            self._lengths[:, None] + self._depths[:, start:],
            cache,
            self._mask(start),
        )
        cache.commit(torch.full_like(state.committed, count))
        known = state.last[:, self._level : self._level + 1] if own_block else self._states
        self._states = torch.cat([known, hidden], dim=1)
        return drafter.logits(hidden[:, -token_ids.shape[1] :])

    def _mask(self, start: int) -> Tensor | None:
        """What the nodes from `start` on read: (B, 1, n − start, W); None for a lone row that reads all there is."""
        unread = min(self._level, len(self._drafter.blocks) - 1)  # rows at the beginning that the block does not have
        chain = self._token_ids.shape[1] == self._level
        if unread == 0 and chain and self._state.cache.uniform:
            return None
        positions = self._lengths[:, None] + self._depths
        itself = torch.eye(positions.shape[1], dtype=torch.bool, device=positions.device)
        nodes = tree.ancestors(self._parents) & ((positions >= unread)[:, None] | itself)
        mask = tree.level_mask(self._lengths, nodes[:, start:], longest=self._longest)
        slot = torch.arange(mask.shape[-1], device=mask.device)
        return mask & ((slot >= unread) | (slot >= self._lengths[:, None]))[:, None, None]
