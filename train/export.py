"""Write an export in the format of another engine, check what was written, and load it again.

    python train/export.py export=outputs/.../export format=vllm_eagle3 output=FOLDER
    python train/export.py export=FOLDER format=sglang_eagle3 source_format=vllm_eagle3

`export` may be a folder of any format that we read, so that published checkpoints can be converted.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from conf.compose import main, plain
from models.errors import UserError

if TYPE_CHECKING:
    from models.checkpoint.native import Export
    from models.target import Target


def job(config: DictConfig) -> None:
    """Read, write, and read again."""
    options = plain(config)
    source = Path(options["export"])
    from models.checkpoint import (  # heavy imports wait until the command line is known to be right
        detect,
        format_of,
        target_options,
    )
    from models.checkpoint.layout import refuse_other_folder
    from models.target import load_target
    from train.model_card import measured_before

    form = format_of(options["format"])  # is there one?
    module = detect(source, options["source_format"], "source_format")
    described = module.read(source)
    folder = Path(options["output"] or source.parent / options["format"])
    refuse(options["format"], described, stitch=options["stitch"])  # before the target is loaded, which takes a while
    refuse_other_folder(folder)
    wanted = target_options(described, options["target"], source)
    target = load_target(**wanted)
    drafter = module.load(source, target)
    described = for_target(described, target, wanted)
    card = (source / "README.md").read_text() if (source / "README.md").exists() else ""
    write(options["format"], drafter, target, described, folder, measured_before(card), stitch=options["stitch"])
    loaded = form.load(folder, target)
    print(f"wrote {folder} and loaded it again: {type(loaded).__name__}, {_parameters(loaded):,} parameters")


def write(
    name: str, drafter: Any, target: Target, export: Export, folder: Path, measured: str, *, stitch: bool = False
) -> None:
    """Write `drafter` to `folder` in format `name`, with a card that holds the figures `measured`.

    It is said, there and in print, where engines propose tokens that the drafter itself never does. Raises UserError
    for a format that does not fit the drafter, or has nothing to stitch.
    """
    from models.checkpoint import format_of, is_widened
    from train.model_card import engine_card

    refuse(name, export, stitch=stitch)
    if is_widened(name, drafter):
        note = (
            f"The drafter was trained to propose {drafter.vocab.size:,} of the target's {target.vocab_size:,} tokens, "
            f"and proposed no others where figures are given. Format {name} has no draft vocabulary: engines propose "
            "all tokens from it, so that acceptance and the cost of a draft are others there."
        )
        print(f"note: {note}")
        measured = f"{measured}\n\n{note}"
    more = {"stitch": True} if stitch else {}
    format_of(name).save(drafter, target, export, folder, engine_card(export, name, measured, folder), **more)


def refuse(name: str, export: Export, *, stitch: bool = False) -> None:
    """Raise UserError for a format that cannot hold the drafter that `export` describes, whatever its target is."""
    from models.checkpoint import NATIVE, format_of, is_inside_target, native
    from models.checkpoint.layout import refuse_kind

    form = format_of(name)
    if name == NATIVE:
        raise UserError(f"format is {name!r}, our own: a run writes it, and this command formats of other engines.")
    if export.target.get("adapted", {}).get("export") == "separate":
        raise UserError(
            f"{export.name!r} has its target as an adapter, and engines load whole targets: train it with "
            "drafter.training.backbone.export=merged."
        )
    if stitch and not is_inside_target(name):
        raise UserError(f"stitch=true, but what format {name} holds is no part of the target: drop it.")
    refuse_kind(name, native.drafter_class(export.model), form.TAKES)


def for_target(export: Export, target: Target, load: dict[str, Any]) -> Export:
    """The same description, with the target that the drafter is used with where it named none."""
    if export.target["fingerprint"]:
        return export
    known = {"name": target.name, "fingerprint": target.fingerprint, "load": json.loads(json.dumps(load))}
    return replace(export, target=known)


def _parameters(drafter: Any) -> int:
    return sum(p.numel() for p in drafter.parameters())


if __name__ == "__main__":
    main("export", job)
