"""Drafts as trees: their shapes, and parents to depths, paths and attention masks.

B batch, N draft nodes, Q query rows, T drafted rows, W key slots. A node's parent is the index of an earlier node, or
−1 for the last committed token. A chain is the tree whose parents are arange(N) − 1.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.errors import UserError


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A shape fixed beforehand: node i is the `ranks[i]`-th likeliest child, from 0, of node `parents[i]`.

    Raises UserError where the numbers describe no tree.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or len(self.parents) != len(self.ranks):
            raise UserError(
                f"A draft tree has {len(self.parents)} parents and {len(self.ranks)} ranks: it needs one of each for "
                "every node, and at least one node."
            )
        _refuse_other_than_ints("A draft tree's parents and ranks", (*self.parents, *self.ranks))
        last: dict[int, int] = {}  # siblings are verified in order of their index, and drawn in order of their rank
        for node, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True)):
            if not -1 <= parent < node:
                raise UserError(
                    f"Node {node} of a draft tree has parent {parent}: it must be −1 or the index of an earlier node."
                )
            if rank <= last.get(parent, -1):
                raise UserError(
                    f"Node {node} of a draft tree has rank {rank} under parent {parent}: ranks must be 0 or more, and "
                    "rise from sibling to sibling."
                )
            last[parent] = rank

    @classmethod
    def chain(cls, num_nodes: int) -> StaticTree:
        """The tree of one branch."""
        return cls(tuple(range(-1, num_nodes - 1)), (0,) * num_nodes)

    @classmethod
    def best_first(cls, acceptance: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
        """The tree of `num_nodes` nodes that is expected to give most tokens, breadth first.

        acceptance[depth][rank] is the probability that the rank-th child at that depth is accepted, given that its
        parent was. Nodes are added in order of their path's product, each opening its next sibling and its first
        child: the optimum wherever acceptance never rises with rank (the dynamic programme of Sequoia, 2402.12374).
        Raises UserError for a table that holds no probabilities, or too few for so many nodes.
        """
        return cls._breadth_first(_best_nodes(acceptance, num_nodes)[0])

    @classmethod
    def for_time(
        cls,
        acceptance: Sequence[Sequence[float]],
        seconds: Callable[[int], float] | Sequence[float],
        max_nodes: int,
    ) -> StaticTree:
        """The best-first tree of up to `max_nodes` nodes that is expected to give most tokens per second.

        seconds(n) or seconds[n] is how long a round with n drafted nodes takes. Raises UserError as `best_first` does,
        and where a time is missing or not positive.
        """
        room = _room(acceptance, max_nodes)
        if isinstance(seconds, Sequence) and len(seconds) <= room:
            raise UserError(f"Seconds are given for up to {len(seconds) - 1} nodes, but a tree may have {room}.")
        nodes, gains = _best_nodes(acceptance, room)
        best, best_rate, tokens = 0, 0.0, 1.0
        for count, gain in enumerate(gains, start=1):
            tokens += gain
            took = seconds[count] if isinstance(seconds, Sequence) else seconds(count)
            if not 0 < took < math.inf:
                raise UserError(
                    f"A round with {count} drafted nodes takes {took} s: it must be more than 0, and finite."
                )
            if tokens / took > best_rate:
                best, best_rate = count, tokens / took
        return cls._breadth_first(nodes[:best])

    @classmethod
    def _breadth_first(cls, nodes: list[tuple[int, ...]]) -> StaticTree:
        """The tree of nodes written as the ranks on their paths."""
        ordered = sorted(nodes, key=lambda path: (len(path), path))
        index = {path: node for node, path in enumerate(ordered)} | {(): -1}
        return cls(tuple(index[path[:-1]] for path in ordered), tuple(path[-1] for path in ordered))

    @property
    def num_nodes(self) -> int:
        """How many tokens are drafted."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """How many of them can be accepted at most."""
        return len(self.levels)

    @property
    def levels(self) -> list[list[int]]:
        """The nodes at each depth, in order of their indices."""
        depth: list[int] = []
        levels: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            depth.append(0 if parent < 0 else depth[parent] + 1)
            if depth[node] == len(levels):
                levels.append([])
            levels[depth[node]].append(node)
        return levels

    def expected_tokens(self, acceptance: Sequence[Sequence[float]]) -> float:
        """Tokens a round is expected to give, the extra one counted: 1 + Σ over nodes of their path's product.

        `acceptance` as for `best_first`. Raises UserError where it knows nothing of a node.
        """
        _room(acceptance, self.num_nodes)
        product = [0.0] * self.num_nodes
        for level, nodes in enumerate(self.levels):
            for node in nodes:
                parent, rank = self.parents[node], self.ranks[node]
                if level >= len(acceptance) or rank >= len(acceptance[level]):
                    raise UserError(f"The acceptance table has no entry for rank {rank} at depth {level}.")
                product[node] = (1.0 if parent < 0 else product[parent]) * acceptance[level][rank]
        return 1.0 + sum(product)


def _refuse_other_than_ints(what: str, values: tuple[int, ...]) -> None:
    if not all(type(value) is int for value in values):
        raise UserError(f"{what} are {', '.join(map(repr, values))}: they must be whole numbers.")


def _room(acceptance: Sequence[Sequence[float]], most: int) -> int:
    """How many nodes, up to `most`, a tree on a checked acceptance table can have."""
    if most < 1:
        raise UserError(f"A draft tree of {most} nodes is asked for: it needs at least 1.")
    if not acceptance:
        raise UserError("The acceptance table is empty: it needs a row of probabilities for each depth.")
    total, level = 0, 1
    for depth, row in enumerate(acceptance):
        if not row or not all(0 <= a <= 1 for a in row) or sum(row) > 1 + 1e-6:
            raise UserError(
                f"Row {depth} of the acceptance table is {list(row)}: it must hold probabilities of events that "
                "exclude each other, which add up to 1 at most."
            )
        level *= len(row)
        total = min(total + level, most)
    return total


def _best_nodes(acceptance: Sequence[Sequence[float]], num_nodes: int) -> tuple[list[tuple[int, ...]], list[float]]:
    """The likeliest nodes, written as the ranks on their paths, in order of their path's product, and the products."""
    if (room := _room(acceptance, num_nodes)) < num_nodes:
        raise UserError(f"A tree of {num_nodes} nodes is asked for, but the acceptance table has room for {room}.")
    nodes: list[tuple[int, ...]] = []
    gains: list[float] = []
    candidates: list[tuple[float, tuple[int, ...], float]] = [
        (-acceptance[0][0], (0,), 1.0)
    ]  # −product, path, parent's
    while len(nodes) < num_nodes:
        negative, path, above = heapq.heappop(candidates)
        nodes.append(path)
        gains.append(-negative)
        row, sibling = acceptance[len(path) - 1], path[-1] + 1
        if sibling < len(row):
            heapq.heappush(candidates, (-above * row[sibling], (*path[:-1], sibling), above))
        if len(path) < len(acceptance):
            heapq.heappush(candidates, (negative * acceptance[len(path)][0], (*path, 0), -negative))
    return nodes, gains


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """A shape that follows the drafter's own probabilities (EAGLE-2, 2406.16858, §4).

    Each of `depth` levels expands the `top_k` best nodes of the one before by their `top_k` likeliest children; of all
    nodes the `num_nodes` best by the product of their path are kept (`rerank`). Raises UserError for sizes that do not
    go together.
    """

    depth: int
    top_k: int
    num_nodes: int

    def __post_init__(self) -> None:
        _refuse_other_than_ints("depth, top_k and num_nodes of a draft tree", (self.depth, self.top_k, self.num_nodes))
        for name in ("depth", "top_k", "num_nodes"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} of a dynamic draft tree is {getattr(self, name)}: it must be at least 1.")
        if self.num_nodes > self.num_candidates:
            raise UserError(
                f"num_nodes of a dynamic draft tree is {self.num_nodes}, but depth {self.depth} with top_k "
                f"{self.top_k} drafts only {self.num_candidates}: lower it or raise those."
            )
        if self.num_nodes < self.depth:
            raise UserError(
                f"num_nodes of a dynamic draft tree is {self.num_nodes}, which cannot hold a path of depth "
                f"{self.depth}: raise it or lower depth."
            )

    @property
    def num_candidates(self) -> int:
        """How many nodes are drafted before the best are kept: top_k, then top_k² on every further level."""
        return self.top_k + (self.depth - 1) * self.top_k**2


def rerank(scores: Tensor, parents: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Keep the `num_nodes` best-scored nodes (all, if there are fewer) of a tree: scores and parents (B, M).

    Scores must never increase along a path; of tied nodes the earlier are kept, so that no child is kept without its
    parent. Returns the kept nodes' indices, ascending, and their parents among the kept: (B, N) and (B, N).
    """
    best = scores.argsort(dim=1, descending=True, stable=True)[:, :num_nodes]
    chosen = best.sort(dim=1).values
    kept = torch.zeros_like(parents).scatter_(1, chosen, 1)
    place = kept.cumsum(1) - 1
    above = parents.gather(1, chosen)
    return chosen, torch.where(above < 0, -1, place.gather(1, above.clamp(min=0)))


def chain_parents(batch_size: int, num_nodes: int, device: torch.device | None = None) -> Tensor:
    """Parents of a chain: (B, N)."""
    return (torch.arange(num_nodes, device=device) - 1).expand(batch_size, num_nodes)


def depths(parents: Tensor) -> Tensor:
    """Depth of each node, 0 for children of the last committed token: (B, N) → (B, N).

    Raises ValueError, on a CPU, where a parent does not come before its child.
    """
    order = torch.arange(parents.shape[1], device=parents.device)
    if parents.device.type == "cpu" and ((parents >= order) | (parents < -1)).any():  # elsewhere asking takes too long
        raise ValueError("a node's parent must be −1 or the index of an earlier node")
    return ancestors(parents).sum(-1) - 1


def ancestors(parents: Tensor) -> Tensor:
    """Which nodes lie on the path from the root to each node, itself included: (B, N) → (B, N, N) bool."""
    node = torch.arange(parents.shape[1], device=parents.device)
    reach = ((parents[..., None] == node) | (node[:, None] == node)).float()
    for _ in range((parents.shape[1] - 1).bit_length()):  # paths of up to 1, 2, 4, .. steps
        reach = (reach @ reach).clamp(max=1.0)
    return reach > 0


def level_mask(lengths: Tensor, ancestors_rows: Tensor, *, longest: int | None = None) -> Tensor:
    """Which key slots the new rows of a tree may read while it is drafted level by level.

    The T rows drafted so far, the new ones included, take the slots lengths[b] .. lengths[b] + T − 1 of request b.
    A new row reads every committed slot, and of the drafted rows those that ancestors_rows (B, Q, T) marks. `longest`
    is max(lengths), where the host knows it: a GPU would have to be asked.

    Returns (B, 1, Q, W) bool with W = max(lengths) + T, True where attention is allowed.
    """
    num_queries, num_rows = ancestors_rows.shape[1:]
    longest = int(lengths.max()) if longest is None else longest
    slot = torch.arange(longest + num_rows, device=ancestors_rows.device)
    offset = slot - lengths.to(slot.device)[:, None, None]  # (B, 1, W) index among the drafted, negative if committed
    marked = ancestors_rows.gather(2, offset.clamp(0, num_rows - 1).expand(-1, num_queries, -1))
    return ((offset < 0) | (marked & (offset < num_rows))).unsqueeze(1)


def attention_mask(
    lengths: Tensor,
    num_queries: int,
    *,
    tree: Tensor | None = None,
    depth: Tensor | None = None,
    window: int = 0,
    longest: int | None = None,
) -> Tensor:
    """Which key slots each new row may read, for caches that hold a different number of rows per request.

    The new rows of request b take the slots lengths[b] .. lengths[b] + Q − 1. Each reads every committed slot and the
    new rows before it, or, with `tree` (B, Q, Q), those that the tree marks. `window` > 0 hides keys whose position is
    `window` or more before the query's; positions of new rows are then lengths + `depth` (B, Q). `longest` is
    max(lengths), where the host knows it.

    Returns (B, 1, Q, W) bool with W = max(lengths) + Q, True where attention is allowed.
    """
    device = lengths.device
    longest = int(lengths.max()) if longest is None else longest
    slot = torch.arange(longest + num_queries, device=device)
    order = torch.arange(num_queries, device=device)
    offset = slot[None, None, :] - lengths[:, None, None]  # (B, 1, W) index among the new rows, negative if committed
    allowed = offset <= order[None, :, None] if tree is None else level_mask(lengths, tree, longest=longest).squeeze(1)
    if window > 0:
        steps = order.expand(len(lengths), -1) if depth is None else depth  # (B, Q)
        key_step = torch.where(
            offset < 0, offset, steps.gather(1, offset.squeeze(1).clamp(0, num_queries - 1))[:, None]
        )
        allowed = allowed & (steps[:, :, None] - key_step < window)
    return allowed.unsqueeze(1)
