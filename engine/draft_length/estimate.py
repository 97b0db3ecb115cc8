"""Drafts as long as the drafter's own confidence head says.

B batch, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.draft_length.policy import DraftLength, Lengths, check_number
from models.chain_drafting import EstimateRule
from models.errors import UserError
from models.types import Drafter


@dataclass(frozen=True)
class Estimate(DraftLength):
    """Stops before a token that is accepted, with all before it, with an estimated chance below `chain`.

    The estimate follows from the tokens that are kept, so the token that is not drawn has no say in it; a whole draft
    may be left out so (DSpark, 2607.05147).
    """

    name: ClassVar[str] = "estimate"
    reads_laws: ClassVar[bool] = True
    chain: float = 0.3

    def __post_init__(self) -> None:
        check_number("chain", self.chain, 0, 1)

    def check(self, drafter: Any) -> None:
        """Raise UserError where the drafter has no confidence head."""
        if getattr(drafter, "confidence_head", None) is None:
            raise UserError(
                f"decode.draft_length=estimate reads a drafter's confidences, and {type(drafter).__name__} has none: "
                "train one with +drafter=dspark, or +drafter=dflash drafter.model.confidence=true."
            )

    def start(self, num_requests: int, most: int, drafter: Drafter) -> Lengths:
        """A rule for each round."""
        return _EstimateLengths(self.chain)


class _EstimateLengths(Lengths):
    def __init__(self, chain: float) -> None:
        self._chain = chain

    def rule(self, requests: list[int], limits: list[int]) -> EstimateRule:
        return _Rule(self._chain, limits)


class _Rule:
    def __init__(self, chain: float, limits: list[int]) -> None:
        self.limits, self._chain = limits, chain
        self._survival: Tensor | float = 1.0  # (B,) estimated chance of all tokens up to the one drawn next
        self._draws: Tensor

    def estimate(self, chance: Tensor) -> None:
        self._survival = self._survival * chance
        self._draws = self._survival >= self._chain

    def draws(self, law: Tensor) -> Tensor:
        return self._draws

    def goes_on(self, chance: Tensor) -> Tensor:
        return torch.ones(len(chance), dtype=torch.bool)
