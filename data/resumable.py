"""Work in numbered chunks whose results are appended to a log, so that a killed run continues where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models.files import explain_disk_errors


def run_chunks(
    log: Path, num_chunks: int, work: Callable[[int], list[dict[str, Any]]], done: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Return the rows of chunks 0 .. num_chunks − 1, calling `work(chunk)` only for those not yet in the log.

    A chunk's rows are one line, flushed to the disk before the next chunk starts; a line cut by a kill is removed and
    its chunk done again. `done(chunk, rows)` is called after each chunk, logged ones included.
    """
    finished = _read_log(log)
    rows: list[dict[str, Any]] = []
    with explain_disk_errors(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            for chunk in range(num_chunks):
                if chunk not in finished:
                    finished[chunk] = work(chunk)
                    line = json.dumps({"chunk": chunk, "rows": finished[chunk]}) + "\n"
                    start = file.tell()
                    try:
                        file.write(line.encode())
                        file.flush()
                        os.fsync(file.fileno())
                    except OSError:
                        os.truncate(log, start)
                        raise
                rows += finished[chunk]
                done(chunk, len(finished[chunk]))
    return rows


def _read_log(log: Path) -> dict[int, list[dict[str, Any]]]:
    if not log.exists():
        return {}
    finished = {}
    content = log.read_bytes()
    good = 0
    for line in content.splitlines(keepends=True):
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n"):
            break
        finished[entry["chunk"]] = entry["rows"]
        good += len(line)
    if good < len(content):
        os.truncate(log, good)
    return finished
