"""Write one HTML page, which needs no network, of what runs, measurements and comparisons found.

    python eval/report.py outputs/RUN
    python eval/report.py outputs/compare-tiny output=report.html
    python eval/report.py outputs/RUN outputs/RUN2 sample=true

A folder is a run's (train/run.py, finished or not), eval/acceptance.py's, train/compare.py's, or one that holds such
folders. What is not in it is left out with a sentence. sample=true lets the exports answer a prompt in the engine.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from conf.compose import main, plain
from models.errors import UserError

if TYPE_CHECKING:
    from eval.run_folder import Found
    from eval.sample import Sample

_WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd",
               "--experimental-rerun")  # fmt: skip


def job(config: DictConfig) -> None:
    """Read the folders and write the page."""
    options = plain(config)
    folders = options["runs"] if isinstance(options["runs"], list) else [options["runs"]]
    if not folders:
        raise UserError("runs is empty: name a folder, as python eval/report.py outputs/RUN")
    from eval.run_folder import endings, read_folders

    found = read_folders([Path(str(folder)) for folder in folders])
    from eval.sample import samples
    from models.files import write_text

    first = Path(str(folders[0]))
    output = Path(options["output"] or (first if first.is_dir() else first.parent) / "report.html")
    exports = [export for run in found.runs for export in run.exports or [run.folder / "export"]]
    written = samples(exports, options) if options["sample"] else ([], [])
    names = ", ".join(dict.fromkeys(endings([Path(str(folder)) for folder in folders])))
    write_text(output, html(names, found, *written, asked=options["sample"]))
    print(f"wrote {output}")


def html(
    names: str, found: Found, samples: Sequence[Sample] = (), lacking: Sequence[str] = (), asked: bool = False
) -> str:
    """The page about what was `found`."""
    from eval.page import Section, page, said
    from eval.report_measured import by_category, by_position, draft_lengths, time_breakdown, tree_shapes
    from eval.report_results import shown_results
    from eval.report_sections import comparison, overview, provenance, text_samples, training_curves

    shown = shown_results(found)
    sections = [
        Section("Overview", "overview", overview(shown, found)),
        Section("Comparison", "comparison", comparison(shown, found)),
        Section("Acceptance by position", "positions", by_position(shown)),
        Section("Acceptance by category", "categories", by_category(shown)),
        Section("Draft length: prediction and measurement", "lengths", draft_lengths(shown)),
        Section("Where the time goes", "time", time_breakdown(shown)),
        Section("Training", "training", training_curves(found, shown)),
        Section("Draft trees", "trees", tree_shapes(found, shown)),
        Section("Text sample", "sample", text_samples(samples, lacking, asked)),
        Section("Provenance", "provenance", provenance(found)),
    ]
    best = max(shown, key=lambda s: s.numbers["block_efficiency"] or 0.0, default=None)
    lead = ""
    if best is not None and best.numbers["block_efficiency"] is not None:
        speed = best.numbers.get("speedup")
        gain = "" if speed is None else f" and {speed:.2f} times plain decoding's speed"
        lead = said(
            f"Best: {best.label} at T = {best.temperature:g}, with {best.numbers['block_efficiency']:.2f} tokens per "
            f"target pass{gain}."
        )
    return page(f"Drafters: {names}", lead, [section for section in sections if section.body])


def with_folders(arguments: list[str]) -> list[str]:
    """The arguments, those that are folders gathered as runs=[…], quoted for Hydra."""
    folders: list[str] = []
    rest: list[str] = []
    for index, argument in enumerate(arguments):
        setting = re.match(r"[+~]{0,2}[A-Za-z_][\w.@/]*=", argument) and not Path(argument).exists()
        if setting or argument.startswith("-") or (index and arguments[index - 1] in _WITH_VALUE):
            rest.append(argument)
        else:
            folders.append(argument)
    if not folders:
        return rest
    quoted = ("'" + folder.replace("\\", "\\\\").replace("'", "\\'") + "'" for folder in folders)
    return [f"runs=[{','.join(quoted)}]", *rest]


if __name__ == "__main__":
    sys.argv[1:] = with_folders(sys.argv[1:])
    main("report", job)
