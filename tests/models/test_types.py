"""Rows of target features, put behind one another."""

from __future__ import annotations

import pytest
import torch

from models.types import TargetFeatures
from models.unread import join


def rows(lengths: list[int], width: int, start: int, *, hidden: bool) -> TargetFeatures:
    """Row t of request b has the token 100·b + start + t; 99 is padding."""
    ids = torch.full((len(lengths), width), 99)
    for b, length in enumerate(lengths):
        ids[b, :length] = 100 * b + start + torch.arange(length)
    return TargetFeatures(
        ids, ids + 1, ids[..., None] * torch.tensor([1.0, 0.5]) if hidden else None, torch.tensor(lengths)
    )


@pytest.mark.parametrize("hidden", [True, False])
def test_rows_follow_the_valid_ones_of_each_request(hidden: bool) -> None:
    first, later = [3, 1, 0], [1, 2, 2]
    joined = join([rows(first, 3, 0, hidden=hidden), rows(later, 2, 50, hidden=hidden)])
    assert joined.lengths.tolist() == [4, 3, 2]
    expected = [[0, 1, 2, 50], [100, 150, 151], [250, 251]]
    for b, tokens in enumerate(expected):
        assert joined.token_ids[b, : len(tokens)].tolist() == tokens
        assert joined.next_token_ids[b, : len(tokens)].tolist() == [token + 1 for token in tokens]
        if hidden:
            assert joined.hidden[b, : len(tokens), 1].tolist() == [token / 2 for token in tokens]
    assert joined.token_ids.shape == (3, 4) and (joined.hidden is None) is not hidden


def test_requests_are_selected() -> None:
    chosen = rows([3, 1, 2], 3, 0, hidden=True).select([2, 0])
    assert chosen.lengths.tolist() == [2, 3]
    assert chosen.token_ids[:, 0].tolist() == [200, 0] == chosen.hidden[:, 0, 0].tolist()
