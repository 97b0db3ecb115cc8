"""Rows of different lengths as they lie in a table: memory-mapped where it is on the disk, and never copied whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import datasets
import numpy as np


class Column:
    """A table's column of lists of numbers: `column[i]` is a view of row i's numbers.

    What is in memory is one reference for each piece that the table was written in, some thousand rows.
    """

    def __init__(self, rows: datasets.Dataset, name: str) -> None:
        if rows._indices is not None:  # selected or shuffled: the table has other rows, in another order
            rows = rows.flatten_indices()
        pieces = rows.data.column(name).chunks
        self._pieces = [(piece.offsets.to_numpy(), piece.values.to_numpy(zero_copy_only=False)) for piece in pieces]
        self._ends = np.cumsum([len(piece) for piece in pieces])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, row: int) -> np.ndarray:
        piece = int(np.searchsorted(self._ends, row, side="right"))
        offsets, values = self._pieces[piece]
        index = row - (int(self._ends[piece - 1]) if piece else 0)
        return values[offsets[index] : offsets[index + 1]]


class Texts(Sequence[list[int]]):
    """The rows `which` of a column, none with more than `max_tokens` numbers.

    What is in memory is `which` and `lengths`, some 12 bytes a row; a row is a list when it is asked for.
    """

    def __init__(self, column: Column, which: np.ndarray, lengths: np.ndarray) -> None:
        self._column, self._which, self.lengths = column, which, lengths

    def array(self, index: int) -> np.ndarray:
        """The numbers of a row: a view."""
        return self._column[self._which[index]][: self.lengths[index]]

    def __len__(self) -> int:
        return len(self._which)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...

    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...

    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        found: list[int] = self.array(index).tolist()
        return found

    def __iter__(self) -> Iterator[list[int]]:
        return (self[index] for index in range(len(self)))


def learnt_rows(token_ids: Column, loss_mask: Column, max_tokens: int) -> tuple[Texts, Texts, np.ndarray, np.ndarray]:
    """Rows cut at `max_tokens` that have something to learn from: their ids and masks.

    Of all rows that were given: how long they are, and how many tokens are supervised once they are cut.
    """
    count = len(token_ids)
    lengths = np.fromiter((len(token_ids[row]) for row in range(count)), np.int32, count)
    said = (np.count_nonzero(loss_mask[row][:max_tokens]) for row in range(count))
    supervised = np.fromiter(said, np.int32, count)
    which = np.flatnonzero(supervised)
    cut = np.minimum(lengths[which], max_tokens)
    return Texts(token_ids, which, cut), Texts(loss_mask, which, cut), lengths, supervised
