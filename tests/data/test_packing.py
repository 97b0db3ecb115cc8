"""Which texts share a row, and that a batch of packed rows is the texts', cached states included."""

from collections import Counter

import datasets
import numpy as np
import pytest
import torch

from data.loader import StepBatches, step_loader
from data.packing import pack


def lengths_of(count: int, longest: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, longest + 1, count)


@pytest.mark.parametrize("begin_share", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("count", "longest", "room"), [(1, 5, 5), (50, 20, 20), (300, 90, 128), (9000, 40, 100)])
def test_every_text_is_in_one_row_that_has_room_for_it(count: int, longest: int, room: int, begin_share: float) -> None:
    lengths = lengths_of(count, longest)
    begins = np.random.default_rng(1).random(count) < begin_share
    packs = pack(lengths, begins, room, seed=3)
    rows = [packs.members(row).tolist() for row in range(len(packs.lengths))]
    assert Counter(text for row in rows for text in row) == Counter(range(count))
    assert all(rows)
    for row, total in zip(rows, packs.lengths, strict=True):
        assert total == sum(int(lengths[text]) for text in row) <= room
        assert not any(begins[text] for text in row[1:])


def test_rows_are_nearly_full_and_the_seed_decides_which_texts_meet() -> None:
    lengths = lengths_of(2000, 60)
    one, other = (pack(lengths, np.zeros(2000, np.bool_), 128, seed) for seed in (0, 1))
    assert one.lengths.mean() > 0.97 * 128
    assert one.members(0).tolist() == pack(lengths, np.zeros(2000, np.bool_), 128, 0).members(0).tolist()
    assert one.members(0).tolist() != other.members(0).tolist()


class States:
    """In place of a cache: states that tell whose they are."""

    def __getitem__(self, text: int) -> torch.Tensor:
        return torch.arange(40)[:, None] + 1000.0 * (text + 1)


def batches_of(lengths: list[int], prompts: list[int], batch_size: int, max_tokens: int) -> StepBatches:
    ids = [[100 * (i + 1) + j for j in range(n)] for i, n in enumerate(lengths)]
    masks = [[0] * p + [1] * (n - p) for n, p in zip(lengths, prompts, strict=True)]
    rows = datasets.Dataset.from_dict({"token_ids": ids, "loss_mask": masks})
    return StepBatches(rows, batch_size, max_tokens, seed=0)


def test_a_batch_of_packed_rows_holds_each_text_whole() -> None:
    lengths, prompts = [9, 4, 12, 7, 5, 30, 3, 8], [4, 2, 1, 3, 3, 5, 2, 4]
    batches = batches_of(lengths, prompts, 2, 20)
    batches.pack(first_supervised=3)
    batches.cache = States()  # type: ignore[assignment]
    assert batches.truncated == 1
    seen: list[int] = []
    for step in range(batches.num_rows // 2):
        batch = batches[step]
        assert batch.segments is not None and batch.hidden is not None
        assert batch.token_ids.shape[1] == int(batch.lengths.max()) <= 20
        for row in range(2):
            start = 0
            while start < batch.lengths[row]:
                text = int(batch.token_ids[row, start]) // 100 - 1
                size = min(20, lengths[text])
                place = slice(start, start + size)
                assert batch.token_ids[row, place].tolist() == [100 * (text + 1) + j for j in range(size)]
                assert batch.loss_mask[row, place].tolist() == [j >= prompts[text] for j in range(size)]
                assert batch.hidden[row, place, 0].tolist() == [1000.0 * (text + 1) + j for j in range(size)]
                assert len(set(batch.segments[row, place].tolist())) == 1
                assert start == 0 or prompts[text] >= 3  # else it begins its row
                seen.append(text)
                start += size
            assert batch.segments[row, start - 1 :].unique().numel() == 1  # padding is the last text's
            assert not batch.loss_mask[row, start:].any() and not batch.token_ids[row, start:].any()
    rest = batches.num_rows % 2
    assert len(seen) == len(set(seen)) and len(seen) >= len(lengths) - 3 * rest


def test_packed_rows_are_shuffled_anew_each_epoch_and_resume_exactly() -> None:
    batches = batches_of([9, 4, 12, 7, 5, 11, 3, 8] * 8, [3] * 64, 2, 20)
    batches.pack(first_supervised=2)
    steps = batches.num_rows  # two epochs
    whole = [batch.token_ids.tolist() for batch in step_loader(batches, 0, steps)]
    rows = [tuple(row) for batch in whole for row in batch]
    first, second = rows[: batches.num_rows], rows[batches.num_rows :]
    starts = [sorted(row[0] for row in epoch) for epoch in (first, second)]
    assert starts[0] == starts[1] and [row[0] for row in first] != [row[0] for row in second]
    again = batches_of([9, 4, 12, 7, 5, 11, 3, 8] * 8, [3] * 64, 2, 20)
    again.pack(first_supervised=2)
    assert [batch.token_ids.tolist() for batch in step_loader(again, 5, steps)] == whole[5:]
