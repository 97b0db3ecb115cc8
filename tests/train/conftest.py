"""What tests of several trainings are given."""

from __future__ import annotations

import pytest
import torch

from data.loader import Batch


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Of 20 tokens: two turns in a row, padding, a prompt of one token, and a row with nothing to learn."""
    token_ids = torch.randint(20, (4, 12), generator=torch.Generator().manual_seed(0))
    mask = [[0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1], [0] * 9, [0, 0, 0, 0, 1]]
    loss_mask = torch.tensor([row + [0] * (12 - len(row)) for row in mask], dtype=torch.bool)
    return Batch(token_ids, loss_mask, torch.tensor([len(row) for row in mask]), None)
