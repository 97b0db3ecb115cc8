"""One trial of train/sweep.py, as Hydra's multirun starts it: a run of train/run.py in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import hydra
from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from conf.compose import ROOT as CONF
from models.files import write_text
from train.search_space import trial_name


def job(config: DictConfig) -> float:
    """Make the run, and return its val/block_efficiency. Where it fails, why is kept in failed.txt of its folder.

    Trials of equal settings have one folder: one waits for the other, and then finds its run finished.
    """
    trials = Path(config.output_root)
    overrides = sorted(HydraConfig.get().overrides.task, key=lambda o: not o.startswith("+"))  # the drafter comes first
    names = json.loads((trials.parent / "sweep.json").read_text())["parameters"]
    given = dict(override.partition("=")[::2] for override in overrides)
    folder = trials / trial_name({name: given[name] for name in names})
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".trial.lock"):
        return _score(folder, overrides)


def _score(folder: Path, overrides: list[str]) -> float:
    command = [sys.executable, str(CONF.parent / "train" / "run.py"), *overrides, f"run_name={folder.name}"]
    with (folder / "log.txt").open("a") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    failed = folder / "failed.txt"
    if code in (130, -2, 143, -15):
        raise KeyboardInterrupt
    if code != 0:
        last = ((folder / "log.txt").read_text().strip().splitlines() or [""])[-1]
        why = last.removeprefix("error: ") if last.startswith("error: ") else f"exit code {code}: {last}"
        write_text(failed, why + "\n")
        raise RuntimeError(f"{folder.name}: {why}")
    failed.unlink(missing_ok=True)
    score = float(json.loads((folder / "validation.json").read_text())["block_efficiency"])
    print(f"{folder.name}: τ {score:.3f}", flush=True)
    return score


if __name__ == "__main__":
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")(job)()
