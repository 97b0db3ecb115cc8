"""Checkpoints on disk, one file for each format; a format is found by its module's name.

A format's module has `save(drafter, target, export, folder, card)`, `read(folder)`, `load(folder, target)` and
`recognises(config, names)`, which says whether a folder with such a config.json and such tensors is of the format.
`TAKES` are the classes of drafters that it can hold; `USE` says in Markdown how engines are told to use it
(`snippets`), and `num_tokens(export)`, if there is one, for how many tokens they are to ask. `WHOLE_VOCABULARY = True`
says that engines propose all of the target's tokens, also with a drafter whose vocabulary is smaller (`widened`).
`native` is our own; the others are what engines load.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

from models.errors import UserError

NATIVE = "native"


def formats() -> list[str]:
    """The names of all formats but our own."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    return [name for name in names if hasattr(importlib.import_module(f"{__name__}.{name}"), "recognises")]


def format_of(name: str) -> Any:
    """The module of a format. Raises UserError for a name that is none, with the nearest that is one."""
    known = [NATIVE, *formats()]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise UserError(f"There is no format {name!r}.{meant} Choose one of: {', '.join(known)}.")
    return importlib.import_module(f"{__name__}.{name}")


def is_inside_target(name: str) -> bool:
    """Whether drafters in format `name` are a part of their target's checkpoint."""
    return "stitch" in inspect.signature(format_of(name).save).parameters


def is_widened(name: str, drafter: Any) -> bool:
    """Whether engines propose tokens in format `name` that the drafter itself never does."""
    return drafter.vocab.reduced and getattr(format_of(name), "WHOLE_VOCABULARY", False)


def widened(name: str, drafter: Any, model: dict[str, Any], target: Any) -> Any:
    """The drafter, which `model` describes, as engines run it in format `name`.

    Where they know no draft vocabulary there, that is one of the same weights over the target's whole vocabulary.
    """
    if not is_widened(name, drafter):
        return drafter
    from models.checkpoint import native
    from models.vocab import DraftVocab

    wide = native.build(model, target, DraftVocab(target.vocab_size))
    native.fill(wide, drafter.state_dict(), Path(name))
    return wide.eval()


def target_options(export: Any, given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """How to load the target: as the export says, but for what is given. Raises UserError where neither says."""
    wanted = {**export.target["load"], **{key: value for key, value in given.items() if value is not None}}
    if "source" not in wanted:
        raise UserError(
            f"{str(folder)!r} does not say which target it is for: give target.source=hf target.name_or_path=FOLDER."
        )
    return wanted


def detect(folder: Path, name: str | None = None, setting: str = "format") -> Any:
    """The module of the format that `folder` is in, or of the one that is named.

    Raises UserError, which says to name it by `setting`, where it is in none, or in several that would read it
    differently.
    """
    from models.checkpoint import layout

    if name is not None:
        return format_of(name)
    config = layout.read_json(folder / "config.json", folder)
    if str(config.get("format", "")).startswith("draftsmith"):
        return format_of(NATIVE)
    if (known := layout.recorded_format(folder)) is not None:
        return format_of(known)
    names = layout.tensor_names(folder)
    found = [format for format in formats() if format_of(format).recognises(config, names)]
    if not found:
        raise UserError(
            f"{str(folder)!r} is in no format that is known: say which by {setting}=NAME, one of "
            f"{', '.join(formats())}."
        )
    if len(found) > 1:
        raise UserError(f"{str(folder)!r} can be read as {' or as '.join(found)}: say which by {setting}=NAME.")
    return format_of(found[0])
