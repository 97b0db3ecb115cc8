"""Lines of a log that tell by themselves whether they are whole: JSON objects whose last key is their checksum."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from models.files import replacing

_SEAL = b', "sha256": "'


def sealed(entry: dict[str, Any]) -> bytes:
    """A line of a log, of an entry that has any keys but sha256."""
    body = json.dumps(entry).encode()[:-1]
    return body + _SEAL + _digest(body) + b'"}\n'


def opened(line: bytes) -> dict[str, Any] | None:
    """The entry that was sealed; None for a line that was cut, or damaged since."""
    body, _, seal = line.rpartition(_SEAL)
    if seal != _digest(body) + b'"}\n':
        return None
    entry: dict[str, Any] = json.loads(body + b"}")
    return entry


def drop_damaged(log: Path) -> None:
    """Take out of a log what was cut by a kill, and what was damaged since, which is said; nothing else is lost."""
    if not log.exists():
        return
    good = bad = cut = 0
    with log.open("rb") as file:
        for line in file:
            if opened(line) is not None:
                good += 1
            elif line.endswith(b"\n"):
                bad += 1
            else:
                cut += 1
    if bad:
        print(f"{str(log)!r}: of {good + bad} finished pieces {bad} are damaged, and are made again")
    if bad or cut:
        with log.open("rb") as file, replacing(log) as temporary, temporary.open("wb") as kept:
            kept.writelines(line for line in file if opened(line) is not None)


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()
