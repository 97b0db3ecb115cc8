"""Merge what several nodes learnt: the weighted average of their LoRA deltas, on the drafter that all began with.

    python train/merge.py export=DIR deltas=[NODE1/deltas/000012,NODE2/deltas/000009] output=FOLDER

A session of train/adapt.py with adaptation.lora writes a delta with every version. No node's requests are needed, and
there is no network: how the folders come together is not this command's business.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from conf.compose import main, plain
from models.errors import UserError


def job(config: DictConfig) -> None:
    """The main job; see `merge_deltas`."""
    merge_deltas(plain(config))


def merge_deltas(options: dict[str, Any]) -> Path:
    """Write an export of the merged drafter; returns its folder. Raises UserError where a delta is for another one."""
    from models.checkpoint import detect, target_options
    from models.target import load_target
    from train.adaptation import deltas
    from train.adaptation.setup import base_of
    from train.adaptation.successors import output_of, save

    source = Path(options["export"]).expanduser()
    output = output_of(options["output"], source, "merge")
    folders = [options["deltas"]] if isinstance(options["deltas"], str) else options["deltas"]
    found = [deltas.load(Path(folder).expanduser()) for folder in folders]
    merged = deltas.merge(found, options["weights"])
    module = detect(source)
    described = module.read(source.resolve())
    target = load_target(**target_options(described, options["target"], source))
    drafter = module.load(source, target)
    if base_of(drafter) != merged.base:
        raise UserError(f"The deltas were not learnt from {str(source)!r}: name the export that the nodes began with.")
    deltas.apply(merged, drafter)
    note = f"Merged by train/merge.py from {described.name!r} and {len(found)} deltas of adapters that learnt from it."
    told = {"merged": [{"requests": delta.requests} for delta in found], "weights": options["weights"]}
    save(drafter, described, source, output, "merge", note, told)
    print(f"{len(found)} deltas of {merged.requests:g} requests in all: {output}")
    return output


if __name__ == "__main__":
    main("merge", job)
