"""Work in numbered or named pieces whose results are appended to a log, so that a killed run continues where it
stopped.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock

from data.lines import drop_damaged, opened, sealed
from models.files import explain_disk_errors

Rows = list[dict[str, Any]]
_Result = tuple[str, Rows | BaseException]  # of a key


def run_chunks(log: Path, work: Callable[[int], Rows], more: Callable[[int, Rows], bool]) -> Rows:
    """Return the rows of chunks 0, 1, ..., calling `work(chunk)` only for those that are not in the log.

    After each chunk, logged ones included, `more(chunk, rows)` says whether there is another. A chunk's rows are one
    line with a checksum, flushed to the disk before the next chunk starts; a line that was cut by a kill, or damaged
    since, is removed and its chunk done again.
    """
    rows: Rows = []
    with _opened(log) as file:
        finished = {entry["chunk"]: entry["rows"] for entry, _, _ in _entries(log)}
        for chunk in count():
            if chunk not in finished:
                finished[chunk] = work(chunk)
                _append(file, [{"chunk": chunk, "rows": finished[chunk]}])
            rows += finished[chunk]
            if not more(chunk, finished[chunk]):
                return rows
    raise AssertionError("unreachable: chunks are counted without end")


class LoggedRows:
    """The rows of a log by their key, read from the disk when asked for: only where they lie is held in memory."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._places = {entry["key"]: (start, size) for entry, start, size in _entries(log)}

    def __contains__(self, key: str) -> bool:
        return key in self._places

    @property
    def keys(self) -> list[str]:
        """All keys, in the order in which they were finished."""
        return list(self._places)

    def read(self, keys: Sequence[str]) -> Iterator[Rows]:
        """The rows of each of `keys`, in that order."""
        with self._log.open("rb") as file:
            for key in keys:
                start, size = self._places[key]
                file.seek(start)
                yield json.loads(file.read(size))["rows"]


def run_keyed(
    log: Path,
    keys: Sequence[str],
    work: Callable[[str], Rows],
    *,
    workers: int,
    stopping: threading.Event,
    done: Callable[[int], None],
) -> LoggedRows:
    """Call `work(key)` in `workers` threads for each of `keys` that is not in the log, which then has them all.

    Keys may finish in any order; each is appended as soon as it has, and flushed to the disk, so that a kill loses only
    those in work. `done(how many)` is called after each write, and at first for what was in the log. The first error,
    or an interruption, sets `stopping`, which `work` should heed; what had finished by then is written before it is
    raised.
    """
    with _opened(log) as file:
        finished = LoggedRows(log)
        waiting = deque(key for key in keys if key not in finished)
        results: queue.Queue[_Result] = queue.Queue()
        left = len(waiting)
        done(len(keys) - left)

        def worker() -> None:
            while not stopping.is_set():
                try:
                    key = waiting.popleft()
                except IndexError:
                    return
                try:
                    results.put((key, work(key)))
                except BaseException as error:
                    results.put((key, error))
                    return

        for _ in range(min(workers, left)):  # daemons: one that waits for an answer does not keep a process alive
            threading.Thread(target=worker, daemon=True).start()
        try:
            while left:
                made = [results.get(), *_waiting_in(results)]
                left -= (written := _append_good(file, made))
                done(written)
                for _, error in made:
                    if isinstance(error, BaseException):
                        raise error
        except BaseException:
            _append_good(file, _waiting_in(results))
            raise
        finally:
            stopping.set()
    return LoggedRows(log)


def _waiting_in(results: queue.Queue[_Result]) -> list[_Result]:
    return [results.get_nowait() for _ in range(results.qsize())]


def _append_good(file: BinaryIO, made: list[_Result]) -> int:
    """Write those of the results that are no errors, and return how many they are."""
    good = [{"key": key, "rows": rows} for key, rows in made if not isinstance(rows, BaseException)]
    if good:
        _append(file, good)
    return len(good)


@contextmanager
def _opened(log: Path) -> Iterator[BinaryIO]:
    """The log for appending, of whole lines and locked: two runs may want the same rows."""
    with explain_disk_errors(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(log.with_suffix(".lock")):
            drop_damaged(log)
            with log.open("ab", buffering=0) as file:
                yield file


def _append(file: BinaryIO, entries: list[dict[str, Any]]) -> None:
    start = file.seek(0, os.SEEK_END)
    try:
        lines = b"".join(sealed(entry) for entry in entries)
        if file.write(lines) != len(lines):
            raise OSError(errno.ENOSPC, "cut short")
        os.fsync(file.fileno())
    except OSError:
        os.truncate(file.fileno(), start)
        raise


def _entries(log: Path) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Each whole entry of the log, where its line starts and how long that is."""
    if not log.exists():
        return
    start = 0
    with log.open("rb") as file:
        for line in file:
            if (entry := opened(line)) is not None:
                yield entry, start, len(line)
            start += len(line)
