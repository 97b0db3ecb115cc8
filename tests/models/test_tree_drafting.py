"""Trees grown by a drafter that looks at the whole path, against trees grown path by path."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from models.cache import KVCache
from models.errors import UserError
from models.sampling import RequestRandom, SamplingParams, probabilities
from models.tree import DynamicTree, StaticTree
from models.tree_drafting import TreeRows, choose_children, grow
from models.vocab import DraftVocab

VOCAB = DraftVocab(9, torch.tensor([0, 1, 3, 4, 5, 8]))
GREEDY, SAMPLED = SamplingParams(), SamplingParams(0.8, top_k=4)
SHAPES = [
    StaticTree.chain(3),
    StaticTree((-1, -1, -1, 0, 0, 2, 3, 5), (0, 1, 2, 0, 1, 0, 0, 0)),
    StaticTree((-1, 0, 1, 1, 2), (0, 0, 0, 1, 0)),
]


def logits_behind(request: int, path: list[int]) -> Tensor:
    """Draft logits (Vd,) that depend on the request and on every token of the path, in order."""
    seed = hash((request, *path)) % 2**31
    return 2 * torch.randn(VOCAB.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class PathExpander:
    """Knows nothing of trees but the path of each node."""

    def __init__(self, batch_size: int) -> None:
        self.paths: list[list[list[int]]] = [[[]] for _ in range(batch_size)]

    def root(self) -> Tensor:
        return self._logits()

    def below(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        self.paths = [
            [[*above[parent], token] for token, parent in zip(tokens, of, strict=True)]
            for above, tokens, of in zip(self.paths, token_ids.tolist(), parents.tolist(), strict=True)
        ]
        return self._logits()

    def _logits(self) -> Tensor:
        return torch.stack([torch.stack([logits_behind(b, p) for p in paths]) for b, paths in enumerate(self.paths)])


def drafted(shape: Any, children: str, sampling: SamplingParams, batch_size: int = 3) -> Any:
    random = RequestRandom(list(range(batch_size)), 32)
    return grow(PathExpander(batch_size), shape, VOCAB, children=children, sampling=sampling, random=random)


def path_of(draft: Any, request: int, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, int(draft.token_ids[request, node]))
        node = int(draft.parents[request, node])
    return path


@pytest.mark.parametrize("shape", SHAPES)
def test_nodes_of_a_static_tree_are_the_likeliest_children_of_their_parents(shape: StaticTree) -> None:
    for sampling in (GREEDY, SAMPLED):
        draft = drafted(shape, "top", sampling)
        assert draft.branches and draft.probs is None
        for request, node in itertools.product(range(3), range(shape.num_nodes)):
            assert int(draft.parents[request, node]) == shape.parents[node]
            *above, token = path_of(draft, request, node)
            order = logits_behind(request, above).argsort(descending=True)
            assert token == int(VOCAB.to_target(order[shape.ranks[node]]))


@pytest.mark.parametrize("kind", ["independent", "without_replacement"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_children_report_the_law_that_they_were_drawn_from(shape: StaticTree, kind: str) -> None:
    draft = drafted(shape, kind, SAMPLED)
    uniforms = RequestRandom(list(range(3)), 32).uniform(shape.num_nodes)
    for request, node in itertools.product(range(3), range(shape.num_nodes)):
        *above, token = path_of(draft, request, node)
        law = VOCAB.widen(probabilities(logits_behind(request, above), SAMPLED))
        if kind == "without_replacement":
            for elder in range(node):
                if shape.parents[elder] == shape.parents[node]:
                    law[draft.token_ids[request, elder]] = 0.0
            law = law / law.sum()
        torch.testing.assert_close(draft.probs[request, node].double(), law, atol=1e-6, rtol=0)
        cumulative = law.cumsum(0)
        assert token == int((cumulative <= uniforms[request, node]).sum())


def test_children_beyond_the_support_are_point_masses() -> None:
    logits = torch.tensor([[[0.0, 1.0, 2.0, 3.0]]])
    chances = torch.full((1, 1, 4), 0.5, dtype=torch.float64)
    made = choose_children(logits, 4, "without_replacement", SamplingParams(1.0, top_k=2), chances)
    assert made.token_ids[0, 0, :2].sort().values.tolist() == [2, 3]
    assert made.token_ids[0, 0, 2:].tolist() == [0, 0]
    assert made.laws is not None and made.laws[0, 0, 2].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    "shape", [DynamicTree(1, 3, 3), DynamicTree(3, 2, 7), DynamicTree(4, 3, 5), DynamicTree(2, 6, 42)]
)
def test_a_dynamic_tree_keeps_the_best_of_all_expanded_nodes(shape: DynamicTree) -> None:
    draft = drafted(shape, "top", SAMPLED)
    assert draft.branches and draft.probs is None
    for request in range(3):
        level: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        found: list[tuple[float, tuple[int, ...]]] = []
        for _ in range(shape.depth):
            children = []
            for score, path in level:
                law = logits_behind(request, list(path)).log_softmax(-1)
                for index in law.argsort(descending=True)[: shape.top_k].tolist():
                    token = int(VOCAB.to_target(torch.tensor(index)))
                    children.append((score + float(law[index]), (*path, token)))
            found += children
            level = sorted(children, reverse=True)[: shape.top_k]
        best = {path for _, path in sorted(found, reverse=True)[: shape.num_nodes]}
        kept = [tuple(path_of(draft, request, node)) for node in range(draft.token_ids.shape[1])]
        assert set(kept) == best and len(kept) == shape.num_nodes
        assert all(int(p) < n for n, p in enumerate(draft.parents[request]))


def test_rows_of_a_tree_stand_behind_the_committed_ones_and_read_their_ancestors() -> None:
    cache = KVCache(1, 2, 32)
    cache.begin(5)
    cache.commit(torch.tensor([5, 3]))
    rows = TreeRows(cache)
    first = rows.begin(torch.zeros(2, 2, dtype=torch.int64))
    rows.end(2)
    positions, mask = rows.begin(torch.tensor([[1, 0, 1], [0, 0, 1]]))
    rows.end(3)
    assert first[0].tolist() == [[5, 5], [3, 3]] and positions.tolist() == [[6, 6, 6], [4, 4, 4]]
    assert cache.lengths.tolist() == [10, 8]
    above = [[1, 0, 1], [0, 0, 1]]
    for b, committed in enumerate((5, 3)):
        for q in range(3):
            readable = {*range(committed), committed + above[b][q], committed + 2 + q}
            assert set(mask[b, 0, q].nonzero().flatten().tolist()) == readable


def test_an_unknown_kind_of_children_is_refused() -> None:
    with pytest.raises(UserError, match="'best': choose top, independent, without_replacement"):
        drafted(SHAPES[0], "best", SAMPLED)
