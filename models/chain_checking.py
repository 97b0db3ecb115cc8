"""How one drafter checks the chain of another, token by token: the same for every second drafter with an `Expander`.

A token y ~ q1 is accepted with probability min(1, q2(y)/q1(y)), or replaced by a draw from norm(max(q2 − q1, 0)), so
that what is handed on is a sample of q2 (2211.17192, with the second drafter in the target's place). A chain may end
behind a token that the second one chose by itself, never before it: that token is still tested.

B batch, N drafted tokens, M tokens of the chain that is checked, V target and Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from models import tree
from models.rejection import try_child
from models.sampling import RequestRandom, SamplingParams, draw, probabilities
from models.tree_drafting import ChainScorer, Expander
from models.types import Draft
from models.vocab import DraftVocab


def check_chain(
    second: Callable[[], Expander],
    vocab: DraftVocab,
    first: Draft,
    num_tokens: int,
    *,
    num_checked: Tensor,
    num_own: int | None = None,
    sampling: SamplingParams,
    random: RequestRandom,
) -> Draft:
    """Draft up to N tokens from the laws that `second` tells, along the chain `first` for as long as its tokens pass.

    Behind `num_checked` (B,) accepted tokens those of `first` are taken as they are, with the laws they were drawn
    from; where that is all there is to say, `second` is not called. A request's chain ends with its token number
    `num_own` that is the second one's own, not the first one's; None: it has N tokens. Two calls of `random` wherever
    it is sampled. A request that the expander has no room for gets a shorter chain, or none.
    """
    uniforms = None if sampling.greedy else (random.uniform(num_tokens), random.uniform(num_tokens))
    check = _Check(first, num_tokens, num_checked, num_own, sampling, uniforms)
    if check.finished(0):
        return check.first
    expander = second()
    if expander.room is not None:
        check.limit(expander.room)
    if not check.most:
        return replace(check.first, lengths=check.ends)
    steps = AlongChain(expander, check.first.token_ids[:, : check.needed])
    logits = steps.root()
    only = torch.zeros(len(logits), 1, dtype=torch.int64, device=logits.device)
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    for depth in range(check.most):
        if check.finished(depth):
            break
        if depth > 0:
            logits = steps.below(tokens[-1][:, None], only)
        token, law = check.next(depth, logits[:, 0], vocab)
        tokens.append(token)
        laws += [] if law is None else [law]
    rest = check.first.token_ids[:, len(tokens) :]
    drafted = torch.cat([torch.stack(tokens, dim=1), rest], dim=1)
    probs = torch.cat([torch.stack(laws, dim=1), check.laws(len(tokens), laws[0])], dim=1) if laws else None
    return Draft(drafted, tree.chain_parents(len(drafted), num_tokens, drafted.device), probs, check.lengths)


class _Check:
    """Which requests still follow the first drafter's chain, where chains end, and what comes next."""

    def __init__(
        self,
        first: Draft,
        num_tokens: int,
        num_checked: Tensor,
        num_own: int | None,
        sampling: SamplingParams,
        uniforms: tuple[Tensor, Tensor] | None,
    ) -> None:
        batch_size, given = first.token_ids.shape
        lengths = torch.full((batch_size,), given) if first.lengths is None else first.lengths
        self.first = _widened(first, num_tokens)
        self.ends = torch.full((batch_size,), num_tokens)  # on the host, as all lengths
        self._full = (lengths == num_tokens).to(first.token_ids.device)  # a trusted one is all there is to say
        self._trusted_from = num_checked.to(first.token_ids.device)
        self._sampling, self._uniforms = sampling, uniforms
        self._lengths = lengths.to(first.token_ids.device)
        self._following = torch.ones_like(self._lengths, dtype=torch.bool)
        self._num_own, self._own = num_own, torch.zeros(batch_size, dtype=torch.int64)
        # How many of the first one's tokens the second may have to read.
        read = torch.where(lengths == num_tokens, num_checked.to(lengths) - 1, lengths).max()
        self.needed = min(max(int(read), 0), num_tokens - 1)

    def limit(self, room: Tensor) -> None:
        """Let no chain be longer than `room` (B,)."""
        self.ends = torch.minimum(self.ends, room.clamp(min=0).to(self.ends))

    @property
    def most(self) -> int:
        """The longest that a chain can still become."""
        return int(self.ends.max())

    @property
    def lengths(self) -> Tensor | None:
        """How long the chains are (B,); None: as long as was asked for."""
        return None if bool((self.ends == self.first.token_ids.shape[1]).all()) else self.ends

    def finished(self, depth: int) -> bool:
        """Whether every request is at its end, or goes on with the rest of a full chain, unchecked."""
        trusted = self._following & self._full & (depth >= self._trusted_from)
        return bool((trusted | (depth >= self.ends).to(trusted.device)).all())

    def next(self, depth: int, logits: Tensor, vocab: DraftVocab) -> tuple[Tensor, Tensor | None]:
        """The tokens (B,) at `depth` and their laws (B, V), where sampled, of the second one's logits (B, Vd)."""
        said, says = self.first.token_ids[:, depth], self._following & (depth < self._lengths)
        trusted = depth >= self._trusted_from
        law = None
        if self._uniforms is None:
            own = vocab.to_target(logits.argmax(-1))
            self._following = says & (trusted | (own == said))
        else:
            draws, tests = (uniforms[:, depth] for uniforms in self._uniforms)
            law = vocab.widen(probabilities(logits, self._sampling))
            q = None if self.first.probs is None else self.first.probs[:, depth]
            chance, residual, _ = try_child(law, said, q)
            self._following = says & (trusted | (tests < chance))
            own = draw(torch.where((says & ~self._following)[:, None], residual, law), draws)
            law = torch.where((says & trusted)[:, None], self.laws(depth, law)[:, 0], law)
        self._count_own(depth)
        return torch.where(self._following, said, own), law

    def _count_own(self, depth: int) -> None:
        """End the chains that have as many tokens of the second one's own as they may; those are the last."""
        if self._num_own is not None:
            self._own += (~self._following).cpu()
            self.ends = torch.where(self._own == self._num_own, self.ends.clamp(max=depth + 1), self.ends)

    def laws(self, depth: int, like: Tensor) -> Tensor:
        """What the first one's tokens from `depth` on were drawn from: (B, N − depth, V), in the dtype of `like`."""
        if self.first.probs is not None:
            return self.first.probs[:, depth:].to(like)
        return one_hot(self.first.token_ids[:, depth:], like.shape[-1]).to(like)


def _widened(first: Draft, num_tokens: int) -> Draft:
    """A chain of N tokens, filled up by padding."""
    more = num_tokens - first.token_ids.shape[1]
    if more == 0:
        return first
    parents = tree.chain_parents(len(first.token_ids), num_tokens, first.token_ids.device)
    probs = None if first.probs is None else pad(first.probs, (0, 0, 0, more))
    return Draft(pad(first.token_ids, (0, more)), parents, probs)


class AlongChain:
    """An expander that reads a given chain (B, M) in one pass, if it can, and is asked along it as any other.

    The pass waits until every request has followed the chain for one token, and what it told is dropped where one
    leaves it: the rest is told step by step.
    """

    def __init__(self, expander: Expander, chain: Tensor) -> None:
        self.room = expander.room
        self._expander, self._chain = expander, chain
        self._scorer = expander if isinstance(expander, ChainScorer) and chain.shape[1] > 1 else None
        self._scored: Tensor | None = None
        self._depth = 0

    def root(self) -> Tensor:
        """As the expander."""
        return self._expander.root()

    def below(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """As the expander, behind the next token (B, 1) of a chain."""
        if self._scorer is not None:
            depth, self._depth = self._depth, self._depth + 1
            if depth < self._chain.shape[1] and torch.equal(token_ids[:, 0], self._chain[:, depth]):
                if self._scored is None:
                    self._scored = self._scorer.score_chain(self._chain)
                return self._scored[:, depth : depth + 1]
            if self._scored is not None:
                self._scorer.keep(depth)
            self._scorer = None
        return self._expander.below(token_ids, parents)
