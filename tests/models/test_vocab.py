"""The draft vocabulary and its map to the target's."""

from __future__ import annotations

import pytest
import torch

from models.errors import UserError
from models.vocab import DraftVocab

IDS = torch.tensor([1, 2, 5, 9])


def test_offsets_are_stored_as_eagle_3_stores_them_and_round_trip() -> None:
    vocab = DraftVocab(10, IDS)
    assert vocab.offsets().tolist() == [1, 1, 3, 6]  # target token = draft token + offset
    assert vocab.offsets().dtype == torch.int64
    again = DraftVocab.from_offsets(10, vocab.offsets())
    assert torch.equal(again.token_ids, IDS) and again.size == 4 and again.vocab_size == 10 and again.reduced


def test_the_whole_vocabulary_maps_to_itself() -> None:
    vocab = DraftVocab(10)
    ids, law = torch.arange(10), torch.rand(2, 10)
    assert (vocab.size, vocab.reduced, vocab.offsets().tolist()) == (10, False, [0] * 10)
    assert vocab.to_target(ids) is ids and vocab.widen(law) is law


def test_draft_ids_become_target_ids_in_any_shape() -> None:
    vocab = DraftVocab(10, IDS)
    assert vocab.to_target(torch.tensor([[3, 0], [2, 1]])).tolist() == [[9, 1], [5, 2]]
    assert vocab.to_target(torch.tensor(2)).item() == 5


@pytest.mark.parametrize(
    ("counts", "size", "expected"),
    [
        ([0, 7, 3, 7, 9], 3, [1, 3, 4]),
        ([5, 7, 5, 7, 5], 3, [0, 1, 3]),  # of those tied at 5, the lowest id
        ([5, 7, 5, 7, 5], 4, [0, 1, 2, 3]),
        ([0, 0, 0, 0, 0], 2, [0, 1]),
        ([1, 2, 3, 4, 5], 1, [4]),
    ],
)
def test_the_most_frequent_tokens_are_chosen_with_the_lower_id_on_a_tie(
    counts: list[int], size: int, expected: list[int]
) -> None:
    vocab = DraftVocab.most_frequent(torch.tensor(counts), size)
    assert vocab.token_ids.tolist() == expected
    assert (vocab.vocab_size, vocab.size) == (5, size)


def test_ties_go_to_lower_ids_in_a_large_vocabulary_too() -> None:
    counts = torch.randint(3, (5000,), generator=torch.Generator().manual_seed(0))
    expected = sorted(sorted(range(5000), key=lambda token: (-counts[token].item(), token))[:2000])
    assert DraftVocab.most_frequent(counts, 2000).token_ids.tolist() == expected


@pytest.mark.parametrize("size", [None, 5, 6])
def test_a_size_of_the_whole_vocabulary_or_more_leaves_nothing_out(size: int | None) -> None:
    vocab = DraftVocab.most_frequent(torch.tensor([3, 1, 4, 1, 5]), size)
    assert (vocab.size, vocab.reduced) == (5, False)


def test_widening_puts_every_column_in_its_place_and_zero_elsewhere() -> None:
    law = torch.rand(2, 3, 4, dtype=torch.float64, requires_grad=True)
    wide = DraftVocab(10, IDS).widen(law)
    assert wide.dtype == law.dtype
    for token in range(10):
        column = law[..., IDS.tolist().index(token)] if token in IDS else torch.zeros(2, 3, dtype=torch.float64)
        assert torch.equal(wide[..., token], column)
    weight = torch.rand_like(wide)
    (wide * weight).sum().backward()
    assert torch.equal(law.grad, weight[..., IDS])


@pytest.mark.parametrize(
    "token_ids", [[1, 1, 2], [2, 1], [-1, 3], [3, 10], []], ids=["twice", "descending", "negative", "too large", "none"]
)
def test_ids_that_are_no_part_of_the_vocabulary_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(UserError, match="distinct target ids below 10 in ascending order"):
        DraftVocab(10, torch.tensor(token_ids, dtype=torch.int64))


def test_offsets_that_are_no_map_into_the_vocabulary_are_refused() -> None:
    for offsets in ([0, 0, 9], [1, 0], [-1, 0]):
        with pytest.raises(UserError, match="ascending order"):
            DraftVocab.from_offsets(10, torch.tensor(offsets))


@pytest.mark.parametrize("size", [0, -3])
def test_an_empty_choice_is_refused(size: int) -> None:
    with pytest.raises(UserError, match=f"draft_vocab_size is {size}: it must be at least 1"):
        DraftVocab.most_frequent(torch.tensor([1, 2, 3]), size)


def test_target_ids_to_draft_ids_and_back() -> None:
    vocab = DraftVocab(8, torch.tensor([1, 4, 6]))
    ids = torch.tensor([[4, 0, 6], [1, 7, 4]])
    assert vocab.to_draft(ids).tolist() == [[1, -1, 2], [0, -1, 1]]
    assert vocab.to_target(vocab.to_draft(torch.tensor([6, 1]))).tolist() == [6, 1]
    assert DraftVocab(8).to_draft(ids) is ids
