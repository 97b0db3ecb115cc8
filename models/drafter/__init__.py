"""Drafters, one file for each; and what can be done to any of them."""

from __future__ import annotations

from typing import Any

from models.linear import accelerate
from models.target.head import linears_of


def accelerate_drafter(drafter: Any) -> None:
    """Prepare a drafter for inference, for good: by its own `accelerate` where it has one, else its linear layers."""
    own = getattr(drafter, "accelerate", None)
    if own is not None:
        own()
    else:
        accelerate(linears_of(drafter))
