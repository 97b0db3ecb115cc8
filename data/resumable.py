"""Work in numbered chunks whose results are appended to a log, so that a killed run continues where it stopped."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock

from data.lines import drop_damaged, opened, sealed
from models.files import explain_disk_errors


def run_chunks(
    log: Path, work: Callable[[int], list[dict[str, Any]]], more: Callable[[int, list[dict[str, Any]]], bool]
) -> list[dict[str, Any]]:
    """Return the rows of chunks 0, 1, ..., calling `work(chunk)` only for those that are not in the log.

    After each chunk, logged ones included, `more(chunk, rows)` says whether there is another. A chunk's rows are one
    line with a checksum, flushed to the disk before the next chunk starts; a line that was cut by a kill, or damaged
    since, is removed and its chunk done again.
    """
    rows: list[dict[str, Any]] = []
    with explain_disk_errors(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(log.with_suffix(".lock")):  # two runs may want the same rows
            drop_damaged(log)
            with log.open("ab", buffering=0) as file:
                finished = _read_log(log)
                for chunk in count():
                    if chunk not in finished:
                        finished[chunk] = work(chunk)
                        _append(file, {"chunk": chunk, "rows": finished[chunk]})
                    rows += finished[chunk]
                    if not more(chunk, finished[chunk]):
                        return rows
    raise AssertionError("unreachable: chunks are counted without end")


def _append(file: BinaryIO, entry: dict[str, Any]) -> None:
    start = file.seek(0, os.SEEK_END)
    try:
        line = sealed(entry)
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, "cut short")
        os.fsync(file.fileno())
    except OSError:
        os.truncate(file.fileno(), start)
        raise


def _read_log(log: Path) -> dict[int, list[dict[str, Any]]]:
    found = (opened(line) for line in log.read_bytes().splitlines(keepends=True))
    return {entry["chunk"]: entry["rows"] for entry in found if entry is not None}
