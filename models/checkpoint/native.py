"""Our own export format: everything needed to rebuild a drafter, and to refuse to where it would be wrong.

config.json          format, the drafter's class and arguments, its target, decoding defaults, provenance
model.safetensors    the drafter's own parameters, and `d2t` where its vocabulary is reduced
README.md            the model card
"""

from __future__ import annotations

import importlib
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from models.errors import UserError
from models.files import atomic_folder
from models.target import Target
from models.vocab import DraftVocab

FORMAT = "draftsmith-1"
_HOME = "models.drafter."  # the only place that drafters are loaded from: a file cannot name code elsewhere


@dataclass(frozen=True, slots=True)
class Export:
    """What an export says of itself; see `save`."""

    name: str
    model: dict[str, Any]
    target: dict[str, str]
    num_speculative_tokens: int
    provenance: dict[str, Any]


def save(drafter: nn.Module, export: Export, vocab: DraftVocab, folder: Path, card: str) -> None:
    """Write the drafter to `folder`, whole or not at all.

    `export.model` is the `_target_` of its class and the arguments that rebuild it. Raises UserError where the disk
    refuses.
    """
    tensors = {name: t.detach().cpu().contiguous() for name, t in drafter.state_dict().items()}
    if vocab.reduced:
        tensors["d2t"] = vocab.offsets()
    config = {
        "format": FORMAT,
        "name": export.name,
        "drafter": export.model,
        "target": export.target,
        "draft_vocab_size": vocab.size,
        "decoding": {"num_speculative_tokens": export.num_speculative_tokens},
        "provenance": export.provenance,
    }
    with atomic_folder(folder) as temporary:
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (temporary / "README.md").write_text(card)
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})


def read(folder: Path) -> Export:
    """Read what an export says of itself. Raises UserError where the folder is none."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        if config["format"] != FORMAT:
            raise UserError(f"{str(path)!r}: format is {config['format']!r}; this version reads {FORMAT!r}.")
        return Export(
            config["name"],
            config["drafter"],
            config["target"],
            config["decoding"]["num_speculative_tokens"],
            config["provenance"],
        )
    except OSError as error:
        raise UserError(f"{str(folder)!r} is not an export: {error.strerror or error} ({path.name}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{str(path)!r} is damaged: {type(error).__name__}: {error}.") from error


def load(folder: Path, target: Target) -> Any:
    """Rebuild the drafter of an export for `target`.

    Raises UserError, naming what is wrong: another target than it was trained for, a damaged file, tensors that are
    missing, unknown or of another shape.
    """
    export = read(folder)
    if export.target["fingerprint"] != target.fingerprint:
        raise UserError(
            f"{str(folder)!r} was trained for {export.target['name']!r} (fingerprint {export.target['fingerprint']}), "
            f"not for {target.name!r} ({target.fingerprint}): its proposals would be worthless there."
        )
    tensors = _read_tensors(folder / "model.safetensors")
    d2t = tensors.pop("d2t", None)
    vocab = DraftVocab(target.vocab_size) if d2t is None else DraftVocab.from_offsets(target.vocab_size, d2t)
    drafter = build(export.model, target, vocab)
    _fill(drafter, tensors, folder)
    return drafter.eval()


def build(model: dict[str, Any], target: Target, vocab: DraftVocab) -> Any:
    """Make the drafter that `model` describes: `_target_` is its class, the rest its arguments.

    Raises UserError for a class outside `models.drafter` and for arguments that it does not take.
    """
    arguments = dict(model)
    path = str(arguments.pop("_target_"))
    module, _, name = path.rpartition(".")
    if not module.startswith(_HOME):
        raise UserError(f"The drafter's class {path!r} is not one of {_HOME}*.")
    try:
        drafter_class = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"This version has no drafter {path!r}.") from error
    unknown = arguments.keys() - inspect.signature(drafter_class).parameters.keys()
    if unknown:
        raise UserError(f"{path} takes no argument {', '.join(sorted(unknown))}.")
    return drafter_class(target, vocab, **arguments)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError as error:
        raise UserError(f"{str(path)!r} is missing.") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{str(path)!r} is damaged or cut short: {error}. Export the drafter again.") from error


def _fill(drafter: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    wanted = drafter.state_dict()
    problems = [f"missing {name}" for name in wanted.keys() - tensors.keys()]
    problems += [f"unknown {name}" for name in tensors.keys() - wanted.keys()]
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, not {tuple(wanted[name].shape)}"
        for name in wanted.keys() & tensors.keys()
        if tensors[name].shape != wanted[name].shape
    ]
    problems += [
        f"{name} holds values that are not finite"
        for name in wanted.keys() & tensors.keys()
        if not torch.isfinite(tensors[name]).all()
    ]
    if problems:
        raise UserError(f"{str(folder)!r} does not fit its drafter: {'; '.join(sorted(problems))}.")
    drafter.load_state_dict(tensors)
