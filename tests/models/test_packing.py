"""Several texts in a row: positions, masks and the target's states against texts by themselves."""

import pytest
import torch

from models import packing
from models.layers import unrolled_mask
from models.types import TargetFeatures
from tests.helpers.models import random_target

SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]])
LENGTHS = torch.tensor([8, 10])


def test_positions_start_anew_with_every_text() -> None:
    assert packing.positions(SEGMENTS).tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]]


def test_lengths_are_those_of_the_texts_without_padding() -> None:
    assert packing.text_lengths(SEGMENTS, LENGTHS).tolist() == [[3, 3, 3, 2, 2, 3, 3, 3, 3, 3], [7] * 7 + [3] * 3]


@pytest.mark.parametrize("window", [0, 1, 2, 3])
def test_a_row_reads_its_own_text_up_to_itself(window: int) -> None:
    mask = packing.attention_mask(SEGMENTS, window)
    assert mask.shape == (2, 1, 10, 10)
    for b, texts in enumerate(SEGMENTS.tolist()):
        for t in range(10):
            for j in range(10):
                allowed = texts[t] == texts[j] and j <= t and (not window or t - j < window)
                assert mask[b, 0, t, j] == allowed


@pytest.mark.parametrize("step", [0, 1, 3])
def test_what_a_step_of_training_reads(step: int) -> None:
    mask = unrolled_mask(10, step, SEGMENTS.device, SEGMENTS)
    assert mask is not None and mask.shape == (2, 1, 10, 10 * (1 + step))
    for b, texts in enumerate(SEGMENTS.tolist()):
        for t in range(10):
            for slot in range(10 * (1 + step)):
                of, j = divmod(slot, 10)
                assert mask[b, 0, t, slot] == (j == t if of else texts[t] == texts[j] and j <= t)


def test_features_tell_positions_and_lengths() -> None:
    ids = torch.zeros(2, 10, dtype=torch.int64)
    plain, packed = (TargetFeatures(ids, ids, None, LENGTHS, segments) for segments in (None, SEGMENTS))
    assert plain.positions.tolist() == [list(range(10))] and plain.text_lengths.tolist() == [[8], [10]]
    assert torch.equal(packed.positions, packing.positions(SEGMENTS))
    assert torch.equal(packed.text_lengths, packing.text_lengths(SEGMENTS, LENGTHS))


BOTH = ("llama", "llama3_rope", "mistral", "qwen2_mixed", "gemma3", "gpt2", "opt", "smollm3")


@pytest.mark.parametrize(
    ("architecture", "attention"),
    [*((name, "sdpa") for name in BOTH), *((name, "eager") for name in (*BOTH, "gemma2"))],
)
def test_states_are_those_of_each_text_alone(architecture: str, attention: str) -> None:
    target = random_target(architecture, attn_implementation=attention)
    texts = [torch.randint(target.vocab_size, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 3, 12, 7)]
    rows = [[0, 1, 2], [3]]
    ids, segments = torch.zeros(2, 26, dtype=torch.int64), torch.zeros(2, 26, dtype=torch.int64)
    places = {}
    for row, members in enumerate(rows):
        start = 0
        for number, text in enumerate(members):
            stop = start + len(texts[text])
            ids[row, start:stop], segments[row, start:], places[text] = texts[text], number, (row, start, stop)
            start = stop
    layers = (0, 2, -1)
    tolerance = 1e-4 if attention == "eager" else 1e-10  # transformers' own softmax is in float32
    near = {"atol": tolerance, "rtol": tolerance}
    with torch.no_grad():
        packed = target(ids, capture_layers=layers, segments=segments)
        for text, (row, start, stop) in places.items():
            alone = target(texts[text][None], capture_layers=layers)
            torch.testing.assert_close(packed.hidden[row, start:stop], alone.hidden[0], **near)
            torch.testing.assert_close(packed.last[row, start:stop], alone.last[0], **near)


def test_an_accelerated_target_reads_packed_rows_too() -> None:
    target = random_target("llama", dtype=torch.float32)
    ids = torch.randint(target.vocab_size, SEGMENTS.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = target(ids, segments=SEGMENTS).last
        target.accelerate()
        assert target._lean is not None
        torch.testing.assert_close(target(ids, segments=SEGMENTS).last, plain, atol=1e-4, rtol=1e-4)
