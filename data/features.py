"""The target's hidden states of the training text: kept on disk once, instead of being computed again every epoch.

Rows are computed in fixed groups, so that the states do not depend on when a run was interrupted. A group is one
safetensors file, written to a temporary name and renamed.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from data.progress import Progress
from models.errors import UserError
from models.files import explain_disk_errors, write_tensors
from models.target import Target

_ROWS_PER_FILE = 16


class FeatureCache:
    """Captured states per row of a data set: `cache[row]` is (S, L·D) in the dtype it was stored in."""

    def __init__(self, folder: Path, groups: list[list[int]]) -> None:
        self._folder = folder
        self._file_of = {row: file for file, group in enumerate(groups) for row in group}
        self._open: dict[int, Any] = {}

    @classmethod
    def build(cls, target: Target, rows: list[list[int]], capture_layers: tuple[int, ...], root: Path) -> FeatureCache:
        """Compute what is not on disk yet for the token ids `rows`. Raises UserError where the disk is too small."""
        layers = tuple(target.layer_index(layer) for layer in capture_layers)
        content = repr((target.fingerprint, target.weights_fingerprint, str(target.dtype), layers, rows))
        folder = root / f"features-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
        order = sorted(range(len(rows)), key=lambda i: (len(rows[i]), i))
        groups = [order[i : i + _ROWS_PER_FILE] for i in range(0, len(order), _ROWS_PER_FILE)]
        size_bytes = target.dtype.itemsize * target.hidden_size * len(layers)
        missing = [g for i, g in enumerate(groups) if not _file(folder, i).exists()]
        needed_bytes = sum(len(rows[row]) for group in missing for row in group) * size_bytes
        with explain_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(folder).free
        if needed_bytes > 0.9 * free_bytes:
            raise UserError(
                f"Caching hidden states needs {needed_bytes / 1e6:,.0f} MB in {str(folder)!r}, where "
                f"{free_bytes / 1e6:,.0f} MB are free: use fit.hidden_states=online, or another data.folder."
            )
        if missing:
            with Progress(f"hidden states ({needed_bytes / 1e6:.0f} MB)", len(groups)) as progress:
                for index, group in enumerate(groups):
                    if not _file(folder, index).exists():
                        _compute(target, [rows[row] for row in group], group, layers, _file(folder, index))
                    progress.advance(1)
        return cls(folder, groups)

    def __getitem__(self, row: int) -> Tensor:
        file = self._file_of[row]
        if file not in self._open:
            self._open[file] = safe_open(_file(self._folder, file), framework="pt")
        return self._open[file].get_tensor(str(row))


def _file(folder: Path, index: int) -> Path:
    return folder / f"{index:06d}.safetensors"


@torch.inference_mode()
def _compute(target: Target, rows: list[list[int]], names: list[int], layers: tuple[int, ...], path: Path) -> None:
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    hidden = target(ids.to(target.device), capture_layers=layers).hidden
    assert hidden is not None
    tensors = {str(n): hidden[i, : len(rows[i])].to("cpu") for i, n in enumerate(names)}
    write_tensors(path, tensors)
