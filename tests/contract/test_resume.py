"""A training that was broken off ends as one that was not, bit for bit, for every drafter of conf/drafter.

It is broken off as a kill does it, behind a step that no checkpoint holds, and goes on in a new trainer with a new
drafter. Real signals are in tests/train/test_faults.py.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conf.compose import composed
from data.prompts import Prompt
from models.checkpoint import native
from models.target import Target
from tests.contract.conftest import NAMES
from tests.helpers.memorising import Text, answered
from train import callbacks, checkpoints, pipeline
from train.backbone import backbone_of
from train.callbacks import LastCheckpoint
from train.regime import Regime

STEPS, EVERY, STOP = 8, 3, 5  # checkpoints behind steps 3 and 6; broken off behind step 5
LORA = "{rank: 2, alpha: 4, dropout: 0.3}"
VARIANTS = {
    "gradnorm, projection, curriculum": (
        "mtp", "drafter.training.weights.by=gradnorm", "drafter.training.projection=true",
        "drafter.training.curriculum={by: acceptance, patience: 1, least_gain: 0.9}",
    ),
    "uncertainty": ("mtp_parallel", "drafter.training.weights.by=uncertainty"),
    "on policy": ("distilled_lm", "drafter.training.on_policy_ratio=0.5", "drafter.training.refresh_every=4"),
    "layers, LoRA": (
        "distilled_lm", "drafter.model.start=first_layers", f"drafter.training.lora={LORA}",
        "drafter.training.w_layers=0.5", "drafter.training.w_attention=0.1",
    ),
    "the whole target": ("medusa2", "drafter.training.backbone.by=full"),
    "the target as a task": (
        "mtp_parallel", "drafter.training.projection=true", "drafter.training.backbone.by=lora",
        "drafter.training.backbone.rank=4", "drafter.training.backbone.dropout=0.2",
    ),
    "two batches a step": ("eagle", "trainer.accumulate_grad_batches=2"),
    "states online": ("eagle3", "fit.hidden_states=online"),
    "reduced vocabulary": ("eagle3", "draft_vocab_size=40"),
}  # fmt: skip
CASES = {name: (name,) for name in NAMES} | VARIANTS


class Killed(BaseException):
    """Stands for a SIGKILL: nothing behind it writes."""


@dataclass
class Ran:
    """One whole training, and what was seen at every batch of it: loss, learning rates, global random numbers."""

    seen: list[tuple[Any, ...]] = field(default_factory=list)
    kept: dict[str, Tensor] = field(default_factory=dict)
    best: float | None = None


@pytest.fixture(scope="module")
def text(target32: Target) -> Text:
    return answered(target32, (3, 7, 5, 4, 6, 2))


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    name, *overrides = request.param
    fit = [f"fit.max_steps={STEPS}", f"fit.checkpoint_every={EVERY}", "fit.evaluate_every=2"]
    small = ["fit.validation_prompts=2", "decode.max_new_tokens=6", "trainer=cpu"]
    return composed("train", [f"+drafter={name}", *fit, *small, *overrides])


@pytest.fixture
def train(
    options: dict[str, Any], target32: Target, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    """Train in a folder, from its last checkpoint on, as far as a kill behind step `stop` lets it."""

    def run(folder: str, stop: int | None = None) -> Ran:
        found, batches = Ran(), copy.copy(text.batches)
        random.seed(0)
        np.random.seed(0)
        step, saved = Regime.training_step, LastCheckpoint.on_train_batch_end

        def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
            numbers = (float(torch.rand(())), random.random(), float(np.random.rand()))
            loss = step(self, batch, batch_idx)
            rates = [group["lr"] for group in self.optimizers().param_groups]
            found.seen.append((batch_idx, float(loss.detach()), rates, numbers))
            return loss

        def on_train_batch_end(self: Any, trainer: Any, *others: Any) -> None:
            saved(self, trainer, *others)
            if trainer.global_step == stop:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(Regime, "training_step", training_step)
            patch.setattr(LastCheckpoint, "on_train_batch_end", on_train_batch_end)
            target = backbone_of(options["drafter"]["training"]).adapt(target32, options["seed"])
            drafter = pipeline.build_drafter(options, target, batches)
            prompts = [Prompt((text,), continuation=True) for text in ('{"a:', "bcd")]
            data = pipeline.Prepared(batches, prompts, [], None)
            placed = {**options, "data": {**options["data"], "folder": str(tmp_path / "data")}}
            try:
                found.best = pipeline.fit(placed, target, drafter, data, tmp_path / folder, False)
            except Killed:
                return found
        trained = {f"target {i}": p for i, p in enumerate(target.trained)}
        found.kept = {name: t.detach().clone() for name, t in (drafter.state_dict() | trained).items()}
        return found

    return run


def check_equal(ours: Any, theirs: Any, where: str) -> None:
    """The same down to the last bit, whatever it is made of."""
    if isinstance(theirs, Tensor):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{where}: {m}")
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            check_equal(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            check_equal(*pair, f"{where}[{index}]")
    else:
        assert ours == theirs, where


def state(run: Path) -> dict[str, Any]:
    """The last checkpoint, without what the clock said and Lightning's own counts of calls."""
    found = checkpoints.load(run / "checkpoints" / "last.ckpt")
    del found["loops"], found["callbacks"]["TrainingRecord"]["seconds"]
    return found


def test_a_training_that_was_broken_off_is_bit_for_bit_an_undisturbed_one(
    options: dict[str, Any], train: Callable[..., Ran], tmp_path: Path
) -> None:
    if not options["drafter"]["training"]:
        pytest.skip("this drafter is not trained")
    whole = train("whole")
    if not whole.seen:  # it learns at once, and what it has learnt is kept, or found again
        check_equal(train("whole").kept, whole.kept, "weights")
        return
    first, second = train("broken", STOP), train("broken")
    per_step = options["trainer"]["accumulate_grad_batches"]
    assert [seen[0] for seen in whole.seen] == list(range(STEPS * per_step))
    check_equal(first.seen, whole.seen[: STOP * per_step], "first part")
    check_equal(second.seen, whole.seen[EVERY * per_step :], "second part")
    ours, theirs = state(tmp_path / "broken"), state(tmp_path / "whole")
    assert {"state_dict", "optimizer_states", "lr_schedulers", "callbacks"} <= theirs.keys()
    assert theirs["optimizer_states"][0]["state"] and theirs["global_step"] == STEPS
    check_equal(ours, theirs, "checkpoint")
    check_equal(second.kept, whole.kept, "weights")
    assert second.best == whole.best
    files = [tmp_path / folder / "checkpoints" / "best.safetensors" for folder in ("broken", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("options", [("eagle",)], indirect=True)
def test_the_best_weights_survive(train: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block efficiency falls from the first measurement on, behind step 2: that step's weights are kept."""
    scores: list[float] = []

    def measured(*args: Any) -> Any:
        scores.append(2.0 - 0.1 * len(scores))
        return SimpleNamespace(stats=SimpleNamespace(block_efficiency=scores[-1], acceptance_rate=0.0))

    monkeypatch.setattr(callbacks, "generate", measured)
    train("run", STOP)
    best = tmp_path / "run" / "checkpoints" / "best.safetensors"
    kept = best.read_bytes()
    ended = train("run")
    assert len(scores) == 2 + 3 and ended.best == 2.0  # behind steps 2 and 4; and 4, 6 and 8
    assert best.read_bytes() == kept
    check_equal(ended.kept, native.read_tensors(best), "weights")
