"""Measure exported drafters in the engine.

    python eval/acceptance.py export=outputs/.../export
    python eval/acceptance.py export=[A,B] prompts=FILE.jsonl temperatures=[0] num_prompts=20

Prints a table, and writes acceptance.json (with provenance) and acceptance.png.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from conf.compose import main, plain
from models.errors import UserError

if TYPE_CHECKING:
    from eval.measure import Measurement


def job(config: DictConfig) -> None:
    """Load every export, run the prompts, print and write the result."""
    options = plain(config)
    folders = [Path(f) for f in _as_list(options["export"])]
    if options["repeats"] < 1:
        raise UserError(f"repeats is {options['repeats']}: it must be at least 1.")
    from models.checkpoint import native  # heavy imports wait until the command line is known to be right

    exports = [native.read(folder) for folder in folders]
    from engine.loop import DecodeSettings
    from eval.measure import measure
    from eval.prompt_sets import prompt_set
    from eval.table import draw, print_tables
    from models.files import write_text
    from models.linear import accelerate
    from models.sampling import SamplingParams
    from models.target import load_target
    from models.target.head import linears_of

    wanted = {**exports[0].target["load"], **{k: v for k, v in options["target"].items() if v is not None}}
    output = Path(options["output"] or folders[0].parent / f"acceptance-{Path(options['prompts']).stem}")
    write_text(output / "config.json", json.dumps(options, indent=1) + "\n")  # before the long work: can it be written?
    target = load_target(**wanted)
    drafters = [native.load(folder, target) for folder in folders]
    target.accelerate()
    for drafter in drafters:
        accelerate(linears_of(drafter))
    prompts = prompt_set(options["prompts"], target, options["num_prompts"], options["seed"])
    decode = options["decode"]
    names = _names(folders, [e.name for e in exports])
    measured = []
    for name, export, drafter in zip(names, exports, drafters, strict=True):
        for temperature in _as_list(options["temperatures"]):
            settings = DecodeSettings(
                max_new_tokens=decode["max_new_tokens"],
                num_speculative_tokens=decode["num_speculative_tokens"] or export.num_speculative_tokens,
                sampling=SamplingParams(float(temperature), decode["top_k"], decode["top_p"]),
                seed=options["seed"],
            )
            measured.append((name, measure(target, drafter, prompts, settings, repeats=options["repeats"])))
    print_tables(measured)
    draw(measured, output / "acceptance.png")
    write_report(options, measured, output)
    print(f"wrote {output / 'acceptance.json'} and {output / 'acceptance.png'}")


def write_report(options: dict[str, Any], measured: list[tuple[str, Measurement]], folder: Path) -> None:
    """Write acceptance.json: the options, every rate with its counts, and provenance; whole or not at all."""
    from eval.provenance import provenance
    from models.files import write_text

    results = [
        {"drafter": name, **m.summary(), "by_category": m.by_category(), "counts": m.counts()} for name, m in measured
    ]
    report = {"config": options, "results": results, "provenance": provenance()}
    write_text(folder / "acceptance.json", json.dumps(_without_nan(report), indent=1) + "\n")


def _without_nan(value: Any) -> Any:
    """JSON knows no nan: a rate of which nothing was counted is null."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if value != value else value


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _names(folders: list[Path], kinds: list[str]) -> list[str]:
    """The kind of drafter, with the run's folder where two exports are of one kind."""
    return [
        k if kinds.count(k) == 1 else f"{k} ({f.resolve().parent.name})" for k, f in zip(kinds, folders, strict=True)
    ]


if __name__ == "__main__":
    main("acceptance", job)
