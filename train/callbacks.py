"""Measuring the drafter in the engine while it trains, and checkpoints that a kill cannot break."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import threading
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from math import isnan
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from data.progress import Progress
from engine.loop import generate
from engine.settings import DecodeSettings
from engine.stats import DecodingStats
from models.allocator import give_back_freed_memory
from models.errors import Terminated
from models.files import write_json
from models.target import Target
from train.checkpoints import load, previous, random_state, save, set_random_state, write_kept
from train.processes import rank, told, total_of

_LINUX = Path("/proc/self")


class BlockEfficiency(lightning.Callback):
    """Answers the validation prompts in the engine every `every` steps and after the last, and keeps the best drafter.

    Logs `val/block_efficiency` (τ, greedy) and `val/acceptance_rate`. The weights with the largest τ so far are in
    the file `best`, written whole or not at all. `target` is the one that the drafter is trained for.

    Of several processes the first measures, or all do together where the target is divided among them. All know what
    was found.
    """

    def __init__(
        self, target: Target, prompts: list[list[int]], settings: DecodeSettings, every: int, best: Path
    ) -> None:
        self.target, self.prompts, self.settings, self.every, self.best = target, prompts, settings, every, best
        self.best_score = 0.0
        self.last_score = float("nan")
        self._measured_at = -1

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "measured_at": self._measured_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score, self._measured_at = state_dict["best_score"], state_dict["measured_at"]

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        step = trainer.global_step
        if step in (0, self._measured_at) or (step % self.every and step != trainer.max_steps):
            return
        self._measured_at = step
        regime: Any = pl_module
        with whole_weights(trainer, pl_module):
            with regime.measurable():
                stats = self._measure(trainer, regime.drafter)
            regime.measured(stats)
            self.last_score = stats.block_efficiency
            values = {"val/block_efficiency": stats.block_efficiency, "val/acceptance_rate": stats.acceptance_rate}
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)
            if self.last_score > self.best_score:
                self.best_score = self.last_score
                told(lambda: write_kept(self.best, regime.kept_state()))

    def _measure(self, trainer: lightning.Trainer, drafter: Any) -> DecodingStats:
        def measure() -> DecodingStats:
            return generate(self.target, self.prompts, self.settings, drafter).stats

        return measure() if getattr(trainer.strategy, "shares_target", False) else told(measure)


def whole_weights(trainer: lightning.Trainer, module: lightning.LightningModule) -> AbstractContextManager[None]:
    """Within, every process can read all weights of the module, however the strategy divides them."""
    whole = getattr(trainer.strategy, "whole", None)
    found: AbstractContextManager[None] = nullcontext() if whole is None else whole(module)
    return found


class LastCheckpoint(lightning.Callback):
    """Writes a checkpoint to resume from every `every` optimizer steps; one a step, however many batches it takes.

    The one before is kept beside it. In a single process, Ctrl-C and SIGTERM let the step under way end, write one
    more, and then stop: `interruption` says by what. A second one stops at once. A training that goes on does so with
    the random numbers that would have come.
    """

    def __init__(self, path: Path, every: int) -> None:
        self.path, self.every = path, every
        self.interruption: KeyboardInterrupt | None = None
        self._saved_at = self._step = 0
        self._random: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"saved_at": self._saved_at, "random": random_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved_at, self._random = state_dict["saved_at"], state_dict.get("random")

    def on_train_start(self, trainer: lightning.Trainer, *args: Any) -> None:
        self._step = trainer.global_step
        if trainer.world_size == 1 and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):  # Lightning gives them back when training ends
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, self._stop)

    def on_train_batch_start(self, trainer: lightning.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._random is not None and trainer.is_global_zero:  # not before: a loader that starts draws a number
            set_random_state(self._random)
        self._random = None

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any, **kwargs: Any) -> None:
        step = trainer.global_step
        ended, self._step = step != self._step, step
        due = step % self.every == 0 or step == trainer.max_steps or (ended and self.interruption is not None)
        if step != self._saved_at and due:
            self._saved_at = step
            trainer.save_checkpoint(self.path)
        if ended and self.interruption is not None:
            raise self.interruption

    def _stop(self, number: int, _: Any) -> None:
        again = self.interruption is not None
        self.interruption = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        if again:
            raise self.interruption
        print("\nstopping behind this step; once more stops at once", flush=True)


class TrainingRecord(lightning.Callback):
    """Writes what the training took to `path` when it ends: steps, their seconds and tokens, and the peak of memory.

    Measurements in between and the loading of batches are not in the seconds. A resumed training goes on counting. It
    must stand before callbacks that work at the end of a batch. Tokens are those of all processes, the rest is of the
    first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seconds, self._tokens, self._started = 0.0, 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._seconds, "tokens": self._all_tokens()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seconds, self._tokens = state_dict["seconds"], 0 if rank() else state_dict["tokens"]

    def _all_tokens(self) -> int:
        return int(total_of(torch.tensor(self._tokens)))

    def on_train_start(self, *args: Any, **kwargs: Any) -> None:
        _forget_peak_memory()

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)  # what the batch has started is still under way
        self._seconds += time.perf_counter() - self._started
        self._tokens += int(batch.lengths.sum())

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        tokens = self._all_tokens()
        found = {
            "steps": trainer.global_step,
            "seconds": self._seconds,
            "tokens": tokens,
            "tokens_per_s": tokens / self._seconds if self._seconds else None,
            "peak_memory_bytes": _peak_memory_bytes(),
        }
        told(lambda: write_json(self.path, found))


def _forget_peak_memory() -> None:
    """Let `_peak_memory_bytes` begin anew, where the system can: on the GPU, and under Linux."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif _LINUX.exists():
        give_back_freed_memory()
        (_LINUX / "clear_refs").write_text("5")


def _peak_memory_bytes() -> int:
    """The most that was held since `_forget_peak_memory`: on the GPU where there is one, else resident in memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if _LINUX.exists():
        (line,) = (s for s in (_LINUX / "status").read_text().splitlines() if s.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class TrainingProgress(lightning.Callback):
    """One line for the whole training: steps, rate, time left, loss, and the last measured block efficiency."""

    def __init__(self, measured: BlockEfficiency) -> None:
        self.measured = measured
        self._progress: Progress

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._progress = Progress("training steps", trainer.max_steps)
        self._progress.advance(trainer.global_step)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, *args: Any
    ) -> None:
        done = trainer.global_step - self._progress.done
        score = "–" if isnan(self.measured.last_score) else f"{self.measured.last_score:.3f}"
        loss = float(trainer.callback_metrics.get("loss", outputs["loss"]))
        self._progress.advance(done, f"loss {loss:.3f}  τ {score}")

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._progress.close()


class AtomicCheckpoints(TorchCheckpointIO):
    """Checkpoints are written to a temporary name, flushed and renamed, and the one before is kept (`checkpoints`)."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        save(checkpoint, Path(path), keep=previous(Path(path)))

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        return load(Path(path))


def quiet_lightning() -> None:
    """Keep Lightning's hints and advertisements out of what a user reads; its errors still show."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
