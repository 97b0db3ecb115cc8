"""Training a drafter on a few texts by the module and the batches that a run uses, until the engine accepts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import hydra
import lightning

from data.loader import StepBatches, step_loader
from engine.loop import generate
from engine.settings import DecodeSettings
from models.target import Target
from tests.helpers.drafters import prompts
from train.trainer import own_settings

# Nothing here is to be general: what a yaml does not know is left out, and the rest of its training is its own.
SETTINGS = {"lr": 1e-2, "noise": 0.0, "weight_decay": 0.0}
MEASURE_EVERY, ENOUGH = 50, 0.97  # training stops there
LEAST_ACCEPTANCE = 0.95  # below it, a drafter has not memorised
NEW_TOKENS = 24


@dataclass(frozen=True)
class Text:
    """A few prompts and the target's own greedy answers, as batches for training."""

    prompts: list[list[int]]
    batches: StepBatches


@dataclass(frozen=True)
class Trained:
    """A drafter that was trained on a `Text`, and the acceptance rate there that the engine measured last."""

    drafter: Any
    acceptance_rate: float
    steps: int


def answered(target: Target, lengths: tuple[int, ...] = (3, 7, 5, 4)) -> Text:
    """A few prompts, answered by the target."""
    start = prompts([*lengths], target.vocab_size)
    answers = generate(target, start, DecodeSettings(max_new_tokens=NEW_TOKENS)).token_ids
    assert all(len(set(answer)) > 5 for answer in answers), "an answer that repeats itself shows no shift by one"
    masks = [[0] * len(p) + [1] * len(a) for p, a in zip(start, answers, strict=True)]
    rows = [p + a for p, a in zip(start, answers, strict=True)]
    data = datasets.Dataset.from_dict({"token_ids": rows, "loss_mask": masks})
    return Text(start, StepBatches(data, batch_size=4, max_tokens=64, seed=0))


class MeasureAndStop(lightning.Callback):
    """Stops the training once the engine accepts nearly everything."""

    def __init__(self, measure: Callable[[], float]) -> None:
        self.measure, self.acceptance_rate = measure, 0.0

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step % MEASURE_EVERY == 0:
            with pl_module.measurable():
                self.acceptance_rate = self.measure()
            trainer.should_stop = self.acceptance_rate > ENOUGH


def memorise(
    drafter: Any, target: Target, text: Text, options: dict[str, Any], folder: Path, max_steps: int = 400
) -> Trained:
    """Train `drafter` by `options` (those of a run) with cached states, for as long as it takes.

    Where the target is trained too, `target` is the adapted one, which the drafter was built for.
    """
    training = options["drafter"]["training"]
    known = {key: value for key, value in SETTINGS.items() if key in training}
    module = hydra.utils.instantiate(training | known, drafter, target, max_steps=max_steps, seed=0)
    settings = DecodeSettings(max_new_tokens=NEW_TOKENS, num_speculative_tokens=4)
    if hasattr(module, "learn"):
        module.learn(text.batches)
        return Trained(drafter.eval(), generate(target, text.prompts, settings, drafter).stats.acceptance_rate, 0)
    module.cache_states(text.batches, folder)
    watch = MeasureAndStop(lambda: generate(target, text.prompts, settings, drafter).stats.acceptance_rate)
    trainer = lightning.Trainer(
        **own_settings(options["trainer"]),
        max_steps=max_steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[watch],
        default_root_dir=folder,
    )
    trainer.fit(module, step_loader(text.batches, 0, max_steps))
    module.load_kept_state(module.kept_state())
    return Trained(drafter.eval(), watch.acceptance_rate, trainer.global_step)
