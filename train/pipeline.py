"""The main job, stage by stage: answers → drafter → training → export → measurement.

Every stage keeps what it finished, so the same command, started again, goes on where it stopped. A drafter whose
`training` is null needs no answers, and is exported as it is built. Training is a LightningModule's, or whatever else
has a `learn(batches)`, which is called once (`train.counting`).
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LearningRateMonitor

from data.answers import build_answers, context_ids, describe, open_answers
from data.features import FeatureCache
from data.loader import StepBatches, step_loader
from data.prompts import Prompt, PromptSource, SplitSizes, split_prompts
from engine.loop import check_prompts, check_settings, generate
from engine.settings import DecodeSettings
from eval.acceptance import write_report
from eval.measure import Measurement, measure
from eval.provenance import provenance
from eval.table import draw, print_tables
from eval.tree import measure_ranks, print_tree, record_of
from models.checkpoint import detect, format_of, native
from models.drafter import accelerate_drafter
from models.errors import UserError
from models.files import write_text
from models.target import Target
from models.tree import StaticTree
from models.vocab import DraftVocab
from train.callbacks import (
    AtomicCheckpoints,
    BlockEfficiency,
    LastCheckpoint,
    TrainingProgress,
    TrainingRecord,
    quiet_lightning,
)
from train.export import write as write_format
from train.model_card import figures, measured_before, model_card
from train.settings import (
    Options,
    answer_settings,
    check,
    instantiate,
    is_trained,
    measured_settings,
    planned_tree,
    record,
    record_data,
    temperatures,
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Batches of answers, prompts of the other splits, and what the answers came from; without training, only test."""

    batches: StepBatches | None
    validation: list[Prompt]
    test: list[Prompt]
    manifest: dict[str, Any] | None


def open_target(options: Options) -> Target:
    """Load the target onto the device that the trainer asks for; with trainer=auto, onto a GPU where there is one."""
    arguments, accelerator = dict(options["target"]), options["trainer"]["accelerator"]
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise UserError("trainer=gpu, but torch finds no CUDA device: use trainer=cpu.")
    if arguments["device"] == "auto" and accelerator != "auto":
        arguments["device"] = "cuda" if accelerator == "gpu" else "cpu"
    target: Target = instantiate(arguments)
    target.accelerate()
    return target


def rehearse(options: Options, target: Target, run: Path) -> None:
    """Build everything that the run will build, and drop it: what is refused is refused before the long work."""
    drafter = native.build(options["drafter"]["model"], target, DraftVocab(target.vocab_size))
    for temperature in temperatures(options):
        check_settings(target, drafter, measured_settings(options, temperature))
    if (tree := planned_tree(options)) is not None:
        check_settings(target, drafter, replace(measured_settings(options, 0.0), tree=tree, verification="token"))
    _rehearse_formats(options, target, run)
    module = _training_module(options, target, drafter) if is_trained(options) else None
    if isinstance(module, lightning.LightningModule):
        module.configure_optimizers()
        _trainer(options, target, run, callbacks=[])
    elif any(True for _ in drafter.parameters()) and not getattr(drafter, "pretrained", False):
        why = "is null" if module is None else "trains no weights that draft"
        raise UserError(
            f"drafter.training {why}, and the weights of drafter {options['drafter']['name']!r} would be random: name "
            "a folder with trained ones where it reads one (drafter.model.name_or_path=FOLDER or "
            "drafter.model.export=FOLDER), or train it."
        )


def _rehearse_formats(options: Options, target: Target, run: Path) -> None:
    """Write a drafter that has learnt nothing in every format that is asked for, and delete it again."""
    if not options["export"]["formats"]:
        return
    size = options["draft_vocab_size"]
    reduced = size is not None and is_trained(options) and size < target.vocab_size
    drafter = _started(options, target, DraftVocab(target.vocab_size, torch.arange(size) if reduced else None))
    described = _described(options, target, None)
    with tempfile.TemporaryDirectory(dir=run, prefix=".rehearsal-") as folder:
        for name in options["export"]["formats"]:
            write_format(name, drafter, target, described, Path(folder) / name, "")


def _started(options: Options, target: Target, vocab: DraftVocab) -> Any:
    """The drafter as training begins with it: that of init_from, with the vocabulary it has, or a new one."""
    if options["init_from"] is None:
        return native.build(options["drafter"]["model"], target, vocab)
    folder = Path(options["init_from"]).expanduser()
    return detect(folder).load(folder, target).train()


def prepare_data(options: Options, target: Target) -> Prepared:
    """Collect prompts, split them, and let the target answer those for training, if there is any."""
    data = options["data"]
    sizes = SplitSizes(**data["sizes"])
    if not is_trained(options):
        sizes = SplitSizes(0, 0, sizes.test)
    source: PromptSource = instantiate(data["source"], _convert_="all")
    splits = split_prompts(source.prompts(target, sizes.total, options["seed"]), sizes)
    check_prompts(target, [context_ids(target, prompt) for prompt in splits["validation"] + splits["test"]])
    if not is_trained(options):
        return Prepared(None, [], splits["test"], None)
    settings = answer_settings(options)
    manifest = describe(target, splits["train"], settings)
    if data["reuse"]:
        rows = open_answers(Path(data["reuse"]), manifest)
    else:
        rows = build_answers(target, splits["train"], settings, Path(data["folder"]))
    batches = StepBatches(rows, options["fit"]["batch_size"], data["max_tokens"], options["seed"])
    if batches.truncated:
        print(
            f"{batches.truncated} of {len(rows)} answers are longer than data.max_tokens and were cut; "
            f"{batches.dropped} had nothing left to learn from"
        )
    return Prepared(batches, splits["validation"], splits["test"], manifest)


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


def fit(options: Options, target: Target, drafter: Any, data: Prepared, run: Path) -> None:
    """Train, measuring val/block_efficiency in the engine, and leave the weights that were best at that."""
    assert data.batches is not None
    settings, module = options["fit"], _training_module(options, target, drafter)
    if hasattr(module, "learn"):
        module.learn(data.batches)
        return
    if settings["hidden_states"] == "cached" and module.capture_layers:
        root = Path(options["data"]["folder"])
        data.batches.cache = FeatureCache.build(target, data.batches.token_ids, module.capture_layers, root)
    checkpoints = run / "checkpoints"
    prompts = [context_ids(target, p) for p in data.validation[: settings["validation_prompts"]]]
    measured = BlockEfficiency(
        target, prompts, measured_settings(options, 0.0), settings["evaluate_every"], checkpoints / "best.safetensors"
    )
    resume = checkpoints / "last.ckpt"
    last = LastCheckpoint(resume, settings["checkpoint_every"])
    trainer = _trainer(
        options, target, run, [TrainingRecord(run / "training.json"), measured, TrainingProgress(measured), last]
    )
    if not resume.exists():
        for name, text in (module.start(data.batches) or {}).items():
            write_text(run / name, text)
    per_step = options["trainer"]["accumulate_grad_batches"]
    loader = step_loader(data.batches, per_step * _steps_done(resume), per_step * settings["max_steps"])
    try:
        trainer.fit(module, loader, ckpt_path=str(resume) if resume.exists() else None)
    except SystemExit:  # what Lightning makes of Ctrl-C
        if trainer.interrupted:
            raise KeyboardInterrupt from None
        raise
    module.load_kept_state(native.read_tensors(measured.best))
    drafter.to(target.device).eval()  # Lightning left it on the CPU


def _training_module(options: Options, target: Target, drafter: Any) -> Any:
    settings = options["drafter"]["training"]
    return instantiate(settings, drafter, target, max_steps=options["fit"]["max_steps"], seed=options["seed"])


def _trainer(options: Options, target: Target, run: Path, callbacks: list[lightning.Callback]) -> lightning.Trainer:
    """Lightning's trainer on the target's device; checkpoints and progress are the callbacks' business."""
    on_gpu = target.device.type == "cuda"
    place = {"accelerator": "gpu", "devices": [target.device.index or 0]} if on_gpu else {"accelerator": "cpu"}
    try:
        logger = instantiate(options["logger"], save_dir=str(run))
    except ModuleNotFoundError as error:
        raise UserError('logger=wandb needs a package: pip install "draftsmith[wandb]".') from error
    try:
        return lightning.Trainer(
            **{**options["trainer"], **place},
            max_steps=options["fit"]["max_steps"],
            max_epochs=-1,
            logger=logger,
            callbacks=[*callbacks, LearningRateMonitor("step")],
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


def _steps_done(checkpoint: Path) -> int:
    return int(AtomicCheckpoints().load_checkpoint(checkpoint)["global_step"]) if checkpoint.exists() else 0


def calibrate(options: Options, target: Target, drafter: Any, data: Prepared) -> Options | None:
    """The best draft tree of `drafter.tree`'s sizes for what is accepted of validation prompts at temperature 0."""
    if (planned := planned_tree(options)) is None:
        return None
    sizes, prompts = options["drafter"]["tree"], data.validation[: options["fit"]["validation_prompts"]]
    settings = replace(measured_settings(options, 0.0), verification="token")
    contexts = [context_ids(target, prompt) for prompt in prompts]
    acceptance = measure_ranks(target, drafter, contexts, settings, planned.depth, sizes["ranks"])
    tree = StaticTree.best_first(acceptance, sizes["num_nodes"])
    print_tree(tree, acceptance)
    return record_of(tree, acceptance, prompts)


def export(options: Options, target: Target, drafter: Any, data: Prepared, folder: Path) -> native.Export:
    """Write the drafter to `folder`; the card gets its figures once they are measured."""
    described = _described(options, target, data.manifest, calibrate(options, target, drafter, data))
    native.save(drafter, described, drafter.vocab, folder, model_card(described, []))
    return described


def _described(
    options: Options, target: Target, manifest: Options | None, tree: Options | None = None
) -> native.Export:
    """What an export of this run says of itself."""
    place = {k: options["target"][k] for k in ("source", "name_or_path", "dtype", "attn_implementation", "revision")}
    return native.Export(
        name=options["drafter"]["name"],
        model=options["drafter"]["model"],
        target={"name": target.name, "fingerprint": target.fingerprint, "load": place},
        num_speculative_tokens=measured_settings(options, 0.0).num_speculative_tokens,
        provenance={"config": options, "data": manifest, **provenance()},
        tree=tree,
    )


def export_formats(
    options: Options, target: Target, drafter: Any, described: native.Export, measured: str, data: Prepared, run: Path
) -> None:
    """Write the drafter in every format that is asked for beside `export`, and check that each drafts as it does."""
    for name in options["export"]["formats"]:
        write_format(name, drafter, target, described, run / name, measured)
        loaded = format_of(name).load(run / name, target)
        check_parity(target, drafter, loaded, data.test, measured_settings(options, 0.0))
        print(f"{name}: {run / name}")


def check_parity(target: Target, trained: Any, loaded: Any, prompts: list[Prompt], settings: DecodeSettings) -> None:
    """Answer a few prompts with the drafter in memory and with the reloaded one: every count must agree.

    Raises UserError otherwise: the export would not be what was trained.
    """
    ids = [context_ids(target, p) for p in prompts[:4]]
    ours, theirs = (generate(target, ids, settings, d).stats for d in (trained, loaded))
    if not (ours.accepted == theirs.accepted).all() or not (ours.rounds == theirs.rounds).all():
        raise UserError(
            f"The reloaded export accepts {theirs.accepted.sum():g} tokens where the trained drafter accepts "
            f"{ours.accepted.sum():g}: the export is broken."
        )
    accepted, drafted = ours.accepted.sum(), ours.drafted.sum()
    print(f"export reloaded: {accepted:g} of {drafted:g} drafted tokens accepted, as before the export")


def measure_export(
    options: Options, target: Target, drafter: Any, prompts: list[Prompt], tree: Options | None
) -> list[tuple[str, Measurement]]:
    """The acceptance table of the run, on test prompts."""
    chosen = prompts[: options["measure"]["num_prompts"]]
    name = options["drafter"]["name"]
    return [
        (name, measure(target, drafter, chosen, measured_settings(options, temperature, tree)))
        for temperature in temperatures(options)
    ]


def run_job(options: Options, run: Path) -> None:
    """Everything from prompts to the acceptance table, in the folder `run`."""
    check(options)
    record(options, run)
    quiet_lightning()
    folder = run / "export"
    if (run / "acceptance.json").exists():
        before = measured_before((folder / "README.md").read_text())
        print(f"this run is finished; to train again choose another run_name, or delete {run}\n{before}")
        print(f"in another engine's format: python train/export.py export={folder} format=NAME")
        return
    target = open_target(options)
    print(f"target {target.name!r}, run folder {run}")
    rehearse(options, target, run)
    data = prepare_data(options, target)
    if data.manifest is not None:
        record_data(data.manifest, run)
    drafter = build_drafter(options, target, data.batches)
    if data.batches is not None:
        fit(options, target, drafter, data, run)
    drafter.eval()
    described = export(options, target, drafter, data, folder)
    loaded = native.load(folder, target)
    check_parity(target, drafter, loaded, data.test, measured_settings(options, 0.0, described.tree))
    accelerate_drafter(loaded)  # not before: it is not trained any more
    measured = measure_export(options, target, loaded, data.test, described.tree)
    print_tables(measured)
    write_text(folder / "README.md", model_card(described, measured))
    export_formats(options, target, drafter, described, figures(measured), data, run)
    draw(measured, run / "acceptance.png")
    write_report(options, measured, run)
    print(f"export: {folder}\nmeasure it on other prompts: python eval/acceptance.py export={folder}")
