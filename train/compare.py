"""Train several drafters on the same data under the same budget, and measure their exports side by side.

    python train/compare.py target=tiny
    python train/compare.py target=smollm2 compare.drafters=[prompt_lookup,medusa,eagle]

Every drafter is a run of train/run.py in a process of its own. All settings but those of `compare` are handed on to it.
Started again, the same command goes on where it stopped: what is trained or measured is not done again.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from conf.compose import choices, explain_overrides, main, plain
from models.errors import UserError

if TYPE_CHECKING:
    from models.target import Target

ROOT = Path(__file__).resolve().parent.parent
_PROBE_STEPS = 12
_OURS = ("compare.", "run_name=", "output_root=")  # settings that are not handed on


def job(config: DictConfig) -> None:
    """Train what is not trained yet, measure what is not measured yet, and write one table."""
    options = plain(config)
    wanted = options["compare"]
    shared = [o for o in HydraConfig.get().overrides.task if not o.startswith(_OURS)]
    check(options, shared)
    folder = Path(options["output_root"]) / (options["run_name"] or f"compare-{options['target']['source']}")
    for number, name in enumerate(wanted["drafters"], 1):
        print(f"\n{name} ({number} of {len(wanted['drafters'])})", flush=True)
        own = [*shared, *_own(wanted, name)]
        _run(name, [*own, *_budget(wanted["minutes"], name, own, folder)], folder, name)
    from eval.comparison import Compared, write
    from train.pipeline import open_target

    target = open_target(options)
    compared = [Compared(name, *_measured(options, target, folder / name)) for name in wanted["drafters"]]
    write(compared, target, folder, options)


def check(options: dict[str, Any], shared: list[str]) -> None:
    """Refuse what would fail after hours, a drafter's own settings too. Raises UserError naming the first mistake."""
    wanted, known = options["compare"], choices("drafter")
    if not wanted["drafters"] or len(set(wanted["drafters"])) != len(wanted["drafters"]):
        raise UserError(f"compare.drafters is {wanted['drafters']}: name one or more drafters, each once.")
    for name in [*wanted["drafters"], *(wanted["overrides"] or {})]:
        if name not in known:
            raise UserError(f"compare: there is no drafter {name!r}. Choose from: {', '.join(known)}.")
    for name in wanted["overrides"] or {}:
        if name not in wanted["drafters"]:
            raise UserError(f"compare.overrides names {name!r}, which is not among compare.drafters.")
    if wanted["minutes"] is not None and not wanted["minutes"] > 0:
        raise UserError(f"compare.minutes is {wanted['minutes']}: it must be above 0, or null.")
    if wanted["minutes"] is not None and any(o.startswith("fit.max_steps=") for o in shared):
        raise UserError("compare.minutes and fit.max_steps are two budgets: give one of them.")
    for name in wanted["drafters"]:
        own = _own(wanted, name)
        if not isinstance(own, list) or not all(isinstance(o, str) for o in own):
            raise UserError(f"compare.overrides.{name} is {own!r}: give a list of settings, as ['fit.batch_size=8'].")
        explain_overrides("train", [f"+drafter={name}", *shared, *own])
    from train.settings import measured_settings

    measured_settings({**options, "decode": {**options["decode"], "tree": wanted["tree"]}}, 0.0)


def _own(wanted: dict[str, Any], name: str) -> Any:
    """The settings that one drafter alone is given."""
    return (wanted["overrides"] or {}).get(name, [])


def _run(name: str, overrides: list[str], folder: Path, run_name: str) -> None:
    """One run of train/run.py, its output passed through. Raises UserError where it fails."""
    place = [f"output_root={folder}", f"run_name={run_name}"]
    if not any(o.startswith("data.folder=") for o in overrides):
        place.append(f"data.folder={folder / 'data'}")
    command = [sys.executable, str(ROOT / "train" / "run.py"), f"+drafter={name}", *overrides, *place]
    code = subprocess.run(command, check=False).returncode
    if code in (130, -2):
        raise KeyboardInterrupt
    if code != 0:
        raise UserError(f"{name} failed (exit code {code}, see above). The rest is kept: mend it, and start again.")


def _budget(minutes: float | None, name: str, overrides: list[str], folder: Path) -> list[str]:
    """The setting that lets a drafter train for `minutes`, by the pace of a short run of its own; nothing for null."""
    if minutes is None:
        return []
    asked = hashlib.sha256(json.dumps(overrides).encode()).hexdigest()[:8]  # other settings have another pace
    probe = f"probes/{name}-{asked}"
    record = folder / probe / "training.json"
    if not record.exists():
        fit = [f"fit.max_steps={_PROBE_STEPS}", "fit.validation_prompts=1"]
        measure = ["measure.num_prompts=1", "measure.temperatures=[0]"]
        _run(name, [*overrides, *fit, *measure], folder, probe)
    if not record.exists():
        return []  # it does not train by steps
    pace = json.loads(record.read_text())
    return [f"fit.max_steps={max(1, int(minutes * 60 * pace['steps'] / pace['seconds']))}"]


def _measured(options: dict[str, Any], target: Target, run: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The results of a run's chains and trees, and what else is told of its drafter; kept in the run's folder."""
    chains = json.loads((run / "acceptance.json").read_text())["results"]
    path, question = run / "compared.json", {"tree": options["compare"]["tree"], "measure": options["measure"]}
    if path.exists() and (kept := json.loads(path.read_text()))["question"] == question:
        return chains + kept["trees"], kept["drafter"]
    from data.prompts import SplitSizes, split_prompts
    from eval.comparison import describe_drafter
    from eval.measure import measure
    from models.checkpoint import native
    from models.drafter import accelerate_drafter
    from models.files import write_json
    from models.types import max_depth
    from train.settings import instantiate, measured_settings, temperatures

    sizes = SplitSizes(**options["data"]["sizes"])
    source = instantiate(options["data"]["source"], _convert_="all")
    prompts = split_prompts(source.prompts(target, sizes.total, options["seed"]), sizes)["test"]
    prompts = prompts[: options["measure"]["num_prompts"]]
    target = native.target_of(run / "export", target, options["target"]["trust_remote_code"])
    drafter = native.load(run / "export", target)
    target.accelerate()
    about = describe_drafter(target, drafter, prompts, measured_settings(options, 0.0))
    accelerate_drafter(drafter)
    trees = []
    if question["tree"] is not None and hasattr(drafter, "propose_tree"):
        depth = min(question["tree"]["depth"], max_depth(drafter) or question["tree"]["depth"])
        options = {**options, "decode": {**options["decode"], "tree": {**question["tree"], "depth": depth}}}
        for temperature in temperatures(options):
            found = measure(target, drafter, prompts, measured_settings(options, temperature))
            trees.append({"drafter": run.name, **found.summary(), "counts": found.counts()})
    training = run / "training.json"
    about["adapted"] = native.read(run / "export").target.get("adapted")
    about["training"] = json.loads(training.read_text()) if training.exists() else None
    write_json(path, {"question": question, "trees": trees, "drafter": about})
    kept = json.loads(path.read_text())
    return chains + kept["trees"], kept["drafter"]


if __name__ == "__main__":
    main("compare", job)
