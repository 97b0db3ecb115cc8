"""A memory of n-grams that never outgrows its capacity: what followed each of them, how often, and when last.

E n-grams held, K the longest n-gram's length, C continuations of an n-gram.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Ngram = tuple[int, ...]


@dataclass(slots=True)
class _Entry:
    written: int = 0
    tokens: dict[int, tuple[int, int]] = field(default_factory=dict)  # count, and time of the last


class Continuations:
    """At most `capacity` n-grams, each with at most `max_continuations` tokens; None sets no limit.

    Where it is full, that n-gram goes which was written to longest ago; with `by_frequency` that which was written to
    least often, and of several the one longest ago. A full n-gram gives up the token that followed it least often, and
    of several the one longest ago; never the new one. Reading leaves no trace: what is held depends on what was written
    alone, not on what was asked.
    """

    def __init__(
        self, capacity: int | None = None, by_frequency: bool = False, max_continuations: int | None = None
    ) -> None:
        self._capacity, self._by_frequency, self._max_continuations = capacity, by_frequency, max_continuations
        self._entries: dict[Ngram, _Entry] = {}
        self._queues: dict[int, OrderedDict[Ngram, None]] = {}  # by rank, each in order of the last time written to
        self._time = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, ngram: Ngram, token: int) -> None:
        """Remember that `token` followed `ngram`."""
        self._time += 1
        entry = self._entries.get(ngram)
        if entry is None:
            if self._capacity is not None and len(self._entries) >= self._capacity:
                self._evict()
            entry = self._entries[ngram] = _Entry()
        else:
            self._leave(ngram, entry)
        entry.written += 1
        self._queues.setdefault(self._rank(entry), OrderedDict())[ngram] = None
        count, _ = entry.tokens.get(token, (0, 0))
        entry.tokens[token] = (count + 1, self._time)
        if self._max_continuations is not None and len(entry.tokens) > self._max_continuations:
            others = {other: seen for other, seen in entry.tokens.items() if other != token}
            del entry.tokens[min(others, key=others.__getitem__)]

    def learn(self, context: Sequence[int], token: int, sizes: Sequence[int]) -> None:
        """Remember that `token` followed the endings of `context` that have these lengths."""
        for size in sizes:
            if size <= len(context):
                self.add(tuple(context[-size:]), token)

    def best(self, ngram: Ngram) -> int | None:
        """The token that followed most often, of several the latest; None for an n-gram that is not held."""
        entry = self._entries.get(ngram)
        return None if entry is None else max(entry.tokens, key=entry.tokens.__getitem__)

    def pack(self, longest: int) -> dict[str, Tensor]:
        """All that is held as integers, the n-gram that is to go first first; −1 and 0 fill up.

        `ngrams` (E, K) from the right, `written` (E,), `tokens`, `counts` and `times` (E, C). C is the limit on an
        n-gram's tokens.
        """
        assert self._max_continuations is not None
        tensors = empty(len(self), longest, self._max_continuations)
        held = [ngram for _, queue in sorted(self._queues.items()) for ngram in queue]
        for row, ngram in enumerate(held):
            entry = self._entries[ngram]
            tensors["ngrams"][row, longest - len(ngram) :] = torch.tensor(ngram)
            tensors["written"][row] = entry.written
            for place, (token, (count, time)) in enumerate(entry.tokens.items()):
                tensors["tokens"][row, place] = token
                tensors["counts"][row, place] = count
                tensors["times"][row, place] = time
        return tensors

    def unpack(self, tensors: dict[str, Tensor]) -> None:
        """Hold what `pack` returned, and nothing else."""
        self._entries, self._queues = {}, {}
        columns = [tensors[name].tolist() for name in ("ngrams", "written", "tokens", "counts", "times")]
        for padded, written, tokens, counts, times in zip(*columns, strict=True):
            ngram = tuple(token for token in padded if token >= 0)
            seen = zip(tokens, counts, times, strict=True)
            entry = _Entry(written, {token: (count, time) for token, count, time in seen if token >= 0})
            self._entries[ngram] = entry
            self._queues.setdefault(self._rank(entry), OrderedDict())[ngram] = None
        self._time = int(tensors["times"].max()) if len(self) else 0

    def _rank(self, entry: _Entry) -> int:
        return entry.written if self._by_frequency else 0

    def _leave(self, ngram: Ngram, entry: _Entry) -> None:
        queue = self._queues[self._rank(entry)]
        del queue[ngram]
        if not queue:
            del self._queues[self._rank(entry)]

    def _evict(self) -> None:
        ngram = next(iter(self._queues[min(self._queues)]))
        self._leave(ngram, self._entries.pop(ngram))


def empty(num_entries: int, longest: int, max_continuations: int) -> dict[str, Tensor]:
    """Tensors for so many n-grams, as `Continuations.pack` returns them, with nothing in them."""
    shape = (num_entries, max_continuations)
    return {
        "ngrams": torch.full((num_entries, longest), -1, dtype=torch.int32),
        "written": torch.zeros(num_entries, dtype=torch.int64),
        "tokens": torch.full(shape, -1, dtype=torch.int32),
        "counts": torch.zeros(shape, dtype=torch.int64),
        "times": torch.zeros(shape, dtype=torch.int64),
    }
