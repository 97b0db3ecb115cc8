import tracemalloc
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch

from data.loader import StepBatches, step_loader
from models.errors import UserError


def rows_of(lengths: list[int], prompt: int = 2) -> datasets.Dataset:
    return datasets.Dataset.from_list(
        [
            {
                "token_ids": [(7 * i + j) % 50 for j in range(n)],
                "loss_mask": [0] * min(prompt, n) + [1] * max(0, n - prompt),
            }
            for i, n in enumerate(lengths)
        ]
    )


def test_a_batch_is_its_rows_padded_on_the_right() -> None:
    rows = rows_of([5, 3, 8])
    batch = StepBatches(rows, batch_size=3, max_tokens=6, seed=0)[0]
    assert batch.token_ids.shape == batch.loss_mask.shape == (3, 6)
    by_start = {ids[0]: (ids, mask) for ids, mask in zip(rows["token_ids"], rows["loss_mask"], strict=True)}
    assert sorted(batch.token_ids[:, 0].tolist()) == sorted(by_start)
    for ids, mask, length in zip(*(t.tolist() for t in batch[:3]), strict=True):
        true_ids, true_mask = by_start[ids[0]]
        assert length == min(6, len(true_ids))
        assert ids == true_ids[:6] + [0] * (6 - length)
        assert mask == [bool(m) for m in true_mask[:6]] + [False] * (6 - length)


def test_every_row_is_seen_once_per_epoch_in_a_new_order_each_time() -> None:
    batches = StepBatches(rows_of([4] * 10), batch_size=4, max_tokens=8, seed=1)
    seen = [int(row[0]) for step in range(10) for row in batches[step].token_ids]  # 40 rows: four epochs
    epochs = [seen[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == sorted(set(seen)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


@pytest.mark.parametrize("count", [64, 61])
def test_rows_of_a_batch_have_similar_lengths(count: int) -> None:
    """Every epoch, whether or not it ends with a whole batch; and batches come in no order of length."""
    batches = StepBatches(rows_of([4 + 5 * i % 64 for i in range(count)]), batch_size=4, max_tokens=99, seed=1)
    steps = [batches[step].lengths for step in range(3 * count // 4)]
    inside = [int(lengths.max() - lengths.min()) for lengths in steps]
    shuffled = torch.cat(steps)[torch.randperm(4 * len(steps), generator=torch.Generator().manual_seed(0))].view(-1, 4)
    by_chance = (shuffled.amax(1) - shuffled.amin(1)).double().mean()
    assert sum(inside) / len(inside) < 0.4 * by_chance
    assert sum(gap > 8 for gap in inside) <= 3  # where one epoch ends and the next begins
    longest = [int(lengths.max()) for lengths in steps[: count // 4]]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


def test_a_resumed_loader_continues_exactly() -> None:
    batches = StepBatches(rows_of([4, 5, 6, 7, 8]), batch_size=2, max_tokens=8, seed=1)
    whole = [batch.token_ids.tolist() for batch in step_loader(batches, 0, 9)]
    resumed = [batch.token_ids.tolist() for batch in step_loader(batches, 4, 9)]
    assert resumed == whole[4:]
    other = StepBatches(rows_of([4, 5, 6, 7, 8]), batch_size=2, max_tokens=8, seed=2)
    assert [batch.token_ids.tolist() for batch in step_loader(other, 0, 9)] != whole


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_a_batch_are_disjoint_and_make_it_up(parts: int) -> None:
    """Each with as many rows, padded to the same width, over the end of an epoch too."""
    whole = StepBatches(rows_of([4 + 5 * i % 23 for i in range(22)]), batch_size=8, max_tokens=99, seed=3)
    whole.cache = [torch.full((99, 1), float(row)) for row in range(22)]  # type: ignore[assignment]
    loaders = [step_loader(whole, 1, 7, (index, parts)) for index in range(parts)]
    for step, made in enumerate(zip(*loaders, strict=True), 1):
        assert all(batch.segments is None for batch in made)
        for ours, theirs in zip(zip(*(batch[:4] for batch in made), strict=True), whole[step][:4], strict=True):
            assert len({t.shape for t in ours}) == 1 and len(ours[0]) == 8 // parts
            assert torch.equal(torch.stack(ours, dim=1).flatten(0, 1), theirs)
    rows = [set(whole.part(index, parts)[2].token_ids[:, 0].tolist()) for index in range(parts)]
    assert len(set.union(*rows)) == sum(map(len, rows)) == 8


def test_parts_that_would_differ_in_size_are_refused() -> None:
    batches = StepBatches(rows_of([4] * 10), batch_size=4, max_tokens=8, seed=1)
    with pytest.raises(UserError, match="of which 3 processes cannot have equal parts"):
        batches.part(0, 3)


def test_what_is_cut_is_counted_and_hopeless_masks_are_refused() -> None:
    assert StepBatches(rows_of([5, 3, 8]), 1, 4, 0).truncated == 2
    with pytest.raises(UserError, match="mask is 0 everywhere"):
        StepBatches(rows_of([5, 5], prompt=3), 1, 3, 0)
    with pytest.raises(UserError, match="mask is 1 everywhere"):
        StepBatches(rows_of([5, 5], prompt=0), 1, 5, 0)


def test_token_counts_count_answers_only() -> None:
    batches = StepBatches(rows_of([5, 3]), 1, 8, 0)  # rows 0 1 [2 3 4] and 7 8 [9]
    assert batches.token_counts(12).tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0]


def test_a_hopeless_source_of_a_mixture_is_named() -> None:
    good, bad = rows_of([5, 8]).to_list(), rows_of([5, 6], prompt=0).to_list()
    mixed = [{**row, "source": "0 (good)"} for row in good] + [{**row, "source": "1 (bad.jsonl)"} for row in bad]
    with pytest.raises(UserError, match=r"is 1 everywhere in the source 1 \(bad\.jsonl\)"):
        StepBatches(datasets.Dataset.from_list(mixed), 1, 8, 0)
    late = [{**row, "source": "1 (late)"} for row in rows_of([9, 9], prompt=8).to_list()]
    mixed = [{**row, "source": "0 (good)"} for row in good] + late
    with pytest.raises(UserError, match=r"is 0 everywhere in the source 1 \(late\)"):
        StepBatches(datasets.Dataset.from_list(mixed), 1, 8, 0)
    assert StepBatches(datasets.Dataset.from_list(mixed), 1, 9, 0).dropped == 0


def test_selected_and_shuffled_rows_are_those_of_the_data_set(tmp_path: Path) -> None:
    rows = rows_of([5, 3, 8, 4, 7, 6])
    rows.save_to_disk(tmp_path, num_shards=3)
    for found in (rows, datasets.load_from_disk(str(tmp_path))):
        for some in (found, found.select([4, 0, 2]), found.select(range(1, 5)), found.shuffle(seed=1)):
            batches = StepBatches(some, 1, 6, 0)
            assert list(batches.token_ids) == [ids[:6] for ids in some["token_ids"]]
            assert list(batches.loss_mask) == [mask[:6] for mask in some["loss_mask"]]
            assert batches.token_ids[1:3] == list(batches.token_ids)[1:3]
            assert batches.token_ids.lengths.tolist() == [len(ids) for ids in batches.token_ids]


def test_rows_stay_on_the_disk(tmp_path: Path) -> None:
    """The memory model: some 30 bytes for a row, however long it is, and a batch."""
    num_rows, length = 20_000, 400
    offsets = pa.array(np.arange(num_rows + 1, dtype=np.int32) * length)
    ids = np.random.default_rng(0).integers(0, 50, num_rows * length, dtype=np.int32)
    masks = np.tile(np.arange(length) >= 100, num_rows).astype(np.int8)
    columns = {"token_ids": ids, "loss_mask": masks}
    table = pa.table({name: pa.ListArray.from_arrays(offsets, pa.array(all)) for name, all in columns.items()})
    datasets.Dataset(datasets.table.InMemoryTable(table)).save_to_disk(tmp_path)
    rows = datasets.load_from_disk(str(tmp_path))
    tracemalloc.start()
    batches = StepBatches(rows, batch_size=4, max_tokens=300, seed=0)
    found = [batches[step] for step in range(8)]
    counts = batches.token_counts(50)
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert now < 40 * num_rows and peak < 5 * num_rows * length / 2  # a token and its mask are 5 bytes
    assert not batches.token_ids.array(7).flags.owndata
    row = int(batches._order[0])
    assert found[0].token_ids[0].tolist() == ids[row * length : row * length + 300].tolist()
    learnt = ids.reshape(num_rows, length)[:, 100:300]
    assert counts.tolist() == np.bincount(learnt.ravel(), minlength=50).tolist()
