"""What a training can start from: the best linear map of what a drafter reads onto what it is to estimate.

M supervised rows of a batch, K read and F wanted numbers of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from data.loader import Batch, StepBatches
from models.errors import UserError

_ROWS_PER_UNKNOWN = 64
Rows = Callable[[Batch], tuple[Tensor, Tensor]]  # a batch → what is read (M, K) and wanted (M, F)


class Moments(NamedTuple):
    """Sums over rows, in float64: XᵀX (K, K), XᵀY (K, F) and Y² (F,); and how many rows."""

    read: Tensor
    both: Tensor
    squares: Tensor
    num_rows: int

    @property
    def root_mean_squares(self) -> Tensor:
        """How large each wanted number is: (F,), at least 1e-6."""
        return (self.squares / max(1, self.num_rows)).sqrt().clamp(min=1e-6)


@torch.no_grad()
def moments(batches: StepBatches, device: torch.device, rows: Rows) -> Moments:
    """Of what `rows` reads (M, K) and wants (M, F) of the first batches, some `_ROWS_PER_UNKNOWN` rows for each K."""
    sums: list[Tensor] = []
    count = step = 0
    while step == 0 or step * batches.batch_size < batches.num_rows:
        made = batches[step]
        hidden = None if made.hidden is None else made.hidden.to(device)
        segments = None if made.segments is None else made.segments.to(device)
        x, y = rows(Batch(made.token_ids.to(device), made.loss_mask.to(device), made.lengths, hidden, segments))
        more = [part.double() for part in (x.t() @ x, x.t() @ y, y.square().sum(0))]
        sums = [a + b for a, b in zip(sums, more, strict=True)] if sums else more
        count, step = count + len(x), step + 1
        if count >= _ROWS_PER_UNKNOWN * x.shape[1]:
            break
    return Moments(sums[0], sums[1], sums[2], count)


def ridge(read: Tensor, both: Tensor) -> Tensor:
    """(XᵀX + λ)⁻¹ XᵀY of the sums XᵀX (K, K) and XᵀY (K, F), with λ a thousandth of the mean of X²: (K, F)."""
    weight = 1e-3 * read.diagonal().mean() * torch.eye(len(read), dtype=read.dtype, device=read.device)
    return torch.linalg.solve(read + weight, both)


def check_start(start: str) -> bool:
    """Whether `drafter.training.start` is least_squares. Raises UserError where it is neither that nor random."""
    if start not in ("least_squares", "random"):
        raise UserError(f"drafter.training.start is {start!r}: choose least_squares or random.")
    return start == "least_squares"
