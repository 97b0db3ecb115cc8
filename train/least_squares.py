"""The best linear map of what a drafter reads onto what it is to tell, found before training.

B batch, S rows, M supervised rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from data.loader import Batch, StepBatches

_ROWS_PER_UNKNOWN = 64

Rows = Callable[[Batch], tuple[Tensor, Tensor]]  # a batch → inputs (M, I) and outputs (M, O)


@torch.no_grad()
def linear_map(batches: StepBatches, rows: Rows, device: torch.device) -> Tensor:
    """The weight (O, I) with the least squared error on the first batches, by ridge regression.

    Some `_ROWS_PER_UNKNOWN` rows are read for each input, or all there are.
    """
    inputs = outputs = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    for given, wanted in _some(batches, rows, device):
        inputs = inputs + (given.t() @ given).double()
        outputs = outputs + (given.t() @ wanted).double()
        count += len(given)
        if count >= _ROWS_PER_UNKNOWN * given.shape[1]:
            break
    ridge = 1e-3 * inputs.diagonal().mean() * torch.eye(len(inputs), dtype=torch.float64, device=device)
    return torch.linalg.solve(inputs + ridge, outputs).t()


@torch.no_grad()
def root_mean_squares(batches: StepBatches, rows: Rows, device: torch.device) -> Tensor:
    """How large each output is on the first batch: (O,), at least 1e-6."""
    _, wanted = next(_some(batches, rows, device))
    return wanted.double().square().mean(0).sqrt().clamp(min=1e-6)


def _some(batches: StepBatches, rows: Rows, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(-(-len(batches.token_ids) // batches.batch_size)):
        made = batches[step]
        hidden = None if made.hidden is None else made.hidden.to(device)
        yield rows(Batch(made.token_ids.to(device), made.loss_mask.to(device), made.lengths, hidden))
