"""Rejection sampling of one proposed token: what a verdict on a draft is made of, and a draft that another checks.

B batch, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def try_child(law: Tensor, tokens: Tensor, draft_probs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """One child of each of B nodes: the chance that it is accepted, what its rejection leaves, and Σ_x min(p, q).

    `law` (B, V) is the law that the token is checked against, or what earlier siblings left of it; tokens (B,),
    draft_probs (B, V) or None for point masses. Returns (B,), the normalised law for the next sibling (B, V), and (B,).
    """
    p = law.gather(1, tokens[:, None]).squeeze(1)
    if draft_probs is None:
        chance = overlap = p
        residual = law.scatter(1, tokens[:, None], 0.0)
    else:
        q = draft_probs.to(law.dtype)
        own = q.gather(1, tokens[:, None]).squeeze(1)
        chance = torch.where(own > 0, p / own, 0.0).clamp(max=1.0)
        overlap = torch.minimum(law, q).sum(1)
        residual = (law - q).clamp(min=0)
    mass = residual.sum(1, keepdim=True)
    # p = q up to rounding leaves nothing: such a child is rejected with probability zero, up to rounding.
    return chance, torch.where(mass > 0, residual / mass, law), overlap.clamp(max=1.0)
