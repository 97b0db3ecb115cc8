"""Measure exported drafters in the engine.

    python eval/acceptance.py export=outputs/.../export
    python eval/acceptance.py export=[A,B] prompts=FILE.jsonl temperatures=[0] num_prompts=20

Prints a table, and writes acceptance.json (with provenance) and acceptance.png.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from conf.compose import main, plain


def job(config: DictConfig) -> None:
    """Load every export, run the prompts, print and write the result."""
    options = plain(config)
    folders = [Path(f) for f in _as_list(options["export"])]
    from models.checkpoint import native  # heavy imports wait until the command line is known to be right

    exports = [native.read(folder) for folder in folders]
    from engine.loop import DecodeSettings
    from eval.measure import measure
    from eval.prompt_sets import prompt_set
    from eval.table import draw, print_tables
    from models.linear import accelerate
    from models.sampling import SamplingParams
    from models.target import load_target

    wanted = {**exports[0].target["load"], **{k: v for k, v in options["target"].items() if v is not None}}
    target = load_target(**wanted)
    drafters = [native.load(folder, target) for folder in folders]
    for frozen in (target, *drafters):
        accelerate(frozen)
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
    output = Path(options["output"]) if options["output"] else folders[0].parent
    report = {"config": options, "results": [{"drafter": n, **m.summary()} for n, m in measured]}
    write_report(report, output)
    draw(measured, output / "acceptance.png")
    print(f"wrote {output / 'acceptance.json'} and {output / 'acceptance.png'}")


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write acceptance.json with provenance, whole or not at all."""
    from eval.provenance import provenance
    from models.files import write_text

    write_text(folder / "acceptance.json", json.dumps({**report, "provenance": provenance()}, indent=1) + "\n")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _names(folders: list[Path], kinds: list[str]) -> list[str]:
    """The kind of drafter, with the run's folder where two exports are of one kind."""
    return [
        k if kinds.count(k) == 1 else f"{k} ({f.resolve().parent.name})" for k, f in zip(kinds, folders, strict=True)
    ]


if __name__ == "__main__":
    main("acceptance", job)
