"""What lies in the folders that training, measuring and comparing leave behind, as far as it is there.

Nothing here loads a model. A part that a folder lacks is None or empty; a part that cannot be read is refused.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from models.errors import UserError

Points = list[tuple[float, float]]
_NEEDED = ("drafter", "temperature", "num_speculative_tokens", "block_efficiency")  # of a result, to tell it at all


@dataclass(frozen=True, slots=True)
class Tree:
    """A static draft tree as it was written down: parents and ranks of its nodes, and what it was built from."""

    source: str
    parents: list[int]
    ranks: list[int]
    expected_tokens: float | None = None
    acceptance: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Run:
    """A folder of one run, or of measurements of several exports; `read_folders` gives each a name of its own."""

    name: str
    folder: Path
    results: list[dict[str, Any]] = field(default_factory=list)  # as in acceptance.json
    exports: list[Path] = field(default_factory=list)  # of the results
    metrics: dict[str, Points] = field(default_factory=dict)  # by their names: (step, value)
    trees: list[Tree] = field(default_factory=list)
    training: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    provenance: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    adapted: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A compare.json: its drafters as train/compare.py wrote them, and its provenance."""

    name: str
    folder: Path
    drafters: list[dict[str, Any]]
    provenance: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that the folders hold: runs, comparisons, and sentences about what is not there."""

    runs: list[Run]
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_folders(folders: list[Path]) -> Found:
    """What all of the folders hold, each run and comparison once.

    Raises UserError, naming the folder, where there is nothing to report.
    """
    found = [read_folder(folder) for folder in folders]
    runs: dict[Path, Run] = {}
    for run in (run for f in found for run in f.runs):
        place = run.folder.resolve()
        if place not in runs or len(runs[place].results) < len(run.results):  # a comparison tells of trees as well
            runs[place] = run
    comparisons = {c.folder.resolve(): c for f in found for c in f.comparisons}
    return Found(
        [replace(run, name=name) for run, name in zip(runs.values(), endings(list(runs)), strict=True)],
        [replace(c, name=name) for c, name in zip(comparisons.values(), endings(list(comparisons)), strict=True)],
        list(dict.fromkeys(note for f in found for note in f.notes)),
    )


def endings(folders: Sequence[Path], least: int = 1) -> list[str]:
    """Each folder's name, with as many of the folders above it as tell it from the others, and `least` parts at least.

    A folder that comes twice has one name both times.
    """
    whole = [folder.resolve().parts[1:] for folder in folders]
    sizes = [least] * len(whole)
    while True:
        ends = [parts[-size:] for parts, size in zip(whole, sizes, strict=True)]
        known = Counter(end for _, end in set(zip(whole, ends, strict=True)))
        longer = [known[end] > 1 and size < len(parts) for parts, end, size in zip(whole, ends, sizes, strict=True)]
        if not any(longer):
            return ["/".join(end) for end in ends]
        sizes = [size + more for size, more in zip(sizes, longer, strict=True)]


def read_folder(folder: Path) -> Found:
    """A run's folder, one that eval/acceptance.py wrote, one of train/compare.py, or one that holds runs."""
    if folder.name in ("acceptance.json", "compare.json") and folder.is_file():
        folder = folder.parent
    if not folder.is_dir():
        raise UserError(f"There is no folder {str(folder)!r}: give a run's folder, as outputs/eagle-tiny-….")
    if (folder / "compare.json").exists():
        return _comparison(folder)
    if _is_run(folder):
        return Found([read_run(folder)])
    inside = sorted(child for child in folder.iterdir() if child.is_dir() and _is_run(child))
    if not inside:
        raise UserError(
            f"{str(folder)!r} holds nothing to report: neither acceptance.json (a finished run, or eval/acceptance.py) "
            "nor compare.json (train/compare.py) nor metrics/…/metrics.csv (a run under way), and no folder in it does."
        )
    note = f"{folder.name} holds no compare.json (yet): the {len(inside)} runs in it are shown as they are."
    return Found([read_run(child) for child in inside], notes=[note])


def read_run(folder: Path) -> Run:
    """What one folder holds. Raises UserError where a file in it is not what its name says."""
    report = _json(folder / "acceptance.json") or {}
    results = report.get("results", [])
    _check_results(results, folder / "acceptance.json")
    config = report.get("config") or _json(folder / "config.json")
    export = _json(folder / "export" / "config.json") or {}
    return Run(
        folder.resolve().name,
        folder,
        results,
        _exports(results, config or {}, folder),
        read_metrics(folder),
        _trees(folder, export),
        _json(folder / "training.json"),
        config,
        report.get("provenance") or export.get("provenance"),
        _json(folder / "data.json"),
        report.get("adapted_targets", []),
    )


def read_metrics(folder: Path) -> dict[str, Points]:
    """The metrics that Lightning's CSVLogger wrote, (step, value) by name; of a step told twice, the later one."""
    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("metrics/version_*/metrics.csv"), key=_version):
        with path.open(newline="", encoding="utf-8") as file:
            for line, row in enumerate(csv.DictReader(file), 2):
                try:
                    values = {k: float(v) for k, v in row.items() if k and v and k not in ("epoch", "step")}
                    step = int(float(row["step"] or "nan"))
                except (KeyError, ValueError, TypeError) as error:
                    raise UserError(f"{str(path)!r}, line {line}: no metrics of a step ({error}).") from error
                for name, value in values.items():
                    if math.isfinite(value):
                        found.setdefault(name, {})[step] = value
    return {name: [(float(step), v) for step, v in sorted(points.items())] for name, points in sorted(found.items())}


def unlike(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """The settings in which runs differ that all of them have: each with its value in every run, as text."""
    from models.files import flat

    configs = [dict(flat(run.config)) for run in runs if run.config]
    if len(configs) < 2 or len(configs) < len(runs):
        return []
    names = [n for n in configs[0] if n not in ("run_name", "output_root", "output") and all(n in c for c in configs)]
    rows = [(name, [json.dumps(c[name], ensure_ascii=False) for c in configs]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _is_run(folder: Path) -> bool:
    return (folder / "acceptance.json").exists() or any(folder.glob("metrics/version_*/metrics.csv"))


def _comparison(folder: Path) -> Found:
    """The drafters of a compare.json, each with what its run's folder holds, where that is there."""
    path = folder / "compare.json"
    written = _json(path) or {}
    drafters = written.get("drafters")
    if not isinstance(drafters, list) or not drafters:
        raise UserError(f"{str(path)!r} has no list 'drafters': is it by train/compare.py?")
    runs, notes = [], []
    for drafter in drafters:
        if not isinstance(drafter, dict) or not {"name", "results", "about"} <= set(drafter):
            raise UserError(f"{str(path)!r}: a drafter in it lacks its name, results or about.")
        _check_results(drafter["results"], path)
        place = folder / str(drafter["name"])
        if place.is_dir():
            run = read_run(place)
        else:
            run = Run(str(drafter["name"]), place)
            notes.append(f"The run of {drafter['name']} is not in {folder.name}: of it, compare.json alone is shown.")
        results = [{**_by_category_of(run, r), **r} for r in drafter["results"]]
        runs.append(replace(run, results=results, exports=[place / "export"] * len(results)))
    return Found(runs, [Comparison(folder.resolve().name, folder, drafters, written.get("provenance"))], notes)


def _by_category_of(run: Run, result: dict[str, Any]) -> dict[str, Any]:
    """What the run itself told of the same result, such as its categories."""
    same = (r for r in run.results if r["temperature"] == result["temperature"] and not result.get("tree"))
    return next(same, {})


def _exports(results: list[dict[str, Any]], config: dict[str, Any], folder: Path) -> list[Path]:
    """The export behind each result: those of eval/acceptance.py come export by export, a run has its own."""
    named = config.get("export")
    if isinstance(named, str):
        named = [named]
    if not isinstance(named, list) or not named or len(results) % len(named):
        return [folder / "export"] * len(results)
    each = len(results) // len(named)
    return [Path(str(named[index // each])) for index in range(len(results))]


def _trees(folder: Path, export: dict[str, Any]) -> list[Tree]:
    """Of the run's export, and of eval/tree.py."""
    written = {
        "fitted in training, in the export": (export.get("decoding") or {}).get("tree"),
        "tree.json, by eval/tree.py": _json(folder / "tree.json"),
    }
    found = []
    for source, told in written.items():
        if isinstance(told, dict) and told.get("parents"):
            found.append(tree_of(told, source, folder))
    return found


def tree_of(told: dict[str, Any], source: str, place: Path) -> Tree:
    """A tree's record. Raises UserError where its parents and ranks are those of no tree."""
    parents, ranks = told["parents"], told.get("ranks", [])
    if len(ranks) != len(parents) or not all(-1 <= p < i for i, p in enumerate(parents)):
        raise UserError(f"{str(place)!r}: the draft tree ({source}) is none: its parents are {parents}.")
    return Tree(source, parents, ranks, told.get("expected_tokens"), told.get("acceptance") or [])


def _check_results(results: Any, path: Path) -> None:
    if not isinstance(results, list):
        raise UserError(f"{str(path)!r} has no list of results.")
    for result in results:
        lacking = [key for key in _NEEDED if not isinstance(result, dict) or key not in result]
        if lacking:
            raise UserError(f"{str(path)!r}: a result in it lacks {', '.join(lacking)}.")


def _version(path: Path) -> tuple[int, str]:
    number = path.parent.name.removeprefix("version_")
    return (int(number) if number.isdigit() else 0, number)


def _json(path: Path) -> dict[str, Any] | None:
    """An object of a JSON file; None where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read {str(path)!r}: {error}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{str(path)!r} holds no JSON object.")
    return value
