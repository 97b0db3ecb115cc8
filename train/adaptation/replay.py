"""The replay buffer: what stays of the records when there are too many, and which are learnt from again.

Nothing here draws from a hidden state: every choice follows from the seed and a count, so that a restart repeats it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from models.errors import UserError
from train.adaptation.records import Record

KEEPS = ("reservoir", "recency", "priority")
DRAWS = ("uniform", "recency", "priority")
_FLOOR = 0.05  # added to 1 − α: what is always accepted is seen at times, lest it be forgotten


class ReplayBuffer:
    """At most `capacity` requests with their tested positions.

    `keep` says what makes room: reservoir (each request so far is kept with the same chance, Vitter's algorithm R),
    recency (the oldest goes) or priority (that of the least mean 1 − α goes). `retention_requests`: a request is
    dropped for good once so many newer ones were served. Raises UserError for senseless settings.
    """

    def __init__(self, capacity: int, keep: str, retention_requests: int | None = None, seed: int = 0) -> None:
        if capacity < 1:
            raise UserError(f"adaptation.buffer.capacity is {capacity}: it must be at least 1.")
        if keep not in KEEPS:
            raise UserError(f"adaptation.buffer.keep is {keep!r}: choose {', '.join(KEEPS)}.")
        if retention_requests is not None and retention_requests < 1:
            raise UserError(f"adaptation.buffer.retention_requests is {retention_requests}: at least 1, or null.")
        self.capacity, self.keep, self.retention_requests, self.seed = capacity, keep, retention_requests, seed
        self._records: list[Record] = []
        self.seen = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    @property
    def requests(self) -> list[int]:
        """The numbers of those in the buffer, in the order of their places."""
        return [record.request for record in self._records]

    @property
    def nbytes(self) -> int:
        """Memory of all tensors in it."""
        return sum(record.nbytes for record in self._records)

    def add(self, record: Record) -> None:
        """Offer a record; one without a tested position, or without its text, teaches nothing and does not stay."""
        self.expire(record.request)
        if record.redacted or len(record.place) == 0:
            return
        self.seen += 1
        if len(self) < self.capacity:
            self._records.append(record)
            return
        if self.keep == "reservoir":
            place = int(torch.randint(self.seen, (), generator=_generator(self.seed, self.seen)))
            if place < self.capacity:
                self._records[place] = record
            return
        offered = [*self._records, record]
        least = min(range(len(offered)), key=lambda i: self._worth(offered[i]))
        self._records = offered[:least] + offered[least + 1 :]

    def expire(self, request: int) -> None:
        """Drop what is older than the retention limit, now that `request` is served."""
        if self.retention_requests is not None:
            self._records = [r for r in self._records if r.request > request - self.retention_requests]

    def forget(self, after: int) -> None:
        """Drop all requests behind `after`: they taught what was undone."""
        self._records = [r for r in self._records if r.request <= after]

    def restore(self, records: Iterable[Record], seen: int) -> None:
        """Hold these records again, in this order, after a restart."""
        self._records, self.seen = list(records), seen

    def _worth(self, record: Record) -> float:
        return float(record.request) if self.keep == "recency" else float(1 - record.chance.mean())

    def draw(self, count: int, by: str, step: int) -> list[Record]:
        """`count` different requests, or all if they are fewer; `step` makes the draw another one.

        uniform: by their numbers of positions; recency: the newest; priority: by the sums of their positions' 1 − α.
        """
        if by == "recency":
            return sorted(self._records, key=lambda r: -r.request)[:count]
        if not self._records:
            return []
        weights = torch.stack([position_weights(record, by).sum() for record in self._records])
        chosen = torch.multinomial(weights, min(count, len(self)), generator=_generator(self.seed, ~step))
        return [self._records[i] for i in chosen.tolist()]


def position_weights(record: Record, by: str) -> Tensor:
    """How likely each position (P,) of a request is drawn: alike, or by 1 − α with `by` priority."""
    priority = 1 - record.chance.double() + _FLOOR
    return priority if by == "priority" else torch.ones_like(priority)


def draw_positions(record: Record, count: int | None, by: str, seed: int, step: int) -> Tensor:
    """`count` different positions of a drawn request, ascending; all with None, or where they are fewer.

    Of requests drawn by the sums of these weights, so that a position is as likely as its own weight says.
    """
    total = len(record.place)
    if count is None or count >= total:
        return torch.arange(total)
    stream = _generator(seed * 1_000_003 + record.request, step)
    return torch.multinomial(position_weights(record, by), count, generator=stream).sort().values


def _generator(seed: int, count: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + count) % 2**63)
