"""Runs of train/run.py as parts of a larger job, each in a process of its own, and their exports."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig

from models.errors import UserError

if TYPE_CHECKING:
    from data.prompts import Prompt
    from models.target import Target

ROOT = Path(__file__).resolve().parent.parent
_PROBE_STEPS = 12
_BUDGETS = "budgets.json"


def handed_on(ours: tuple[str, ...]) -> list[str]:
    """The settings of the running job that its runs get too: all but those that begin like one of `ours`."""
    return [o for o in HydraConfig.get().overrides.task if not o.startswith(ours)]


def check_minutes(minutes: float | None, name: str, shared: list[str]) -> None:
    """Refuse minutes that are none, and two budgets. Raises UserError, in which they are called `name`."""
    if minutes is None:
        return
    if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not minutes > 0:
        raise UserError(f"{name} is {minutes!r}: it must be a number above 0, or null.")
    if any(o.startswith("fit.max_steps=") for o in shared):
        raise UserError(f"{name} and fit.max_steps are two budgets: give one of them.")


def run(drafter: str, overrides: list[str], folder: Path, run_name: str, data: Path) -> None:
    """One run of train/run.py, its output passed through; answers are kept in `data`. Raises UserError on failure."""
    place = [f"output_root={folder}", f"run_name={run_name}"]
    if not any(o.startswith("data.folder=") for o in overrides):
        place.append(f"data.folder={data}")
    code = finished([sys.executable, str(ROOT / "train" / "run.py"), f"+drafter={drafter}", *overrides, *place])
    if code in (130, -2, 143, -15):
        raise KeyboardInterrupt
    if code != 0:
        raise UserError(f"{run_name} failed (exit code {code}, see above). The rest is kept: mend it, and start again.")


def finished(command: list[str]) -> int:
    """The exit code of a process; when this one is to end (SIGTERM), that one is told to, and is waited for."""
    process = subprocess.Popen(command)

    def end(number: int, _: object) -> None:
        process.send_signal(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        return process.wait()
    finally:
        process.wait()
        signal.signal(signal.SIGTERM, before)


def check_begun(folder: Path, run_names: Iterable[str], minutes: float | None, name: str) -> None:
    """Refuse other minutes than those that a run has begun with: it would keep them beside runs of these.

    Raises UserError that names the first such run, and in which the minutes are called `name`.
    """
    began = _began_with(folder)
    for run_name in run_names:
        path, before = folder / run_name / "config.json", began.get(run_name)
        if before == minutes or not path.exists():
            continue
        if json.loads(path.read_text())["config"]["drafter"]["training"] is not None:
            was, now = ("null" if m is None else m for m in (before, minutes))
            raise UserError(
                f"{str(folder / run_name)!r} has begun with {name}={was}, which {now} would not change: give {name} as "
                "it was, or another run_name."
            )


def _began_with(folder: Path) -> dict[str, float | None]:
    """The minutes of training that runs have begun with, by their names."""
    path = folder / _BUDGETS
    found: dict[str, float | None] = json.loads(path.read_text()) if path.exists() else {}
    return found


def budget(
    minutes: float | None, drafter: str, overrides: list[str], folder: Path, run_name: str, data: Path
) -> list[str]:
    """The setting that lets a drafter train for `minutes`, by the pace of a short run of its own; nothing for null.

    A run that has begun keeps the number of steps that it began with; `check_begun` says whether it may go on. The
    minutes are recorded in `folder`.
    """
    from models.files import write_json

    began = _began_with(folder)
    if began.get(run_name) != minutes:
        write_json(folder / _BUDGETS, {**began, run_name: minutes})
    if minutes is None:
        return []
    begun = folder / run_name / "config.json"
    if begun.exists():
        return [f"fit.max_steps={json.loads(begun.read_text())['config']['fit']['max_steps']}"]
    asked = hashlib.sha256(json.dumps(overrides).encode()).hexdigest()[:8]  # other settings have another pace
    probe = f"probes/{drafter}-{asked}"
    record = folder / probe / "training.json"
    if not record.exists():
        fit = [f"fit.max_steps={_PROBE_STEPS}", "fit.validation_prompts=1"]
        measure = ["measure.num_prompts=1", "measure.temperatures=[0]"]
        run(drafter, [*overrides, *fit, *measure], folder, probe, data)
    if not record.exists():
        return []  # it does not train by steps
    pace = json.loads(record.read_text())
    return [f"fit.max_steps={max(1, int(minutes * 60 * pace['steps'] / pace['seconds']))}"]


def check_measured(run: Path, measure: dict[str, Any]) -> None:
    """Refuse a finished run that was measured otherwise than by `measure`: it is not measured again."""
    path = run / "acceptance.json"
    if path.exists() and json.loads(path.read_text())["config"]["measure"] != measure:
        raise UserError(
            f"{str(run)!r} was measured on other prompts or at other temperatures: give the measure settings that it "
            "has, or another run_name."
        )


def measured_prompts(options: dict[str, Any], target: Target) -> list[Prompt]:
    """The prompts that a run with these options is measured on."""
    from data.prompts import SplitSizes, deal
    from train.settings import instantiate

    sizes = SplitSizes(**options["data"]["sizes"])
    source = instantiate(options["data"]["source"], _convert_="all")
    found = deal(source, target, sizes, options["seed"])["test"]
    return found[: options["measure"]["num_prompts"]]


def open_export(options: dict[str, Any], target: Target, folder: Path) -> tuple[Target, Any]:
    """The drafter in an export, and its target: `target`, or the one that was trained with it, ready to be measured."""
    from models.checkpoint import native

    own = native.target_of(folder, target, options["target"]["trust_remote_code"])
    drafter = native.load(folder, own)
    own.accelerate()
    return own, drafter
