"""Train the arms of an ablation on the same data under the same budget, with several seeds, and say what differs.

    python train/ablate.py                                   lists the ablations
    python train/ablate.py name=labels target=tiny
    python train/ablate.py name=labels seeds=[0,1,2,3,4] fit.max_steps=300

An ablation is a file of conf/ablation: a drafter, the settings of each arm, and what is claimed of the first one. Every
arm and seed is a run of train/run.py in a process of its own; all other settings are handed on to it. Started again,
the same command goes on where it stopped, and takes further seeds as well.
"""

from __future__ import annotations

import itertools
import json
import shlex
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from conf.compose import ROOT, choices, composed, explain_overrides, main, plain
from models.errors import UserError
from train import subruns

if TYPE_CHECKING:
    from data.prompts import Prompt
    from models.target import Target

_OURS = ("name=", "seeds=", "settings=", "minutes=", "run_name=", "output_root=")  # settings that are not handed on


@dataclass(frozen=True)
class Ablation:
    """What a file of conf/ablation says. Raises UserError where it cannot be meant."""

    name: str
    drafter: str
    arms: dict[str, list[str]]  # settings of each; the first is said to win
    claim: dict[str, Any]  # {of: a statistic of `eval.ablation`, temperature}
    settings: list[str] = field(default_factory=list)  # of all arms
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)  # what of `decode` arms are measured with

    def __post_init__(self) -> None:
        place = f"conf/ablation/{self.name}.yaml"
        if len(self.arms) < 2:
            raise UserError(f"{place}: an ablation has two arms at least.")
        if set(self.claim) != {"of", "temperature"}:
            raise UserError(f"{place}: claim has {', '.join(self.claim)}: give of and temperature.")
        if unknown := set(self.measured) - set(self.arms):
            raise UserError(f"{place}: measured names {', '.join(sorted(unknown))}, which is no arm.")

    def run_of(self, arm: str) -> str:
        """The arm whose training serves this one: the first that is trained alike."""
        return next(name for name, settings in self.arms.items() if settings == self.arms[arm])

    def overrides(self, arm: str, shared: list[str]) -> list[str]:
        """The settings of its runs. The arm's own come last: nobody changes what is compared by accident."""
        return [*self.settings, *shared, *self.arms[arm]]


def job(config: DictConfig) -> None:
    """Train what is not trained yet, measure what is not measured yet, and write one table."""
    options = plain(config)
    known = choices("ablation")
    if options["name"] is None:
        listed = "\n".join(f"  name={name:<20} {what}" for name, what in known.items())
        raise UserError(f"Say which ablation to run:\n{listed}")
    ablation, shared = read(options["name"]), subruns.handed_on(_OURS)
    settings = options["settings"]
    if not isinstance(settings, list) or not all(isinstance(o, str) for o in settings):
        raise UserError(f"settings is {settings!r}: give a list, as ['drafter.training.lr=3e-4'].")
    ablation = replace(ablation, settings=[*ablation.settings, *settings])
    asked = check(ablation, options, shared)
    first = next(iter(asked.values()))
    folder = Path(options["output_root"])
    folder /= options["run_name"] or f"ablate-{ablation.name}-{first['target']['source']}"
    data = Path(options["data"]["folder"])
    runs = [(seed, arm) for seed in options["seeds"] for arm in ablation.arms if ablation.run_of(arm) == arm]
    subruns.check_begun(folder, [f"{arm}-{seed}" for seed, arm in runs], options["minutes"], "minutes")
    for seed, arm in runs:
        if arm not in ablation.measured:
            subruns.check_measured(folder / f"{arm}-{seed}", asked[arm]["measure"])
    _rehearse(asked, folder)
    for number, (seed, arm) in enumerate(runs, 1):
        print(f"\n{ablation.name}: {arm}, seed {seed} ({number} of {len(runs)})", flush=True)
        own = ablation.overrides(arm, shared)
        steps = subruns.budget(options["minutes"], ablation.drafter, own, folder, f"{arm}-{seed}", data)
        subruns.run(ablation.drafter, [*own, *steps, f"seed={seed}"], folder, f"{arm}-{seed}", data)
    from eval.ablation import Ablated, write

    arms = _collected(ablation, asked, options["seeds"], folder)
    title, claim = f"{ablation.name}: {known[ablation.name]}", ablation.claim
    command = shlex.join(["python", "train/ablate.py", *subruns.handed_on(())])
    found = Ablated(title, arms, options["seeds"], claim["of"], float(claim["temperature"]), command)
    write(found, folder, options)


def read(name: str) -> Ablation:
    """The ablation of that name. Raises UserError where there is none, or its file has unknown or missing parts."""
    known = choices("ablation")
    if name not in known:
        raise UserError(f"There is no ablation {name!r}. Choose from: {', '.join(known)}.")
    found: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "ablation" / f"{name}.yaml"))
    try:
        return Ablation(name, **found)
    except TypeError as error:
        raise UserError(f"conf/ablation/{name}.yaml: {str(error).split('__init__() ')[-1]}.") from error


def check(ablation: Ablation, options: dict[str, Any], shared: list[str]) -> dict[str, dict[str, Any]]:
    """The options of a run of each arm, with what the arm is measured with. Raises UserError for the first mistake in
    any, which would show after hours."""
    seeds, place = options["seeds"], f"conf/ablation/{ablation.name}.yaml"
    if not isinstance(seeds, list) or not seeds or len(set(seeds)) != len(seeds):
        raise UserError(f"seeds is {seeds!r}: give one or more, each once, as [0, 1, 2].")
    if any(not isinstance(seed, int) or isinstance(seed, bool) or seed < 0 for seed in seeds):
        raise UserError(f"seeds is {seeds!r}: they must be whole numbers of 0 or more.")
    if any(o.startswith("seed=") for o in shared):
        raise UserError("seed is that of a single run: give an ablation seeds=[0,1,2].")
    subruns.check_minutes(options["minutes"], "minutes", shared)
    asked = {}
    for arm in ablation.arms:
        overrides = [f"+drafter={ablation.drafter}", *ablation.overrides(arm, shared)]
        explain_overrides("train", overrides)
        asked[arm], own = composed("train", overrides), ablation.measured.get(arm, {})
        if unknown := set(own) - set(asked[arm]["decode"]):
            raise UserError(f"{place}: decode has no {', '.join(sorted(unknown))}.")
        asked[arm]["decode"] |= own
    from eval.ablation import STATISTICS
    from train import settings

    if ablation.claim["of"] not in STATISTICS:
        raise UserError(f"{place}: claim.of is {ablation.claim['of']!r}: choose {', '.join(STATISTICS)}.")
    temperature = float(ablation.claim["temperature"])
    for found in asked.values():
        if temperature not in settings.temperatures(found):
            raise UserError(
                f"The ablation {ablation.name!r} is about temperature {temperature:g}, which measure.temperatures "
                "leaves out."
            )
        settings.check(found)
    return asked


def _rehearse(asked: dict[str, dict[str, Any]], folder: Path) -> None:
    """Build what the runs of every arm will build, and what arms are measured with. Raises UserError as they would."""
    from train.callbacks import quiet_lightning
    from train.pipeline import adapt, open_target, rehearse

    quiet_lightning()
    target = open_target(next(iter(asked.values())))
    for found in asked.values():
        rehearse(found, adapt(found, target), folder)


def _collected(
    ablation: Ablation, asked: dict[str, dict[str, Any]], seeds: list[int], folder: Path
) -> dict[str, dict[float, list[Any]]]:
    """What was counted of every arm at every temperature, seed by seed; what is not measured yet is now."""
    from train.pipeline import open_target

    first = next(iter(asked.values()))
    target = cache(lambda: open_target(first))
    prompts = cache(lambda seed: subruns.measured_prompts({**first, "seed": seed}, target()))
    arms: dict[str, dict[float, list[Any]]] = {arm: {} for arm in ablation.arms}
    for arm, seed in itertools.product(ablation.arms, seeds):
        run, options = folder / f"{ablation.run_of(arm)}-{seed}", {**asked[arm], "seed": seed}
        path = run / "acceptance.json"
        if arm in ablation.measured:
            path = run / f"measured-{arm}.json"
            if not path.exists() or not _same(path, options, ("decode", "measure")):
                _measure(run, options, target(), prompts(seed), path)
        for result in json.loads(path.read_text())["results"]:
            arms[arm].setdefault(result["temperature"], []).append(result["counts"])
    return arms


def _same(path: Path, options: dict[str, Any], parts: tuple[str, ...]) -> bool:
    """Whether a measurement was made with these parts of the options."""
    config = json.loads(path.read_text())["config"]
    return all(config[part] == options[part] for part in parts)


def _measure(run: Path, options: dict[str, Any], target: Target, prompts: list[Prompt], path: Path) -> None:
    """Measure a run's export with these options, and write what was found as a run does."""
    from eval.measure import measure
    from models.checkpoint import native
    from models.drafter import accelerate_drafter
    from models.files import write_json
    from train.settings import measured_settings, temperatures

    tree = native.read(run / "export").tree
    own, drafter = subruns.open_export(options, target, run / "export")
    accelerate_drafter(drafter)
    settings = [measured_settings(options, temperature, tree) for temperature in temperatures(options)]
    found = [measure(own, drafter, prompts, decode) for decode in settings]
    results = [{**made.summary(), "counts": made.counts()} for made in found]
    write_json(path, {"config": options, "results": results})


if __name__ == "__main__":
    main("ablate", job)
