"""What every training of a drafter shares: the frozen target beside it, the optimizer, and what a batch tells.

B batch, S rows, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from data.loader import Batch, StepBatches
from engine.stats import DecodingStats
from models.errors import UserError
from models.target import Target
from models.types import TargetFeatures


class Regime(lightning.LightningModule):
    """AdamW with linear warm-up and a half cosine down to zero; a subclass says in `training_losses` what is lessened.

    `capture_layers` are the target's states that a batch must hold: those that the drafter reads, and behind them those
    that the target's head reads, as far as the regime asks for the target's laws (`needs_laws`).
    """

    needs_laws = True

    def __init__(
        self,
        drafter: Any,
        target: Target,
        *,
        max_steps: int,
        seed: int,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        warmup_fraction: float,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        # In a tuple, so that it is neither trained nor saved with the drafter, nor moved by Lightning, which puts the
        # module on the CPU when training ends.
        self._target = (target,)
        self.max_steps, self.lr, self.weight_decay, self.seed = max_steps, lr, weight_decay, seed
        self.betas = (betas[0], betas[1])
        self.warmup_steps = max(1, round(warmup_fraction * max_steps))
        self._head = target.head.rows(drafter.vocab.token_ids)
        read, last = tuple(map(target.layer_index, drafter.capture_layers)), target.num_layers
        self.capture_layers = read if last in read or not self.needs_laws else (*read, last)
        self._num_read = len(read)

    @property
    def target(self) -> Target:
        """The frozen target."""
        return self._target[0]

    def start(self, batches: StepBatches) -> dict[str, str] | None:
        """Prepare the drafter before the first step of all; a resumed run does not come here.

        Returns files for the run's folder that tell what was found, by their names.
        """
        return None

    def measured(self, stats: DecodingStats) -> None:
        """Take note of what the engine measured with the drafter on validation prompts."""

    @contextmanager
    def measurable(self) -> Iterator[None]:
        """Within, the drafter is as the engine measures it: in evaluation mode, and what its export would be."""
        self.drafter.eval()
        try:
            yield
        finally:
            self.drafter.train()

    def kept_state(self) -> dict[str, Tensor]:
        """What is kept of the best step: the weights that an export would hold."""
        state: dict[str, Tensor] = self.drafter.state_dict()
        return state

    def load_kept_state(self, tensors: dict[str, Tensor]) -> None:
        """End the training with what `kept_state` gave."""
        self.drafter.load_state_dict(tensors)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_scale)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _lr_scale(self, step: int) -> float:
        """Linear warm-up, then a half cosine down to zero at `max_steps`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.max_steps - self.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))

    def with_states(self, batch: Batch) -> Batch:
        """The batch with the target's states, which are computed here where they are not cached."""
        if batch.hidden is not None or not self.capture_layers:
            return batch
        with torch.no_grad(), torch.autocast(batch.token_ids.device.type, enabled=False):
            return batch._replace(hidden=self.target(batch.token_ids, capture_layers=self.capture_layers).hidden)

    def features(self, batch: Batch) -> tuple[TargetFeatures, Tensor | None]:
        """What the drafter reads of a batch, and the states (B, S, D) that the target's head reads, if asked for.

        Both are cached states, or of the target's forward pass. The token after the last row is unknown, and 0 here;
        no supervised estimate reads it.
        """
        hidden = self.with_states(batch).hidden
        following = nn.functional.pad(batch.token_ids[:, 1:], (0, 1))
        parts = () if hidden is None else hidden.chunk(len(self.capture_layers), dim=-1)
        last = parts[self.capture_layers.index(self.target.num_layers)] if self.needs_laws else None
        if self._num_read < len(self.capture_layers):
            hidden = torch.cat(parts[: self._num_read], dim=-1) if self._num_read else None
        return TargetFeatures(batch.token_ids, following, hidden, batch.lengths), last

    def training_losses(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """`loss`, which is lessened, and all that is to be logged beside it; `step` is the batch's number."""
        raise NotImplementedError

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        losses = self.training_losses(batch, batch_idx)
        self.log_dict({f"train/{k}": v for k, v in losses.items()}, prog_bar=False)
        self.log("loss", losses["loss"], prog_bar=True, logger=False)
        return losses["loss"]


def check_counts(**counts: int) -> None:
    """Raise UserError for a setting of `drafter.training` that is no number of at least 1."""
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"drafter.training.{name} is {value}: it must be at least 1.")
