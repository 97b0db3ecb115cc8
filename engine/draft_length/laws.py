"""Policies that look at the law a token is drawn from, or at the chance of one that was drawn.

B batch, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.draft_length.policy import DraftLength, Lengths, check_number
from models.chain_drafting import StopRule
from models.types import Drafter


@dataclass(frozen=True)
class Confidence(DraftLength):
    """Stops behind a token that was drawn with a chance below `token`, or that ends a chain of chance below `chain`.

    That token is kept: to discard it would be biased. The chance is that of the law which the token was drawn from;
    where greedy, that of the softmax. 0 leaves a threshold out.
    """

    name: ClassVar[str] = "confidence"
    reads_laws: ClassVar[bool] = True
    token: float = 0.4
    chain: float = 0.0

    def __post_init__(self) -> None:
        check_number("token", self.token, 0, 1)
        check_number("chain", self.chain, 0, 1)

    def start(self, num_requests: int, most: int, drafter: Drafter) -> Lengths:
        """A rule for each round."""
        return _ConfidenceLengths(self)


class _ConfidenceLengths(Lengths):
    def __init__(self, policy: Confidence) -> None:
        self._policy = policy

    def rule(self, requests: list[int], limits: list[int]) -> StopRule:
        return _ConfidenceRule(self._policy, limits)


class _ConfidenceRule:
    def __init__(self, policy: Confidence, limits: list[int]) -> None:
        self.limits, self._policy = limits, policy
        self._chain: Tensor | float = 1.0  # (B,) chance of all tokens so far

    def draws(self, law: Tensor) -> Tensor:
        return torch.ones(len(law), dtype=torch.bool)

    def goes_on(self, chance: Tensor) -> Tensor:
        self._chain = self._chain * chance
        return (chance >= self._policy.token) & (self._chain >= self._policy.chain)


@dataclass(frozen=True)
class Entropy(DraftLength):
    """Stops before a token whose law has an entropy above `most` nats; a whole draft may be left out so.

    The law follows from the tokens that are kept, so the token that is not drawn has no say in it.
    """

    name: ClassVar[str] = "entropy"
    reads_laws: ClassVar[bool] = True
    most: float = 2.0

    def __post_init__(self) -> None:
        check_number("most", self.most, 0)

    def start(self, num_requests: int, most: int, drafter: Drafter) -> Lengths:
        """A rule for each round."""
        return _EntropyLengths(self)


class _EntropyLengths(Lengths):
    def __init__(self, policy: Entropy) -> None:
        self._policy = policy

    def rule(self, requests: list[int], limits: list[int]) -> StopRule:
        return _EntropyRule(self._policy.most, limits)


class _EntropyRule:
    def __init__(self, most: float, limits: list[int]) -> None:
        self.limits, self._most = limits, most

    def draws(self, law: Tensor) -> Tensor:
        return torch.special.entr(law).sum(-1) <= self._most

    def goes_on(self, chance: Tensor) -> Tensor:
        return torch.ones(len(chance), dtype=torch.bool)
