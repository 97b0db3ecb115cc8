"""The main job, stage by stage: answers → drafter → training → export → measurement.

Every stage keeps what it finished, so the same command, started again, goes on where it stopped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra.errors
import hydra.utils
import lightning
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint

from data.answers import AnswerSettings, build_answers, context_ids, describe, fingerprint
from data.features import FeatureCache
from data.loader import StepBatches, step_loader
from data.prompts import Prompt, PromptSource, SplitSizes, split_prompts
from engine.loop import DecodeSettings, check_prompts, generate
from eval.acceptance import write_report
from eval.measure import Measurement, measure
from eval.provenance import provenance
from eval.table import draw, print_tables
from models.checkpoint import native
from models.errors import UserError
from models.files import write_text
from models.linear import accelerate
from models.sampling import SamplingParams
from models.target import Target
from models.vocab import DraftVocab
from train.callbacks import AtomicCheckpoints, BlockEfficiency, TrainingProgress, quiet_lightning
from train.model_card import model_card


@dataclass(frozen=True, slots=True)
class Prepared:
    """What training needs: batches of answers, prompts of the other splits, and what the answers came from."""

    batches: StepBatches
    validation: list[Prompt]
    test: list[Prompt]
    manifest: dict[str, Any]


def open_target(options: dict[str, Any]) -> Target:
    """Load the target onto the device that the trainer uses."""
    arguments = dict(options["target"])
    if arguments["device"] == "auto" and options["trainer"]["accelerator"] == "cpu":
        arguments["device"] = "cpu"
    target: Target = _instantiate(arguments)
    return target


def _instantiate(config: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Build what `_target_` names; its own errors come through as they are, not wrapped by Hydra."""
    try:
        return hydra.utils.instantiate(config, *args, **kwargs)
    except hydra.errors.InstantiationException as error:
        if isinstance(error.__cause__, UserError | ModuleNotFoundError):
            raise error.__cause__ from None
        raise


def check_options(options: dict[str, Any], target: Target) -> None:
    """Refuse senseless settings before the long work: everything that the run will build is built once and dropped."""
    fit = options["fit"]
    if fit["hidden_states"] not in ("cached", "online"):
        raise UserError(f"fit.hidden_states is {fit['hidden_states']!r}: choose cached or online.")
    for key in ("max_steps", "batch_size", "checkpoint_every", "evaluate_every", "validation_prompts"):
        if fit[key] < 1:
            raise UserError(f"fit.{key} is {fit[key]}: it must be at least 1.")
    for temperature in options["measure"]["temperatures"]:
        decode_settings(options, float(temperature))
    AnswerSettings(**options["data"]["answers"])
    vocab = DraftVocab(target.vocab_size)
    _training_module(options, target, native.build(options["drafter"]["model"], target, vocab))


def prepare_data(options: dict[str, Any], target: Target) -> Prepared:
    """Collect prompts, split them, and let the target answer those for training."""
    data = options["data"]
    sizes = SplitSizes(**data["sizes"])
    source: PromptSource = _instantiate(data["source"])
    splits = split_prompts(source.prompts(target, sizes.total, options["seed"]), sizes)
    settings = AnswerSettings(**data["answers"], seed=options["seed"])
    rows = build_answers(target, splits["train"], settings, Path(data["folder"]))
    batches = StepBatches(rows, options["fit"]["batch_size"], data["max_tokens"], options["seed"])
    if batches.truncated:
        print(f"{batches.truncated} of {len(rows)} answers are longer than data.max_tokens and were cut")
    return Prepared(batches, splits["validation"], splits["test"], describe(target, splits["train"], settings))


def build_drafter(options: dict[str, Any], target: Target, batches: StepBatches) -> Any:
    """Make the drafter, from the run's seed, over the most frequent tokens of the answers."""
    size = options["draft_vocab_size"]
    vocab = DraftVocab.most_frequent(batches.token_counts(target.vocab_size), size)
    torch.manual_seed(options["seed"])
    drafter = native.build(options["drafter"]["model"], target, vocab)
    parameters = sum(p.numel() for p in drafter.parameters())
    print(
        f"drafter {options['drafter']['name']!r}: {parameters:,} parameters, "
        f"proposes {vocab.size:,} of {target.vocab_size:,} tokens"
    )
    return drafter


def fit(options: dict[str, Any], target: Target, drafter: Any, data: Prepared, run: Path) -> None:
    """Train, measuring val/block_efficiency in the engine, and leave the weights that were best at that."""
    settings = options["fit"]
    if settings["hidden_states"] == "cached" and drafter.capture_layers:
        root = Path(options["data"]["folder"])
        data.batches.cache = FeatureCache.build(target, data.batches.token_ids, drafter.capture_layers, root)
    module = _training_module(options, target, drafter)
    checkpoints = run / "checkpoints"
    prompts = [context_ids(target, p) for p in data.validation[: settings["validation_prompts"]]]
    measured = BlockEfficiency(
        target, prompts, decode_settings(options, 0.0), settings["evaluate_every"], checkpoints / "best.safetensors"
    )
    last = ModelCheckpoint(
        checkpoints, "last", every_n_train_steps=settings["checkpoint_every"], enable_version_counter=False
    )
    trainer = lightning.Trainer(
        **options["trainer"],
        max_steps=settings["max_steps"],
        max_epochs=-1,
        logger=_logger(options, run),
        callbacks=[measured, TrainingProgress(measured), LearningRateMonitor("step"), last],
        plugins=[AtomicCheckpoints()],
        default_root_dir=run,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=10,
    )
    resume = checkpoints / "last.ckpt"
    per_step = options["trainer"]["accumulate_grad_batches"]
    loader = step_loader(data.batches, per_step * _steps_done(resume), per_step * settings["max_steps"])
    try:
        trainer.fit(module, loader, ckpt_path=str(resume) if resume.exists() else None)
    except SystemExit:  # what Lightning makes of Ctrl-C
        if trainer.interrupted:
            raise KeyboardInterrupt from None
        raise
    drafter.load_state_dict(native.read_tensors(measured.best))
    drafter.to(target.device).eval()  # Lightning left it on the CPU


def _training_module(options: dict[str, Any], target: Target, drafter: Any) -> Any:
    settings = options["drafter"]["training"]
    return _instantiate(settings, drafter, target, max_steps=options["fit"]["max_steps"], seed=options["seed"])


def _logger(options: dict[str, Any], run: Path) -> Any:
    try:
        return _instantiate(options["logger"], save_dir=str(run))
    except ModuleNotFoundError as error:
        raise UserError('logger=wandb needs a package: pip install "draftsmith[wandb]".') from error


def _steps_done(checkpoint: Path) -> int:
    return int(AtomicCheckpoints().load_checkpoint(checkpoint)["global_step"]) if checkpoint.exists() else 0


def decode_settings(options: dict[str, Any], temperature: float) -> DecodeSettings:
    """The settings of the run's measurements at one temperature."""
    decode = options["decode"]
    return DecodeSettings(
        max_new_tokens=decode["max_new_tokens"],
        num_speculative_tokens=decode["num_speculative_tokens"],
        sampling=SamplingParams(temperature, decode["top_k"], decode["top_p"]),
        seed=options["seed"],
    )


def export(options: dict[str, Any], target: Target, drafter: Any, data: Prepared, folder: Path) -> native.Export:
    """Write the drafter to `folder`; the card gets its figures once they are measured."""
    place = {k: options["target"][k] for k in ("source", "name_or_path", "dtype", "revision")}
    described = native.Export(
        name=options["drafter"]["name"],
        model=options["drafter"]["model"],
        target={"name": target.name, "fingerprint": target.fingerprint, "load": place},
        num_speculative_tokens=options["decode"]["num_speculative_tokens"],
        provenance={"config": options, "data": data.manifest, **provenance()},
    )
    native.save(drafter, described, drafter.vocab, folder, model_card(described, []))
    return described


def check_parity(target: Target, trained: Any, loaded: Any, prompts: list[Prompt], options: dict[str, Any]) -> None:
    """Answer a few prompts with the drafter in memory and with the reloaded one: every count must agree.

    Raises UserError otherwise: the export would not be what was trained.
    """
    ids = [context_ids(target, p) for p in prompts[:4]]
    settings = decode_settings(options, 0.0)
    ours, theirs = (generate(target, ids, settings, d).stats for d in (trained, loaded))
    if not (ours.accepted == theirs.accepted).all() or not (ours.rounds == theirs.rounds).all():
        raise UserError(
            f"The reloaded export accepts {theirs.accepted.sum():g} tokens where the trained drafter accepts "
            f"{ours.accepted.sum():g}: the export is broken."
        )
    accepted, drafted = ours.accepted.sum(), ours.drafted.sum()
    print(f"export reloaded: {accepted:g} of {drafted:g} drafted tokens accepted, as before the export")


def measure_export(
    options: dict[str, Any], target: Target, drafter: Any, prompts: list[Prompt]
) -> list[tuple[str, Measurement]]:
    """The acceptance table of the run, on test prompts."""
    chosen = prompts[: options["measure"]["num_prompts"]]
    name = options["drafter"]["name"]
    return [
        (name, measure(target, drafter, chosen, decode_settings(options, float(t))))
        for t in options["measure"]["temperatures"]
    ]


def run_job(options: dict[str, Any], target: Target, run: Path) -> None:
    """Everything from prompts to the acceptance table, in the folder `run`."""
    quiet_lightning()
    print(f"target {target.name!r}, run folder {run}")
    check_options(options, target)
    data = prepare_data(options, target)
    check_prompts(target, [context_ids(target, prompt) for prompt in data.validation + data.test])
    drafter = build_drafter(options, target, data.batches)
    fit(options, target, drafter, data, run)
    folder = run / "export"
    described = export(options, target, drafter, data, folder)
    loaded = native.load(folder, target)
    check_parity(target, drafter, loaded, data.test, options)
    for frozen in (target, loaded):  # training is over
        accelerate(frozen)
    measured = measure_export(options, target, loaded, data.test)
    write_text(folder / "README.md", model_card(described, measured))
    summaries = [{"drafter": name, **m.summary()} for name, m in measured]
    write_report({"config": options, "results": summaries}, run)
    draw(measured, run / "acceptance.png")
    print_tables(measured)
    print(f"export: {folder}\nmeasure it on other prompts: python eval/acceptance.py export={folder}")


def run_folder(options: dict[str, Any]) -> Path:
    """outputs/<drafter>-<target>-<hash>: the same configuration always has the same folder, and so is resumed."""
    root = Path(options["output_root"])
    if options["run_name"]:
        return root / options["run_name"]
    relevant = {k: v for k, v in options.items() if k not in ("debug", "logger", "output_root", "measure")}
    name = (
        options["target"]["source"]
        if options["target"]["source"] != "hf"
        else Path(options["target"]["name_or_path"]).name
    )
    return root / f"{options['drafter']['name']}-{name}-{fingerprint(relevant)[:8]}"


def record(options: dict[str, Any], run: Path) -> None:
    """Write what the run is, before it starts."""
    write_text(run / "config.json", json.dumps({"config": options, "provenance": provenance()}, indent=1) + "\n")
