"""Draft trees: siblings are tested one after another in the order of their indices, and the first accepted is followed.

Recursive rejection (SpecInfer, 2305.09781; without replacement 2402.14160): a child x ~ q is accepted with probability
min(1, p(x)/q(x)); where it is rejected, p becomes norm(max(p − q, 0)) before the next sibling is tested; where all are,
the extra token is drawn from what is left. That leaves the target's law as it is for any siblings, as long as q is the
law the child was really drawn from, given its earlier siblings, and the order is that of drawing.

A node's parent is the index of an earlier node, or −1 for the last committed token. The laws (B, N + 1, V) stand
behind the last committed token (row 0) and behind each node n (row n + 1).

B batch, N draft nodes, P depth of the tree, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.verify import Verdict
from models.rejection import try_child
from models.sampling import draw
from models.tree import ancestors, chain_parents


def verify_tree_greedy(choices: Tensor, draft_tokens: Tensor, parents: Tensor, limits: Tensor) -> Verdict:
    """Follow the tree for as long as a child is the target's own choice.

    choices (B, N + 1), draft_tokens and parents (B, N), limits (B,) the most tokens to accept. Of siblings with the
    same token only the first is looked at, as `verify_tree` does.
    """
    siblings = parents[:, :, None] == parents[:, None, :]
    same = siblings & (draft_tokens[:, :, None] == draft_tokens[:, None, :])
    accept = (choices.gather(1, parents + 1) == draft_tokens) & ~same.tril(-1).any(-1)
    at, accepted, path = _longest(accept, parents, limits)
    return Verdict(accepted, choices.gather(1, at[:, None]).squeeze(1), _reached(accepted, path), path)


def verify_tree(
    target_probs: Tensor,
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    parents: Tensor,
    limits: Tensor,
    uniforms: Tensor,
) -> Verdict:
    """Follow or correct a tree by recursive rejection; the law of what comes out is the target's.

    target_probs (B, N + 1, V), draft_tokens and parents (B, N), limits (B,) the most tokens to accept, and uniforms
    (B, 1 + N) in [0, 1): the first draws the extra token, the others test the nodes. draft_probs (B, N, V) is the law
    each node was really drawn from: the same q for independent siblings; q without the earlier siblings, renormalised,
    where they are drawn without replacement; None for deterministic ones, which are point masses. A node whose token
    has probability zero under its own law is never accepted: padding may have a law of zeros.

    `expected` counts all children of the node reached: 1 − Π_{j<k} (1 − min(1, p_j(x_j)/q_j(x_j))) · (1 − Σ_x
    min(p_k, q_k)), with p_j the law that child j of k is tested against. Its mean over drafts is the probability that
    one of them is accepted, however they were drawn.
    """
    rows = torch.arange(len(draft_tokens), device=draft_tokens.device)
    lazy = _may_ask(target_probs)
    rank, fanout = _siblings(parents)
    law = target_probs[:, 0].clone()
    at, accepted = torch.full_like(rows, -1), torch.zeros_like(rows)
    path = torch.zeros(len(rows), len(fanout), dtype=torch.int64, device=rows.device)
    expected = torch.zeros(len(rows), len(fanout), dtype=torch.float64, device=rows.device)
    for level, most in enumerate(fanout):
        child = (parents == at[:, None]) & ((accepted == level) & (limits > level))[:, None]  # (B, N)
        missed, rejected = torch.ones_like(expected[:, 0]), torch.ones_like(expected[:, 0])
        chosen = at.clone()
        for place in range(most):
            here = child & (rank == place)
            exists, node = here.any(1), here.int().argmax(1)
            some = exists.nonzero().squeeze(1) if lazy else rows
            if lazy and len(some) == 0:
                break
            n, there = node[some], exists[some]
            q = None if draft_probs is None else draft_probs[some, n]
            chance, left, overlap = try_child(law[some], draft_tokens[some, n], q)
            accept = there & (chosen[some] == at[some]) & (uniforms[some, n + 1] < chance)
            chosen[some] = torch.where(accept, n, chosen[some])
            law[some] = torch.where(there[:, None], left, law[some])
            missed[some] = torch.where(there, rejected[some] * (1 - overlap.double()), missed[some])
            rejected[some] *= torch.where(there, 1 - chance.double(), 1.0)
        moved = chosen != at
        law = torch.where(moved[:, None], target_probs[rows, chosen + 1], law)
        path[:, level] = chosen.clamp(min=0)
        expected[:, level] = 1 - missed
        at, accepted = chosen, accepted + moved
        if lazy and not moved.any():
            break
    return Verdict(accepted, draw(law, uniforms[:, 0]), expected, path)


def _may_ask(x: Tensor) -> bool:
    """Whether to look if anything is left to test: on a GPU the answer takes longer than testing nothing."""
    return x.device.type == "cpu"


def verify_typical(
    target_probs: Tensor,
    draft_tokens: Tensor,
    parents: Tensor | None,
    limits: Tensor,
    uniforms: Tensor,
    *,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Verdict:
    """Accept what the target finds typical. This is NOT lossless: the law of what comes out is not the target's.

    A token is accepted where p(x) > min(epsilon, delta·exp(−H(p))), whatever it was drawn from, and the longest path
    accepted whole is kept, the first by index of several; the extra token is drawn from the target's law behind it
    (Medusa, 2401.10774, §2.3.1). target_probs (B, N + 1, V), draft_tokens (B, N), parents (B, N) or None for a chain,
    limits (B,), uniforms (B, 1 or more) of which the first is used.
    """
    batch_size, num_nodes = draft_tokens.shape
    rows = torch.arange(batch_size, device=draft_tokens.device)
    tree = chain_parents(batch_size, num_nodes, rows.device) if parents is None else parents
    entropy = torch.special.entr(target_probs).sum(-1)
    threshold = (delta * torch.exp(-entropy)).clamp(max=epsilon)
    accept = target_probs[rows[:, None], tree + 1, draft_tokens] > threshold.gather(1, tree + 1)
    at, accepted, path = _longest(accept, tree, limits)
    extra = draw(target_probs[rows, at], uniforms[:, 0])
    if parents is None:
        return Verdict(accepted, extra, accept.double())
    return Verdict(accepted, extra, _reached(accepted, path), path)


def _longest(accept: Tensor, parents: Tensor, limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The longest path of at most `limits` (B,) nodes that are all marked in `accept` (B, N).

    Returns the law's row behind it (B,), 0 for the last committed token; its length (B,); and its nodes (B, P).
    """
    above = ancestors(parents)
    length = above.sum(-1)
    whole = (accept[:, None, :] | ~above).all(-1) & (length <= limits[:, None])
    lengths = torch.nn.functional.pad(length * whole, (1, 0))  # (B, 1 + N), the empty path first
    at = lengths.argmax(1, keepdim=True)
    nodes = torch.nn.functional.pad(above, (0, 0, 1, 0))[torch.arange(len(at), device=at.device), at.squeeze(1)]
    depth = int(torch.nn.functional.pad(length, (1, 0)).max())
    path = nodes.int().argsort(dim=1, descending=True, stable=True)[:, :depth]
    return at.squeeze(1), lengths.gather(1, at).squeeze(1), path


def _reached(accepted: Tensor, path: Tensor) -> Tensor:
    """1 at each depth (B, P) where a child was accepted, else 0: `expected` where no chance plays a part."""
    return (torch.arange(path.shape[1], device=path.device) < accepted[:, None]).double()


def _siblings(parents: Tensor) -> tuple[Tensor, list[int]]:
    """Each node's place among its siblings (B, N), and for each depth the most children of any one node."""
    rank = (parents[:, :, None] == parents[:, None, :]).tril(-1).sum(-1)
    depth = ancestors(parents).sum(-1) - 1
    most = torch.zeros(parents.shape[1], dtype=torch.int64, device=parents.device)
    most.scatter_reduce_(0, depth.flatten(), rank.flatten() + 1, "amax")
    return rank, [count for count in most.tolist() if count > 0]
