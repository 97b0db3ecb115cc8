"""Which records stay, and which are drawn: counted against the laws that they are to follow."""

import numpy as np
import pytest
import torch

from models.errors import UserError
from tests.helpers.laws import chi_square_p_value
from train.adaptation.records import Record
from train.adaptation.replay import ReplayBuffer, draw_positions, position_weights


def record(request: int, chances: list[float]) -> Record:
    count = len(chances)
    ids = torch.arange(count + 3)
    empty = torch.zeros(count, 2)
    accepted = torch.tensor([c > 0.5 for c in chances], dtype=torch.bool)
    place = torch.arange(count) + 3
    chance = torch.tensor(chances, dtype=torch.float32)
    return Record(request, "d", 2, ids, place, place * 0, place, accepted, chance, empty.long(), empty)


def test_a_reservoir_keeps_every_request_with_the_same_chance() -> None:
    counts = np.zeros(40)
    for seed in range(1500):
        buffer = ReplayBuffer(5, "reservoir", seed=seed)
        for request in range(40):
            buffer.add(record(request, [0.5]))
        assert len(buffer) == 5
        counts[buffer.requests] += 1
    assert chi_square_p_value(counts, np.full(40, 1 / 40)) > 1e-3


def test_recency_keeps_the_newest_and_priority_the_worst() -> None:
    chances = [0.1, 0.9, 0.5, 0.2, 0.7, 0.3]
    kept = {}
    for keep in ("recency", "priority"):
        buffer = ReplayBuffer(3, keep)
        for request, chance in enumerate(chances):
            buffer.add(record(request, [chance, chance]))
        kept[keep] = sorted(buffer.requests)
    assert kept == {"recency": [3, 4, 5], "priority": [0, 3, 5]}


def test_memory_is_bounded() -> None:
    buffer = ReplayBuffer(4, "reservoir")
    sizes = []
    for request in range(60):
        buffer.add(record(request, [0.5] * 6))
        sizes.append(buffer.nbytes)
    assert max(sizes) == 4 * record(0, [0.5] * 6).nbytes == sizes[-1]


def test_old_requests_are_deleted_for_good() -> None:
    buffer = ReplayBuffer(10, "reservoir", retention_requests=3)
    for request in range(6):
        buffer.add(record(request, [0.5]))
    assert buffer.requests == [3, 4, 5]
    buffer.add(record(9, []))  # teaches nothing, and time goes on
    assert buffer.requests == []


def test_what_was_undone_is_forgotten_and_a_restart_goes_on_the_same() -> None:
    buffer, other = ReplayBuffer(3, "reservoir", seed=4), ReplayBuffer(3, "reservoir", seed=4)
    for request in range(8):
        buffer.add(record(request, [0.5]))
    other.restore(list(buffer), buffer.seen)
    for request in range(8, 30):
        for each in (buffer, other):
            each.add(record(request, [0.5]))
    assert buffer.requests == other.requests
    buffer.forget(after=min(buffer.requests))
    assert buffer.requests == [min(other.requests)]


@pytest.mark.parametrize("by", ["uniform", "priority"])
def test_positions_are_drawn_by_their_own_weights(by: str) -> None:
    """In two stages, a request and then one of its positions: together by 1 − α, or all alike."""
    records = [record(0, [0.0, 1.0]), record(1, [0.5]), record(2, [0.9, 0.2, 0.6, 1.0])]
    buffer = ReplayBuffer(3, "reservoir", seed=1)
    for each in records:
        buffer.add(each)
    weights = torch.cat([position_weights(each, by) for each in records])
    counts = np.zeros(7)
    first = {0: 0, 1: 2, 2: 3}
    for step in range(6000):
        (drawn,) = buffer.draw(1, by, step)
        counts[first[drawn.request] + int(draw_positions(drawn, 1, by, 7, step))] += 1
    assert chi_square_p_value(counts, (weights / weights.sum()).numpy()) > 1e-3
    alike = weights.max() == weights.min()
    assert bool(alike) == (by == "uniform")


def test_draws_are_distinct_and_recency_takes_the_newest() -> None:
    buffer = ReplayBuffer(6, "reservoir")
    for request in range(6):
        buffer.add(record(request, [0.3]))
    assert sorted(r.request for r in buffer.draw(9, "uniform", 0)) == list(range(6))
    assert [r.request for r in buffer.draw(2, "recency", 0)] == [5, 4]
    assert draw_positions(record(0, [0.1] * 5), None, "uniform", 0, 0).tolist() == list(range(5))
    assert len(set(draw_positions(record(0, [0.1] * 5), 3, "priority", 0, 0).tolist())) == 3
    assert ReplayBuffer(2, "reservoir").draw(3, "priority", 0) == []


@pytest.mark.parametrize("wrong", [{"capacity": 0}, {"keep": "all"}, {"retention_requests": 0}])
def test_senseless_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(UserError, match=f"adaptation.buffer.{next(iter(wrong))}"):
        ReplayBuffer(**{"capacity": 3, "keep": "reservoir", **wrong})
