"""Activation checkpointing: what a drafter's layers compute inside is not kept, but computed again for the gradients.

Then a layer keeps what it reads alone, and training takes some third more time (1604.06174).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models.errors import UserError


class Recomputing(nn.Module):
    """A module of layers that can be computed twice; `passes` counts how often one was to be.

    `recompute` is off until `recompute_activations` turns it on.
    """

    recompute = False
    passes = 0

    def recomputed(self, run: Callable[..., Any], *inputs: Any) -> Any:
        """`run(*inputs)`, a layer that draws no random numbers and changes nothing outside."""
        if not (self.recompute and self.training and torch.is_grad_enabled()):
            return run(*inputs)
        self.passes += 1
        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)


def recompute_activations(drafter: Any) -> None:
    """Let all layers of a drafter be computed twice while it is trained.

    Raises UserError for a drafter that has no layers for which that is known.
    """
    parts = [part for part in drafter.modules() if isinstance(part, Recomputing)]
    if not parts:
        raise UserError(
            f"fit.activation_checkpointing=true: {type(drafter).__name__} has no decoder layers of ours whose inner "
            "results could be computed twice. Set it to false."
        )
    for part in parts:
        part.recompute = True
