"""The KV cache against a plain list of rows per request, over random sequences of operations."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from models.cache import KVCache

LAYERS, HEADS, KEY_SIZE, VALUE_SIZE = 2, 3, 4, 2


def key_of(row: int, layer: int) -> Tensor:
    """What row number `row` holds: (H, 1, D), different for each number, layer, head and column."""
    return (row * 100 + layer * 50 + torch.arange(HEADS * KEY_SIZE).view(HEADS, 1, KEY_SIZE)).double()


def value_of(row: int, layer: int) -> Tensor:
    return -key_of(row, layer)[..., :VALUE_SIZE] - 0.5


def stacked(rows: list[list[int]], layer: int) -> tuple[Tensor, Tensor]:
    keys = torch.stack([torch.cat([key_of(row, layer) for row in request], dim=1) for request in rows])
    values = torch.stack([torch.cat([value_of(row, layer) for row in request], dim=1) for request in rows])
    return keys, values


@dataclass
class Pair:
    """A cache and the lists that it must equal."""

    cache: KVCache
    rows: list[list[int]]
    next_row: int = 1

    def write(self, num_rows: int) -> list[list[int]]:
        """Write new rows for all requests and compare all that comes back: old rows, then new ones."""
        new = [[self.next_row + b * num_rows + i for i in range(num_rows)] for b in range(len(self.rows))]
        self.next_row += num_rows * len(self.rows)
        self.cache.begin(num_rows)
        for layer in range(LAYERS):
            keys, values = self.cache.update(*stacked(new, layer), layer)
            assert keys.shape[2] == values.shape[2] == max(map(len, self.rows)) + num_rows
            for b, request in enumerate(self.rows):
                expected_keys, expected_values = stacked([request + new[b]], layer)
                visible = len(request) + num_rows
                assert torch.equal(keys[b, :, :visible], expected_keys[0])
                assert torch.equal(values[b, :, :visible], expected_values[0])
        return new

    def check_lengths(self) -> None:
        assert self.cache.lengths.tolist() == [len(request) for request in self.rows]
        assert self.cache.uniform == (len({len(request) for request in self.rows}) == 1)
        assert self.cache.get_seq_length() == max(map(len, self.rows))

    def append(self, rng: random.Random, num_rows: int) -> None:
        new = self.write(num_rows)
        counts = [rng.randint(0, num_rows) for _ in new] if rng.random() < 0.7 else [num_rows] * len(new)
        self.cache.commit(torch.tensor(counts))
        self.rows = [old + fresh[:count] for old, fresh, count in zip(self.rows, new, counts, strict=True)]

    def append_path(self, rng: random.Random, num_rows: int) -> None:
        new = self.write(num_rows)
        counts = [rng.randint(0, num_rows) for _ in new]
        width = max(1, *counts)
        path = torch.tensor([[rng.choice([-1, 0, 99]) for _ in range(width)] for _ in new])  # ignored unless set below
        for b, count in enumerate(counts):
            kept = sorted(rng.sample(range(num_rows), count))
            path[b, :count] = torch.tensor(kept)
            self.rows[b] = self.rows[b] + [new[b][i] for i in kept]
        self.cache.commit(torch.tensor(counts), path)

    def truncate(self, rng: random.Random) -> None:
        lengths = [rng.randint(0, len(request) + 2) for request in self.rows]  # longer than it is: nothing happens
        self.cache.truncate(torch.tensor(lengths))
        self.rows = [request[:length] for request, length in zip(self.rows, lengths, strict=True)]

    def select(self, rng: random.Random) -> None:
        kept = rng.sample(range(len(self.rows)), rng.randint(max(1, len(self.rows) - 1), len(self.rows)))
        self.cache.select(kept)
        self.rows = [self.rows[b] for b in kept]


@pytest.mark.parametrize("seed", range(30))
def test_random_operations_equal_lists_of_rows(seed: int) -> None:
    rng = random.Random(seed)
    batch_size, capacity = rng.randint(1, 5), 40
    pair = Pair(KVCache(LAYERS, batch_size, capacity), [[] for _ in range(batch_size)])
    pair.check_lengths()
    for _ in range(25):
        num_rows = min(rng.randint(1, 7), capacity - max(map(len, pair.rows)))
        operation = rng.choices(["append", "append_path", "truncate", "select"], [4, 4, 2, 1])[0]
        if operation == "select":
            pair.select(rng)
        elif operation == "truncate" or num_rows == 0:
            pair.truncate(rng)
        elif operation == "append":
            pair.append(rng, num_rows)
        else:
            pair.append_path(rng, num_rows)
        pair.check_lengths()


def test_requests_of_equal_length_are_written_as_one_slice() -> None:
    pair = Pair(KVCache(LAYERS, 3, 10), [[], [], []])
    pair.write(4)
    assert pair.cache.slots == 0
    pair.cache.commit(torch.tensor([4, 2, 3]))
    pair.cache.begin(2)
    assert torch.equal(pair.cache.slots, torch.tensor([[4, 5], [2, 3], [3, 4]]))
    pair.cache.truncate(torch.tensor([2, 2, 2]))
    pair.cache.begin(2)
    assert pair.cache.slots == 2


def test_a_path_may_overlap_the_slots_that_it_moves_to() -> None:
    pair = Pair(KVCache(LAYERS, 1, 10), [[]])
    pair.write(6)
    pair.cache.commit(torch.tensor([3]), torch.tensor([[1, 2, 4]]))  # 1 → 0 and 2 → 1: each source is a destination
    pair.rows = [[2, 3, 5]]
    pair.check_lengths()
    pair.write(1)


def test_writing_past_the_capacity_fails_before_anything_is_written() -> None:
    pair = Pair(KVCache(LAYERS, 2, 8), [[], []])
    pair.write(5)
    pair.cache.commit(torch.tensor([5, 2]))
    pair.rows = [[1, 2, 3, 4, 5], [6, 7]]
    with pytest.raises(ValueError, match=r"5 \+ 4 rows do not fit into a cache of 8"):
        pair.cache.begin(4)
    pair.check_lengths()
    pair.write(3)  # up to the last slot


def test_huggingface_reads_lengths_and_mask_sizes() -> None:
    pair = Pair(KVCache(LAYERS, 2, 8), [[], []])
    assert (pair.cache.get_seq_length(), pair.cache.get_mask_sizes(3, 0)) == (0, (3, 0))
    pair.write(5)
    pair.cache.commit(torch.tensor([4, 2]))
    assert (pair.cache.get_seq_length(), pair.cache.get_mask_sizes(3, 1)) == (4, (7, 0))
    assert pair.cache.layers[0].get_max_length() == 8


def test_slots_not_yet_written_are_finite() -> None:
    cache = KVCache(1, 2, 6)
    cache.begin(2)
    cache.update(torch.ones(2, 1, 2, 3), torch.ones(2, 1, 2, 3), 0)
    cache.commit(torch.tensor([2, 0]))
    cache.begin(1)
    keys, values = cache.update(torch.ones(2, 1, 1, 3), torch.ones(2, 1, 1, 3), 0)
    assert keys.isfinite().all() and values.isfinite().all()
    assert cache.layers[0].keys is not None and (cache.layers[0].keys[:, :, 3:] == 0).all()


def test_a_selection_may_come_before_the_first_rows() -> None:
    pair = Pair(KVCache(LAYERS, 3, 8), [[], [], []])
    pair.cache.select([2, 0])
    pair.rows = [[], []]
    pair.append(random.Random(0), 4)
    pair.check_lengths()
