"""What is noted of tested positions, against the text and the target's own laws."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.loop import generate
from engine.settings import DecodeSettings
from models.sampling import SamplingParams
from models.tree import DynamicTree
from models.vocab import DraftVocab
from tests.helpers.adaptation import EAGLE, records_of
from tests.helpers.drafters import EXACT, build_shaken, five_token_target, prompts
from train.adaptation.records import Recorder, RecordLog

GREEDY = DecodeSettings(14, 3, stop_token_ids=frozenset())
SAMPLED = replace(GREEDY, sampling=SamplingParams(0.8))
TREE = replace(GREEDY, tree=DynamicTree(depth=3, top_k=2, num_nodes=5))
BLOCK = replace(SAMPLED, verification="block")


@pytest.fixture(scope="module")
def target():
    return five_token_target()


@pytest.fixture(scope="module")
def drafter(target):
    return build_shaken(EAGLE, target, DraftVocab(5), seed=1)


@pytest.mark.parametrize("decode", [GREEDY, SAMPLED, TREE, BLOCK], ids=["greedy", "sampled", "tree", "block"])
def test_every_tested_position_has_the_law_before_it(target, drafter, decode) -> None:
    """The law that a token at index i was drawn from is the one at i − 1; every count is the engine's."""
    asked = prompts([3, 6, 4, 5, 9], 5, seed=4)
    recorder = Recorder(asked, law_tokens=5)
    made = generate(target, asked, decode, drafter, observer=recorder)
    for index, answer in enumerate(made.token_ids):
        record = recorder.record(index, answer, request=index, domain="d", about={})
        text = [*asked[index], *answer]
        assert record.token_ids.tolist() == text and record.prompt_tokens == len(asked[index])
        laws = target.head(target(torch.tensor([text])).last[0]).softmax(-1)
        for row, (place, token, kept) in enumerate(
            zip(record.place.tolist(), record.drafted.tolist(), record.accepted.tolist(), strict=True)
        ):
            law = torch.zeros(5, dtype=torch.float64)
            law[record.law_ids[row]] = record.law_probs[row].double()
            torch.testing.assert_close(law, laws[place - 1], atol=1e-6, rtol=1e-5)
            assert not kept or token == text[place]
            if decode is GREEDY:
                assert kept == (token == text[place]) == bool(record.chance[row])
        stats = made.stats.select([index])
        assert len(record.place) == stats.tested.sum() and record.accepted.sum() == stats.accepted.sum()
        np.testing.assert_allclose(record.chance.double().sum(), stats.expected.sum(), atol=1e-5)
        assert np.array_equal(np.bincount(record.depth, minlength=3), stats.tested[0])


def test_what_lies_behind_the_end_of_an_answer_is_left_out(target, drafter) -> None:
    asked, decode = prompts([3] * 30, 5, seed=6), replace(SAMPLED, stop_token_ids=frozenset({2}))
    recorder = Recorder(asked, 5)
    made = generate(target, asked, decode, drafter, observer=recorder)
    records = [recorder.record(i, a, request=i, domain="d", about={}) for i, a in enumerate(made.token_ids)]
    assert any(made.stopped) and sum(len(r.place) for r in records) == made.stats.tested.sum()
    assert all((r.place < len(r.token_ids)).all() for r in records)


def test_positions_follow_the_rounds(target, drafter) -> None:
    """Behind an accepted token comes the next of its draft or, where that is through, a token that nobody tested."""
    for record in records_of(target, drafter, prompts([4] * 8, 5), SAMPLED):
        pairs = zip(record.place.tolist(), record.depth.tolist(), record.accepted.tolist(), strict=True)
        entries = list(pairs)
        assert entries[0][:2] == (record.prompt_tokens + 1, 0)
        for (place, depth, kept), (later, its_depth, _) in pairwise(entries):
            assert (later, its_depth) in ([(place + 1, depth + 1), (place + 2, 0)] if kept else [(place + 1, 0)])
            assert (later, its_depth) != (place + 1, 3)


def test_laws_are_cut_to_the_likeliest(target, drafter) -> None:
    whole, cut = (records_of(target, drafter, prompts([4], 5), GREEDY, law_tokens=k)[0] for k in (5, 2))
    assert cut.law_probs.shape[1] == 2
    torch.testing.assert_close(cut.law_probs, whole.law_probs[:, :2], **EXACT)
    assert torch.equal(cut.law_ids, whole.law_ids[:, :2])


def test_a_record_on_disk_is_the_same(target, drafter, tmp_path: Path) -> None:
    record = replace(records_of(target, drafter, prompts([4], 5), GREEDY)[0], about={"seconds": 0.5, "member": "m"})
    log = RecordLog(tmp_path)
    log.write(record)
    found = log.read(0)
    assert found is not None and (found.domain, found.about) == ("some", record.about)
    assert all(torch.equal(value, found.tensors()[name]) for name, value in record.tensors().items())
    assert log.read(1) is None
    log.keep_only([5])
    assert log.read(0) is None


def test_hashed_records_hold_no_token(target, drafter, tmp_path: Path) -> None:
    record = records_of(target, drafter, prompts([4], 5), GREEDY)[0]
    for session in "aab":
        RecordLog(tmp_path / session / "records", "hashes").write(record)
    first, second = (RecordLog(tmp_path / session / "records").read(0) for session in "ab")
    assert first is not None and second is not None and first.redacted
    left = {name for name, tensor in first.tensors().items() if len(tensor)}
    assert left == {"place", "depth", "accepted"}, "neither tokens, nor numbers that only their law has"
    assert first.acceptance_rate == record.acceptance_rate
    assert first.about["hash"] != second.about["hash"] and len(first.about["hash"]) == 64
    salt = (tmp_path / "a" / "salt").read_text()
    assert len(salt) == 32 and record.hashed(salt).about["hash"] == first.about["hash"]


def test_no_draft_is_no_position() -> None:
    record = Recorder([[1, 2]], 4).record(0, [3], request=0, domain="d", about={})
    assert math.isnan(record.acceptance_rate) and len(record.place) == 0 and record.law_probs.shape == (0, 4)
