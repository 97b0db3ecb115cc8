"""Measure exported drafters in the engine.

    python eval/acceptance.py export=outputs/.../export
    python eval/acceptance.py export=[A,B] prompts=FILE.jsonl temperatures=[0] num_prompts=20
    python eval/acceptance.py export=CHECKPOINT target.source=hf target.name_or_path=FOLDER

An export may be in the format of another engine, a published one too: see models/checkpoint.

Prints a table, and writes acceptance.json (with provenance) and acceptance.png.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from conf.compose import main, plain
from models.errors import UserError

if TYPE_CHECKING:
    from eval.measure import Measurement
    from models.checkpoint.native import Export


def job(config: DictConfig) -> None:
    """The main job; see `measure_exports`."""
    measure_exports(plain(config))


def measure_exports(options: dict[str, Any]) -> list[tuple[str, Measurement]]:
    """Load every export, run the prompts, print and write the result; a measurement per export and temperature."""
    folders = [Path(f) for f in _as_list(options["export"])]
    if options["repeats"] < 1:
        raise UserError(f"repeats is {options['repeats']}: it must be at least 1.")
    from models.checkpoint import detect, target_options  # heavy imports wait until the command line is right

    modules = [detect(folder, options["format"]) for folder in folders]
    exports = [module.read(folder) for module, folder in zip(modules, folders, strict=True)]
    from engine.loop import check_settings
    from engine.options import decode_settings
    from eval.adapted import report
    from eval.measure import measure
    from eval.prompt_sets import prompt_set, without_fitted
    from eval.table import draw, print_tables, unique_names
    from models.drafter import accelerate_drafter
    from models.files import write_json
    from models.target import load_target

    wanted = target_options(exports[0], options["target"], folders[0])
    output = Path(options["output"] or folders[0].parent / f"acceptance-{Path(options['prompts']).stem}")
    write_json(output / "config.json", options)  # before the long work: can it be written?
    target = load_target(**wanted)
    drafters = [module.load(folder, target) for module, folder in zip(modules, folders, strict=True)]
    target.accelerate()
    for drafter in drafters:
        accelerate_drafter(drafter)
    prompts = without_fitted(
        prompt_set(options["prompts"], target, options["num_prompts"], options["seed"]),
        options["decode"]["tree"],
        [export.tree for export in exports],
    )
    names = unique_names(folders, [e.name for e in exports])
    runs = []
    for name, export, drafter in zip(names, exports, drafters, strict=True):
        for temperature in _as_list(options["temperatures"]):
            settings = decode_settings(
                options["decode"], float(temperature), options["seed"], export.num_speculative_tokens, export.tree
            )
            check_settings(target, drafter, settings)
            runs.append((name, drafter, settings))
    measured = [(n, measure(target, d, prompts, s, repeats=options["repeats"])) for n, d, s in runs]
    print_tables(measured)
    for name, export in zip(names, exports, strict=True):
        if (adapted := report(export.target)) is not None:
            print(f"{name}: {adapted}")
    draw(measured, output / "acceptance.png")
    write_report(options, measured, output, exports)
    print(f"wrote {output / 'acceptance.json'} and {output / 'acceptance.png'}")
    return measured


def write_report(
    options: dict[str, Any], measured: list[tuple[str, Measurement]], folder: Path, exports: Sequence[Export] = ()
) -> None:
    """Write acceptance.json: the options, every rate with its counts, the exports' targets where those were trained
    with the drafter, and provenance; whole or not at all.
    """
    from eval.provenance import provenance
    from models.files import write_json

    results = [
        {"drafter": name, **m.summary(), "by_category": m.by_category(), "counts": m.counts()} for name, m in measured
    ]
    report = {"config": options, "results": results, "provenance": provenance()}
    if adapted := [{"drafter": e.name, **e.target["adapted"]} for e in exports if "adapted" in e.target]:
        report["adapted_targets"] = adapted
    write_json(folder / "acceptance.json", report)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


if __name__ == "__main__":
    main("acceptance", job)
