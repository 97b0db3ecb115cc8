"""How a tree of drafted tokens grows: the same for every drafter that can say what follows several nodes at once.

A tree grows level by level. The drafter is asked for the draft logits behind some nodes (`Expander`); which children
they get depends on the shape, a fixed one or EAGLE-2's (2406.16858) that follows the drafter's confidence.

B batch, Q nodes of one level, C children of a node, N nodes of the draft, T rows of the tree in a drafter's cache,
Vd draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from models import tree
from models.cache import KVCache
from models.errors import UserError
from models.sampling import RequestRandom, SamplingParams, draw, probabilities
from models.tree import DynamicTree, StaticTree
from models.types import Draft
from models.vocab import DraftVocab

KINDS = ("top", "independent", "without_replacement")


class Expander(Protocol):
    """What a drafter says behind the nodes of a tree, or token by token along a chain."""

    @property
    def room(self) -> Tensor | None:
        """How many tokens of a chain have room behind each request's text: (B,), on the host; None: any number."""

    def root(self) -> Tensor:
        """Draft logits (B, 1, Vd) behind the last committed token."""

    def below(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Draft logits (B, Q, Vd) behind the nodes `token_ids` (B, Q), in the target's vocabulary.

        `parents` (B, Q) tells of each node which of the nodes of the call before it follows (0 after `root`).
        """


@runtime_checkable
class ChainScorer(Expander, Protocol):
    """An expander that can tell in one pass what follows every token of a chain that is given."""

    def score_chain(self, token_ids: Tensor) -> Tensor:
        """Draft logits (B, Q, Vd) behind each token of the chain (B, Q); only `keep` makes later calls follow it."""

    def keep(self, num_tokens: int) -> None:
        """Go on behind the first tokens of the chain just told."""


class Children(NamedTuple):
    """Draft token ids (B, Q, C) in the order of their trial, and the laws they were drawn from; None: point masses."""

    token_ids: Tensor
    laws: Tensor | None  # (B, Q, C, Vd)


def grow(
    expander: Expander,
    shape: StaticTree | DynamicTree,
    vocab: DraftVocab,
    *,
    children: str,
    sampling: SamplingParams,
    random: RequestRandom,
) -> Draft:
    """Draft a tree of the given shape. `children` is how those of a static tree are chosen (`choose_children`).

    A dynamic tree always takes the likeliest tokens. Raises UserError for a tree with more children than tokens.
    """
    if isinstance(shape, DynamicTree):
        return _grow_dynamic(expander, shape, vocab)
    check_children(children)
    if max(shape.ranks) >= vocab.size:
        raise UserError(
            f"The draft tree asks for {max(shape.ranks) + 1} children of a node, but the drafter proposes {vocab.size} "
            "tokens: use a smaller tree."
        )
    uniforms = None if sampling.greedy or children == "top" else random.uniform(shape.num_nodes)
    return _grow_static(expander, shape, vocab, children, sampling, uniforms)


def check_children(kind: str) -> None:
    """Raise UserError for an unknown way to choose children."""
    if kind not in KINDS:
        raise UserError(f"decode.children is {kind!r}: choose {', '.join(KINDS)}.")


def choose_children(
    logits: Tensor, count: int, kind: str, sampling: SamplingParams, uniforms: Tensor | None
) -> Children:
    """Choose `count` children for each node from the draft logits (B, Q, Vd) behind it.

    "top" takes the likeliest tokens, as greedy decoding always does. "independent" draws each child from the draft law
    (SpecInfer, 2305.09781), "without_replacement" from the law without its elder siblings (2402.14160). `uniforms`
    (B, Q, C) in [0, 1) are for those two.
    """
    if kind == "top" or sampling.greedy:
        return Children(logits.topk(count, dim=-1).indices, None)
    assert uniforms is not None
    law = probabilities(logits, sampling)
    if kind == "independent":
        laws = law.unsqueeze(2).expand(-1, -1, count, -1)
        return Children(draw(laws, uniforms), laws)
    first_token = torch.zeros_like(law)
    first_token[..., 0] = 1.0
    tokens, used = [], []
    for child in range(count):
        token = draw(law, uniforms[..., child])
        tokens.append(token)
        used.append(law)
        law = law.scatter(-1, token.unsqueeze(-1), 0.0)
        mass = law.sum(-1, keepdim=True)
        law = torch.where(mass > 0, law / mass, first_token)  # of fewer tokens than children: any point mass will do
    return Children(torch.stack(tokens, dim=2), torch.stack(used, dim=2))


def _grow_static(
    expander: Expander,
    shape: StaticTree,
    vocab: DraftVocab,
    kind: str,
    sampling: SamplingParams,
    uniforms: Tensor | None,
) -> Draft:
    logits = expander.root()
    batch_size, device = len(logits), logits.device
    tokens = torch.zeros(batch_size, shape.num_nodes, dtype=torch.int64, device=device)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    laws = None if uniforms is None else logits.new_zeros(batch_size, shape.num_nodes, vocab.size, dtype=dtype)
    asked = [-1]  # the nodes that `logits` are about
    for nodes in shape.levels:
        above = [asked.index(shape.parents[node]) for node in nodes]
        rank = [shape.ranks[node] for node in nodes]
        chances = None
        if uniforms is not None:
            chances = uniforms.new_zeros(batch_size, len(asked), max(rank) + 1)
            chances[:, above, rank] = uniforms[:, nodes]
        chosen = choose_children(logits, max(rank) + 1, kind, sampling, chances)
        tokens[:, nodes] = vocab.to_target(chosen.token_ids[:, above, rank])
        if laws is not None and chosen.laws is not None:
            laws[:, nodes] = chosen.laws[:, above, rank]
        inner = [node for node in nodes if node in shape.parents]
        if inner:
            parents = torch.tensor([asked.index(shape.parents[node]) for node in inner], device=device)
            logits = expander.below(tokens[:, inner], parents.expand(batch_size, -1))
            asked = inner
    parents = torch.tensor(shape.parents, device=device).expand(batch_size, -1)
    return Draft(tokens, parents, None if laws is None else vocab.widen(laws), branches=True)


def _grow_dynamic(expander: Expander, shape: DynamicTree, vocab: DraftVocab) -> Draft:
    """Expand the `top_k` best nodes of every level by their `top_k` likeliest children, and keep the best of all.

    A node's score is the log-probability of its path.
    """
    logits = expander.root()
    batch_size, device, k = len(logits), logits.device, min(shape.top_k, vocab.size)
    dtype = torch.promote_types(logits.dtype, torch.float32)  # sums of bfloat16 tie
    found = logits.log_softmax(-1, dtype=dtype).topk(k, dim=-1)  # (B, 1, k)
    scores, tokens = found.values.flatten(1), vocab.to_target(found.indices.flatten(1))
    parents = torch.full_like(tokens, -1)
    chosen = torch.arange(k, device=device).expand(batch_size, k)  # candidates of the last level that are expanded
    above = torch.zeros_like(chosen)  # and their parents among those expanded before
    for _ in range(1, shape.depth):
        logits = expander.below(tokens.gather(1, chosen), above)
        found = logits.log_softmax(-1, dtype=dtype).topk(k, dim=-1)  # (B, k, k)
        new_scores = (scores.gather(1, chosen)[..., None] + found.values).flatten(1)
        first = tokens.shape[1]
        tokens = torch.cat([tokens, vocab.to_target(found.indices.flatten(1))], dim=1)
        parents = torch.cat([parents, chosen.repeat_interleave(k, dim=1)], dim=1)
        scores = torch.cat([scores, new_scores], dim=1)
        best = new_scores.topk(k, dim=-1).indices
        chosen, above = first + best, best // k
    kept, kept_parents = tree.rerank(scores, parents, min(shape.num_nodes, scores.shape[1]))
    return Draft(tokens.gather(1, kept), kept_parents, None, branches=True)


class TreeRows:
    """The rows of a growing tree in a drafter's own cache: where they stand, and which of them each may read.

    With a `stride`, only every so many of the tree's levels has rows here: the first is level `stride`.
    """

    def __init__(self, cache: KVCache, stride: int = 1) -> None:
        self._cache, self._stride = cache, stride
        self._committed = cache.lengths
        self._ancestors: Tensor | None = None  # (B, T of the level above, T so far) bool
        self._depth = stride - 1
        self._chain = True  # so far: then a request's rows read all that is there

    def begin(self, parents: Tensor) -> tuple[Tensor, Tensor | None]:
        """Announce a level whose rows follow `parents` (B, Q) of the level above: positions (B, Q) and mask."""
        batch_size, num_rows = parents.shape
        own = torch.eye(num_rows, dtype=torch.bool, device=parents.device).expand(batch_size, -1, -1)
        if self._ancestors is None:
            self._ancestors = own
        else:
            index = parents[..., None].expand(-1, -1, self._ancestors.shape[-1])
            self._ancestors = torch.cat([self._ancestors.gather(1, index), own], dim=-1)
        self._cache.begin(num_rows)
        lengths = self._committed.to(parents.device)
        positions = (lengths[:, None] + self._depth).expand(batch_size, num_rows)
        self._depth += self._stride
        self._chain &= num_rows == 1
        if self._chain and self._cache.uniform:
            return positions, None
        longest = int(self._committed.max())  # on the host
        return positions, tree.level_mask(lengths, self._ancestors, longest=longest)

    def end(self, num_rows: int) -> None:
        """Keep the level's rows for the levels below."""
        self._cache.commit(torch.full_like(self._committed, num_rows))
