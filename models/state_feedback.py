"""Drafters that read the target's states and, where the text ends, their own outputs in place of those.

EAGLE-1 and EAGLE-3 differ in what they make of a state and a token, and in how an output becomes draft logits. How
outputs are fed back, in training and along chains and trees of drafted tokens, is the same for both, and is here.

A row may read a window of k pairs: its own token and state, and those of the k − 1 rows before. A pass of the layers
may tell m outputs at once, for the next m states; then only every m-th drafted token takes a pass.

B batch, S rows, R committed rows, Q nodes, N drafted tokens, L captured layers, D hidden size, Vd draft vocabulary,
P = (2k − 1)·D what a row reads beside its token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from models import tree
from models.cache import KVCache
from models.errors import UserError
from models.law_drafting import DraftsTrees
from models.layers import DecoderStack, UnrolledMemory, moved_up, unrolled_mask
from models.target import Target
from models.tree_drafting import Expander, TreeRows
from models.types import TargetFeatures
from models.vocab import DraftVocab


class FeedbackState:
    """Keys of the committed rows, and the last k − 1 pairs; what was drafted is dropped when the next rows come."""

    def __init__(self, cache: KVCache, pairs: Tensor) -> None:
        self.cache = cache
        self.committed = cache.lengths  # (B,) rows that are confirmed
        self.pairs = pairs  # (B, k − 1, 2·D), zero before the text

    def select(self, rows: list[int]) -> None:
        """Keep the requests `rows`, in that order."""
        self.cache.select(rows)
        self.committed, self.pairs = self.committed[rows], self.pairs[rows]


class FeedbackDrafter(DraftsTrees, nn.Module):
    """Row t reads x_{t+1} beside the target's state at x_t, or beside its own output for that state.

    A subclass has `stack`, says in `fuse` what the stack reads, and in `logits` what its output tells of the next
    token. The target's embedding is shared and frozen. `feature_window` is k, `num_future` is m. Raises UserError where
    one of them is below 1.
    """

    stack: DecoderStack
    capture_layers: tuple[int, ...]

    def __init__(self, target: Target, vocab: DraftVocab, feature_window: int = 1, num_future: int = 1) -> None:
        super().__init__()
        for name, value in (("feature_window", feature_window), ("num_future", num_future)):
            if value < 1:
                raise UserError(f"drafter.model.{name} is {value}: it must be at least 1.")
        self.vocab, self.feature_window, self.num_future = vocab, feature_window, num_future
        self.size = target.hidden_size
        self._embedding = (target.embedding,)  # in a tuple, so that it is neither trained nor saved with the drafter

    feeds_back = True

    @property
    def packs(self) -> bool:
        """A window of several pairs would reach into the text before."""
        return self.feature_window == 1

    def _settle(self, target: Target) -> None:
        """Go to the target's device, in float32 at least whatever its dtype: small steps would be rounded away."""
        self.to(device=target.device, dtype=torch.promote_types(target.dtype, torch.float32))

    def condense(self, hidden: Tensor) -> Tensor:
        """The target's captured states (B, S, L·D) as the states (B, S, D) that rows read."""
        return hidden

    def fuse(self, token_ids: Tensor, past: Tensor) -> Tensor:
        """What the stack reads of tokens (B, S) and what is before them (B, S, P)."""
        raise NotImplementedError

    def outlook(self, hidden: Tensor) -> Tensor:
        """The stack's output (B, S, D) as the outputs for the next m states: (B, S, m, D)."""
        return hidden[:, :, None]

    def feed_back(self, hidden: Tensor) -> Tensor:
        """An output (B, S, D) as the state of the next step."""
        return hidden

    def window(self, token_ids: Tensor, past: Tensor) -> Tensor:
        """The k pairs [emb; state], oldest first, that end with tokens (B, S) and what is before them: (B, S, 2k·D)."""
        return torch.cat([past[..., : -self.size], self._embedding[0](token_ids), past[..., -self.size :]], dim=-1)

    def follow(self, token_ids: Tensor, past: Tensor, hidden: Tensor) -> Tensor:
        """What is before the tokens (B, S, P) that follow `token_ids`, whose output was `hidden` (B, S, D)."""
        if self.feature_window == 1:
            return self.feed_back(hidden)
        return torch.cat([self.window(token_ids, past)[..., 2 * self.size :], self.feed_back(hidden)], dim=-1)

    def before(self, features: TargetFeatures, pairs: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What is before each row's token (B, S, P), and all pairs (B, k − 1 + S, 2·D), `pairs` being those before."""
        assert features.hidden is not None
        states = self.condense(features.hidden)
        if pairs is None:
            pairs = states.new_zeros(len(states), self.feature_window - 1, 2 * self.size)
        if self.feature_window == 1:
            return states, pairs
        rows = torch.cat([self._embedding[0](features.next_token_ids), states], dim=-1)
        pairs = torch.cat([pairs, rows], dim=1)
        windows = pairs.unfold(1, self.feature_window, 1)  # (B, S, 2·D, k)
        return torch.cat([windows[..., :-1].transpose(2, 3).flatten(2), states], dim=-1), pairs

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Draft logits (..., Vd) of the stack's outputs (..., D)."""
        raise NotImplementedError

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        """Yield the outputs (B, S, D) of step 0, 1, ..: row t of step s is about x_{t+2+s}.

        Step s reads the output of step s − 1 in place of the state, and the token one further on. The last s rows of
        step s have no such token, and repeat the last one.
        """
        memory = UnrolledMemory()
        (past, _), token_ids = self.before(features), features.next_token_ids
        positions = features.positions
        for step in range(num_steps):
            passes, ahead = divmod(step, self.num_future)
            if ahead == 0:
                mask = unrolled_mask(token_ids.shape[1], passes, token_ids.device, features.segments)
                outlook = self.outlook(self.stack(self.fuse(token_ids, past), positions + step, memory, mask))
            hidden = outlook[:, :, ahead]
            yield hidden
            past = self.follow(token_ids, past, hidden)
            token_ids = moved_up(token_ids)

    def new_state(self, batch_size: int, max_len: int) -> FeedbackState:
        """Memory for requests of at most `max_len` rows, those of a draft included."""
        weight = next(self.parameters())
        cache = KVCache(len(self.stack.layers), batch_size, max_len, weight.device)
        return FeedbackState(cache, weight.new_zeros(batch_size, self.feature_window - 1, 2 * self.size))

    def expander(self, state: FeedbackState, committed: TargetFeatures) -> Expander:
        """Take in the confirmed rows (B, R); what follows them is then told node by node."""
        cache, num_rows = state.cache, committed.token_ids.shape[1]
        cache.truncate(state.committed)
        cache.begin(num_rows)
        past, pairs = self.before(committed, state.pairs)
        lengths = cache.lengths.to(past.device)
        positions = lengths[:, None] + torch.arange(num_rows, device=lengths.device)
        alone = num_rows == 1 and cache.uniform
        mask = None if alone else tree.attention_mask(lengths, num_rows, longest=cache.width - num_rows)
        hidden = self.stack(self.fuse(committed.next_token_ids, past), positions, cache, mask)
        cache.commit(committed.lengths)
        state.committed = cache.lengths
        counts = committed.lengths.to(hidden.device)[:, None]
        kept = counts + torch.arange(self.feature_window - 1, device=hidden.device)
        state.pairs = _take(pairs, kept)
        last = (counts - 1).clamp(min=0)
        outlook = self.outlook(_take(hidden, last))
        past = self.follow(committed.next_token_ids.gather(1, last), _take(past, last), outlook[:, :, 0])
        return _Expander(self, cache, outlook, past)


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """The rows (B, S, ·) named by `index` (B, Q): (B, Q, ·)."""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))


class _Expander:
    """Outputs behind the nodes of a tree, each read behind its parent's.

    `outlook` (B, Q, m, D) is that of each node's last pass, `past` (B, Q, P) what is before the tokens to come.
    """

    room = None

    def __init__(self, drafter: FeedbackDrafter, cache: KVCache, outlook: Tensor, past: Tensor) -> None:
        self._drafter, self._cache, self._outlook, self._past = drafter, cache, outlook, past
        self._rows, self._depth = TreeRows(cache, stride=drafter.num_future), 0
        self._passed = torch.zeros(outlook.shape[:2], dtype=torch.int64, device=outlook.device)  # rows of these passes

    def root(self) -> Tensor:
        return self._drafter.logits(self._outlook[:, :, 0])

    def below(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        drafter, past, self._depth = self._drafter, _take(self._past, parents), self._depth + 1
        passed, ahead = self._passed.gather(1, parents), self._depth % drafter.num_future
        if ahead == 0:
            positions, mask = self._rows.begin(passed)
            hidden = drafter.stack(drafter.fuse(token_ids, past), positions, self._cache, mask)
            self._rows.end(token_ids.shape[1])
            self._outlook = drafter.outlook(hidden)
            self._passed = torch.arange(token_ids.shape[1], device=passed.device).expand_as(passed)
        else:
            self._outlook = _take(self._outlook.flatten(2), parents).unflatten(2, (-1, drafter.size))
            self._passed = passed
        hidden = self._outlook[:, :, ahead]
        self._past = drafter.follow(token_ids, past, hidden)
        return drafter.logits(hidden)
