"""The memory of n-grams against a list of everything that was ever written to it."""

from __future__ import annotations

import random

import pytest
import torch

from models.continuations import Continuations, Ngram, _Entry

SETTINGS = [(None, False, None), (4, False, 2), (4, True, 2), (3, True, 1), (1, False, 3), (6, True, 3)]


class WrittenOut:
    """The same memory as a plain list of rows, searched through at every step."""

    def __init__(self, capacity: int | None, by_frequency: bool, max_continuations: int | None) -> None:
        self.capacity, self.by_frequency, self.most = capacity, by_frequency, max_continuations
        self.rows: list[dict] = []
        self.now = 0

    def row(self, ngram: Ngram) -> dict | None:
        return next((row for row in self.rows if row["ngram"] == ngram), None)

    def add(self, ngram: Ngram, token: int) -> None:
        self.now += 1
        row = self.row(ngram)
        if row is None:
            if self.capacity is not None and len(self.rows) == self.capacity:
                worth = [(r["written"] if self.by_frequency else 0, r["last"]) for r in self.rows]
                del self.rows[worth.index(min(worth))]
            row = {"ngram": ngram, "written": 0, "seen": []}
            self.rows.append(row)
        row["written"] += 1
        row["last"] = self.now
        counts = {t: (c, w) for t, c, w in row["seen"]}
        counts[token] = (counts.get(token, (0, 0))[0] + 1, self.now)
        if self.most is not None and len(counts) > self.most:
            del counts[min((c, w, t) for t, (c, w) in counts.items() if t != token)[2]]
        row["seen"] = [(t, c, w) for t, (c, w) in counts.items()]

    def best(self, ngram: Ngram) -> int | None:
        row = self.row(ngram)
        return None if row is None else max((c, w, t) for t, c, w in row["seen"])[2]


def agrees(memory_class: type[Continuations], capacity: int | None, by_frequency: bool, most: int | None) -> bool:
    """Whether random writing always leaves what the list says; saved and loaded again now and then."""
    for seed in range(4):
        rng = random.Random(seed)
        memory = memory_class(capacity, by_frequency, most)
        written = WrittenOut(capacity, by_frequency, most)
        for step in range(300):
            ngram = tuple(rng.choices(range(3), weights=[4, 2, 1], k=rng.randint(1, 2)))
            token = rng.choices(range(5), weights=[6, 4, 2, 1, 1])[0]
            memory.add(ngram, token)
            written.add(ngram, token)
            if most is not None and step % 25 == 24:
                packed = memory.pack(2)
                memory = memory_class(capacity, by_frequency, most)
                memory.unpack(packed)
            asked = [(i, j) for i in range(3) for j in range(3)] + [(i,) for i in range(3)]
            if len(memory) != len(written.rows) or any(memory.best(n) != written.best(n) for n in asked):
                return False
    return True


@pytest.mark.parametrize(("capacity", "by_frequency", "most"), SETTINGS)
def test_what_is_held_is_what_the_list_says(capacity: int | None, by_frequency: bool, most: int | None) -> None:
    assert agrees(Continuations, capacity, by_frequency, most)


class EvictsTheNewest(Continuations):
    def _evict(self) -> None:
        ngram = next(reversed(self._queues[min(self._queues)]))
        self._leave(ngram, self._entries.pop(ngram))


class EvictsTheMostFrequent(Continuations):
    def _evict(self) -> None:
        ngram = next(iter(self._queues[max(self._queues)]))
        self._leave(ngram, self._entries.pop(ngram))


class NeverMovesUp(Continuations):
    """The time of the first writing counts."""

    def add(self, ngram: Ngram, token: int) -> None:
        before = {rank: list(queue) for rank, queue in self._queues.items()}
        super().add(ngram, token)
        for rank, queue in self._queues.items():
            if ngram in before.get(rank, []):
                queue.move_to_end(ngram, last=False)


class EarliestOfSeveral(Continuations):
    def best(self, ngram: Ngram) -> int | None:
        entry = self._entries.get(ngram)
        return None if entry is None else max(entry.tokens, key=lambda t: (entry.tokens[t][0], -entry.tokens[t][1]))


class LatestOnly(Continuations):
    def best(self, ngram: Ngram) -> int | None:
        entry = self._entries.get(ngram)
        return None if entry is None else max(entry.tokens, key=lambda t: entry.tokens[t][1])


class ReadingCounts(Continuations):
    """What is asked for is kept longer."""

    def best(self, ngram: Ngram) -> int | None:
        if (entry := self._entries.get(ngram)) is not None:
            self._queues[self._rank(entry)].move_to_end(ngram)
        return super().best(ngram)


class SavesInNoOrder(Continuations):
    def pack(self, longest: int) -> dict[str, torch.Tensor]:
        return {name: tensor.flip(0) for name, tensor in super().pack(longest).items()}


class ForgetsHowOften(Continuations):
    def unpack(self, tensors: dict[str, torch.Tensor]) -> None:
        super().unpack(tensors | {"written": torch.ones_like(tensors["written"])})


class StartsTheClockAgain(Continuations):
    def unpack(self, tensors: dict[str, torch.Tensor]) -> None:
        super().unpack(tensors)
        self._time = 0


class RefusesNewTokens(Continuations):
    """An n-gram that is full keeps what it has."""

    def add(self, ngram: Ngram, token: int) -> None:
        entry = self._entries.get(ngram, _Entry())
        if len(entry.tokens) == self._max_continuations and token not in entry.tokens:
            token = self.best(ngram) or 0
        super().add(ngram, token)


@pytest.mark.parametrize(
    ("mutant", "by_frequency"),
    [
        (EvictsTheNewest, False), (EvictsTheNewest, True), (EvictsTheMostFrequent, True), (NeverMovesUp, False),
        (EarliestOfSeveral, False), (LatestOnly, False), (ReadingCounts, False), (SavesInNoOrder, False),
        (ForgetsHowOften, True), (StartsTheClockAgain, False), (RefusesNewTokens, False),
    ],
)  # fmt: skip
def test_the_list_notices_mistakes(mutant: type[Continuations], by_frequency: bool) -> None:
    assert not agrees(mutant, 4, by_frequency, 2)


def test_all_endings_are_learnt() -> None:
    memory = Continuations()
    memory.learn([7, 8, 9], 5, [4, 2, 1])
    assert len(memory) == 2 and memory.best((9,)) == memory.best((8, 9)) == 5
    assert memory.best((7, 8, 9)) is None and memory.best(()) is None
