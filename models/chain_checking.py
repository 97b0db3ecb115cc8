"""How one drafter checks the chain of another, token by token: the same for every second drafter with an `Expander`.

A token y ~ q1 is accepted with probability min(1, q2(y)/q1(y)), or replaced by a draw from norm(max(q2 − q1, 0)), so
that what is handed on is a sample of q2 (2211.17192, with the second drafter in the target's place).

B batch, N drafted tokens, M tokens of the chain that is checked, V target and Vd draft vocabulary.
"""

from __future__ import annotations

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
    expander: Expander,
    vocab: DraftVocab,
    first: Draft,
    num_tokens: int,
    *,
    num_checked: Tensor,
    sampling: SamplingParams,
    random: RequestRandom,
) -> Draft:
    """Draft N tokens from the laws that `expander` tells, along the chain `first` for as long as its tokens pass.

    Behind `num_checked` (B,) accepted tokens those of `first` are taken as they are, with the laws they were drawn
    from. Two calls of `random` wherever it is sampled. A request that the expander has no room for gets a shorter
    chain, or none.
    """
    lengths = None if expander.room is None else expander.room.clamp(0, num_tokens)
    uniforms = None if sampling.greedy else (random.uniform(num_tokens), random.uniform(num_tokens))
    check = _Check(first, num_tokens, num_checked, sampling, uniforms)
    if (lengths is not None and not lengths.any()) or check.finished(0):
        return replace(check.first, lengths=lengths)
    steps = AlongChain(expander, check.first.token_ids[:, : check.needed])
    logits = steps.root()
    only = torch.zeros(len(logits), 1, dtype=torch.int64, device=logits.device)
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    for depth in range(num_tokens if lengths is None else int(lengths.max())):
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
    return Draft(drafted, tree.chain_parents(len(drafted), num_tokens, drafted.device), probs, lengths)


class _Check:
    """Which requests still follow the first drafter's chain, and what comes next."""

    def __init__(
        self,
        first: Draft,
        num_tokens: int,
        num_checked: Tensor,
        sampling: SamplingParams,
        uniforms: tuple[Tensor, Tensor] | None,
    ) -> None:
        batch_size, given = first.token_ids.shape
        lengths = torch.full((batch_size,), given) if first.lengths is None else first.lengths
        self.first = _widened(first, num_tokens)
        self._full = bool((lengths == num_tokens).all())  # then a trusted chain is all there is to say
        self._trusted_from = num_checked.to(first.token_ids.device)
        self._most = min(int(num_checked.max()), num_tokens)
        self._sampling, self._uniforms = sampling, uniforms
        self._lengths = lengths.to(first.token_ids.device)
        self._following = torch.ones_like(self._lengths, dtype=torch.bool)
        # How many of the first one's tokens the second may have to read.
        self.needed = max(0, self._most - 1 if self._full else min(int(lengths.max()), num_tokens - 1))

    def finished(self, depth: int) -> bool:
        """Whether every request goes on with the rest of a full chain, unchecked."""
        return depth >= self._most and self._full and bool(self._following.all())

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
        return torch.where(self._following, said, own), law

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
