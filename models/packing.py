"""Several texts in one row of a batch: where each starts, and what its rows may read.

`segments` (B, S) number the texts of a row 0, 1, ..; padding on the right belongs to the last of them, as it does to a
text that has a row for itself. B batch, S rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def positions(segments: Tensor) -> Tensor:
    """The place of each row within its text, from 0: (B, S)."""
    row = torch.arange(segments.shape[1], device=segments.device)
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return row - torch.where(starts, row, 0).cummax(1).values


def attention_mask(segments: Tensor, window: int = 0) -> Tensor:
    """Each row reads the rows of its own text up to itself, the last `window` of them if that is above 0.

    Returns (B, 1, S, S) bool, True where attention is allowed.
    """
    row = torch.arange(segments.shape[1], device=segments.device)
    distance = row[:, None] - row
    allowed = (segments[:, :, None] == segments[:, None, :]) & (distance >= 0)
    if window > 0:
        allowed = allowed & (distance < window)
    return allowed[:, None]


def text_lengths(segments: Tensor, lengths: Tensor) -> Tensor:
    """How long the text of each row is, without padding, of which there are `lengths` (B,) rows before: (B, S)."""
    valid = torch.arange(segments.shape[1], device=segments.device) < lengths.to(segments.device)[:, None]
    counts = torch.zeros_like(segments).scatter_add_(1, segments, valid.to(segments.dtype))
    return counts.gather(1, segments)
