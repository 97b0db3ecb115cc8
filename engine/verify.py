"""Probabilities in, accepted tokens out: no model in sight.

Speculative sampling (2211.17192, 2302.01318): a drafted token x ~ q is accepted with probability min(1, p(x)/q(x));
the first rejection emits a correction token from norm(max(p − q, 0)), and a draft accepted whole is followed by a
bonus token from p. What comes out has exactly the target's law. A deterministic draft is the case of q a point mass:
accept with p(x), correct from p without x. Greedy decoding is the case of p a point mass too.

A draft may be cut at `limits[b]` tokens, by a rule that looks at no token behind the cut; a draft accepted up to its
limit is followed by a bonus token there. Trees are verified in verify_tree.py.

B batch, N drafted tokens, V vocabulary; P the depth of a draft tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.sampling import draw


@dataclass(frozen=True, slots=True)
class Verdict:
    """`accepted` drafted tokens, then one `extra_token`.

    `expected` is Σ_x min(p, q) at each position of a chain; in a tree, at each depth that was tested, the probability
    that one of the children there is accepted. `path` names a tree's accepted nodes in order; entries from
    `accepted` on are the indices of any nodes.
    """

    accepted: Tensor  # (B,)
    extra_token: Tensor  # (B,)
    expected: Tensor  # (B, N), or (B, P) for a tree
    path: Tensor | None = None  # (B, P), None for a chain

    def last_node(self) -> Tensor:
        """The last accepted node (B,), −1 where none was."""
        if self.path is None or self.path.shape[1] == 0:
            return self.accepted - 1
        last = self.path.gather(1, (self.accepted - 1).clamp(min=0)[:, None]).squeeze(1)
        return torch.where(self.accepted > 0, last, -1)


def verify_greedy(target_tokens: Tensor, draft_tokens: Tensor, limits: Tensor) -> Verdict:
    """Accept drafted tokens for as long as they are the target's own choice.

    target_tokens (B, N + 1) are the target's choices behind each committed or drafted token, draft_tokens (B, N).
    """
    matches = target_tokens[:, :-1] == draft_tokens
    accepted = _leading(matches, limits)
    return Verdict(accepted, target_tokens.gather(1, accepted[:, None]).squeeze(1), matches.double())


def acceptance_probabilities(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None) -> Tensor:
    """min(1, p(x)/q(x)) of each drafted token, given that it is tested: (B, N).

    target_probs (B, N + 1, V), draft_tokens (B, N), draft_probs (B, N, V) or None for point masses.
    """
    return _ratios(target_probs, draft_tokens, draft_probs).clamp(max=1.0)


def extra_law(
    target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None, accepted: Tensor, limits: Tensor
) -> Tensor:
    """The law, up to a factor, of the token after `accepted` (B,) drafted ones: (B, V).

    The target's own where the draft was accepted up to its limit, else the residual at the rejected position.
    """
    batch_size, num_tokens = draft_tokens.shape
    rows = torch.arange(batch_size, device=accepted.device)
    p = target_probs[rows, accepted]
    if num_tokens == 0:
        return p
    rejected = accepted.clamp(max=num_tokens - 1)
    if draft_probs is None:
        q = torch.zeros_like(p).scatter_(1, draft_tokens[rows, rejected][:, None], 1.0)
    else:
        q = draft_probs[rows, rejected].to(p.dtype)
    residual = (p - q).clamp(min=0)
    # p = q up to rounding leaves nothing: such a token is rejected with probability zero, up to rounding.
    empty = residual.sum(1) == 0
    return torch.where(((accepted >= limits) | empty)[:, None], p, residual)


def verify_chain(
    target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None, limits: Tensor, uniforms: Tensor
) -> Verdict:
    """Accept or correct a chain by speculative sampling.

    target_probs (B, N + 1, V), draft_tokens (B, N), draft_probs (B, N, V) or None, limits (B,), and uniforms
    (B, 1 + N) in [0, 1): the first draws the extra token, the others test the drafted ones.
    """
    accept = uniforms[:, 1:] < acceptance_probabilities(target_probs, draft_tokens, draft_probs)
    accepted = _leading(accept, limits)
    extra = draw(extra_law(target_probs, draft_tokens, draft_probs, accepted, limits), uniforms[:, 0])
    return Verdict(accepted, extra, _overlap(target_probs, draft_tokens, draft_probs))


def block_acceptance(
    target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None, limits: Tensor
) -> tuple[Tensor, Tensor]:
    """The probabilities h_i by which block verification keeps the first i tokens, and the laws P_i·p it corrects from.

    P_0 = 1 and P_i = min(1, P_{i−1}·p(x_i)/q(x_i)) is the chance that i or more tokens are accepted, given them. With
    R_i = Σ_x max(P_i·p − q, 0) at the position behind them, h_i = R_i / (R_i + 1 − P_i) before the limit, P_i at it
    and 0 behind it (2403.10444, Algorithm 2). Returns h_1 .. h_N (B, N) and P_i·p (B, N + 1, V).
    """
    reached = [torch.ones_like(target_probs[:, 0, 0])]
    for ratio in _ratios(target_probs, draft_tokens, draft_probs).unbind(1):
        reached.append((reached[-1] * ratio).clamp(max=1.0))
    chance = torch.stack(reached, dim=1)  # (B, N + 1)
    scaled = chance[..., None] * target_probs
    if draft_probs is None:
        mass = chance[:, :-1] - scaled[:, :-1].gather(2, draft_tokens[..., None]).squeeze(2)
    else:
        mass = (scaled[:, :-1] - draft_probs).clamp(min=0).sum(-1)
    mass = torch.nn.functional.pad(mass.clamp(min=0), (0, 1))
    total = mass + (1 - chance)
    keep = torch.where(total > 0, mass / total, 1.0)  # nothing left to go on with: never stopped here but by rounding
    position = torch.arange(chance.shape[1], device=chance.device)
    keep = torch.where(position == limits[:, None], chance, keep)
    return keep.masked_fill(position > limits[:, None], 0.0)[:, 1:], scaled


def verify_block(
    target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None, limits: Tensor, uniforms: Tensor
) -> Verdict:
    """Accept or correct a chain as a block: the same law as `verify_chain`, and never fewer accepted tokens on average.

    Arguments as there. All prefixes are tested and the longest one kept, so that a token which by itself would be
    rejected may be saved by those behind it (2403.10444). `expected` is Σ_x min(p, q) as for `verify_chain`: it
    describes the drafter, and falls short of what this verifier accepts.
    """
    keep, scaled = block_acceptance(target_probs, draft_tokens, draft_probs, limits)
    order = torch.arange(1, draft_tokens.shape[1] + 1, device=draft_tokens.device)
    kept = (uniforms[:, 1:] < keep) * order
    accepted = torch.nn.functional.pad(kept, (1, 0)).amax(1)
    extra = draw(extra_law(scaled, draft_tokens, draft_probs, accepted, limits), uniforms[:, 0])
    return Verdict(accepted, extra, _overlap(target_probs, draft_tokens, draft_probs))


def _ratios(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None) -> Tensor:
    """p(x)/q(x) of each drafted token: (B, N)."""
    p = target_probs[:, :-1].gather(2, draft_tokens[..., None]).squeeze(2)
    return p if draft_probs is None else p / draft_probs.gather(2, draft_tokens[..., None]).squeeze(2)


def _overlap(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None) -> Tensor:
    """Σ_x min(p(x), q(x)) at each drafted position: (B, N) float64."""
    p = target_probs[:, :-1]
    if draft_probs is None:
        return p.gather(2, draft_tokens[..., None]).squeeze(2).double()
    return torch.minimum(p, draft_probs).sum(-1).double()


def _leading(accept: Tensor, limits: Tensor) -> Tensor:
    """How many tokens are accepted before the first that is not, at most `limits`: (B, N) → (B,)."""
    return torch.minimum(accept.long().cumprod(1).sum(1), limits)
