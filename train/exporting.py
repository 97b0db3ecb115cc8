"""The end of a run: write the drafter, read it back, prove that it is the one that was trained, and measure it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from data.answers import context_ids
from data.prompts import Prompt
from engine.loop import generate
from engine.settings import DecodeSettings
from eval.adapted import distance
from eval.confidence import calibrate as calibrate_confidence
from eval.confidence import report as report_confidence
from eval.measure import Measurement, measure
from eval.provenance import provenance
from eval.tree import measure_ranks, print_tree, record_of
from models.checkpoint import format_of, native, widened
from models.errors import UserError
from models.target import Target
from models.tree import StaticTree
from train.backbone import Backbone, backbone_of
from train.export import write as write_format
from train.model_card import model_card
from train.settings import Options, measured_settings, planned_tree, temperatures

_CALIBRATED_AT = (0.0, 1.0)  # temperatures: whatever is measured, the export is the same


def export(
    options: Options, target: Target, drafter: Any, validation: list[Prompt], manifest: Options | None, folder: Path
) -> native.Export:
    """Write the drafter to `folder`, with the target where that was trained too; `target` is the trained one.

    The card gets its figures once they are measured.
    """
    finished = target.finished()
    tree = calibrate(options, finished, drafter, validation)
    about = _described(options, finished, manifest, tree, _confidence(options, finished, drafter, validation))
    backbone, save = backbone_of(options["drafter"]["training"]), None
    if not backbone.frozen:
        told = _adapted(options, target, finished, validation, backbone, about.target["load"])
        about, save = replace(about, target=about.target | told), _saving(target, finished, backbone)
    native.save(drafter, about, drafter.vocab, folder, model_card(about, []), save)
    return about


def _described(
    options: Options,
    target: Target,
    manifest: Options | None,
    tree: Options | None = None,
    confidence: Options | None = None,
) -> native.Export:
    """What an export of this run says of itself."""
    place = {k: options["target"][k] for k in ("source", "name_or_path", "dtype", "attn_implementation", "revision")}
    told = {} if confidence is None else {"confidence": confidence}
    return native.Export(
        name=options["drafter"]["name"],
        model=options["drafter"]["model"],
        target={"name": target.name, "fingerprint": target.fingerprint, "load": place},
        num_speculative_tokens=measured_settings(options, 0.0).num_speculative_tokens,
        provenance={"config": options, "data": manifest, **provenance(), **told},
        tree=tree,
    )


def rehearse_formats(options: Options, target: Target, drafter: Any, run: Path) -> None:
    """Write a drafter that has learnt nothing in every format that is asked for, and delete it again."""
    described = _described(options, target, None)
    with tempfile.TemporaryDirectory(dir=run, prefix=".rehearsal-") as folder:
        for name in options["export"]["formats"]:
            write_format(name, drafter, target, described, Path(folder) / name, "")


def export_formats(
    options: Options,
    target: Target,
    drafter: Any,
    described: native.Export,
    measured: str,
    prompts: list[Prompt],
    run: Path,
) -> None:
    """Write the drafter in every format that is asked for beside `export`, and check that each drafts as it does.

    Raises UserError behind the last of them, which names those that were refused and why: the run itself is finished.
    """
    refused = []
    for name in options["export"]["formats"]:
        try:
            write_format(name, drafter, target, described, run / name, measured)
            try:
                loaded = format_of(name).load(run / name, target)
                ours = widened(name, drafter, described.model, target)
                check_parity(target, ours, loaded, prompts, measured_settings(options, 0.0))
            except UserError:
                shutil.rmtree(run / name)  # what does not draft as the drafter does is not left behind
                raise
        except UserError as error:
            refused.append(f"{name} ({str(error).rstrip('.')})")
            continue
        print(f"{name}: {run / name}")
    if refused:
        raise UserError(
            f"The run is finished and measured, but not exported as {'; '.join(refused)}. To try again, start the same "
            f"command, or python train/export.py export={run / 'export'} format=NAME."
        )


def _adapted(
    options: Options,
    target: Target,
    finished: Target,
    validation: list[Prompt],
    backbone: Backbone,
    load: Options,
) -> Options:
    """Where the export finds its own target, and how far that is from the original on the latter's answers."""
    original = target.original
    contexts = [context_ids(original, prompt) for prompt in validation[: options["fit"]["validation_prompts"]]]
    answers = generate(original, contexts, measured_settings(options, 0.0)).token_ids
    texts = [(context + answer, len(context)) for context, answer in zip(contexts, answers, strict=True)]
    known = {"name": original.name, "fingerprint": original.fingerprint}
    told = {**backbone.describe(), "original": known, **distance(original, finished, texts)}
    whole = {**load, "source": "hf", "revision": None} if backbone.export == "merged" else load
    return {"load": whole, "adapted": told}


def _saving(target: Target, finished: Target, backbone: Backbone) -> Callable[[Path], None]:
    """What writes the adapted target, as `backbone.export` has it."""
    from models.target.adapted import AdaptedTarget, save_target  # needs peft

    assert isinstance(target, AdaptedTarget)
    return target.save_adapter if backbone.export == "separate" else partial(save_target, finished)


def calibrate(options: Options, target: Target, drafter: Any, validation: list[Prompt]) -> Options | None:
    """The best draft tree of `drafter.tree`'s sizes for what is accepted of validation prompts at temperature 0."""
    if (planned := planned_tree(options)) is None:
        return None
    sizes, prompts = options["drafter"]["tree"], validation[: options["fit"]["validation_prompts"]]
    settings = replace(measured_settings(options, 0.0), verification="token")
    contexts = [context_ids(target, prompt) for prompt in prompts]
    acceptance = measure_ranks(target, drafter, contexts, settings, planned.depth, sizes["ranks"])
    tree = StaticTree.best_first(acceptance, sizes["num_nodes"])
    print_tree(tree, acceptance)
    return record_of(tree, acceptance, prompts)


def _confidence(options: Options, target: Target, drafter: Any, validation: list[Prompt]) -> Options | None:
    """Calibrate a drafter's confidence head on validation prompts, and print how far it is off; None without a head."""
    if getattr(drafter, "confidence_head", None) is None:
        return None
    prompts = validation[: options["fit"]["validation_prompts"]]
    settings = replace(
        measured_settings(options, 0.0), tree=None, verification="token", num_speculative_tokens=drafter.max_depth
    )
    contexts = [context_ids(target, prompt) for prompt in prompts]
    found = calibrate_confidence(target, drafter, contexts, settings, _CALIBRATED_AT)
    print(report_confidence(found))
    return found


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
