"""Batches of answers for training: which rows a step sees depends on the seed and the step's number alone.

So a resumed run sees just what an uninterrupted one does. B batch, S rows, L captured layers, D hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from data.features import FeatureCache
from data.packing import Packs, pack
from data.ragged import Column, learnt_rows
from models.errors import UserError

_POOL = 16  # batches
_COUNTED = 4096  # rows at a time


class Batch(NamedTuple):
    """Answers padded on the right. `hidden` is None where the training step is to run the target itself."""

    token_ids: Tensor  # (B, S)
    loss_mask: Tensor  # (B, S) bool, True on tokens the target said
    lengths: Tensor  # (B,)
    hidden: Tensor | None  # (B, S, L·D)
    segments: Tensor | None = None  # (B, S) which of a row's texts (`models.packing`); None: each row is one


class StepBatches(Dataset[Batch]):
    """The batch of every step: item i holds the rows of step i, in an order shuffled anew each epoch.

    Rows of a batch have similar lengths, since padding costs as much as tokens do: of each `_POOL` batches' worth of
    shuffled rows the shortest make one batch, and so on, in shuffled order.

    Rows longer than `max_tokens` are cut, and counted in `truncated`; those left without a single token to learn from
    are dropped, and counted in `dropped`. Rows stay where they are, on the disk as a rule: what is in memory is some
    30 bytes for each. Raises UserError when no row has anything to learn from, or all masks are 1 throughout, which no
    prompt with an answer gives; where rows tell their source, when that is so of one of the sources.

    After `pack`, a row of a batch holds several of the texts, one behind the other.
    """

    def __init__(
        self, rows: datasets.Dataset, batch_size: int, max_tokens: int, seed: int, cache: FeatureCache | None = None
    ) -> None:
        ids, masks = Column(rows, "token_ids"), Column(rows, "loss_mask")
        self.token_ids, self.loss_mask, lengths, supervised = learnt_rows(ids, masks, max_tokens)
        self.truncated, self.dropped = int((lengths > max_tokens).sum()), int((supervised == 0).sum())
        totals = np.minimum(lengths, max_tokens) * (supervised > 0)
        for source, which in _sources(rows):
            _refuse_hopeless(int(supervised[which].sum()), int(totals[which].sum()), source)
        self.batch_size, self.seed, self.cache, self.max_tokens = batch_size, seed, cache, max_tokens
        self._packs: Packs | None = None
        self.row_lengths = self.token_ids.lengths
        self.cached_steps = len(self)  # later ones go without the cache
        self._part, self._parts = 0, 1

    def part(self, index: int, parts: int) -> StepBatches:
        """The same batches with rows `index`, `index` + `parts`, … alone, padded as if all were there.

        Raises UserError where parts would differ in size.
        """
        if self.batch_size % parts:
            raise UserError(
                f"fit.batch_size is {self.batch_size}, of which {parts} processes cannot have equal parts: "
                f"choose a multiple of {parts}."
            )
        mine = copy.copy(self)
        mine._part, mine._parts = index, parts
        return mine

    @property
    def num_rows(self) -> int:
        """Rows of an epoch: texts, or what they were packed into."""
        return len(self.row_lengths)

    def pack(self, first_supervised: int) -> None:
        """Put texts into rows of at most `max_tokens`, the same ones in every epoch.

        A text with a supervised token before its place `first_supervised` begins a row (see `train.regime`).
        """
        first = (int(np.argmax(self.loss_mask.array(text) != 0)) for text in range(len(self.loss_mask)))
        begins = np.fromiter((place < first_supervised for place in first), np.bool_, len(self.loss_mask))
        self._packs = pack(self.token_ids.lengths, begins, self.max_tokens, self.seed)
        self.row_lengths = self._packs.lengths

    def __len__(self) -> int:
        return 2**62  # steps: as many as are asked for

    def __getitem__(self, step: int) -> Batch:
        rows = [self._row(step * self.batch_size + i) for i in range(self.batch_size)]
        longest = int(self.row_lengths[rows].max())
        rows = rows[self._part :: self._parts]
        lengths = torch.from_numpy(self.row_lengths[rows].astype(np.int64))
        shape = (len(rows), longest)
        token_ids = torch.zeros(shape, dtype=torch.int64)
        loss_mask = torch.zeros(shape, dtype=torch.bool)
        segments = None if self._packs is None else torch.zeros(shape, dtype=torch.int64)
        hidden: Tensor | None = None
        for index, row in enumerate(rows):
            start = 0
            for number, text in enumerate(self._texts(row)):
                place = slice(start, start + int(self.token_ids.lengths[text]))
                token_ids[index, place] = torch.from_numpy(self.token_ids.array(text).astype(np.int64))
                loss_mask[index, place] = torch.from_numpy(self.loss_mask.array(text).astype(np.bool_))
                if segments is not None:
                    segments[index, start:] = number
                if self.cache is not None and step < self.cached_steps:
                    states = self.cache[text][: place.stop - start]
                    hidden = states.new_zeros(*shape, states.shape[-1]) if hidden is None else hidden
                    hidden[index, place] = states
                start = place.stop
        return Batch(token_ids, loss_mask, lengths, hidden, segments)

    def _texts(self, row: int) -> list[int]:
        """Which texts a row of a batch holds."""
        return [row] if self._packs is None else self._packs.members(row).tolist()

    def _row(self, position: int) -> int:
        epoch, index = divmod(position, self.num_rows)
        if getattr(self, "_epoch", None) != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            first = -epoch * self.num_rows % self.batch_size  # rows that fill the last epoch's last batch
            self._order, self._epoch = self._shuffled(first, generator), epoch
        return int(self._order[index])

    def _shuffled(self, first: int, generator: torch.Generator) -> np.ndarray:
        """All rows, in batches of similar lengths behind `first` rows."""
        order = torch.randperm(self.num_rows, generator=generator).numpy()
        size = _POOL * self.batch_size
        for start in range(first, len(order), size):
            pool = order[start : start + size]
            pool = pool[np.argsort(self.row_lengths[pool], kind="stable")]
            whole = len(pool) // self.batch_size
            last = pool[whole * self.batch_size :]  # the next epoch completes it
            batches = pool[: whole * self.batch_size].reshape(whole, self.batch_size)
            mixed = batches[torch.randperm(whole, generator=generator).numpy()]
            order[start : start + size] = np.concatenate([mixed.reshape(-1), last])
        return order

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often the target said each token: (V,)."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for start in range(0, len(self.token_ids), _COUNTED):
            rows = range(start, min(start + _COUNTED, len(self.token_ids)))
            said = [self.token_ids.array(row)[self.loss_mask.array(row) != 0] for row in rows]
            counts += torch.bincount(torch.from_numpy(np.concatenate(said).astype(np.int64)), minlength=vocab_size)
        return counts


def _sources(rows: datasets.Dataset) -> Iterator[tuple[str, np.ndarray]]:
    """The sources that rows are of, by name, and which rows each has; one without a name where that is not told."""
    if "source" not in rows.column_names or not len(rows):
        yield "", np.arange(len(rows))
        return
    column = rows.select_columns("source").with_format("arrow")[:]["source"]
    encoded = column.combine_chunks().dictionary_encode()
    indices = encoded.indices.to_numpy()
    for index, name in enumerate(encoded.dictionary.to_pylist()):
        yield name, np.flatnonzero(indices == index)


def _refuse_hopeless(supervised: int, total: int, source: str) -> None:
    """Raise UserError where none or all of `total` tokens are supervised."""
    where = f" in the source {source}" if source else ""
    if supervised == 0:
        raise UserError(
            f"Nothing to learn from: the loss mask is 0 everywhere{where} (data.max_tokens cuts the answers off?)."
        )
    if supervised == total:
        raise UserError(
            f"The loss mask is 1 everywhere{where}: the prompts themselves would be learnt. Check the template."
        )


class _Steps(Sampler[int]):
    """Steps from `first` on. Its length counts the earlier ones too: a resumed Lightning loop counts from there."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._first, self._last))

    def __len__(self) -> int:
        return self._last


def step_loader(batches: StepBatches, first: int, last: int, part: tuple[int, int] = (0, 1)) -> DataLoader[Batch]:
    """A loader of the batches of steps `first` to `last` − 1, or of one part of each, as (which, of how many)."""
    return DataLoader(batches.part(*part), batch_size=None, sampler=_Steps(first, last))
