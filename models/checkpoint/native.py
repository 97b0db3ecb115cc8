"""Our own export format: everything needed to rebuild a drafter, and to refuse to where it would be wrong.

config.json          format, the drafter's class and arguments, its target, decoding defaults, provenance
model.safetensors    the drafter's own parameters, and `d2t` where its vocabulary is reduced; with `weights` int8 in
                     config.json as `models.quantization` has it, which loading turns back into floating point
README.md            the model card
target/ or adapter/  where a target was trained together with the drafter, that target: whole, or as a peft adapter
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from models.errors import UserError
from models.files import atomic_folder, sha256
from models.quantization import dequantized, quantized
from models.target import Target, load_target
from models.vocab import DraftVocab

FORMAT = "draftsmith-1"
_INT8 = "int8"
_LAYOUT = {
    "name": str,
    "drafter": dict,
    "drafter._target_": str,
    "target": dict,
    "target.name": str,
    "target.fingerprint": str,
    "target.load": dict,
    "capture_layers": list,
    "draft_vocab_size": int,
    "sha256": str,
    "decoding": dict,
    "decoding.num_speculative_tokens": int,
    "provenance": dict,
}
INSIDE = {"merged": ("name_or_path", "target"), "separate": ("adapter", "adapter")}  # arguments of load, and folders
_HOME = "models.drafter."  # the only place that drafters are loaded from: a file cannot name code elsewhere
_PLACE = ("source", "name_or_path", "dtype", "attn_implementation", "revision", "adapter")


@dataclass(frozen=True, slots=True)
class Export:
    """What an export says of itself; see `save`. `tree` is a draft tree that suits the drafter, if one was
    built; with `int8` its weights are stored so.

    `target` has the target's name, its fingerprint, and in `load` the arguments of `load_target` that find it. A
    target that was trained together with the drafter lies in the export itself: `adapted` tells of it, and in which
    form (`export`: a key of `INSIDE`).
    """

    name: str
    model: dict[str, Any]
    target: dict[str, Any]
    num_speculative_tokens: int
    provenance: dict[str, Any]
    tree: dict[str, Any] | None = None
    int8: bool = False


def save(
    drafter: Any,
    export: Export,
    vocab: DraftVocab,
    folder: Path,
    card: str,
    save_target: Callable[[Path], None] | None = None,
) -> None:
    """Write the drafter to `folder`, whole or not at all.

    `export.model` is the `_target_` of its class and the arguments that rebuild it; a drafter that read files of its
    own says in `export_arguments` what stands for them. A drafter without weights has a file without tensors.
    `save_target` writes an adapted target into a folder of its own. Raises UserError where the disk refuses.
    """
    tensors = {name: t.detach().cpu().contiguous() for name, t in drafter.state_dict().items()}
    if vocab.reduced:
        tensors["d2t"] = vocab.offsets()
    config = config_of(drafter, export, vocab)
    if export.int8:
        config["weights"], tensors = _INT8, quantized(tensors)
    _write(folder, tensors, config, card, save_target)


def config_of(drafter: Any, export: Export, vocab: DraftVocab) -> dict[str, Any]:
    """What config.json says of a drafter, but for the sha256 of its tensors."""
    return {
        "format": FORMAT,
        "name": export.name,
        "drafter": export.model | getattr(drafter, "export_arguments", {}),
        "target": _without_paths(export.target),
        "capture_layers": list(drafter.capture_layers),
        "draft_vocab_size": vocab.size,
        "decoding": {"num_speculative_tokens": export.num_speculative_tokens, "tree": export.tree},
        "provenance": export.provenance,
    }


def save_int8(source: Path, folder: Path) -> None:
    """Write the export in `source` to `folder` with int8 weights and name, whole or not at all; it needs no target.

    Raises UserError where `source` is damaged, was altered, or has int8 weights already.
    """
    config = read_config(source / "config.json")
    if config.get("weights") == _INT8:
        raise UserError(f"{str(source)!r} has int8 weights already.")
    tensors = read_tensors(source / "model.safetensors")
    _check_unaltered(source, config)
    card = (source / "README.md").read_text() if (source / "README.md").exists() else ""
    int8 = {**config, "name": f"{config['name']}-int8", "weights": _INT8}
    _write(folder, quantized(tensors), int8, card, _copying(source, config["target"]))


def _write(
    folder: Path,
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    card: str,
    save_target: Callable[[Path], None] | None,
) -> None:
    with atomic_folder(folder) as temporary:
        if save_target is not None:
            save_target(temporary / INSIDE[config["target"]["adapted"]["export"]][1])
        (temporary / "README.md").write_text(card)
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        config["sha256"] = sha256(temporary / "model.safetensors")
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def update(drafter: Any, folder: Path) -> None:
    """Write what a drafter has learnt since it was loaded from `folder` back to it, whole or not at all.

    What the export says of itself stays. Of several processes that do so, the last one's memory is kept. Raises
    UserError as `read` and `save` do.
    """
    described = read(folder)
    card = (folder / "README.md").read_text()
    save(drafter, described, drafter.vocab, folder, card, _copying(folder, described.target))


def _copying(source: Path, target: dict[str, Any]) -> Callable[[Path], None] | None:
    """What writes the adapted target of the export in `source` once more; None where there is none."""
    if "adapted" not in target:
        return None
    _, name = INSIDE[target["adapted"]["export"]]

    def copy(folder: Path) -> None:
        shutil.copytree(source / name, folder)

    return copy


def _without_paths(target: dict[str, Any]) -> dict[str, Any]:
    """What an export stores of its target: where it lies itself is not known to it."""
    if "adapted" not in target:
        return target
    argument, _ = INSIDE[target["adapted"]["export"]]
    return {**target, "load": {k: v for k, v in target["load"].items() if k != argument}}


def _with_paths(target: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What an export in `folder` says of its target, so that `load` finds it."""
    if "adapted" not in target:
        return target
    argument, name = INSIDE[target["adapted"]["export"]]
    return {**target, "load": {**target["load"], argument: str(folder / name)}}


def read(folder: Path) -> Export:
    """Read what an export says of itself. Raises UserError where the folder is none."""
    found = export_of(read_config(folder / "config.json"))
    return replace(found, target=_with_paths(found.target, folder))


def export_of(config: dict[str, Any]) -> Export:
    """What a config.json that was read says. Of how to load the target it may say where that is, not what may run."""
    load = {key: value for key, value in config["target"]["load"].items() if key in _PLACE}
    return Export(
        config["name"],
        config["drafter"],
        {**config["target"], "load": load},
        config["decoding"]["num_speculative_tokens"],
        config["provenance"],
        config["decoding"].get("tree"),
        config.get("weights") == _INT8,
    )


def read_config(path: Path) -> dict[str, Any]:
    """The config.json at `path`. Raises UserError where there is none, or it is damaged or another version's."""
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        if config["format"] != FORMAT:
            raise UserError(f"{str(path)!r}: format is {config['format']!r}; this version reads {FORMAT!r}.")
        for keys, kind in _LAYOUT.items():
            value: Any = config
            for key in keys.split("."):
                value = value[key]
            if not isinstance(value, kind):
                raise TypeError(f"{keys} is {value!r}")
        if not isinstance(tree := config["decoding"].get("tree"), dict | None):
            raise TypeError(f"decoding.tree is {tree!r}")
        if "adapted" in config["target"] and config["target"]["adapted"]["export"] not in INSIDE:
            raise ValueError(f"target.adapted.export is {config['target']['adapted']['export']!r}")
        if config.get("weights", _INT8) != _INT8:
            raise UserError(f"{str(path)!r}: weights are {config['weights']!r}; this version reads {_INT8!r} or none.")
        return config
    except OSError as error:
        raise UserError(f"{str(path.parent)!r} is not an export: {error.strerror or error} ({path.name}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{str(path)!r} is damaged: {type(error).__name__}: {error}.") from error


def load(folder: Path, target: Target) -> Any:
    """Rebuild the drafter of an export for `target`.

    A link is followed once, so that all files are of one version. Raises UserError, naming what is wrong: another
    target than it was trained for, a damaged file, tensors that are missing, unknown or of another shape.
    """
    folder = folder.resolve() if folder.is_symlink() else folder
    export = read(folder)
    refuse_other_target(export, target, folder)
    config, weights = read_config(folder / "config.json"), folder / "model.safetensors"
    tensors = read_tensors(weights)
    vocab = _vocab(tensors.pop("d2t", None), config["draft_vocab_size"], target, folder)
    if export.int8:
        try:
            tensors = dequantized(tensors)
        except UserError as error:
            raise UserError(f"{str(folder)!r} does not fit its drafter: {error}") from error
    drafter = build(export.model, target, vocab)
    fill(drafter, tensors, folder)
    _check_unaltered(folder, config)
    return drafter.eval()


def target_of(folder: Path, target: Target, trust_remote_code: bool = False) -> Target:
    """The target that the export in `folder` is for: the one that lies in it, or `target` where there is none.

    Raises UserError as `read` and `load_target` do.
    """
    export = read(folder)
    if "adapted" not in export.target or export.target["fingerprint"] == target.fingerprint:
        return target
    return load_target(**export.target["load"], device=str(target.device), trust_remote_code=trust_remote_code)


def refuse_other_target(export: Export, target: Target, folder: Path) -> None:
    """Raise UserError, naming both, where `target` is not the one that the export in `folder` is for."""
    if export.target["fingerprint"] != target.fingerprint:
        inside = (
            "" if "adapted" not in export.target else " The target that it was trained with lies in its own folder."
        )
        raise UserError(
            f"{str(folder)!r} was trained for {export.target['name']!r} (fingerprint {export.target['fingerprint']}), "
            f"not for {target.name!r} ({target.fingerprint}): its proposals would be worthless there.{inside}"
        )


def _check_unaltered(folder: Path, config: dict[str, Any]) -> None:
    weights = folder / "model.safetensors"
    if sha256(weights) != config["sha256"]:
        raise UserError(f"{str(weights)!r} was altered after the export: its sha256 is not the one in config.json.")


def build(model: dict[str, Any], target: Target, vocab: DraftVocab) -> Any:
    """Make the drafter that `model` describes: `_target_` is its class, the rest its arguments.

    Raises UserError for anything but a class defined in `models.drafter`, and for arguments that it does not take or
    lacks.
    """
    kind: Any = drafter_class(model)
    arguments = {name: value for name, value in model.items() if name != "_target_"}
    path, parameters = model["_target_"], arguments_of(kind)
    for argument in arguments.keys() - parameters.keys():
        near = difflib.get_close_matches(argument, parameters, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else f" It takes: {', '.join(parameters) or 'none'}."
        raise UserError(f"{path} takes no argument {argument!r}.{meant}")
    for argument, default in parameters.items():
        if default is inspect.Parameter.empty and argument not in arguments:
            raise UserError(f"{path} needs the argument {argument!r}.")
    return kind(target, vocab, **arguments)


def drafter_class(model: dict[str, Any]) -> type:
    """The class of the drafter that `model` describes. Raises UserError for anything but one of `models.drafter`."""
    path = str(model.get("_target_"))
    module, _, name = path.rpartition(".")
    if not module.startswith(_HOME):
        raise UserError(f"The drafter's class {path!r} is not one of {_HOME}*.")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"This version has no drafter {path!r}.") from error
    if not isinstance(found, type) or found.__module__ != module:  # something that the file imports
        raise UserError(f"{path!r} is not a drafter.")
    return found


def arguments_of(drafter_class: Any) -> dict[str, Any]:
    """What a drafter takes behind target and vocab, and its defaults; those that must be given have `Parameter.empty`.

    Of a `**sizes: Unpack[...]` these are the keys of the TypedDict (`models.layers.LayerSizes`), by default None.
    """
    found: dict[str, Any] = {}
    for parameter in list(inspect.signature(drafter_class).parameters.values())[2:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            (keys,) = get_args(get_type_hints(drafter_class.__init__)[parameter.name])
            found |= dict.fromkeys(get_type_hints(keys))
        else:
            found[parameter.name] = parameter.default
    return found


def load_or_build(
    folder: str | None, model: dict[str, Any], target: Target, vocab: DraftVocab
) -> tuple[Any, dict[str, Any]]:
    """A drafter that is part of another: that of the export in `folder`, or without one what `model` describes.

    Returns it and its description. An export has its own vocabulary. Raises UserError as `load` and `build` do.
    """
    if folder is None:
        return build(dict(model), target, vocab), dict(model)
    path = Path(folder).expanduser()
    return load(path, target), read(path).model


def _vocab(d2t: Tensor | None, size: int, target: Target, folder: Path) -> DraftVocab:
    """The draft vocabulary that `d2t` describes; a head without its own weights would fit any other one as well."""
    if d2t is None:
        if size != target.vocab_size:
            raise UserError(f"{str(folder)!r}: d2t is missing, but the drafter proposes {size} tokens only.")
        return DraftVocab(target.vocab_size)
    if d2t.dtype != torch.int64 or d2t.shape != (size,):
        raise UserError(f"{str(folder)!r}: d2t is {d2t.dtype} {tuple(d2t.shape)}, not torch.int64 {(size,)}.")
    try:
        return DraftVocab.from_offsets(target.vocab_size, d2t)
    except UserError as error:
        raise UserError(f"{str(folder)!r}: d2t is wrong. {error}") from error


def read_tensors(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """The `wanted` tensors of a safetensors file. Raises UserError where it is missing, damaged or cut short."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118 (not a dict)


def tensor_names(path: Path) -> set[str]:
    """The names of a safetensors file's tensors, none of which is read. Raises UserError as `read_tensors` does."""
    with _opened(path) as file:
        return set(file.keys())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError as error:
        raise UserError(f"{str(path)!r} is missing.") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{str(path)!r} is damaged or cut short: {error}. Export the drafter again.") from error


def fill(drafter: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """Load `tensors` as the drafter's state. Raises UserError that names every one that does not fit it."""
    wanted = drafter.state_dict()
    problems = [f"missing {name}" for name in wanted.keys() - tensors.keys()]
    problems += [f"unknown {name}" for name in tensors.keys() - wanted.keys()]
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, not {tuple(wanted[name].shape)}"
        for name in wanted.keys() & tensors.keys()
        if tensors[name].shape != wanted[name].shape
    ]
    problems += [
        f"{name} holds {tensors[name].dtype}"
        for name in wanted.keys() & tensors.keys()
        if tensors[name].is_floating_point() != wanted[name].is_floating_point()
    ]
    problems += [
        f"{name} holds values that are not finite"
        for name in wanted.keys() & tensors.keys()
        if not torch.isfinite(tensors[name]).all()
    ]
    if problems:
        raise UserError(f"{str(folder)!r} does not fit its drafter: {'; '.join(sorted(problems))}.")
    drafter.load_state_dict(tensors)
