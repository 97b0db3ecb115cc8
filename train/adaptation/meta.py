"""A starting point from which a few requests of a new domain suffice: Reptile and first-order MAML over domains.

Every outer step takes a domain and learns from its requests for a few inner steps of plain gradient descent, θ → θ_k.
Reptile (1803.02999) then moves the start towards where that led, θ ← θ + ε (θ_k − θ). First-order MAML (1703.03400,
§5.2) moves it against the gradient that other requests of the domain have at θ_k, θ ← θ − ε ∇L(θ_k), the second
derivatives left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.errors import UserError

BY = ("reptile", "fomaml")
Loss = Callable[[str, int], Tensor]  # a domain, and the number of a batch of it → the loss there


@dataclass(frozen=True)
class MetaSettings:
    """`outer_steps` of step size `outer_lr`, each of `inner_steps` of size `inner_lr` in one domain, in turn."""

    by: str = "reptile"
    outer_steps: int = 20
    inner_steps: int = 4
    outer_lr: float = 0.2
    inner_lr: float = 0.05
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.by not in BY:
            raise UserError(f"meta.by is {self.by!r}: choose {' or '.join(BY)}.")
        for name in ("outer_steps", "inner_steps"):
            if getattr(self, name) < 1:
                raise UserError(f"meta.{name} is {getattr(self, name)}: it must be at least 1.")
        for name in ("outer_lr", "inner_lr", "clip"):
            if not getattr(self, name) > 0:
                raise UserError(f"meta.{name} is {getattr(self, name)}: it must be above 0.")


def pre_adapt(parameters: Sequence[nn.Parameter], loss: Loss, domains: Sequence[str], settings: MetaSettings) -> None:
    """Move `parameters` to a start from which the domains are learnt quickly, in place.

    Batches are numbered on and on, so that no inner step sees another's; the last of an outer step is FOMAML's own.
    """
    for outer in range(settings.outer_steps):
        domain, first = domains[outer % len(domains)], outer * (settings.inner_steps + 1)
        start = [p.detach().clone() for p in parameters]
        for inner in range(settings.inner_steps):
            _descend(parameters, _gradients(parameters, loss(domain, first + inner), settings.clip), settings.inner_lr)
        if settings.by == "reptile":
            moves = [p.detach() - before for p, before in zip(parameters, start, strict=True)]
        else:
            found = _gradients(parameters, loss(domain, first + settings.inner_steps), settings.clip)
            moves = [-gradient for gradient in found]
        with torch.no_grad():
            for p, before, move in zip(parameters, start, moves, strict=True):
                p.copy_(before + settings.outer_lr * move)


def adapted_loss(
    parameters: Sequence[nn.Parameter], loss: Loss, domain: str, settings: MetaSettings, first: int
) -> float:
    """The loss of a domain after the inner steps alone, on a batch behind theirs; the parameters stay as they were."""
    start = [p.detach().clone() for p in parameters]
    for inner in range(settings.inner_steps):
        _descend(parameters, _gradients(parameters, loss(domain, first + inner), settings.clip), settings.inner_lr)
    with torch.no_grad():
        found = float(loss(domain, first + settings.inner_steps))
        for p, before in zip(parameters, start, strict=True):
            p.copy_(before)
    return found


def _gradients(parameters: Sequence[nn.Parameter], loss: Tensor, clip: float) -> list[Tensor]:
    """Of the loss, scaled down together to the norm `clip`."""
    found = torch.autograd.grad(loss, list(parameters), allow_unused=True)
    gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    return [g * min(1.0, clip / max(float(norm), 1e-12)) for g in gradients]


@torch.no_grad()
def _descend(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], lr: float) -> None:
    for p, gradient in zip(parameters, gradients, strict=True):
        p.sub_(lr * gradient)


def check_domains(found: Mapping[str, int], least: int) -> None:
    """Raise UserError where there are fewer than two domains, or fewer than `least` requests of one."""
    if len(found) < 2 or min(found.values()) < least:
        raise UserError(
            f"Meta-learning is over domains, with {least} requests of each at least: there are {dict(found)}."
        )
