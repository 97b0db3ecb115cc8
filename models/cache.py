"""A preallocated key-value cache with a length of its own for every request.

It is handed to Hugging Face models as their `Cache`, and to our drafters' layers alike. Rows of request b fill the
slots 0 .. lengths[b] − 1 without gaps, whatever its neighbours do; a forward pass writes its new rows behind them, and
`commit` says which of those stay.

B batch, H key-value heads, Q new rows, W slots in use, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


class KVCache(Cache):
    """Keys and values of `num_layers` layers for `batch_size` requests of at most `capacity` rows each."""

    def __init__(self, num_layers: int, batch_size: int, capacity: int, device: torch.device | str = "cpu") -> None:
        self._stores = [_Layer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._stores))
        self.capacity = capacity
        self.device = torch.device(device)
        self.lengths = torch.zeros(batch_size, dtype=torch.int64)  # on the host: no device is asked for them
        self.slots: Tensor | int = 0  # (B, Q) where the next rows go, or the first slot where all requests agree
        self.width = 0

    @property
    def uniform(self) -> bool:
        """True where all requests hold equally many rows."""
        return len(self.lengths) == 1 or bool((self.lengths == self.lengths[0]).all())

    def begin(self, num_rows: int) -> None:
        """Announce a forward pass that brings `num_rows` new rows for every request.

        Raises ValueError when they do not fit.
        """
        longest = int(self.lengths.max())
        if longest + num_rows > self.capacity:
            raise ValueError(f"{longest} + {num_rows} rows do not fit into a cache of {self.capacity}")
        self.width = longest + num_rows
        if self.uniform:
            self.slots = longest
        else:
            self.slots = (self.lengths[:, None] + torch.arange(num_rows)).to(self.device)

    def commit(self, counts: Tensor, path: Tensor | None = None) -> None:
        """Keep `counts` (B,) of the rows just written, and drop the others.

        Without `path` the first ones are kept. `path` (B, P) names the kept rows, in order, by their index among the
        new rows; entries from counts[b] on are ignored.
        """
        if path is not None:
            start = self.lengths[:, None].to(path.device)
            source = (start + path).clamp(0, self.width - 1).to(self.device)  # ignored entries may name anything
            destination = (start + torch.arange(path.shape[1], device=path.device)).to(self.device)
            for layer in self._stores:
                layer.move(source, destination)
        self.lengths = self.lengths + counts.to("cpu")

    def truncate(self, lengths: Tensor) -> None:
        """Forget all rows from `lengths` (B,) on."""
        self.lengths = torch.minimum(self.lengths, lengths.to("cpu"))

    def select(self, rows: list[int]) -> None:
        """Keep the requests `rows`, in that order."""
        self.lengths = self.lengths[rows]
        index = torch.tensor(rows, device=self.device)
        for layer in self._stores:
            layer.reorder_cache(index)


class _Layer(CacheLayerMixin):
    """One layer's keys and values: (B, H, capacity, D), allocated when the first rows show H, D and dtype."""

    is_compileable = False

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch_size = len(self._cache.lengths)

        def empty(states: Tensor) -> Tensor:  # zeros: a masked slot may hold anything finite, but not a NaN
            return states.new_zeros(batch_size, states.shape[1], self._cache.capacity, states.shape[-1])

        self.keys, self.values = empty(key_states), empty(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        slots = self._cache.slots
        for store, new in ((self.keys, key_states), (self.values, value_states)):
            if isinstance(slots, int):
                store[:, :, slots : slots + new.shape[2]] = new
            else:
                store.scatter_(2, slots[:, None, :, None].expand_as(new), new)
        width = self._cache.width
        return self.keys[:, :, :width], self.values[:, :, :width]

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy the rows of the slots `source` (B, P) to the slots `destination` (B, P)."""
        for store in (self.keys, self.values):
            if store is not None:
                shape = (-1, store.shape[1], -1, store.shape[3])
                rows = store.gather(2, source[:, None, :, None].expand(shape))
                store.scatter_(2, destination[:, None, :, None].expand(shape), rows)

    def get_seq_length(self) -> int:
        return int(self._cache.lengths.max())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self._cache.capacity

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[beam_idx], self.values[beam_idx]
