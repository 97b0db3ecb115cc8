"""Train a drafter against a frozen target, export it, load the export into the engine, and measure it there.

    python train/run.py +drafter=eagle
    python train/run.py +drafter=eagle target=smollm2
    python train/run.py +drafter=eagle target=hf target.name_or_path=FOLDER data=file data.source.path=PROMPTS.jsonl

Started again, the same command goes on where it stopped.
"""

from __future__ import annotations

from omegaconf import DictConfig

from conf.compose import choices, given_settings, main, plain
from models.errors import UserError


def job(config: DictConfig) -> float | None:
    """The main job; see `train.pipeline.run_job`. Hydra's sweepers compare runs by what it returns."""
    if "drafter" not in config:
        listed = "\n".join(f"  +drafter={name:<12} {what}" for name, what in choices("drafter").items())
        raise UserError(f"Say which drafter to train:\n{listed}")
    options = plain(config)
    from train import pipeline, settings  # torch, lightning and transformers: only once the command line is right

    options = settings.with_start(settings.with_tree(options), given_settings())
    return pipeline.run_job(options, settings.run_folder(options))


if __name__ == "__main__":
    main("train", job)
