"""Probabilities in, accepted tokens out: no model in sight.

Speculative sampling (2211.17192, 2302.01318): a drafted token x ~ q is accepted with probability min(1, p(x)/q(x));
the first rejection emits a correction token from norm(max(p − q, 0)), and a draft accepted whole is followed by a
bonus token from p. What comes out has exactly the target's law. A deterministic draft is the case of q a point mass:
accept with p(x), correct from p without x. Greedy decoding is the case of p a point mass too.

A draft may be cut at `limits[b]` tokens, by a rule that does not look at the tokens themselves; a draft accepted up to
its limit is followed by a bonus token there.

B batch, N drafted tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.sampling import draw


@dataclass(frozen=True, slots=True)
class Verdict:
    """`accepted` drafted tokens, then one `extra_token`; `expected` is Σ_x min(p, q) at each drafted position."""

    accepted: Tensor  # (B,)
    extra_token: Tensor  # (B,)
    expected: Tensor  # (B, N)


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
    p = target_probs[:, :-1].gather(2, draft_tokens[..., None]).squeeze(2)
    if draft_probs is None:
        return p
    q = draft_probs.gather(2, draft_tokens[..., None]).squeeze(2)
    return (p / q).clamp(max=1.0)


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
    p = target_probs[:, :-1]
    if draft_probs is None:
        expected = p.gather(2, draft_tokens[..., None]).squeeze(2)
    else:
        expected = torch.minimum(p, draft_probs).sum(-1)
    return Verdict(accepted, extra, expected.double())


def _leading(accept: Tensor, limits: Tensor) -> Tensor:
    """How many tokens are accepted before the first that is not, at most `limits`: (B, N) → (B,)."""
    return torch.minimum(accept.long().cumprod(1).sum(1), limits)
