"""A run's options: refused early where they make no sense, and remembered so that a resumed run is the same one."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import hydra.errors
import hydra.utils

from data.answers import AnswerSettings, Generator, fingerprint
from data.features import CacheSettings
from data.prompts import SplitSizes
from engine.draft_length import CostAware
from engine.options import CALIBRATED, decode_settings, describe_tree, read_tree
from engine.settings import DecodeSettings
from eval.provenance import provenance
from eval.tree import comb
from models.checkpoint import detect, format_of, layout, native
from models.errors import UserError
from models.files import flat, write_text
from models.tree import StaticTree
from train.backbone import backbone_of
from train.curriculum import check_reach

Options = dict[str, Any]
_FOLDER = "name_or_path"  # by which a drafter reads a Hugging Face folder
# What may differ between a run and its resumption: nothing here changes the weights.
_FREE_IN_CACHE = ("budget_gb", "writers")
_FREE = ("debug", "logger", "output_root", "run_name", "measure", "export")
_FREE_OF_THE_TRAINER = ("devices", "num_nodes", "strategy", "compile")  # nothing but the order of sums


def instantiate(config: Options, *args: Any, **kwargs: Any) -> Any:
    """Build what `_target_` names. Its own errors come through as they are, and a wrong argument is named."""
    try:
        return hydra.utils.instantiate(config, *args, **kwargs)
    except hydra.errors.InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, UserError | ModuleNotFoundError):
            raise cause from None
        if isinstance(cause, TypeError) and "argument" in str(cause):
            raise UserError(f"{config['_target_']}: {cause}.") from error
        raise


def answer_settings(options: Options) -> AnswerSettings:
    """How the target's answers are made. Raises UserError for unknown or senseless values."""
    try:
        return AnswerSettings(**options["data"]["answers"], seed=options["seed"])
    except TypeError as error:
        raise UserError(f"data.answers: {error}.") from error


def generator_of(options: Options) -> Generator:
    """Who makes the answers. Raises UserError for unknown or senseless settings of it."""
    generator: Generator = instantiate(options["data"]["generator"])
    return generator


def with_tree(options: Options) -> Options:
    """The same options with the numbers of decode.tree in place of a file, which may change."""
    if options["decode"]["tree"] == CALIBRATED:
        return options
    tree = describe_tree(read_tree(options["decode"]["tree"]))
    return {**options, "decode": {**options["decode"], "tree": tree}}


def with_start(options: Options, given: Collection[str] = ()) -> Options:
    """The same options with the model of init_from in place of the drafter's, which then starts from its weights alone.

    A language model that stands by itself is the `name_or_path` of any drafter that reads one. `given` are the settings
    that a user made. Raises UserError where the folder holds another kind of drafter, and for those of them that
    would not be read.
    """
    if options["init_from"] is None:
        if options["source_format"] is not None:
            raise UserError(f"source_format={options['source_format']} is that of init_from, and there is none.")
        return options
    folder, drafter = Path(options["init_from"]).expanduser(), options["drafter"]
    model = detect(folder, options["source_format"], "source_format").read(folder).model
    if drafter["training"] is None:
        raise UserError(f"init_from is a start for training, but drafter {drafter['name']!r} is not trained.")
    theirs, ours = (found["_target_"].rpartition(".")[2] for found in (model, drafter["model"]))
    if theirs != ours and model.keys() == {"_target_", _FOLDER} and _FOLDER in drafter["model"]:
        if drafter["model"][_FOLDER] not in (None, model[_FOLDER]):
            raise UserError(f"init_from={str(folder)!r} is drafter.model.{_FOLDER}, which is given too: drop one.")
        started = {**drafter, "model": {**drafter["model"], _FOLDER: model[_FOLDER]}}
        return {**options, "drafter": started, "init_from": None, "source_format": None}
    if theirs != ours:
        raise UserError(
            f"init_from={str(folder)!r} holds a {theirs}, but +drafter={drafter['name']} is a {ours}. (A draft model "
            "starts from a Hugging Face folder by drafter.model.name_or_path.)"
        )
    _refuse_unread(options, model, folder, given)
    training = {**drafter["training"], **({"start": "random"} if "start" in drafter["training"] else {})}
    return {**options, "drafter": {**drafter, "model": model, "training": training}}


def _refuse_unread(options: Options, model: Options, folder: Path, given: Collection[str]) -> None:
    """Raise UserError that names all of the `given` settings in whose place that of the folder's drafter is taken.

    Of those that only stand in the drafter's yaml it is told.
    """
    drafter, defaults = options["drafter"], native.arguments_of(native.drafter_class(model))
    has = {f"drafter.model.{name}": model.get(name, default) for name, default in defaults.items()}
    asked = {f"drafter.model.{name}": value for name, value in drafter["model"].items() if name != "_target_"}
    if "start" in drafter["training"]:
        has["drafter.training.start"], asked["drafter.training.start"] = "random", drafter["training"]["start"]
    has["draft_vocab_size"], asked["draft_vocab_size"] = _draft_vocab_size(folder), options["draft_vocab_size"]
    other = {name: value for name, value in asked.items() if value is not None and value != has.get(name)}
    unread = {name for name in other if any(_sets(key, name) for key in given)}
    if unread:
        raise UserError(
            f"init_from={str(folder)!r} is a drafter of its own settings, beside which these would not be read: "
            f"{', '.join(f'{name}={other[name]}' for name in other if name in unread)}. Drop them."
        )
    if told := [f"{name}={has[name]}, not {value}" for name, value in other.items() if has.get(name) is not None]:
        print(f"init_from brings its own settings: {'; '.join(told)}")


def _sets(key: str, name: str) -> bool:
    """Whether who gives setting `key` gives `name`, or a part of it; a group's choice, as "drafter", gives none."""
    return key == name or key.startswith(f"{name}.") or ("." in key and name.startswith(f"{key}."))


def _draft_vocab_size(folder: Path) -> int | None:
    """How many tokens the drafter in a folder proposes, as far as its JSON files tell; None for all."""
    files = [
        layout.read_json(path, folder) for name in (layout.RECORD, layout.CONFIG) if (path := folder / name).exists()
    ]
    keys = ("draft_vocab_size", "truncated_vocab_size")
    return next((found[key] for found in files for key in keys if key in found), None)


def measured_settings(options: Options, temperature: float, tree: Options | None = None) -> DecodeSettings:
    """The settings of the run's measurements at one temperature.

    `tree` is the one built for the export. Before there is one, chains are drafted in its place.
    """
    decode = options["decode"]
    if decode["tree"] == CALIBRATED and tree is None:
        decode = {**decode, "tree": None}
    return decode_settings(decode, temperature, options["seed"], calibrated=tree)


def is_trained(options: Options) -> bool:
    """False for a drafter that is measured as it is built."""
    return options["drafter"]["training"] is not None


def temperatures(options: Options) -> list[float]:
    """The temperatures of the acceptance table; one may stand alone."""
    given = options["measure"]["temperatures"]
    return [float(t) for t in (given if isinstance(given, list) else [given])]


def check(options: Options) -> None:
    """Refuse values that would fail, or mean nothing, hours later. Raises UserError naming the first."""
    fit, sizes = options["fit"], SplitSizes(**options["data"]["sizes"])
    if fit["hidden_states"] not in ("cached", "online"):
        raise UserError(f"fit.hidden_states is {fit['hidden_states']!r}: choose cached or online.")
    if not isinstance(fit["activation_checkpointing"], bool):
        raise UserError(
            f"fit.activation_checkpointing is {fit['activation_checkpointing']!r}: it must be true or false."
        )
    CacheSettings(**fit["cache"])
    others = ("hidden_states", "cache", "activation_checkpointing")
    counts = {f"fit.{key}": value for key, value in fit.items() if key not in others}
    counts |= {
        "data.sizes.train": sizes.train,
        "data.sizes.validation": sizes.validation,
        "data.sizes.test": sizes.test,
    }
    counts |= {"measure.num_prompts": options["measure"]["num_prompts"]}
    counts |= {"trainer.accumulate_grad_batches": options["trainer"]["accumulate_grad_batches"]}
    if options["draft_vocab_size"] is not None:
        counts["draft_vocab_size"] = options["draft_vocab_size"]
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{name} is {value!r}: it must be a whole number of at least 1.")
    if options["decode"]["max_new_tokens"] < 2:
        raise UserError("decode.max_new_tokens must be at least 2: the first token comes from the prompt, undrafted.")
    for temperature in temperatures(options):
        policy = measured_settings(options, temperature).draft_length
        if isinstance(policy, CostAware) and policy.cost is None:
            raise UserError(
                "decode.draft_length=cost_aware learns from the clock, so that no two measurements of a run agree: "
                "give it decode.draft_length.cost, or measure the export with it (eval/acceptance.py)."
            )
    answer_settings(options)
    generator_of(options)
    if not isinstance(options["data"]["packing"], bool):
        raise UserError(f"data.packing is {options['data']['packing']!r}: it must be true or false.")
    planned_tree(options)
    backbone = backbone_of(options["drafter"]["training"])
    if backbone.by == "full" and options["draft_vocab_size"] is not None:
        raise UserError(
            "drafter.training.backbone.by=full trains the target's head, of which a drafter with fewer tokens has a "
            "copy: set draft_vocab_size=null."
        )
    training = options["drafter"]["training"] or {}
    if "curriculum" in training:
        check_reach(training["curriculum"], training["num_steps"], fit["max_steps"], fit["evaluate_every"])
    if options["export"]["formats"] and not backbone.frozen and backbone.export == "separate":
        raise UserError(
            "export.formats needs a whole target beside the drafter: use drafter.training.backbone.export=merged."
        )
    for name in options["export"]["formats"]:
        if format_of(name) is native:
            raise UserError(f"export.formats has {name!r}, which every run writes: name formats of other engines.")


def planned_tree(options: Options) -> StaticTree | None:
    """The comb that is drafted to build the export's tree (`eval.tree`), where the drafter's yaml asks for one.

    Raises UserError for sizes that make no tree, for a drafter that is not trained, and where decode asks for a tree
    that will not be built.
    """
    sizes = options["drafter"].get("tree")
    if sizes is None:
        if options["decode"]["tree"] == CALIBRATED:
            raise UserError(f"decode.tree=calibrated, but drafter {options['drafter']['name']!r} builds no draft tree.")
        return None
    if set(sizes) != {"num_nodes", "depth", "ranks"}:
        raise UserError(f"drafter.tree has {', '.join(sizes)}: give num_nodes, depth and ranks.")
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise UserError(f"drafter.tree.{name} is {value!r}: it must be a whole number of at least 1.")
    if not is_trained(options):
        raise UserError("drafter.tree is built on validation prompts, which a run without training does not have.")
    depth, ranks = sizes["depth"], sizes["ranks"]
    some = StaticTree.best_first([[1 / ranks] * ranks] * depth, sizes["num_nodes"])  # is there room for as many?
    for temperature in temperatures(options):
        measured_settings(options, temperature, describe_tree(some))
    return comb(depth, ranks)


def run_folder(options: Options) -> Path:
    """outputs/<drafter>-<target>-<hash>: the same configuration always has the same folder, and so is resumed."""
    root, target = Path(options["output_root"]), options["target"]
    if options["run_name"]:
        return root / options["run_name"]
    name = Path(target["name_or_path"]).name if target["source"] == "hf" else target["source"]
    return root / f"{options['drafter']['name']}-{name}-{fingerprint(_fixed(options))[:8]}"


def record(options: Options, run: Path) -> None:
    """Write what the run is, before it starts. Raises UserError where the folder holds another run."""
    path = run / "config.json"
    if path.exists() and any((run / made).exists() for made in ("checkpoints", "export")):
        before, now = (dict(flat(_fixed(o))) for o in (json.loads(path.read_text())["config"], options))
        different = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        if different:
            raise UserError(
                f"{str(run)!r} holds a run with another {', '.join(different)}: choose another run_name, or delete it."
            )
    write_text(path, json.dumps({"config": options, "provenance": provenance()}, indent=1) + "\n")


def record_data(manifest: Options, run: Path) -> None:
    """Write what the answers came from. Raises UserError where the checkpoints were trained on other ones."""
    path = run / "data.json"
    if (run / "checkpoints").exists() and path.exists():
        before = json.loads(path.read_text())
        different = sorted(key for key in manifest if before.get(key) != manifest[key])
        if different:
            raise UserError(
                f"The checkpoints in {str(run)!r} were trained on answers made with another {', '.join(different)}: "
                "choose another run_name, or delete that folder."
            )
    write_text(path, json.dumps(manifest, indent=1) + "\n")


def _fixed(options: Options) -> Options:
    """What the weights depend on. Settings that are younger than some runs are left out where they change nothing."""
    fixed = {key: value for key, value in options.items() if key not in _FREE}
    trainer = {key: value for key, value in options["trainer"].items() if key not in _FREE_OF_THE_TRAINER}
    fixed["trainer"] = {**trainer, "devices": 1}  # as it was when there was but one process
    if fixed.get("init_from", 0) is None:
        del fixed["init_from"]
    if fixed.get("source_format", 0) is None:
        del fixed["source_format"]
    fit, usual = {**fixed["fit"]}, CacheSettings()
    fit.pop("activation_checkpointing", None)
    cache = {name: value for name, value in fit.pop("cache", {}).items() if name not in _FREE_IN_CACHE}
    if told := {name: value for name, value in cache.items() if value != getattr(usual, name)}:
        fit["cache"] = told
    data = dict(fixed["data"])
    how = generator_of({"data": data}).describe() if "generator" in data else None
    if not data.get("packing"):
        data.pop("packing", None)
    data.pop("generator", None)  # where a server is, and how often it is asked again, changes no answer
    return {**fixed, "fit": fit, "data": data if how is None else {**data, "generator": how}}
