"""Drafts as long as a network that came with the drafter says.

B batch, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.draft_length.policy import DraftLength, Lengths, Round
from models.chain_drafting import StopRule
from models.errors import UserError
from models.length_predictor import ChainFeatures, LengthPredictor

_MEMORY = 0.8  # of a request's acceptance rate, from round to round


@dataclass(frozen=True)
class Learnt(DraftLength):
    """Stops where the drafter's own `length_predictor` gives the chain too little chance to have survived."""

    name: ClassVar[str] = "learnt"
    reads_laws: ClassVar[bool] = True

    def check(self, drafter: Any) -> None:
        """Raise UserError where the drafter has no predictor."""
        if not hasattr(drafter, "length_predictor"):
            raise UserError(
                f"decode.draft_length=learnt needs an export with a predictor, and {type(drafter).__name__} has none: "
                "python train/run.py +drafter=draft_length drafter.model.export=FOLDER trains one."
            )

    def start(self, num_requests: int, most: int, drafter: Any) -> Lengths:
        """No acceptance known yet."""
        return _LearntLengths(drafter.length_predictor, num_requests)


class RecentAcceptance:
    """Every request's acceptance rate in its last rounds, the latest counting most; a half at first."""

    def __init__(self, num_requests: int) -> None:
        self._rates = [0.5] * num_requests

    def of(self, requests: list[int]) -> Tensor:
        """The rates (B,) of the running requests."""
        return torch.tensor([self._rates[request] for request in requests])

    def after(self, made: Round) -> None:
        """Take in a round."""
        for request, drafted, accepted in zip(made.requests, made.drafted, made.accepted, strict=True):
            if drafted:
                rate = accepted / min(accepted + 1, drafted)
                self._rates[request] = _MEMORY * self._rates[request] + (1 - _MEMORY) * rate


class _LearntLengths(Lengths):
    def __init__(self, predictor: LengthPredictor, num_requests: int) -> None:
        self._predictor, self._recent = predictor, RecentAcceptance(num_requests)

    def rule(self, requests: list[int], limits: list[int]) -> StopRule:
        return _LearntRule(self._predictor, self._recent.of(requests), limits)

    def after(self, made: Round) -> None:
        self._recent.after(made)


class _LearntRule:
    def __init__(self, predictor: LengthPredictor, recent: Tensor, limits: list[int]) -> None:
        self.limits, self._predictor = limits, predictor
        self._features = ChainFeatures(recent.to(predictor.thresholds))
        self._survival: Tensor | float = 1.0  # (B,)
        self._thresholds = iter(predictor.thresholds)

    def draws(self, law: Tensor) -> Tensor:
        self._features.look(law)
        return torch.ones(len(law), dtype=torch.bool)

    def goes_on(self, chance: Tensor) -> Tensor:
        self._survival = self._survival * self._predictor(self._features.add(chance)).sigmoid()
        return self._survival > next(self._thresholds, self._predictor.thresholds[-1])
