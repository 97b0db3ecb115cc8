"""Drafts as trees: parents to depths, paths and attention masks.

B batch, N draft nodes, Q query rows, W key slots. A node's parent is the index of an earlier node, or −1 for the last
committed token. A chain is the tree whose parents are arange(N) − 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def chain_parents(batch_size: int, num_nodes: int, device: torch.device | None = None) -> Tensor:
    """Parents of a chain: (B, N)."""
    return (torch.arange(num_nodes, device=device) - 1).expand(batch_size, num_nodes)


def depths(parents: Tensor) -> Tensor:
    """Depth of each node, 0 for children of the last committed token: (B, N) → (B, N).

    Raises ValueError where a parent does not come before its child.
    """
    num_nodes = parents.shape[1]
    if (parents >= torch.arange(num_nodes, device=parents.device)).any() or (parents < -1).any():
        raise ValueError("a node's parent must be −1 or the index of an earlier node")
    result = torch.zeros_like(parents)
    for node in range(num_nodes):
        parent = parents[:, node : node + 1]
        above = result.gather(1, parent.clamp(min=0)) + 1
        result[:, node : node + 1] = torch.where(parent < 0, 0, above)
    return result


def ancestors(parents: Tensor) -> Tensor:
    """Which nodes lie on the path from the root to each node, itself included: (B, N) → (B, N, N) bool."""
    batch_size, num_nodes = parents.shape
    result = torch.zeros(batch_size, num_nodes, num_nodes, dtype=torch.bool, device=parents.device)
    rows = torch.arange(batch_size, device=parents.device)
    for node in range(num_nodes):
        parent = parents[:, node]
        result[:, node] = result[rows, parent.clamp(min=0)] & (parent >= 0)[:, None]
        result[:, node, node] = True
    return result


def attention_mask(
    lengths: Tensor, num_queries: int, *, tree: Tensor | None = None, depth: Tensor | None = None, window: int = 0
) -> Tensor:
    """Which key slots each new row may read, for caches that hold a different number of rows per request.

    The new rows of request b take the slots lengths[b] .. lengths[b] + Q − 1. Each reads every committed slot and the
    new rows before it, or, with `tree` (B, Q, Q), those that the tree marks. `window` > 0 hides keys whose position is
    `window` or more before the query's; positions of new rows are then lengths + `depth` (B, Q).

    Returns (B, 1, Q, W) bool with W = max(lengths) + Q, True where attention is allowed.
    """
    device = lengths.device
    slot = torch.arange(int(lengths.max()) + num_queries, device=device)
    order = torch.arange(num_queries, device=device)
    offset = slot[None, None, :] - lengths[:, None, None]  # (B, 1, W) index among the new rows, negative if committed
    if tree is None:
        allowed = offset <= order[None, :, None]
    else:
        index = offset.clamp(0, num_queries - 1).expand(-1, num_queries, -1)
        allowed = (offset < 0) | (tree.gather(2, index) & (offset < num_queries))
    if window > 0:
        steps = order.expand(len(lengths), -1) if depth is None else depth  # (B, Q)
        key_step = torch.where(
            offset < 0, offset, steps.gather(1, offset.squeeze(1).clamp(0, num_queries - 1))[:, None]
        )
        allowed = allowed & (steps[:, :, None] - key_step < window)
    return allowed.unsqueeze(1)
