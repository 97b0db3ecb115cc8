"""Which checkpoint a training goes on from, and what in it is no weight: damage is found, random numbers go on.

A checkpoint is torch's own zip archive, of which torch writes a checksum for every part and reads none.
"""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from models.checkpoint import native
from models.errors import UserError
from models.files import replacing, tensors_sha256, write_tensors

_SHA256 = "sha256"


def previous(path: Path) -> Path:
    """Where the checkpoint before that at `path` is kept."""
    return path.with_name(f"previous-{path.name}")


def save(checkpoint: Mapping[str, Any], path: Path, keep: Path | None = None) -> None:
    """Write a checkpoint, whole or not at all; that which was at `path` before is then at `keep`, if that is given.

    Raises UserError where the disk refuses.
    """
    content = io.BytesIO()  # torch.save hides what the disk said
    torch.save(checkpoint, content)
    with replacing(path, keep) as temporary:
        temporary.write_bytes(content.getbuffer())


def load(path: Path) -> dict[str, Any]:
    """The checkpoint file at `path`, on the CPU; nothing but tensors, numbers and texts are read.

    Raises UserError for a damaged one.
    """
    check_archive(path)
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive fails in as many ways as it has bytes
        raise UserError(f"{str(path)!r} is damaged: {_first_line(error)}.") from error
    return found


def check_archive(path: Path) -> None:
    """Raise UserError for a file of torch's in which a part is not what was written."""
    try:
        with zipfile.ZipFile(path) as archive:
            part = archive.testzip()
    except Exception as error:
        raise UserError(f"{str(path)!r} is damaged: {_first_line(error)}.") from error
    if part is not None:
        raise UserError(f"{str(path)!r} is damaged: {part} is not what was written.")


def resume_point(path: Path) -> tuple[Path | None, int]:
    """The checkpoint to go on from and the optimizer steps behind it; None and 0 before there is one.

    That is the one at `path`, or, where this is damaged or was lost, the one before it, which is said. Raises UserError
    where none is whole.
    """
    damaged: list[str] = []
    for candidate in (path, previous(path)):
        if not candidate.exists():
            continue
        try:
            steps = int(load(candidate)["global_step"])
        except UserError as error:
            damaged.append(str(error))
            continue
        if damaged:
            print(f"{damaged[0]} Training goes on from step {steps}, of the checkpoint before it.")
        return candidate, steps
    if damaged:
        raise UserError(
            f"{' '.join(damaged)} No older checkpoint is whole: delete the folder {str(path.parent)!r}, and the same "
            "command trains again from the first step. The answers are kept."
        )
    return None, 0


def write_kept(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors with their checksum, whole or not at all. Raises UserError where the disk refuses."""
    write_tensors(path, tensors, {_SHA256: tensors_sha256(tensors)})


def read_kept(path: Path) -> dict[str, Tensor]:
    """What `write_kept` wrote. Raises UserError, which says what to delete, where it is damaged or gone."""
    remedy = (
        f"Delete the folder {str(path.parent)!r}, and the same command trains again from the first step. The answers "
        "are kept."
    )
    try:
        tensors = native.read_tensors(path)
        with safe_open(path, framework="pt") as file:
            told = (file.metadata() or {}).get(_SHA256)
    except UserError as error:
        raise UserError(f"{str(error).removesuffix('Export the drafter again.').rstrip()} {remedy}") from error
    if told != tensors_sha256(tensors):
        raise UserError(f"{str(path)!r} is damaged: its tensors are not those that were written. {remedy}")
    return tensors


def random_state() -> dict[str, Any]:
    """The states of all global random generators, as a checkpoint can hold them."""
    name, keys, *others = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": [name, [int(key) for key in keys], *others],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on with the random numbers where `random_state` was asked."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    name, keys, *others = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *others))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
