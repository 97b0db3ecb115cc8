"""Drafters of one size: the width of the layers at which a drafter has as many parameters as another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from models.checkpoint import native
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab
from train.pipeline import adapt

Options = dict[str, Any]
WIDTH = "intermediate_size"  # of drafter.model
_APART = 0.03  # of the parameters that are wanted


def parameters_of(options: Options, target: Target, width: int | None = None) -> int:
    """How many parameters the drafter of a run has, those that it shares with the target not counted.

    `width` takes the place of the model's own.
    """
    model, size = options["drafter"]["model"], options["draft_vocab_size"]
    model = model if width is None else {**model, WIDTH: width}
    reduced = size is not None and size < target.vocab_size
    vocab = DraftVocab(target.vocab_size, torch.arange(size) if reduced else None)
    return sum(p.numel() for p in native.build(model, adapt(options, target), vocab).parameters())


def equal_width(options: Options, target: Target, wanted: int) -> tuple[int, int]:
    """The width at which the drafter of a run has nearly `wanted` parameters, which grow evenly with it, and how many
    it then has.

    Raises UserError where it has no such width, or none of its widths comes within 3%.
    """
    name = options["drafter"]["name"]
    if WIDTH not in options["drafter"]["model"]:
        raise UserError(f"compare.equal_to: drafter {name!r} has no drafter.model.{WIDTH} that would change its size.")
    some = 2 * target.hidden_size
    there, next_one = (parameters_of(options, target, width) for width in (some, some + 1))
    width = max(1, round(some + (wanted - there) / max(1, next_one - there)))
    found = parameters_of(options, target, width)
    if abs(found - wanted) > _APART * wanted:
        raise UserError(
            f"compare.equal_to: drafter {name!r} cannot have {wanted:,} parameters. The nearest, with "
            f"drafter.model.{WIDTH}={width}, are {found:,}: give it more or fewer layers by compare.overrides."
        )
    return width, found


def equal_settings(runs: Mapping[str, Options], target: Target, like: str) -> dict[str, list[str]]:
    """For each run, by its drafter's name, the settings that make that as large as the drafter of `like`; printed."""
    wanted = parameters_of(runs[like], target)
    settings: dict[str, list[str]] = {}
    print(f"{like}: {wanted:,} parameters")
    for name, options in runs.items():
        settings[name] = []
        if name != like:
            width, found = equal_width(options, target, wanted)
            settings[name] = [f"drafter.model.{WIDTH}={width}"]
            print(f"{name}: {found:,}, with {settings[name][0]}")
    return settings
