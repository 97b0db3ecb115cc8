"""The main job, stage by stage: answers → drafter → training → export → measurement.

Every stage keeps what it finished, so the same command, started again, goes on where it stopped. A drafter whose
`training` is null needs no answers, and is exported as it is built. Training is a LightningModule's, or whatever else
has a `learn(batches)`, which is called once (`train.counting`).
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch

from data.answers import build_answers, context_ids, describe, open_answers
from data.features import CacheSettings
from data.loader import StepBatches, step_loader
from data.prompts import Prompt, PromptSource, SplitSizes, deal
from engine.loop import check_prompts, check_settings, generate
from eval.acceptance import write_report
from eval.adapted import report
from eval.table import draw, print_tables
from models.allocator import keep_freed_memory
from models.checkpoint import detect, native
from models.drafter import accelerate_drafter
from models.errors import UserError
from models.files import alone_in, clear_leftovers, explain_disk_errors, write_json, write_text
from models.recompute import recompute_activations
from models.target import Target
from models.types import packs
from models.vocab import DraftVocab
from train import processes
from train.backbone import backbone_of
from train.callbacks import (
    BlockEfficiency,
    LastCheckpoint,
    TrainingProgress,
    TrainingRecord,
    quiet_lightning,
)
from train.checkpoints import read_kept, write_kept
from train.exporting import check_parity, export, export_formats, measure_export, rehearse_formats
from train.memory import peak_of_run
from train.model_card import figures, measured_before, model_card
from train.regime import Regime
from train.settings import (
    Options,
    answer_settings,
    check,
    generator_of,
    instantiate,
    is_trained,
    measured_settings,
    planned_tree,
    record,
    record_data,
    temperatures,
)
from train.trainer import (
    check_parts,
    check_place,
    compile_layers,
    make_trainer,
    resume_point_of,
    reunite,
    shards_target,
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Batches of answers, prompts of the other splits, and the answers' origin; without training, only prompts."""

    batches: StepBatches | None
    validation: list[Prompt]
    test: list[Prompt]
    manifest: dict[str, Any] | None


def open_target(options: Options) -> Target:
    """Load the target onto the device that the trainer asks for; with trainer=auto, onto a GPU where there is one."""
    arguments, accelerator = dict(options["target"]), options["trainer"]["accelerator"]
    if arguments["device"] == "auto" and accelerator != "auto":
        arguments["device"] = "cuda" if accelerator == "gpu" else "cpu"
    target: Target = instantiate(arguments)
    if not shards_target(options):  # whose layers then run as they are
        target.accelerate()
    return target


def adapt(options: Options, target: Target) -> Target:
    """The target that is trained with the drafter, where drafter.training.backbone asks for it; else `target`."""
    return backbone_of(options["drafter"]["training"]).adapt(target, options["seed"])


def rehearse(options: Options, target: Target, run: Path) -> None:
    """Build everything that the run will build, and drop it: what is refused is refused before the long work."""
    drafter = _started(options, target, DraftVocab(target.vocab_size))
    for temperature in temperatures(options):
        check_settings(target, drafter, measured_settings(options, temperature))
    if (tree := planned_tree(options)) is not None:
        check_settings(target, drafter, replace(measured_settings(options, 0.0), tree=tree, verification="token"))
    if options["export"]["formats"]:
        size = options["draft_vocab_size"]
        reduced = size is not None and is_trained(options) and size < target.vocab_size
        started = _started(options, target, DraftVocab(target.vocab_size, torch.arange(size) if reduced else None))
        rehearse_formats(options, target, started, run)
    module = _training_module(options, target, drafter) if is_trained(options) else None
    if options["data"]["packing"] and is_trained(options):
        check_packing(drafter, module)
    if isinstance(module, lightning.LightningModule):
        module.configure_optimizers()
        strategy = make_trainer(options, target, run, callbacks=[]).strategy
        if hasattr(strategy, "check_module"):
            strategy.check_module(module)
    elif any(True for _ in drafter.parameters()) and not getattr(drafter, "pretrained", False):
        why = "is null" if module is None else "trains no weights that draft"
        raise UserError(
            f"drafter.training {why}, and the weights of drafter {options['drafter']['name']!r} would be random: name "
            "a folder with trained ones where it reads one (drafter.model.name_or_path=FOLDER or "
            "drafter.model.export=FOLDER), or train it."
        )


def check_packing(drafter: Any, module: Any) -> None:
    """Raise UserError for a drafter, or a training, that would read across the texts of a row."""
    if not packs(drafter):
        raise UserError(
            f"data.packing=true: {type(drafter).__name__}, as it is set, reads across the texts of a row. Use "
            "data.packing=false."
        )
    if not isinstance(module, Regime):
        raise UserError(f"data.packing=true: {type(module).__name__} has no batches to pack. Use data.packing=false.")


def _started(options: Options, target: Target, vocab: DraftVocab) -> Any:
    """The drafter as training begins with it: that of init_from, with the vocabulary it has, or a new one."""
    if options["init_from"] is None:
        return native.build(options["drafter"]["model"], target, vocab)
    folder = Path(options["init_from"]).expanduser()
    drafter = detect(folder, options["source_format"], "source_format").load(folder, target).train()
    if hasattr(drafter, "pretrained"):
        drafter.pretrained = True  # whatever its weights were before it was trained
    return drafter


def prepare_data(options: Options, target: Target) -> Prepared:
    """Collect prompts, split them, and let the target answer those for training, if there is any.

    All are collected for a drafter without training too, so that it is measured on the same ones as the others.
    """
    data, splits = options["data"], _splits(options, target)
    check_prompts(target, [context_ids(target, prompt) for prompt in splits["validation"] + splits["test"]])
    if not is_trained(options):
        return Prepared(None, splits["validation"], splits["test"], None)
    settings, generator = answer_settings(options), generator_of(options)
    manifest = describe(target, splits["train"], settings, generator)
    if data["reuse"]:
        rows = open_answers(Path(data["reuse"]), manifest)
    else:
        rows = build_answers(target, splits["train"], settings, Path(data["folder"]), generator)
    batches = StepBatches(rows, options["fit"]["batch_size"], data["max_tokens"], options["seed"])
    if batches.truncated:
        print(
            f"{batches.truncated} of {len(rows)} answers are longer than data.max_tokens and were cut; "
            f"{batches.dropped} had nothing left to learn from"
        )
    return Prepared(batches, splits["validation"], splits["test"], manifest)


def _splits(options: Options, target: Target) -> dict[str, list[Prompt]]:
    """The run's prompts by what they are for; of a drafter without training only those that it is measured on."""
    sizes = SplitSizes(**options["data"]["sizes"])
    source: PromptSource = instantiate(options["data"]["source"], _convert_="all")
    wanted = sizes
    if not is_trained(options):
        wanted = SplitSizes(0, sizes.validation if options["measure"]["validation"] else 0, sizes.test)
    return deal(source, target, sizes, options["seed"], wanted)


def build_drafter(options: Options, target: Target, batches: StepBatches | None) -> Any:
    """Make the drafter, from the run's seed, over the most frequent tokens of the answers, or all without answers."""
    if batches is None:
        vocab = DraftVocab(target.vocab_size)
    else:
        vocab = DraftVocab.most_frequent(batches.token_counts(target.vocab_size), options["draft_vocab_size"])
    torch.manual_seed(options["seed"])
    drafter = _started(options, target, vocab)
    parameters = sum(p.numel() for p in drafter.parameters())
    print(
        f"drafter {options['drafter']['name']!r}: {parameters:,} parameters, "
        f"proposes {drafter.vocab.size:,} of {target.vocab_size:,} tokens"
    )
    return drafter


def fit(options: Options, target: Target, drafter: Any, data: Prepared, run: Path, logger: Any) -> float | None:
    """Train, measuring val/block_efficiency in the engine, and leave the weights that were best at that.

    All processes train; what is left behind is for the first of them. Returns the best; None where training is no
    matter of steps, and nothing was measured.
    """
    assert data.batches is not None
    settings, module = options["fit"], _training_module(options, target, drafter)
    per_step = options["trainer"]["accumulate_grad_batches"]
    if hasattr(module, "learn"):
        processes.told(partial(_learn, module, drafter, data.batches, run / "checkpoints" / "learnt.safetensors"))
        return None
    if options["data"]["packing"]:
        texts = len(data.batches.token_ids)
        data.batches.pack(module.first_supervised)
        share = data.batches.row_lengths.mean() / data.batches.max_tokens
        print(f"{texts} answers are packed into {data.batches.num_rows} rows, which are {share:.0%} full")
    if settings["hidden_states"] == "cached":
        folder, kept = Path(options["data"]["folder"]), CacheSettings(**settings["cache"])
        with processes.first():
            module.cache_states(data.batches, folder, per_step, kept)
        if data.batches.cache is not None:
            data.batches.cache.target_divided = shards_target(options)
    checkpoints = run / "checkpoints"
    prompts = [context_ids(target, p) for p in data.validation[: settings["validation_prompts"]]]
    measured = BlockEfficiency(
        target, prompts, measured_settings(options, 0.0), settings["evaluate_every"], checkpoints / "best.safetensors"
    )
    last = LastCheckpoint(checkpoints / "last.ckpt", settings["checkpoint_every"])
    seen = [] if processes.rank() else [TrainingProgress(measured)]
    trainer = make_trainer(options, target, run, [TrainingRecord(run / "training.json"), measured, *seen, last], logger)
    print(peak_of_run(module, data.batches, options))
    resume, done = processes.told(partial(resume_point_of, last.path, measured.best, trainer.strategy))
    if resume is None:
        with module.whole_states(data.batches):
            made = module.start(data.batches) or {}
        processes.agree(module)
        for name, text in made.items():
            processes.told(partial(write_text, run / name, text))
    if options["trainer"]["compile"]:
        compile_layers(drafter)
    part = (processes.rank(), processes.count())
    loader = step_loader(data.batches, per_step * done, per_step * settings["max_steps"], part)
    keep_freed_memory()
    try:
        with explain_disk_errors(run):
            trainer.fit(module, loader, ckpt_path=None if resume is None else str(resume))
    except SystemExit:  # what Lightning makes of an interruption
        if trainer.interrupted:
            raise last.interruption or KeyboardInterrupt() from None
        raise
    if data.batches.cache is not None and data.batches.cache.summary:
        print(data.batches.cache.summary)
    reunite(trainer, module, target)
    module.load_kept_state(read_kept(measured.best))
    return measured.best_score


def _learn(module: Any, drafter: Any, batches: StepBatches, kept: Path) -> None:
    """Let `module` learn; where what it finds is another each time, because it looks at the clock, it is kept."""
    if not getattr(module, "timed", False):
        module.learn(batches)
    elif kept.exists():
        drafter.load_state_dict(read_kept(kept))
    else:
        module.learn(batches)
        write_kept(kept, drafter.state_dict())


def _training_module(options: Options, target: Target, drafter: Any) -> Any:
    settings = options["drafter"]["training"]
    if options["fit"]["activation_checkpointing"]:
        recompute_activations(drafter)
    module = instantiate(settings, drafter, target, max_steps=options["fit"]["max_steps"], seed=options["seed"])
    top_k = options["fit"]["cache"]["top_k"]
    if top_k is not None and options["fit"]["hidden_states"] == "cached" and isinstance(module, Regime):
        module.keep_laws(top_k)
    return module


def open_logger(options: Options, run: Path) -> Any:
    """What takes the run's metrics. One that has `begin` is told of the whole run, and not of training alone.

    Of several processes, the first has it.
    """
    if processes.rank():
        return False
    try:
        return instantiate(options["logger"], save_dir=str(run))
    except ModuleNotFoundError as error:
        raise UserError('logger=wandb needs a package: pip install -e ".[wandb]".') from error


def _validate(
    options: Options, target: Target, drafter: Any, prompts: list[Prompt], tree: Options | None, logger: Any
) -> float:
    """val/block_efficiency of a finished drafter that was not trained by steps."""
    contexts = [context_ids(target, prompt) for prompt in prompts[: options["fit"]["validation_prompts"]]]
    stats = generate(target, contexts, measured_settings(options, 0.0, tree), drafter).stats
    if hasattr(logger, "begin"):
        values = {"val/block_efficiency": stats.block_efficiency, "val/acceptance_rate": stats.acceptance_rate}
        logger.log_metrics(values, step=0)
    return stats.block_efficiency


def _score(run: Path) -> float | None:
    path = run / "validation.json"
    return float(json.loads(path.read_text())["block_efficiency"]) if path.exists() else None


def run_job(options: Options, run: Path) -> float | None:
    """Everything from prompts to the acceptance table, in the folder `run`.

    Returns the best val/block_efficiency, which `validation.json` keeps; None where no validation was asked for. Raises
    UserError where another process is at work there.
    """
    check(options)
    check_place(options)
    quiet_lightning()
    processes.launch(options["trainer"])
    check_parts(options, processes.count())
    with ExitStack() as alone:
        processes.told(lambda: alone.enter_context(alone_in(run)))
        return _run(options, run)


def _run(options: Options, run: Path) -> float | None:
    """As `run_job`, in a folder of its own. All processes come as far as the end of the training."""
    processes.told(lambda: record(options, run))
    for place in (run, run / "checkpoints"):
        processes.told(partial(clear_leftovers, place))
    folder, logger = run / "export", open_logger(options, run)
    tracked = hasattr(logger, "begin")
    if processes.told((run / "acceptance.json").exists):
        processes.dismiss_others()
        _complete(options, run, logger)
        return _score(run)
    with processes.first():
        original = open_target(options)
        print(f"target {original.name!r}, run folder {run}")
        target = adapt(options, original)
    processes.told(lambda: rehearse(options, target, run))
    if tracked:
        logger.begin(options)
    with processes.first():
        data = prepare_data(options, original)
    if (manifest := data.manifest) is not None:
        processes.told(lambda: record_data(manifest, run))
    drafter = build_drafter(options, target, data.batches)
    score = None if data.batches is None else fit(options, target, drafter, data, run, logger)
    processes.dismiss_others()
    drafter.eval()
    described = export(options, target, drafter, data.validation, data.manifest, folder)
    target = native.target_of(folder, original, options["target"]["trust_remote_code"])
    loaded = native.load(folder, target)
    check_parity(target, drafter, loaded, data.test, measured_settings(options, 0.0, described.tree))
    target.accelerate()  # not before, nor the drafter: what was trained had not the fast routes of its own target
    accelerate_drafter(loaded)
    if score is None and data.validation:
        score = _validate(options, target, loaded, data.validation, described.tree, logger)
    if score is not None:
        write_json(run / "validation.json", {"block_efficiency": score})
    measured = measure_export(options, target, loaded, data.test, described.tree)
    print_tables(measured)
    if (adapted := report(described.target)) is not None:
        print(adapted)
    write_text(folder / "README.md", model_card(described, measured))
    draw(measured, run / "acceptance.png")
    write_report(options, measured, run, [described])
    if tracked:
        logger.finish(options, described, score)
    print(f"export: {folder}\nmeasure it on other prompts: python eval/acceptance.py export={folder}")
    export_formats(options, target, drafter, native.read(folder), figures(measured), data.test, run)
    return score


def _complete(options: Options, run: Path, logger: Any) -> None:
    """Tell what a finished run has found, and add what it lacks: formats, and its figures where the logger takes them.

    Raises UserError as `export_formats` does.
    """
    folder = run / "export"
    described, before = native.read(folder), measured_before((folder / "README.md").read_text())
    print(f"this run is finished; to train again choose another run_name, or delete {run}\n{before}")
    print(f"in another engine's format: python train/export.py export={folder} format=NAME")
    if hasattr(logger, "begin"):
        logger.again(options, described, _score(run))
    missing = [name for name in options["export"]["formats"] if not (run / name).exists()]
    if not missing:
        return
    original = open_target(options)
    target = native.target_of(folder, original, options["target"]["trust_remote_code"])
    drafter, prompts = native.load(folder, target), _splits(options, original)["test"]
    wanted = {**options, "export": {**options["export"], "formats": missing}}
    export_formats(wanted, target, drafter, described, before, prompts, run)
