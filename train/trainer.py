"""Lightning's trainer, as conf/trainer describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import nn

from models.errors import UserError
from models.target import Target
from train import processes
from train.callbacks import AtomicCheckpoints
from train.checkpoints import read_kept, resume_point
from train.settings import Options, instantiate
from train.strategies import DeepSpeed, restore_name, steps_in

_OURS = ("strategy", "compile")  # of the settings, those that are not the trainer's own


def check_place(options: Options) -> None:
    """Refuse, before any process is started, what the machine cannot run. Raises UserError that says what it can."""
    trainer = options["trainer"]
    if trainer["accelerator"] == "gpu" and not torch.cuda.is_available():
        if processes.wants_several(trainer):
            raise UserError(
                "trainer.accelerator=gpu, but torch finds no CUDA device: use trainer=ddp trainer.accelerator=cpu, or "
                "trainer=cpu."
            )
        raise UserError("trainer=gpu, but torch finds no CUDA device: use trainer=cpu.")
    strategy = strategy_of(options)
    if hasattr(strategy, "check"):
        strategy.check(trainer["accelerator"])
    fit = options["fit"]
    if shards_target(options) and fit["hidden_states"] == "cached" and fit["cache"]["budget_gb"] is not None:
        raise UserError(
            "fit.cache.budget_gb lets a process compute hidden states again by itself, and a target that "
            "trainer.strategy.shard_target divides runs in all processes at once: set one of them to null or false, or "
            "fit.hidden_states=online."
        )
    asked = trainer["devices"]
    if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0:
        check_parts(options, asked * trainer["num_nodes"])


def check_parts(options: Options, parts: int) -> None:
    """Raise UserError where processes would not have equal parts of a batch."""
    size = options["fit"]["batch_size"]
    if size % parts:
        raise UserError(
            f"fit.batch_size is {size}, of which {parts} processes cannot have equal parts: choose a multiple of "
            f"{parts}. It counts all processes' rows."
        )


def strategy_of(options: Options) -> Any:
    """What trainer.strategy describes: a strategy, or the name of one of Lightning's."""
    given = options["trainer"]["strategy"]
    if given is None:
        return "ddp_find_unused_parameters_true" if processes.wants_several(options["trainer"]) else "auto"
    return given if isinstance(given, str) else instantiate(given)


def shards_target(options: Options) -> bool:
    """Whether the target will be divided among the processes."""
    given = options["trainer"]["strategy"]
    return isinstance(given, dict) and bool(given.get("shard_target"))


def own_settings(trainer: Options) -> Options:
    """Those of conf/trainer that Lightning's trainer takes as they are."""
    return {key: value for key, value in trainer.items() if key not in _OURS}


def make_trainer(
    options: Options, target: Target, run: Path, callbacks: list[lightning.Callback], logger: Any = False
) -> lightning.Trainer:
    """The trainer on the target's device; checkpoints and progress are the callbacks' business."""
    given = own_settings(options["trainer"])
    on_gpu = target.device.type == "cuda"
    if processes.wants_several(options["trainer"]):
        place: Options = {"accelerator": "gpu" if on_gpu else "cpu"}
    else:
        place = {"accelerator": "gpu", "devices": [target.device.index or 0]} if on_gpu else {"accelerator": "cpu"}
    try:
        return lightning.Trainer(
            **{**given, **place},
            strategy=strategy_of(options),
            max_steps=options["fit"]["max_steps"],
            max_epochs=-1,
            logger=logger,
            callbacks=[*callbacks, *([LearningRateMonitor("step")] if logger else [])],
            plugins=[AtomicCheckpoints()],
            default_root_dir=run,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=10,
        )
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise UserError(f"trainer: {str(error).splitlines()[0]}") from error


def resume_point_of(path: Path, best: Path, strategy: Any) -> tuple[Path | None, int]:
    """The checkpoint to go on from and the optimizer steps behind it, as `train.checkpoints.resume_point` has it.

    Raises UserError for one that the strategy cannot go on from, and where `best` beside it is damaged.
    """
    restore_name(path)
    if path.exists() and path.is_dir() != isinstance(strategy, DeepSpeed):
        how = "by" if path.is_dir() else "without"
        raise UserError(
            f"{str(path)!r} was written {how} DeepSpeed, whose checkpoints are of another kind: go on with the "
            "trainer that it was begun with, or choose another run_name."
        )
    resume, done = (path, steps_in(path, processes.count())) if path.is_dir() else resume_point(path)
    if resume is not None and best.exists():
        read_kept(best)  # is it whole? before the rest is trained
    return resume, done


def reunite(trainer: lightning.Trainer, module: lightning.LightningModule, target: Target) -> None:
    """Give all processes whole weights again, those of the target too, where the strategy divided them."""
    gather = getattr(trainer.strategy, "reunite", None)
    if gather is not None:
        gather(module, target)


def compile_layers(drafter: nn.Module) -> None:
    """Let torch compile the drafter's layers where they stand; names of weights stay as they are."""
    for part in drafter.modules():
        for layer in part if isinstance(part, nn.ModuleList) else []:
            layer.compile(dynamic=True)
