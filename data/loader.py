"""Batches of answers for training: which rows a step sees depends on the seed and the step's number alone.

So a resumed run sees just what an uninterrupted one does. B batch, S rows, L captured layers, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import datasets
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from data.features import FeatureCache
from models.errors import UserError

_POOL = 16  # batches


class Batch(NamedTuple):
    """Answers padded on the right. `hidden` is None where the training step is to run the target itself."""

    token_ids: Tensor  # (B, S)
    loss_mask: Tensor  # (B, S) bool, True on tokens the target said
    lengths: Tensor  # (B,)
    hidden: Tensor | None  # (B, S, L·D)


class StepBatches(Dataset[Batch]):
    """The batch of every step: item i holds the rows of step i, in an order shuffled anew each epoch.

    Rows of a batch have similar lengths, since padding costs as much as tokens do: of each `_POOL` batches' worth of
    shuffled rows the shortest make one batch, and so on, in shuffled order.

    Rows longer than `max_tokens` are cut, and counted in `truncated`; those left without a single token to learn from
    are dropped, and counted in `dropped`. Raises UserError when no row has anything to
    learn from, or all masks are 1 throughout, which no prompt with an answer gives.
    """

    def __init__(
        self, rows: datasets.Dataset, batch_size: int, max_tokens: int, seed: int, cache: FeatureCache | None = None
    ) -> None:
        cut = [
            (ids[:max_tokens], mask[:max_tokens])
            for ids, mask in zip(rows["token_ids"], rows["loss_mask"], strict=True)
        ]
        kept = [(ids, mask) for ids, mask in cut if any(mask)]
        self.token_ids: list[list[int]] = [ids for ids, _ in kept]
        self.loss_mask: list[list[int]] = [mask for _, mask in kept]
        self.truncated = sum(len(ids) > max_tokens for ids in rows["token_ids"])
        self.dropped = len(cut) - len(kept)
        supervised, total = sum(map(sum, self.loss_mask)), sum(map(len, self.loss_mask))
        if supervised == 0:
            raise UserError(
                "Nothing to learn from: the loss mask is 0 everywhere (data.max_tokens cuts the answers off?)."
            )
        if supervised == total:
            raise UserError(
                "The loss mask is 1 everywhere: the prompts themselves would be learnt. Check the template."
            )
        self.batch_size, self.seed, self.cache = batch_size, seed, cache
        self.cached_steps = len(self)  # later ones go without the cache

    def __len__(self) -> int:
        return 2**62  # steps: as many as are asked for

    def __getitem__(self, step: int) -> Batch:
        rows = [self._row(step * self.batch_size + i) for i in range(self.batch_size)]
        lengths = torch.tensor([len(self.token_ids[row]) for row in rows])
        shape = (len(rows), int(lengths.max()))
        token_ids = torch.zeros(shape, dtype=torch.int64)
        loss_mask = torch.zeros(shape, dtype=torch.bool)
        hidden: Tensor | None = None
        for index, row in enumerate(rows):
            length = int(lengths[index])
            token_ids[index, :length] = torch.tensor(self.token_ids[row])
            loss_mask[index, :length] = torch.tensor(self.loss_mask[row], dtype=torch.bool)
            if self.cache is not None and step < self.cached_steps:
                states = self.cache[row][:length]
                hidden = states.new_zeros(*shape, states.shape[-1]) if hidden is None else hidden
                hidden[index, :length] = states
        return Batch(token_ids, loss_mask, lengths, hidden)

    def _row(self, position: int) -> int:
        epoch, index = divmod(position, len(self.token_ids))
        if getattr(self, "_epoch", None) != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            first = -epoch * len(self.token_ids) % self.batch_size  # rows that fill the last epoch's last batch
            self._order, self._epoch = self._shuffled(first, generator), epoch
        return self._order[index]

    def _shuffled(self, first: int, generator: torch.Generator) -> list[int]:
        """All rows, in batches of similar lengths behind `first` rows."""
        order: list[int] = torch.randperm(len(self.token_ids), generator=generator).tolist()
        size = _POOL * self.batch_size
        for start in range(first, len(order), size):
            pool = sorted(order[start : start + size], key=lambda row: len(self.token_ids[row]))
            batches = [pool[i : i + self.batch_size] for i in range(0, len(pool), self.batch_size)]
            last = [batches.pop()] if len(batches[-1]) < self.batch_size else []  # the next epoch completes it
            mixed = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()] + last
            order[start : start + size] = [row for batch in mixed for row in batch]
        return order

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often the target said each token: (V,)."""
        said = [
            t
            for ids, mask in zip(self.token_ids, self.loss_mask, strict=True)
            for t, m in zip(ids, mask, strict=True)
            if m
        ]
        return torch.bincount(torch.tensor(said), minlength=vocab_size)


class _Steps(Sampler[int]):
    """Steps from `first` on. Its length counts the earlier ones too: a resumed Lightning loop counts from there."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._first, self._last))

    def __len__(self) -> int:
        return self._last


def step_loader(batches: StepBatches, first: int, last: int) -> DataLoader[Batch]:
    """A loader of the batches of steps `first` to `last` − 1."""
    return DataLoader(batches, batch_size=None, sampler=_Steps(first, last))
