"""EAGLE-3's training: match laws over several steps of its own output, from a start near the best linear map.

B batch, S rows, M supervised rows, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from data.loader import Batch, StepBatches
from models.errors import UserError
from models.target import Target
from train.law_matching import LawMatching
from train.least_squares import check_start, moments, ridge


class TrainingTimeTest(LawMatching):
    """Law matching that trains on the drafter's own states, which `unroll` feeds back (2503.01840, section 3.2)."""

    def __init__(self, drafter: Any, target: Target, *, start: str, **others: Any) -> None:
        super().__init__(drafter, target, **others)
        self.from_least_squares = check_start(start)
        self.fc_lr_multiple = 1.0
        if not hasattr(drafter, "start_layers"):
            raise UserError(f"{type(drafter).__name__} is not trained by drafter.training._target_={__name__}.")

    @torch.no_grad()
    def start(self, batches: StepBatches) -> None:
        """With least squares: begin as the best linear map of what the drafter reads onto the target's next state.

        Its states h start as the best estimate of the target's own, in units of their root mean square, and its layers
        as the best map of what they read onto what the next state has more. A target's inner states may be long: then
        the map from them has small weights, which steps of the others' size would undo at once, so that its own are
        smaller by as much.
        """
        if not self.from_least_squares:
            return
        own = moments(batches, self.target.device, lambda batch: self._read_and_wanted(batch, None))
        scale = own.root_mean_squares
        length = float((own.read.diagonal().mean() / own.num_rows).sqrt())
        self.fc_lr_multiple = 1 / max(1.0, length)
        self.drafter.start_states(ridge(own.read, own.both).t(), scale)
        following = moments(batches, self.target.device, lambda batch: self._read_and_wanted(batch, scale))
        self.drafter.start_layers(ridge(following.read, following.both).t(), following.read / following.num_rows)

    def slower_parameters(self) -> list[tuple[list[nn.Parameter], float]]:
        """fc, in proportion to what it reads."""
        return [(list(self.drafter.fc.parameters()), self.fc_lr_multiple)]

    def _read_and_wanted(self, batch: Batch, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of rows before supervised tokens: what fc reads and the state wanted, or the same of the layers."""
        features, states = self.features(batch)
        assert features.hidden is not None and states is not None
        drafter, supervised = self.drafter, batch.loss_mask[:, 2:]
        states = states.to(drafter.fc.weight.dtype)
        if scale is None:
            read, wanted = drafter.captured(features.hidden), states
        else:
            h = drafter.condense(features.hidden)
            read = drafter.stack.layers[0].read(drafter.fuse(features.next_token_ids, h))
            wanted = states.roll(-1, dims=1) / scale.to(states) - h
        return read[:, :-2][supervised], wanted[:, :-2][supervised]
