"""A small network that says, along a growing chain, how likely each drafted token is to be accepted.

It reads what is known once a token is drawn: the request's recent acceptance, the entropy of the token's law, its
chance, the chance of the chain before it, and its position. What it says about the tokens so far, multiplied, is the
chance that a further one is ever looked at; a draft ends where that is not above the position's threshold.

B batch, Vd draft vocabulary, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_FEATURES = 5
MOST_POSITIONS = 32  # with a threshold of their own; later ones have the last
_LEAST_CHANCE = 1e-6


class ChainFeatures:
    """What the predictor reads along chains that grow together, token by token."""

    def __init__(self, recent: Tensor) -> None:
        self._recent = recent  # (B,) acceptance rate of the requests' last rounds
        self._chain = torch.zeros_like(recent)  # log-chance of the tokens so far
        self._position = 0
        self._entropy: Tensor

    def look(self, law: Tensor) -> None:
        """Take in the law (B, Vd) that the next token is drawn from."""
        self._entropy = torch.special.entr(law).sum(-1).to(self._recent)

    def add(self, chance: Tensor) -> Tensor:
        """Take in the chance (B,) of the token that was drawn: its features (B, F)."""
        log_chance = chance.to(self._recent).clamp(min=_LEAST_CHANCE).log()
        position = torch.full_like(self._recent, self._position)
        found = torch.stack([self._recent, self._entropy, log_chance, self._chain, position], dim=-1)
        self._chain = self._chain + log_chance
        self._position += 1
        return found


class LengthPredictor(nn.Module):
    """Features (..., F) → logit (...) of the chance that a token is accepted, given that it is tested.

    `center`, `scale` (F,) and `thresholds` (MOST_POSITIONS,) are set in training.
    """

    center: Tensor
    scale: Tensor
    thresholds: Tensor

    def __init__(self, hidden_size: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NUM_FEATURES, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, 1),
        )
        self.register_buffer("center", torch.zeros(NUM_FEATURES))
        self.register_buffer("scale", torch.ones(NUM_FEATURES))
        self.register_buffer("thresholds", torch.full((MOST_POSITIONS,), 0.3))

    def forward(self, features: Tensor) -> Tensor:
        """The logits (...) of features (..., F)."""
        logits: Tensor = self.layers((features - self.center) / self.scale)
        return logits.squeeze(-1)
