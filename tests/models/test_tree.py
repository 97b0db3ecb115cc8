"""Depths, ancestors and masks of draft trees against plain Python loops."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from models import tree


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
