"""Rows that a drafter has not read yet: those of the last round and, where rounds went by without a draft, of those.

B batch, S rows, L captured layers, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.types import TargetFeatures


class Unread:
    """Keeps what was committed until it is taken, for the same requests throughout."""

    def __init__(self) -> None:
        self._parts: list[TargetFeatures] = []

    def add(self, rows: TargetFeatures) -> None:
        """Keep the rows that a round has committed."""
        self._parts.append(rows)

    def take(self) -> TargetFeatures:
        """All rows since the last call, in order."""
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else join(parts)

    def select(self, rows: list[int]) -> None:
        """Keep the requests `rows`, in that order."""
        self._parts = [part.select(rows) for part in self._parts]


def join(parts: list[TargetFeatures]) -> TargetFeatures:
    """Put each request's valid rows one behind the other, and padding of zeros at the end."""
    lengths = torch.stack([part.lengths for part in parts]).sum(0)
    widths = [part.token_ids.shape[1] for part in parts]
    valid = torch.cat([torch.arange(w) < p.lengths[:, None] for p, w in zip(parts, widths, strict=True)], dim=1)
    longest = int(lengths.max())
    place = torch.where(valid, valid.cumsum(1) - 1, longest).to(
        parts[0].token_ids.device
    )  # padding: the column to drop

    def moved(pieces: list[Tensor]) -> Tensor:
        rows = torch.cat(pieces, dim=1)  # (B, S), or (B, S, L·D)
        index = place.view(*place.shape, *[1] * (rows.dim() - 2)).expand_as(rows)
        return rows.new_zeros(len(rows), longest + 1, *rows.shape[2:]).scatter_(1, index, rows)[:, :longest]

    hidden = [part.hidden for part in parts if part.hidden is not None]
    return TargetFeatures(
        moved([part.token_ids for part in parts]),
        moved([part.next_token_ids for part in parts]),
        moved(hidden) if hidden else None,
        lengths,
    )
