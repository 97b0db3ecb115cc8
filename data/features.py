"""The target's hidden states of the training text: kept on disk once, instead of being computed again every epoch.

Rows are computed in fixed groups, so that the states depend neither on when a run was interrupted nor on which groups
had to be computed again. A group is a shard (`data.shards`), and `index.json` says what all of them hold.

S rows of a text, L captured layers, D hidden size.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from data.progress import Progress
from data.shards import DTYPES, DamagedShard, Error, StateLayout, open_shard, top_laws, write_shard
from models.errors import UserError
from models.files import explain_disk_errors, write_json
from models.target import Target

_FORMAT = 2
_MOST_OPEN = 512  # shards
_LAWS_AT_ONCE = 512  # tokens


@dataclass(frozen=True)
class CacheSettings:
    """`fit.cache`; conf/train.yaml says what each setting means. Raises UserError for senseless ones."""

    dtype: str = "same"
    rows_per_shard: int = 16
    top_k: int | None = None
    budget_gb: float | None = None
    writers: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"fit.cache.dtype is {self.dtype!r}: choose {', '.join(DTYPES)}.")
        for name in ("rows_per_shard", "writers", *([] if self.top_k is None else ["top_k"])):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"fit.cache.{name} is {value!r}: it must be a whole number of at least 1.")
        if self.budget_gb is not None and not (isinstance(self.budget_gb, int | float) and self.budget_gb > 0):
            raise UserError(f"fit.cache.budget_gb is {self.budget_gb!r}: it must be above 0, or null.")

    @property
    def budget_bytes(self) -> float:
        """The most that shards may take on disk."""
        return float("inf") if self.budget_gb is None else self.budget_gb * 1e9


class FeatureCache:
    """Captured states per row of a data set: `cache[row]` is (S, L·D) in the target's dtype.

    With `top_k` K the target's laws are behind them: (S, L·D + 2·K), in float32 at least (`data.shards`).

    With a budget, shards are deleted by least recent use, and computed again when they are asked for. So are those that
    a checksum finds damaged, or that somebody deleted. Processes that read the same folder keep to the budget together.
    """

    def __init__(
        self,
        target: Target,
        rows: Sequence[Sequence[int]],
        capture_layers: tuple[int, ...],
        root: Path,
        settings: CacheSettings,
    ) -> None:
        self._target, self._rows, self.settings = target, rows, settings
        self._layers = tuple(map(target.layer_index, capture_layers))
        self.layout = StateLayout(len(self._layers), target.hidden_size, settings.dtype, target.dtype, settings.top_k)
        self._lengths = [len(row) for row in rows]
        order = sorted(range(len(rows)), key=lambda row: (self._lengths[row], row))
        size = settings.rows_per_shard
        self._groups = [order[start : start + size] for start in range(0, len(order), size)]
        self._place: dict[int, tuple[int, slice]] = {}  # a row's shard, and its tokens there
        for shard, group in enumerate(self._groups):
            start = 0
            for row in group:
                self._place[row] = shard, slice(start, start + self._lengths[row])
                start += self._lengths[row]
        tokens = [sum(self._lengths[row] for row in group) for group in self._groups]
        self._bytes = [self.layout.size_bytes(count, 1) for count in tokens]  # of every shard
        self._key = self._fingerprint()
        self.folder = root / f"features-{self._key[:12]}"
        self._used: OrderedDict[int, None] = OrderedDict()  # shards on disk, the least recently used first
        self._kept_bytes = 0  # of these
        self._opened: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._known: set[int] = set()  # shards whose checksums were right
        self._errors: dict[int, Error] = {}
        self.evicted = self.damaged = self.recomputed = 0
        self.target_divided = False  # among processes: then none can compute states by itself

    @classmethod
    def build(
        cls,
        target: Target,
        rows: Sequence[Sequence[int]],
        capture_layers: tuple[int, ...],
        root: Path,
        settings: CacheSettings | None = None,
    ) -> FeatureCache:
        """Compute what is not on disk yet for the token ids `rows`, as far as the budget goes.

        Raises UserError where the disk, or the budget, is too small.
        """
        cache = cls(target, rows, capture_layers, root, settings or CacheSettings())
        with explain_disk_errors(cache.folder):
            cache.folder.mkdir(parents=True, exist_ok=True)
            with _alone(cache.folder):
                cache._fill()
        return cache

    def __getitem__(self, row: int) -> Tensor:
        shard, tokens = self._place[row]
        return self.layout.decode(self._open(shard), tokens)

    @property
    def summary(self) -> str:
        """What had to be computed again since the cache was built; empty if nothing."""
        if not self.recomputed:
            return ""
        return (
            f"hidden states: {self.recomputed} of {len(self._groups)} shards were computed again "
            f"({self.evicted} times one was deleted for fit.cache.budget_gb, {self.damaged} were damaged)"
        )

    def _fingerprint(self) -> str:
        """Hash of all that the states depend on, and of how they are stored."""
        target, stored = self._target, (self.settings.dtype, self.settings.rows_per_shard, self.settings.top_k)
        about = (_FORMAT, target.fingerprint, target.weights_fingerprint, str(target.dtype), self._layers, *stored)
        digest = hashlib.sha256(repr(about).encode())
        for row in self._rows:
            ids = np.asarray(row, dtype=np.int64)
            digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
        return digest.hexdigest()

    def _file(self, shard: int) -> Path:
        return self.folder / f"{shard:06d}.safetensors"

    def _shard_key(self, shard: int) -> str:
        return f"{self._key}/{shard}"

    def _fill(self) -> None:
        """Write the index, and the shards that are missing, in order, while there is room for them."""
        budget, every = self.settings.budget_bytes, range(len(self._groups))
        if (largest := max(self._bytes)) > budget:
            raise UserError(
                f"fit.cache.budget_gb is {self.settings.budget_gb}, but a shard of {self.settings.rows_per_shard} "
                f"texts takes {largest / 1e9:.2g} GB: raise it, or lower fit.cache.rows_per_shard."
            )
        there = [shard for shard in every if self._file(shard).exists()]
        there.sort(key=lambda shard: self._file(shard).stat().st_mtime_ns)
        for shard in there:
            self._use(shard)
        self._make_room(0)
        wanted, kept = [], self._kept_bytes
        for shard in every:
            if shard not in self._used and kept + self._bytes[shard] <= budget:
                wanted.append(shard)
                kept += self._bytes[shard]
        self._check_disk(wanted)
        self._write_index()
        if wanted:
            self._write(wanted)

    def _check_disk(self, wanted: list[int]) -> None:
        """Say what `wanted` takes, and refuse where there is no room for it."""
        needed, free = sum(self._bytes[shard] for shard in wanted), shutil.disk_usage(self.folder).free
        if needed > 0.9 * free:
            raise UserError(
                f"Caching hidden states needs {needed / 1e6:,.0f} MB in {str(self.folder)!r}, where "
                f"{free / 1e6:,.0f} MB are free: use fit.hidden_states=online, fit.cache.dtype=int8, "
                "fit.cache.budget_gb, or another data.folder."
            )
        if not wanted:
            return
        whole, kept = sum(self._bytes), self._kept_bytes + needed
        print(
            f"hidden states: {sum(self._lengths):,} tokens of {self.layout.bytes_per_token:,} bytes take "
            f"{whole / 1e6:,.1f} MB, of which {needed / 1e6:,.1f} MB are written to {self.folder} "
            f"({free / 1e6:,.0f} MB free)"
        )
        if kept < whole:
            print(f"fit.cache.budget_gb holds {kept / whole:.0%} of them; the rest is computed when it is needed")

    def _write_index(self) -> None:
        target = self._target
        shards = [
            {"file": self._file(shard).name, "rows": group, "tokens": sum(self._lengths[row] for row in group)}
            for shard, group in enumerate(self._groups)
        ]
        index = {
            "format": _FORMAT,
            "key": self._key,
            "target": {
                "name": target.name,
                "fingerprint": target.fingerprint,
                "weights_fingerprint": target.weights_fingerprint,
                "dtype": str(target.dtype),
            },
            "layers": self._layers,
            "hidden_size": target.hidden_size,
            "dtype": self.settings.dtype,
            "top_k": self.settings.top_k,
            "num_rows": len(self._lengths),
            "num_tokens": sum(self._lengths),
            "shards": shards,
        }
        write_json(self.folder / "index.json", index)

    def _write(self, shards: list[int]) -> None:
        """Compute shards in turn, while `writers` threads write those before."""
        writers = self.settings.writers
        with Progress("hidden states", len(shards)) as progress, ThreadPoolExecutor(writers) as pool:
            waiting: deque[tuple[int, Future[None]]] = deque()
            for shard in shards:
                if len(waiting) > writers:  # no more in memory than are written, and one
                    self._written(*waiting.popleft(), progress)
                waiting.append((shard, pool.submit(self._store, shard, self._states(shard))))
            while waiting:
                self._written(*waiting.popleft(), progress)
        self._tell_error()

    def _written(self, shard: int, future: Future[None], progress: Progress) -> None:
        future.result()
        self._use(shard)
        progress.advance(1)

    def _tell_error(self) -> None:
        if self.layout.dtype != "same" and self._errors:
            difference, whole = (sum(self._errors[shard][i] for shard in sorted(self._errors)) for i in (0, 1))
            print(
                f"hidden states in {self.layout.dtype}: off by {(difference / max(whole, 1e-300)) ** 0.5:.2%} of their "
                "root mean square"
            )

    @torch.inference_mode()
    def _states(self, shard: int) -> Tensor:
        """The states (T, L·D) of a shard's rows, one behind the other, and laws where they are kept, on the host."""
        group = self._groups[shard]
        ids = torch.zeros(len(group), max(self._lengths[row] for row in group), dtype=torch.int64)
        for index, row in enumerate(group):
            ids[index, : self._lengths[row]] = torch.as_tensor(self._rows[row])
        target, top_k = self._target, self.settings.top_k
        layers = self._layers if top_k is None else (*self._layers, target.num_layers)
        with torch.autocast(target.device.type, enabled=False):
            hidden = target.states(ids.to(target.device), layers)
            states = torch.cat([hidden[index, : self._lengths[row]] for index, row in enumerate(group)])
            if top_k is None:
                return states.cpu()
            read, last = states[:, : -target.hidden_size].cpu(), states[:, -target.hidden_size :]
            laws = [top_laws(target.head(rows), top_k).cpu() for rows in last.split(_LAWS_AT_ONCE)]
        return torch.cat([read.to(laws[0].dtype), torch.cat(laws)], dim=-1)

    @torch.inference_mode()
    def _store(self, shard: int, states: Tensor) -> None:
        stored = self.layout.encode(states)
        if self.layout.dtype != "same" and self._layers:
            self._errors[shard] = self.layout.error(states, stored)
        write_shard(self._file(shard), stored, self._shard_key(shard))

    def _open(self, shard: int) -> dict[str, Any]:
        """A shard's tensors, from the disk or computed again."""
        if shard not in self._opened:
            self._opened[shard] = self._checked(shard)
            self._known.add(shard)
            with suppress(FileNotFoundError):  # another process has a budget too
                os.utime(self._file(shard))  # so that the next run knows what was used last
            while len(self._opened) > _MOST_OPEN:
                self._opened.popitem(last=False)
        self._opened.move_to_end(shard)
        self._use(shard)
        return self._opened[shard]

    def _checked(self, shard: int) -> dict[str, Any]:
        path, key, why = self._file(shard), self._shard_key(shard), "it was deleted"
        try:
            return open_shard(path, key, known=shard in self._known)
        except FileNotFoundError:
            pass
        except DamagedShard as damage:
            why, self.damaged = str(damage), self.damaged + 1
            path.unlink(missing_ok=True)
            if not self.target_divided:
                print(f"{path}: {why}; its states are computed again")
        if self.target_divided:
            raise UserError(f"{str(path)!r}: {why}. Start the same command again, which computes its states.")
        self.recomputed += 1
        states = self._states(shard)
        with FileLock(self.folder / ".room"):  # so that no other process writes or deletes meanwhile
            self._see_others()
            self._drop(shard)
            self._make_room(self._bytes[shard])
            self._store(shard, states)
            try:
                return open_shard(path, key)
            except DamagedShard as damage:
                raise UserError(f"What was just written to {str(path)!r} cannot be read: {damage}.") from damage

    def _see_others(self) -> None:
        """Count what other processes wrote, and no longer what they deleted."""
        there = {path.name for path in self.folder.glob("*.safetensors")}
        for shard in range(len(self._groups)):
            if (exists := self._file(shard).name in there) and shard not in self._used:
                self._use(shard)
            elif not exists:
                self._drop(shard)

    def _make_room(self, needed: int) -> None:
        """Delete shards, the least recently used first, until `needed` bytes more keep to the budget."""
        while self._used and self._kept_bytes + needed > self.settings.budget_bytes:
            shard = next(iter(self._used))
            self._drop(shard)
            self._file(shard).unlink(missing_ok=True)
            self.evicted += 1

    def _use(self, shard: int) -> None:
        """Count a shard on disk as the one that was used last."""
        if shard not in self._used:
            self._kept_bytes += self._bytes[shard]
        self._used[shard] = None
        self._used.move_to_end(shard)

    def _drop(self, shard: int) -> None:
        """Count a shard as no longer on disk, and close it: an open file would keep its room."""
        self._opened.pop(shard, None)
        self._known.discard(shard)
        if shard in self._used:
            del self._used[shard]
            self._kept_bytes -= self._bytes[shard]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from filling a folder; one that wants to waits."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"another process computes the hidden states in {folder}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
