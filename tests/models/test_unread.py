"""Rows that wait for the drafter, against lists."""

from __future__ import annotations

import torch

from models.types import TargetFeatures
from models.unread import Unread


def part(lengths: list[int], width: int, first: int, hidden: bool) -> TargetFeatures:
    """Rows that all differ, padding too."""
    ids = first + torch.arange(len(lengths) * width).view(len(lengths), width)
    states = torch.stack([ids.double(), -ids.double()], dim=-1) if hidden else None
    return TargetFeatures(ids, ids + 1000, states, torch.tensor(lengths))


def chosen(p: TargetFeatures, rows: list[int]) -> TargetFeatures:
    hidden = None if p.hidden is None else p.hidden[rows]
    return TargetFeatures(p.token_ids[rows], p.next_token_ids[rows], hidden, p.lengths[rows])


def test_parts_are_joined_request_by_request() -> None:
    for hidden in (True, False):
        parts = [part([4, 1, 2], 4, 100, hidden), part([1, 1, 1], 1, 200, hidden), part([1, 3, 2], 3, 300, hidden)]
        unread, kept = Unread(), [2, 0]
        unread.add(parts[0])
        unread.add(parts[1])
        unread.select(kept)
        unread.add(chosen(parts[2], kept))
        found = unread.take()
        assert found.lengths.tolist() == [5, 6]
        assert found.token_ids.shape == (2, 6)
        for row, request in enumerate(kept):
            rows = [(p, i) for p in parts for i in range(int(p.lengths[request]))]
            length = len(rows)
            assert found.token_ids[row, :length].tolist() == [int(p.token_ids[request, i]) for p, i in rows]
            assert found.next_token_ids[row, :length].tolist() == [int(p.next_token_ids[request, i]) for p, i in rows]
            if hidden:
                assert found.hidden is not None
                assert found.hidden[row, :length].tolist() == [p.hidden[request, i].tolist() for p, i in rows]
            else:
                assert found.hidden is None


def test_a_single_part_is_handed_on_as_it_is_and_once() -> None:
    unread, one, two = Unread(), part([2, 3], 3, 0, True), part([1, 1], 1, 50, True)
    unread.add(one)
    assert unread.take() is one
    unread.add(two)
    assert unread.take() is two
