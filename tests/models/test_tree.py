"""Shapes, depths, ancestors and masks of draft trees against plain Python loops."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from models import tree
from models.errors import UserError


def random_parents(rng: random.Random, batch_size: int, num_nodes: int) -> Tensor:
    return torch.tensor(
        [[rng.randint(max(-1, i - rng.randint(1, 4)), i - 1) for i in range(num_nodes)] for _ in range(batch_size)]
    ).view(batch_size, num_nodes)


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from a root down to `node`, itself included."""
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


def loop_mask(
    lengths: list[int], num_queries: int, parents: list[list[int]] | None, window: int, depth: list[list[int]] | None
) -> Tensor:
    """(B, 1, Q, W) by the definition: committed tokens at their own positions, new rows by path and depth."""
    width = max(lengths) + num_queries
    allowed = torch.zeros(len(lengths), 1, num_queries, width, dtype=torch.bool)
    for b, length in enumerate(lengths):
        for query in range(num_queries):
            visible = range(query + 1) if parents is None else path_to(parents[b], query)
            steps = list(range(num_queries)) if depth is None else depth[b]
            positions = {slot: slot for slot in range(length)} | {length + n: length + steps[n] for n in visible}
            for slot, position in positions.items():
                near = window == 0 or length + steps[query] - position < window
                allowed[b, 0, query, slot] = near
    return allowed


@pytest.mark.parametrize("seed", range(20))
def test_depths_and_ancestors_equal_loops(seed: int) -> None:
    rng = random.Random(seed)
    batch_size, num_nodes = rng.randint(1, 4), rng.randint(1, 12)
    parents = random_parents(rng, batch_size, num_nodes)
    depths, ancestors = tree.depths(parents), tree.ancestors(parents)
    for b in range(batch_size):
        for node in range(num_nodes):
            path = path_to(parents[b].tolist(), node)
            assert depths[b, node] == len(path) - 1
            assert ancestors[b, node].nonzero().flatten().tolist() == path


def test_a_chain_is_the_tree_that_its_parents_say() -> None:
    parents = tree.chain_parents(2, 4)
    assert parents.tolist() == [[-1, 0, 1, 2]] * 2
    assert tree.depths(parents).tolist() == [[0, 1, 2, 3]] * 2
    assert torch.equal(tree.ancestors(parents), torch.ones(2, 4, 4, dtype=torch.bool).tril())


def test_no_nodes_are_a_tree_too() -> None:
    nothing = torch.zeros(2, 0, dtype=torch.int64)
    assert tree.depths(nothing).shape == (2, 0)
    assert tree.ancestors(nothing).shape == (2, 0, 0)


@pytest.mark.parametrize(
    "parents", [[[0]], [[-1, 1]], [[-1, 0, 5]], [[-1, -2]], [[-1, 0, 1], [-1, 2, 0]]], ids=lambda parents: str(parents)
)
def test_a_parent_that_does_not_come_before_its_child_is_refused(parents: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="a node's parent must be −1 or the index of an earlier node"):
        tree.depths(torch.tensor(parents))


@pytest.mark.parametrize("window", [0, 1, 3, 6])
@pytest.mark.parametrize("seed", range(12))
def test_masks_of_chains_equal_loops(seed: int, window: int) -> None:
    rng = random.Random(seed)
    lengths, num_queries = [rng.randint(0, 9) for _ in range(rng.randint(1, 4))], rng.randint(1, 8)
    mask = tree.attention_mask(torch.tensor(lengths), num_queries, window=window)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, loop_mask(lengths, num_queries, None, window, None))


@pytest.mark.parametrize("window", [0, 1, 3, 6])
@pytest.mark.parametrize("seed", range(12))
def test_masks_of_trees_equal_loops(seed: int, window: int) -> None:
    rng = random.Random(seed)
    lengths, num_queries = [rng.randint(0, 9) for _ in range(rng.randint(1, 4))], rng.randint(1, 8)
    parents = random_parents(rng, len(lengths), num_queries)
    depths = tree.depths(parents)
    mask = tree.attention_mask(
        torch.tensor(lengths), num_queries, tree=tree.ancestors(parents), depth=depths, window=window
    )
    assert torch.equal(mask, loop_mask(lengths, num_queries, parents.tolist(), window, depths.tolist()))


def test_a_mask_as_drawn_by_hand() -> None:
    parents = torch.tensor([[-1, 0, 0, 1]]).expand(2, -1)  # node 0 with children 1 and 2; 3 behind 1
    mask = tree.attention_mask(
        torch.tensor([3, 1]), 4, tree=tree.ancestors(parents), depth=tree.depths(parents), window=3
    )
    drawn = [["".join("x" if seen else "." for seen in row) for row in request[0]] for request in mask.tolist()]
    assert drawn == [
        [".xxx...", "..xxx..", "..xx.x.", "...xx.x"],
        ["xx.....", "xxx....", "xx.x...", ".xx.x.."],
    ]


def test_every_row_reads_at_least_itself() -> None:
    """A row with nothing to read gives NaN in the softmax, padding included."""
    parents = torch.tensor([[-1, 0, -1], [-1, -1, 1]])
    mask = tree.attention_mask(
        torch.tensor([0, 4]), 3, tree=tree.ancestors(parents), depth=tree.depths(parents), window=1
    )
    assert mask.any(-1).all()
    own = torch.tensor([[0, 1, 2], [4, 5, 6]])[:, None, :, None]
    assert mask.gather(3, own).all()


# ---- shapes ----

Table = list[list[float]]


def random_table(rng: random.Random, depth: int, width: int) -> Table:
    """Probabilities of children by rank, never rising, of which some are tied."""
    rows = [sorted((rng.randint(1, 9) for _ in range(rng.randint(1, width))), reverse=True) for _ in range(depth)]
    totals = [sum(row) + rng.randint(0, 9) for row in rows]
    return [[x / total for x in row] for row, total in zip(rows, totals, strict=True)]


def most_by_dynamic_programme(table: Table, num_nodes: int) -> float:
    """The most tokens that a tree of `num_nodes` nodes can be expected to give, by Sequoia's recursion."""

    @functools.cache
    def best(depth: int, rank: int, nodes: int) -> float:
        """Under one node: children of that rank and later ones, `nodes` nodes in all."""
        if nodes == 0:
            return 0.0
        if depth == len(table) or rank == len(table[depth]):
            return -math.inf
        splits = (best(depth + 1, 0, below) + 1 for below in range(nodes))
        return max(
            table[depth][rank] * split + best(depth, rank + 1, nodes - 1 - below) for below, split in enumerate(splits)
        )

    return 1 + best(0, 0, num_nodes)


def most_by_search(table: Table, num_nodes: int) -> float:
    """The same by trying every set of nodes that holds the parent of each, siblings in any choice of ranks."""
    paths = [
        path
        for depth in range(1, len(table) + 1)
        for path in itertools.product(*(range(len(row)) for row in table[:depth]))
    ]
    value = {path: math.prod(table[d][rank] for d, rank in enumerate(path)) for path in paths}
    trees = (
        nodes
        for nodes in itertools.combinations(paths, num_nodes)
        if all(len(path) == 1 or path[:-1] in nodes for path in nodes)
    )
    return 1 + max(sum(value[path] for path in nodes) for nodes in trees)


@pytest.mark.parametrize("seed", range(8))
def test_best_first_is_the_optimum(seed: int) -> None:
    rng = random.Random(seed)
    table = random_table(rng, depth=3, width=2)
    room = sum(math.prod(len(row) for row in table[: depth + 1]) for depth in range(3))
    for num_nodes in range(1, min(room, 5) + 1):
        found = tree.StaticTree.best_first(table, num_nodes)
        assert found.num_nodes == num_nodes
        assert found.expected_tokens(table) == pytest.approx(most_by_search(table, num_nodes), abs=1e-12)
    table = random_table(rng, depth=5, width=4)
    room = sum(math.prod(len(row) for row in table[: depth + 1]) for depth in range(5))
    for num_nodes in (1, 4, 9, 16):
        if num_nodes <= room:
            found = tree.StaticTree.best_first(table, num_nodes)
            wanted = most_by_dynamic_programme(table, num_nodes)
            assert found.expected_tokens(table) == pytest.approx(wanted, abs=1e-12)


def test_best_first_by_hand() -> None:
    table = [[0.6, 0.3], [0.5, 0.4]]
    found = tree.StaticTree.best_first(table, 5)  # products .6, .3, .3, .24; then .15 before .12
    assert (found.parents, found.ranks) == ((-1, -1, 0, 0, 1), (0, 1, 0, 1, 0))
    assert (found.depth, found.levels) == (2, [[0, 1], [2, 3, 4]])
    assert found.expected_tokens(table) == pytest.approx(1 + 0.6 + 0.3 + 0.3 + 0.24 + 0.15)


@pytest.mark.parametrize("seed", range(10))
def test_levels_are_the_depths_of_the_parents(seed: int) -> None:
    rng = random.Random(seed)
    parents = random_parents(rng, 1, 12)
    ranks = [parents[0, :n].tolist().count(parent) for n, parent in enumerate(parents[0].tolist())]
    shape = tree.StaticTree(tuple(parents[0].tolist()), tuple(ranks))
    depths = tree.depths(parents)[0].tolist()
    assert shape.levels == [[n for n in range(12) if depths[n] == d] for d in range(max(depths) + 1)]
    assert shape.depth == max(depths) + 1
    table = random_table(rng, shape.depth, 1)
    wide = [row * 12 for row in [[row[0] / 12] for row in table]]
    wanted = 1 + sum(math.prod(wide[d][0] for d in range(len(path_to(parents[0].tolist(), n)))) for n in range(12))
    assert shape.expected_tokens(wide) == pytest.approx(wanted, abs=1e-12)


def test_a_chain_shape_is_one_branch() -> None:
    shape = tree.StaticTree.chain(3)
    assert (shape.parents, shape.ranks, shape.depth, shape.levels) == ((-1, 0, 1), (0, 0, 0), 3, [[0], [1], [2]])
    assert shape.expected_tokens([[0.5]] * 3) == 1.875


@pytest.mark.parametrize("per_node", [0.0, 0.02, 0.1, 0.5, 2.0])
def test_for_time_weighs_tokens_against_seconds(per_node: float) -> None:
    table = [[0.6, 0.2, 0.1], [0.5, 0.2], [0.4]]

    def seconds(num_nodes: int) -> float:
        return 1.0 + per_node * num_nodes + 0.3 * (num_nodes > 4)

    trees = [tree.StaticTree.best_first(table, n) for n in range(1, 11)]
    best = max(trees, key=lambda t: t.expected_tokens(table) / seconds(t.num_nodes))
    assert tree.StaticTree.for_time(table, seconds, 10) == best
    assert tree.StaticTree.for_time(table, [seconds(n) for n in range(11)], 10) == best
    assert tree.StaticTree.for_time(table, seconds, 3).num_nodes <= 3
    room = 3 + 6 + 6
    assert tree.StaticTree.for_time(table, lambda n: 1.0, 99).num_nodes == room


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tree.StaticTree((), ()), "0 parents and 0 ranks"),
        (lambda: tree.StaticTree((-1,), (0, 1)), "1 parents and 2 ranks"),
        (lambda: tree.StaticTree.chain(0), "at least one node"),
        (lambda: tree.StaticTree((-1, 1), (0, 0)), "Node 1 of a draft tree has parent 1"),
        (lambda: tree.StaticTree((-2,), (0,)), "Node 0 of a draft tree has parent -2"),
        (lambda: tree.StaticTree((-1, -1), (1, 1)), "Node 1 of a draft tree has rank 1 under parent -1"),
        (lambda: tree.StaticTree((-1,), (-1,)), "Node 0 of a draft tree has rank -1"),
        (lambda: tree.StaticTree((-1, -1), (1, 0)), "Node 1 .* rise from sibling to sibling"),
        (lambda: tree.StaticTree((-1,), (0.0,)), "whole numbers"),  # type: ignore[arg-type]
        (lambda: tree.DynamicTree(2.5, 2, 4), "2.5, 2, 4: they must be whole numbers"),  # type: ignore[arg-type]
        (lambda: tree.StaticTree.best_first([[0.5]], 0), "A draft tree of 0 nodes"),
        (lambda: tree.StaticTree.best_first([], 1), "table is empty"),
        (lambda: tree.StaticTree.best_first([[0.5], []], 1), r"Row 1 of the acceptance table is \[\]"),
        (lambda: tree.StaticTree.best_first([[0.5, 0.6]], 1), "add up to 1"),
        (lambda: tree.StaticTree.best_first([[0.5, -0.1]], 1), "Row 0 of the acceptance table"),
        (lambda: tree.StaticTree.best_first([[math.nan]], 1), "Row 0 of the acceptance table"),
        (lambda: tree.StaticTree.best_first([[0.5], [0.2, 0.1]], 4), "4 nodes is asked for, .* room for 3"),
        (lambda: tree.StaticTree.for_time([[0.5]], lambda n: 0.0, 1), "1 drafted nodes takes 0.0 s"),
        (lambda: tree.StaticTree.for_time([[0.5]], [1.0, math.nan], 1), "1 drafted nodes takes nan s"),
        (lambda: tree.StaticTree.for_time([[0.5, 0.1]], [1.0, 1.0], 9), "up to 1 nodes, but a tree may have 2"),
        (lambda: tree.StaticTree.chain(2).expected_tokens([[0.5]]), "no entry for rank 0 at depth 1"),
        (lambda: tree.StaticTree((-1,), (1,)).expected_tokens([[0.5]]), "no entry for rank 1 at depth 0"),
        (lambda: tree.DynamicTree(0, 2, 2), "depth of a dynamic draft tree is 0"),
        (lambda: tree.DynamicTree(2, 0, 2), "top_k of a dynamic draft tree is 0"),
        (lambda: tree.DynamicTree(2, 2, 0), "num_nodes of a dynamic draft tree is 0"),
        (lambda: tree.DynamicTree(2, 3, 13), "is 13, but depth 2 with top_k 3 drafts only 12"),
        (lambda: tree.DynamicTree(5, 3, 4), "cannot hold a path of depth 5"),
    ],
)
def test_nonsense_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


def rerank_by_loop(scores: list[float], parents: list[int], num_nodes: int) -> tuple[list[int], list[int]]:
    """One node after another: the best of those whose parent is kept, the earlier of tied ones."""
    kept: list[int] = []
    while len(kept) < min(num_nodes, len(scores)):
        open_nodes = [n for n in range(len(scores)) if n not in kept and (parents[n] < 0 or parents[n] in kept)]
        kept.append(max(open_nodes, key=lambda n: (scores[n], -n)))
    kept.sort()
    return kept, [kept.index(parents[n]) if parents[n] >= 0 else -1 for n in kept]


@pytest.mark.parametrize("seed", range(20))
def test_reranking_equals_a_loop_and_keeps_parents_of_ties(seed: int) -> None:
    rng = random.Random(seed)
    batch_size, num_nodes = rng.randint(1, 4), rng.randint(1, 14)
    parents = random_parents(rng, batch_size, num_nodes)
    steps = [[rng.choice([0.0, 0.0, -1.0, -2.0, -math.inf]) for _ in range(num_nodes)] for _ in range(batch_size)]
    rows = [
        [sum(row[n] for n in path_to(above, node)) for node in range(num_nodes)]
        for row, above in zip(steps, parents.tolist(), strict=True)
    ]
    for keep in (1, 3, num_nodes, num_nodes + 2):
        chosen, above = tree.rerank(torch.tensor(rows), parents, keep)
        for b in range(batch_size):
            wanted = rerank_by_loop(rows[b], parents[b].tolist(), keep)
            assert (chosen[b].tolist(), above[b].tolist()) == wanted
        assert torch.equal(tree.depths(above), tree.depths(parents).gather(1, chosen))


@pytest.mark.parametrize("seed", range(12))
def test_masks_of_levels_equal_loops(seed: int) -> None:
    rng = random.Random(seed)
    batch_size, num_rows = rng.randint(1, 4), rng.randint(1, 10)
    lengths, num_queries = [rng.randint(0, 9) for _ in range(batch_size)], rng.randint(1, num_rows)
    parents = random_parents(rng, batch_size, num_rows)
    mask = tree.level_mask(torch.tensor(lengths), tree.ancestors(parents)[:, -num_queries:])
    wanted = torch.zeros(batch_size, 1, num_queries, max(lengths) + num_rows, dtype=torch.bool)
    for b, length in enumerate(lengths):
        for query in range(num_queries):
            path = path_to(parents[b].tolist(), num_rows - num_queries + query)
            for slot in [*range(length), *(length + n for n in path)]:
                wanted[b, 0, query, slot] = True
    assert torch.equal(mask, wanted)


def test_a_level_mask_as_drawn_by_hand() -> None:
    parents = torch.tensor([[-1, -1, 0, 1, 1]]).expand(2, -1)
    mask = tree.level_mask(torch.tensor([3, 1]), tree.ancestors(parents)[:, 2:])  # nodes 2, 3 and 4 are new
    drawn = [["".join("x" if seen else "." for seen in row) for row in request[0]] for request in mask.tolist()]
    assert drawn == [["xxxx.x..", "xxx.x.x.", "xxx.x..x"], ["xx.x....", "x.x.x...", "x.x..x.."]]
