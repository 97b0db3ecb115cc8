"""Train a drafter against a frozen target, export it, load the export into the engine, and measure it there.

    python train/run.py +drafter=eagle
    python train/run.py +drafter=eagle target=smollm2
    python train/run.py +drafter=eagle target=hf target.name_or_path=FOLDER data=file data.source.path=PROMPTS.jsonl
    python train/run.py +drafter=eagle +adaptation=replay

With `adaptation` the export then answers a stream of requests and learns from it (train/adapt.py).
Started again, the same command goes on where it stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

    adaptation = options.pop("adaptation", None)
    if adaptation is not None:
        from data.streams import check_stream
        from models.checkpoint import native
        from train.adaptation.regime import check_adaptable_kind
        from train.adaptation.sections import sections_of

        check_adaptable_kind(native.drafter_class(options["drafter"]["model"]))
        check_stream(adaptation["stream"])
        sections_of(adaptation)
    options = settings.with_start(settings.with_tree(options), given_settings())
    run = settings.run_folder(options)
    found = pipeline.run_job(options, run)
    if adaptation is not None:
        from train.adapt import adapt

        adapt(adapted_options(options, adaptation, run))
    return found


def adapted_options(options: dict[str, Any], adaptation: dict[str, Any], run: Path) -> dict[str, Any]:
    """What train/adapt.py is told of the run's export."""
    place = dict.fromkeys(("source", "name_or_path", "dtype", "attn_implementation", "revision"))  # as the export says
    target = {key: options["target"][key] for key in ("device", "trust_remote_code")}
    return {
        **{key: options[key] for key in ("decode", "logger", "seed", "debug")},
        "adaptation": adaptation,
        "export": str(run / "export"),
        "stream": adaptation["stream"],
        "output": None,
        "target": place | target,
    }


if __name__ == "__main__":
    main("train", job)
