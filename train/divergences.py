"""How far a draft law q is from the target's p, row by row; any weighted sum of them is a loss.

The names are those of `drafter.training.losses`:
  cross_entropy        −log q(y) of the token y that the target said; 0 where q cannot propose it
  soft_cross_entropy   −Σ p log q: forward KL up to a constant
  kl, reverse_kl       Σ p log(p/q), Σ q log(q/p)
  jsd                  ½ KL(p‖m) + ½ KL(q‖m) with m = (p + q)/2 (2310.08461)
  tvd                  ½ Σ |p − q| = 1 − α, where α = Σ min(p, q) is the chance of acceptance
  lk                   −log α (2602.23881)
  lk_hybrid            λ·kl + (1 − λ)·tvd with λ = e^(−η·α), which hands over from the one to the other as α grows
The second to the fifth are about laws at `temperature` T, times T², so that their gradients stay of one size
(1503.02531). Acceptance is at T = 1, and so are the others.

M rows, Vd draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.errors import UserError


class Divergence:
    """Σ of the named divergences, each with its weight.

    Raises UserError, which calls the weights `where`, for an unknown name, or none at all.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        temperature: float = 1.0,
        lk_eta: float = 3.0,
        where: str = "drafter.training.losses",
    ) -> None:
        self._weights = {name: float(weight) for name, weight in weights.items() if weight}
        known = ("cross_entropy", *_TEMPERED, "tvd", "lk", "lk_hybrid")
        for name in weights:
            if name not in known:
                raise UserError(f"{where} has {name!r}: choose from {', '.join(known)}.")
        if not self._weights:
            raise UserError(f"{where} is empty: give at least one loss a weight.")
        if not temperature > 0:
            raise UserError(f"drafter.training.temperature is {temperature}: it must be above 0.")
        self._temperature, self._lk_eta = temperature, lk_eta

    @property
    def reads_labels(self) -> bool:
        """Whether what the target said is looked at."""
        return "cross_entropy" in self._weights

    @property
    def reads_target(self) -> bool:
        """Whether the target's law is looked at, beside what it said."""
        return self._weights.keys() != {"cross_entropy"}

    def __call__(self, draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
        """(M, Vd), (M, Vd) and the draft ids (M,) of what the target said, −1 where it has none → (M,).

        Both laws are over the draft vocabulary, the target's renormalised. Laws and losses are in float32 at least.
        """
        return self.compared(draft_logits, target_logits, labels)[0]

    def compared(
        self, draft_logits: Tensor, target_logits: Tensor, labels: Tensor, label_weight: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same (M,), and the draft law q and the target's p (M, Vd), which have no gradients.

        With `label_weight`, cross_entropy counts so many times as much: a mean over M rows of which some have no label
        is then one over those that have.
        """
        weights = self._weights
        if label_weight != 1 and self.reads_labels:
            weights = {**weights, "cross_entropy": label_weight * weights["cross_entropy"]}
        dtype = torch.promote_types(draft_logits.dtype, torch.float32)
        draft, target = draft_logits.to(dtype), target_logits.to(dtype)
        if self._temperature == 1 and weights.keys() <= _CrossEntropies.NAMES:
            return _CrossEntropies.apply(draft, target, labels, weights)
        log_q, log_p = draft.log_softmax(-1), target.log_softmax(-1)
        t = self._temperature
        warm_q, warm_p = (log_q, log_p) if t == 1 else ((draft / t).log_softmax(-1), (target / t).log_softmax(-1))
        total = log_q.new_zeros(len(log_q))
        for name, weight in weights.items():
            if name == "cross_entropy":
                found = torch.where(labels >= 0, -log_q.gather(-1, labels.clamp(min=0)[:, None])[:, 0], 0.0)
            elif name in _TEMPERED:
                found = t * t * _TEMPERED[name](warm_q, warm_p)
            elif name == "lk_hybrid":
                share = torch.exp(-self._lk_eta * acceptance(log_q, log_p).detach())
                found = share * _kl(log_q, log_p) + (1 - share) * _tvd(log_q, log_p)
            else:
                found = _tvd(log_q, log_p) if name == "tvd" else _lk(log_q, log_p)
            total = total + weight * found
        return total, log_q.detach().exp(), log_p.detach().exp()


class _CrossEntropies(torch.autograd.Function):
    """Cross-entropies, hard and soft, and the forward KL: of all, the gradient by the draft's logits is q − p or q − y.

    So it takes one pass, where autograd would go back through every operation.
    """

    NAMES = frozenset(("cross_entropy", "soft_cross_entropy", "kl"))

    @staticmethod
    def forward(
        ctx: Any, draft: Tensor, target: Tensor, labels: Tensor, weights: Mapping[str, float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, p = draft.softmax(-1), target.softmax(-1)
        norm = _log_norm(draft, q)
        total, gradient = torch.zeros_like(norm), torch.zeros_like(q)
        if soft := weights.get("soft_cross_entropy", 0.0) + weights.get("kl", 0.0):
            total += soft * (norm - (p * draft).sum(-1))
            torch.sub(q, p, out=gradient)
            gradient *= soft
        if kl := weights.get("kl", 0.0):
            total -= kl * (_log_norm(target, p) - (p * target).sum(-1))
        if hard := weights.get("cross_entropy", 0.0):
            said, known = labels.clamp(min=0)[:, None], hard * (labels >= 0).to(q.dtype)[:, None]  # (M, 1) both
            total += (known * (norm[:, None] - draft.gather(-1, said)))[:, 0]
            gradient.addcmul_(q, known).scatter_add_(-1, said, -known)
        ctx.gradient = gradient
        ctx.mark_non_differentiable(q, p)
        return total, q, p

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.gradient * upstream[0][:, None], None, None, None


def acceptance(log_q: Tensor, log_p: Tensor) -> Tensor:
    """α = Σ_x min(p, q) of two laws given by their logarithms: (M, Vd), (M, Vd) → (M,)."""
    return torch.minimum(log_q, log_p).exp().sum(-1)


def agreement(q: Tensor, p: Tensor) -> Tensor:
    """Whether the likeliest token of p is q's too: (..., Vd) twice → (...)."""
    return q.gather(-1, p.argmax(-1, keepdim=True))[..., 0] >= q.amax(-1)


def _log_norm(logits: Tensor, law: Tensor) -> Tensor:
    """log Σ exp of logits (M, Vd) whose softmax is known: (M,)."""
    return logits.amax(-1) - law.amax(-1).log()


def _soft_cross_entropy(log_q: Tensor, log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_q).sum(-1)


def _kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _jsd(log_q: Tensor, log_p: Tensor) -> Tensor:
    log_m = torch.logaddexp(log_q, log_p) - math.log(2)
    return 0.5 * (_kl(log_m, log_p) + _kl(log_m, log_q))


def _tvd(log_q: Tensor, log_p: Tensor) -> Tensor:
    return 0.5 * (log_q.exp() - log_p.exp()).abs().sum(-1)


def _lk(log_q: Tensor, log_p: Tensor) -> Tensor:
    return -torch.minimum(log_q, log_p).logsumexp(-1)


_TEMPERED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "soft_cross_entropy": _soft_cross_entropy,
    "kl": _kl,
    "reverse_kl": lambda log_q, log_p: _kl(log_p, log_q),
    "jsd": _jsd,
}
