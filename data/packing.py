"""Which texts share a row: as few rows as first-fit-decreasing finds, over pools of texts that chance puts together."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

_POOL = 8192  # texts


class Packs:
    """Texts by row: `members(row)` in their order, `lengths` (rows,) in tokens."""

    def __init__(self, rows: list[list[int]], lengths: np.ndarray) -> None:
        self._members = np.array([text for row in rows for text in row], dtype=np.int64)
        self._ends = np.cumsum([len(row) for row in rows])
        self.lengths = np.add.reduceat(lengths[self._members], self._ends - [len(row) for row in rows])

    def members(self, row: int) -> np.ndarray:
        """The texts of a row."""
        return self._members[self._ends[row - 1] if row else 0 : self._ends[row]]


def pack(lengths: np.ndarray, must_begin: np.ndarray, room: int, seed: int) -> Packs:
    """Put texts of `lengths` (texts,), none above `room`, into rows of at most `room` tokens.

    Those that `must_begin` a row, (texts,) bool, are the first in theirs.
    """
    order = np.random.default_rng(seed).permutation(len(lengths))
    rows: list[list[int]] = []
    for start in range(0, len(order), _POOL):
        pool = order[start : start + _POOL]
        rows += _packed(pool[np.argsort(-lengths[pool], kind="stable")], lengths, must_begin, room)
    return Packs(rows, lengths)


def _packed(texts: np.ndarray, lengths: np.ndarray, must_begin: np.ndarray, room: int) -> list[list[int]]:
    """Each text goes into the fullest row that has room for it."""
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # room in a row, and which, in order
    for text in [*texts[must_begin[texts]], *texts[~must_begin[texts]]]:
        length = int(lengths[text])
        place = len(left) if must_begin[text] else bisect_left(left, (length, -1))
        if place == len(left):
            row, free = len(rows), room
            rows.append([])
        else:
            free, row = left.pop(place)
        rows[row].append(int(text))
        insort(left, (free - length, row))
    return rows
