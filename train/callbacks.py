"""Measuring the drafter in the engine while it trains, and checkpoints that a kill cannot break."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from engine.loop import DecodeSettings, generate
from models.files import explain_disk_errors
from models.target import Target


class BlockEfficiency(lightning.Callback):
    """Every `every` steps, and after the last: answer the validation prompts with the drafter, and log what it won.

    Logs `val/block_efficiency` (τ, greedy) and `val/acceptance_rate`.
    """

    def __init__(self, target: Target, prompts: list[list[int]], settings: DecodeSettings, every: int) -> None:
        self.target, self.prompts, self.settings, self.every = target, prompts, settings, every
        self._measured_at = -1

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        step = trainer.global_step
        if step == self._measured_at or (step % self.every and step != trainer.max_steps):
            return
        self._measured_at = step
        drafter: Any = pl_module.drafter
        drafter.eval()
        stats = generate(self.target, self.prompts, self.settings, drafter).stats
        drafter.train()
        pl_module.log("val/block_efficiency", stats.block_efficiency, prog_bar=True)
        pl_module.log("val/acceptance_rate", stats.acceptance_rate)


class AtomicCheckpoints(TorchCheckpointIO):
    """Checkpoints are written to a temporary name, flushed and renamed; nothing but tensors and numbers is loaded."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        final = Path(path)
        temporary = final.with_name(f".{final.name}.tmp")
        with explain_disk_errors(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(final)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(path, map_location=map_location or "cpu", weights_only=True)
        return loaded
