"""Readers see whole versions, and a running engine changes its weights between rounds: the output's law stays."""

import copy
import threading
import time
from pathlib import Path

import pytest
import torch

from engine.loop import generate
from engine.observer import Checked
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.errors import UserError
from models.sampling import SamplingParams
from models.tree import StaticTree
from models.vocab import DraftVocab
from tests.helpers.adaptation import EAGLE, equal, learner_of
from tests.helpers.drafters import (
    LEAST_P_VALUE,
    answers_p_value,
    build_shaken,
    five_token_target,
    prompts,
    sampled_p_value,
    shaken,
    tiny_target,
)
from train.adaptation.records import Recorder
from train.adaptation.replay import ReplayBuffer
from train.adaptation.versions import Observers, Swap, Versions


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def drafter(target):
    return build_shaken(EAGLE, target, DraftVocab(target.vocab_size), seed=3)


def versions_in(folder: Path, target, keep: int = 2) -> Versions:
    described = native.Export(
        name="some", model=EAGLE, target={"name": target.name, "fingerprint": target.fingerprint, "load": {}},
        num_speculative_tokens=3, provenance={},
    )  # fmt: skip
    return Versions(folder, described, "card", keep)


def test_a_reader_never_sees_half_a_version(target, drafter, tmp_path: Path) -> None:
    versions, errors = versions_in(tmp_path, target), []
    made = [shaken(copy.deepcopy(drafter), seed) for seed in range(8)]
    versions.publish(made[0], 0, {})
    stop, seen = threading.Event(), ([0], [0])

    def reader(read: list[int]) -> None:
        while not stop.is_set():
            try:
                found = native.load(versions.current, target)
                read.append(next(i for i, each in enumerate(made) if equal(found.state_dict(), each.state_dict())))
            except (UserError, StopIteration) as error:
                errors.append(error)

    threads = [threading.Thread(target=reader, args=(read,)) for read in seen]
    for thread in threads:
        thread.start()
    for number in range(1, 8):
        versions.publish(made[number], number, {"requests": number})
        while any(read[-1] != number for read in seen) and not errors:  # both are through with the one before
            time.sleep(0.002)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors and all(sorted(set(read)) == list(range(8)) for read in seen)
    assert sorted(p.name for p in (tmp_path / "versions").iterdir()) == ["000000", "000006", "000007"]
    assert native.read(versions.current).provenance["adaptation"] == {"version": 7, "requests": 7}
    cards = [(tmp_path / "versions" / name / "README.md").read_text() for name in ("000000", "000007")]
    assert cards[0] == "card" and "version 7 of a session, from 'some'. What is measured below is of" in cards[1]


def test_deltas_go_with_their_versions(target, drafter, tmp_path: Path) -> None:
    versions = versions_in(tmp_path, target)
    for number in range(5):
        (tmp_path / "deltas" / f"{number:06d}").mkdir(parents=True)
        versions.publish(drafter, number, {})
    for kind in ("versions", "deltas"):
        assert sorted(p.name for p in (tmp_path / kind).iterdir()) == ["000000", "000003", "000004"]


def test_a_version_that_is_there_is_left_alone(target, drafter, tmp_path: Path) -> None:
    versions = versions_in(tmp_path, target)
    folder = versions.publish(drafter, 0, {})
    before = (folder / "model.safetensors").stat().st_mtime_ns
    versions.publish(shaken(copy.deepcopy(drafter), 5), 1, {})
    assert versions.current.resolve() != folder.resolve()
    versions.publish(shaken(copy.deepcopy(drafter), 6), 0, {})
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert versions.current.resolve() == folder.resolve()
    with pytest.raises(UserError, match=r"versions\.keep"):
        versions_in(tmp_path, target, keep=1)


class Shaking:
    """Offers other weights while a draft is checked, so that they come with the next round; notes what served it."""

    def __init__(self, drafter, amount: float = 0.3) -> None:
        self.swap, self.served, self.amount = Swap(drafter), [], amount
        self._first = {name: t.clone() for name, t in drafter.state_dict().items()}

    def before_round(self) -> None:
        self.swap.before_round()
        self.served.append(self._mark())

    def checked(self, made: Checked) -> None:
        assert self.served[-1] == self._mark(), "weights changed between draft and verdict"
        stream = torch.Generator().manual_seed(len(self.served))
        self.swap.offer(
            {
                k: t + self.amount * t.std() * torch.randn(t.shape, generator=stream).to(t)
                for k, t in self._first.items()
            }
        )
        assert self.served[-1] == self._mark(), "an offer changed weights at once"

    def _mark(self) -> float:
        return float(self.swap.drafter.fc.weight.double().sum())


def test_greedy_output_is_plain_decodings_while_weights_change(drafter) -> None:
    target = tiny_target(torch.float64)
    drafter = build_shaken(EAGLE, target, DraftVocab(target.vocab_size), seed=3)
    asked, decode = (
        prompts([9, 1, 4, 14], target.vocab_size, seed=1),
        DecodeSettings(1000, 4, stop_token_ids=frozenset()),
    )
    expected = generate(target, asked, decode).token_ids
    shaking = Shaking(drafter)
    assert generate(target, asked, decode, drafter, observer=shaking).token_ids == expected
    assert len(set(shaking.served)) == len(shaking.served) > 5


@pytest.mark.parametrize("changes", [{}, {"verification": "block"}, {"tree": StaticTree((-1, -1, 0, 0), (0, 1, 0, 1))}])
def test_sampled_law_is_the_targets_while_weights_change(changes: dict) -> None:
    target = five_token_target()
    drafter = build_shaken(EAGLE, target, DraftVocab(5), seed=1)
    shaking = Shaking(drafter)
    p_value = sampled_p_value(target, drafter, SamplingParams(1.0), observer=shaking, **changes)
    assert p_value > LEAST_P_VALUE and len(set(shaking.served)) > 2


@pytest.mark.parametrize("sampling", [SamplingParams(1.0), SamplingParams(0.7, top_k=3)])
def test_sampled_law_is_the_targets_while_a_drafter_learns_from_its_own_drafts(sampling: SamplingParams) -> None:
    """Every update learns from the very answers that are counted, and the next answers are drafted with it."""
    target, prompt = five_token_target(), [3, 0, 4, 1]
    serving = build_shaken(EAGLE, target, DraftVocab(5), seed=1)
    learner = learner_of(copy.deepcopy(serving), target, updates={"steps": 3, "requests": 32})
    swap, buffer, answers, served, rates = Swap(serving), ReplayBuffer(64, "reservoir"), [], set(), []
    decode = DecodeSettings(4, 3, sampling, frozenset())
    for turn in range(10):
        asked = [prompt] * 400
        recorder = Recorder(asked, law_tokens=5)
        seeds = [turn * len(asked) + i for i in range(len(asked))]
        made = generate(target, asked, decode, serving, seeds=seeds, observer=Observers([swap, recorder]))
        answers += made.token_ids
        served.add(float(serving.fc.weight.detach().double().sum()))
        rates.append(made.stats.acceptance_rate)
        records = [
            recorder.record(i, made.token_ids[i], request=seeds[i], domain="", about={}) for i in range(len(asked))
        ]
        learner.update(records[:32], buffer)
        for record in records[32:64]:
            buffer.add(record)
        swap.offer(learner.weights())
    assert answers_p_value(target, prompt, answers, sampling) > LEAST_P_VALUE
    assert len(served) == 10 and rates[-1] > rates[0] + 0.1, "it has learnt meanwhile"
