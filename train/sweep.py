"""Search a drafter's settings with Optuna, over the same spaces as `wandb sweep conf/sweep/NAME.yaml`.

    python train/sweep.py sweep=eagle trials=12 jobs=2
    python train/sweep.py sweep=medusa trials=6 fit.max_steps=100 "overrides=['drafter.model.num_heads=3']"

Trials are compared by val/block_efficiency. Hydra's multirun makes them, `jobs` at a time, each a run of train/run.py.
Started again, the same command goes on where it stopped; with more trials, it adds what is lacking. A grid has no more
trials than points.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from conf.compose import ROOT as CONF
from conf.compose import choices, explain_overrides, main, plain
from models.errors import UserError

_OURS = ("sweep", "trials", "jobs", "sampler", "overrides", "run_name", "output_root", "data.folder", "debug")
_TRIAL = CONF.parent / "train" / "trial.py"
_NEEDED = ("optuna", "hydra_plugins.hydra_optuna_sweeper", "hydra_plugins.hydra_joblib_launcher")


def job(config: DictConfig) -> None:
    """Make the trials that are lacking, and write the table and the picture of all."""
    family = HydraConfig.get().runtime.choices.get("sweep")
    if family in (None, "null"):
        listed = "\n".join(f"  sweep={name:<22} {what}" for name, what in choices("sweep").items())
        raise UserError(f"Say which drafter's settings to search:\n{listed}")
    options = plain(OmegaConf.masked_copy(config, [str(key) for key in config if key != "sweep"]))
    from train.search_space import read

    space = read(CONF / "sweep" / f"{family}.yaml")
    shared = [o for o in HydraConfig.get().overrides.task if o.lstrip("+").split("=")[0] not in _OURS]
    logged = any(o.startswith("logger=") for o in shared)
    own = [s for s in space.settings if logged or not s.startswith("logger=")]
    settings = _last_of_each([*own, *shared, *options["overrides"]])
    check(options, settings, space)
    folder = Path(options["output_root"]) / (options["run_name"] or f"sweep-{family}-{options['target']['source']}")
    about = {"sweep": family, "settings": settings, "parameters": [p.name for p in space.parameters]}
    _remember(about, folder)
    from train.sweep_summary import Study, write

    study = Study(folder)
    study.take_up(about["parameters"])
    data = options["data"]["folder"] if _given("data.folder") else f"{options['output_root']}/data"
    place = [f"output_root={folder}/trials", f"data.folder={data}"]
    make_lacking(study, options, [*settings, *place], space)
    write(study.trials(), about, folder)


def check(options: dict[str, Any], settings: list[str], space: Any) -> None:
    """Refuse what no trial could run with. Raises UserError naming the first mistake."""
    if any(not _installed(name) for name in _NEEDED):
        raise UserError('train/sweep.py needs packages: pip install -e ".[sweep]".')
    for key in ("trials", "jobs"):
        if not isinstance(options[key], int) or options[key] < 1:
            raise UserError(f"{key} is {options[key]!r}: it must be a whole number of at least 1.")
    if options["sampler"] not in (None, "tpe", "random", "grid"):
        raise UserError(f"sampler is {options['sampler']!r}: choose tpe, random or grid.")
    if options["sampler"] == "grid" and any(p.values is None for p in space.parameters):
        raise UserError("sampler=grid, but the space has settings without a list of values: choose tpe or random.")
    for name in (s.split("=")[0] for s in settings):
        if name in [p.name for p in space.parameters]:
            raise UserError(f"{name} is searched: it cannot be given a value as well.")
    explain_overrides("train", settings)
    for missing in (s.split("${oc.env:")[1].split("}")[0] for s in settings if "${oc.env:" in s):
        if missing not in os.environ:
            raise UserError(
                f"The search space reads {missing} from the environment: put {missing}=FOLDER in front of the command."
            )


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _given(key: str) -> bool:
    return any(o.startswith(f"{key}=") for o in HydraConfig.get().overrides.task)


def _last_of_each(settings: list[str]) -> list[str]:
    """Without settings that a later one overrides: Hydra's sweepers take each once."""
    return list({setting.partition("=")[0]: setting for setting in settings}.values())


def _remember(about: dict[str, Any], folder: Path) -> None:
    """Write what is searched. Raises UserError where the folder holds trials of another search."""
    from models.files import write_text

    path = folder / "sweep.json"
    if path.exists() and (before := json.loads(path.read_text())) != about:
        different = sorted(key for key in about if before.get(key) != about[key])
        raise UserError(
            f"{str(folder)!r} holds a sweep with other {', '.join(different)}: choose another run_name, or delete it."
        )
    write_text(path, json.dumps(about, indent=1) + "\n")


def make_lacking(study: Any, options: dict[str, Any], settings: list[str], space: Any) -> None:
    """Let Hydra's multirun make the trials that are lacking. One that fails is kept, and the others go on.

    The points of a grid are queued here, for Optuna's own grid forgets the points of interrupted trials.
    """
    sampler, wanted = options["sampler"] or space.sampler, options["trials"]
    if sampler == "grid":
        points = space.grid()
        Random(options["seed"]).shuffle(points)  # a part of the grid is spread over it
        sampler, wanted = "random", min(wanted, len(points))
        count = study.queue(points, wanted)
    else:
        count = wanted - study.finished
    if count <= 0:
        return
    print(f"{count} of {wanted} trials to make, {options['jobs']} at a time, in {study.folder}", flush=True)
    hydra = [
        "hydra/sweeper=optuna", f"hydra/sweeper/sampler={sampler}", "hydra/launcher=joblib",
        f"hydra.sweeper.sampler.seed={options['seed'] + study.finished}",
        f"hydra.launcher.n_jobs={options['jobs']}", f"hydra.sweeper.n_jobs={options['jobs']}",
        f"hydra.sweeper.n_trials={count}", "hydra.sweeper.direction=maximize", "hydra.sweeper.max_failure_rate=1.0",
        f"hydra.sweeper.storage='{study.storage}'", f"hydra.sweeper.study_name={study.name}",
        f"hydra.sweep.dir={study.folder}", "hydra.sweep.subdir=.",
    ]  # fmt: skip
    swept = [parameter.swept() for parameter in space.parameters]
    command = [sys.executable, str(_TRIAL), "--multirun", *hydra, *settings, *swept]
    before = study.finished
    code = subprocess.run(command, check=False).returncode
    if code in (130, -2, 143, -15):
        raise KeyboardInterrupt
    if code != 0 and study.finished == before:  # Hydra fails too where every trial has, and these are told of
        raise UserError(f"Hydra's multirun ended with exit code {code}, see above, and no trial was made.")


if __name__ == "__main__":
    main("sweep", job)
