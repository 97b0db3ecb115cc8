"""Train several drafters on the same data under the same budget, and measure their exports side by side.

    python train/compare.py target=tiny
    python train/compare.py target=smollm2 compare.drafters=[prompt_lookup,medusa,eagle]
    python train/compare.py compare.drafters=[eagle,conv,linear_attention,experts] compare.equal_to=eagle

Every drafter is a run of train/run.py in a process of its own. All settings but those of `compare` are handed on to it.
With compare.equal_to, all get layers as wide as it takes to have as many parameters as that one.
Started again, the same command goes on where it stopped: what is trained or measured is not done again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from conf.compose import choices, composed, explain_overrides, main, plain
from models.errors import UserError
from train import subruns

if TYPE_CHECKING:
    from models.target import Target

_OWN = ("drafter.", "fit.", "trainer.", "draft_vocab_size=", "init_from=", "source_format=")  # of one drafter alone
_UNEQUAL = ("draft_vocab_size=", "init_from=", "drafter.model.name_or_path=")  # allowed, and told of
_WIDTH = "drafter.model.intermediate_size="
_OURS = ("compare.", "run_name=", "output_root=")  # settings that are not handed on


def job(config: DictConfig) -> None:
    """Train what is not trained yet, measure what is not measured yet, and write one table."""
    options = plain(config)
    wanted = options["compare"]
    shared = subruns.handed_on(_OURS)
    check(options, shared)
    folder = Path(options["output_root"]) / (options["run_name"] or f"compare-{options['target']['source']}")
    subruns.check_begun(folder, wanted["drafters"], wanted["minutes"], "compare.minutes")
    for name in wanted["drafters"]:
        subruns.check_measured(folder / name, options["measure"])
    settings = {name: [*shared, *_own(wanted, name)] for name in wanted["drafters"]}
    if wanted["equal_to"] is not None:
        sizes = _equal_sizes(options, settings)
        settings = {name: [*own, *sizes[name]] for name, own in settings.items()}
    for number, (name, own) in enumerate(settings.items(), 1):
        print(f"\n{name} ({number} of {len(settings)})", flush=True)
        steps = subruns.budget(wanted["minutes"], name, own, folder, name, folder / "data")
        subruns.run(name, [*own, *steps], folder, name, folder / "data")
    from eval.comparison import Compared, write
    from train.pipeline import open_target

    target = open_target(options)
    compared = []
    for name in wanted["drafters"]:
        results, about = _measured(options, target, folder / name)
        unequal = [o for o in _own(wanted, name) if o.lstrip("+").startswith(_UNEQUAL)]
        compared.append(Compared(name, results, {**about, "unequal": unequal}))
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
    subruns.check_minutes(wanted["minutes"], "compare.minutes", shared)
    if wanted["equal_to"] not in (None, *wanted["drafters"]):
        raise UserError(f"compare.equal_to is {wanted['equal_to']!r}, which is not among compare.drafters.")
    for name in wanted["drafters"]:
        own = _own(wanted, name)
        if not isinstance(own, list) or not all(isinstance(o, str) for o in own):
            raise UserError(
                f"compare.overrides.{name} is {own!r}: give a list of settings, as ['drafter.training.lr=3e-4']."
            )
        explain_overrides("train", [f"+drafter={name}", *shared, *own])
        if unfair := [o for o in own if not o.lstrip("+~").startswith(_OWN)]:
            raise UserError(
                f"compare.overrides.{name} has {', '.join(unfair)}, which must be the same for all: give it by itself."
            )
        _check_budget(wanted, name, shared)
        if wanted["equal_to"] not in (None, name) and any(o.startswith(_WIDTH) for o in own):
            raise UserError(f"compare.overrides.{name} has {_WIDTH}…, which compare.equal_to is to find: drop one.")
    from train.settings import measured_settings

    measured_settings({**options, "decode": {**options["decode"], "tree": wanted["tree"]}}, 0.0)


def _check_budget(wanted: dict[str, Any], name: str, shared: list[str]) -> None:
    """Refuse a budget of one drafter's own. Raises UserError that names the settings that make it one."""
    own = _own(wanted, name)
    if steps := [o for o in own if o.lstrip("+~").startswith("fit.max_steps")]:
        raise UserError(
            f"compare.overrides.{name} has {', '.join(steps)}, a budget of its own: give it by itself, for all."
        )
    if not own or wanted["minutes"] is not None:
        return
    usual = _texts_per_step([f"+drafter={name}", *shared])
    its = _texts_per_step([f"+drafter={name}", *shared, *own])
    if its != usual:
        raise UserError(
            f"compare.overrides.{name} lets each of its steps train on {its} texts, and others on {usual}: give "
            f"fit.batch_size and trainer.accumulate_grad_batches whose product is {usual}, or compare.minutes as the "
            "budget."
        )


def _texts_per_step(overrides: list[str]) -> Any:
    run = composed("train", overrides)
    return run["fit"]["batch_size"] * run["trainer"]["accumulate_grad_batches"]


def _equal_sizes(options: dict[str, Any], settings: dict[str, list[str]]) -> dict[str, list[str]]:
    """Further settings of every drafter's run, by which all have as many parameters as that of `compare.equal_to`."""
    from train.equal_size import equal_settings
    from train.settings import instantiate

    runs = {name: composed("train", [f"+drafter={name}", *own]) for name, own in settings.items()}
    target = instantiate({**options["target"], "device": "cpu"})  # runs have the GPU for themselves
    return equal_settings(runs, target, options["compare"]["equal_to"])


def _own(wanted: dict[str, Any], name: str) -> Any:
    """The settings that one drafter alone is given."""
    return (wanted["overrides"] or {}).get(name, [])


def _measured(options: dict[str, Any], target: Target, run: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The results of a run's chains and trees, and what else is told of its drafter; kept in the run's folder."""
    chains = json.loads((run / "acceptance.json").read_text())["results"]
    path, question = run / "compared.json", {"tree": options["compare"]["tree"], "measure": options["measure"]}
    if path.exists() and (kept := json.loads(path.read_text()))["question"] == question:
        return chains + kept["trees"], kept["drafter"]
    from eval.comparison import describe_drafter
    from eval.measure import measure
    from models.checkpoint import native
    from models.drafter import accelerate_drafter
    from models.files import write_json
    from models.types import max_depth
    from train.settings import measured_settings, temperatures

    prompts = subruns.measured_prompts(options, target)
    target, drafter = subruns.open_export(options, target, run / "export")
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
