"""Reads what W&B wrote while it was offline, without W&B's own reader: records in the layout of LevelDB's logs."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7
_FIRST, _LAST = (1, 2), (1, 4)  # kinds of pieces: 1 is a whole record, 2 its first piece, 3 a middle one, 4 its last


def records(path: Path) -> Iterator[Any]:
    """The records of an offline run's file, as W&B's protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, pieces = path.read_bytes(), _HEADER, b""
    assert content[:4] == b":W&B"
    while at + _HEADER <= len(content):
        if _BLOCK - at % _BLOCK < _HEADER:  # the end of a block is left empty
            at += _BLOCK - at % _BLOCK
            continue
        size, kind = struct.unpack_from("<HB", content, at + 4)
        assert kind in (1, 2, 3, 4)
        piece = content[at + _HEADER : at + _HEADER + size]
        pieces = piece if kind in _FIRST else pieces + piece
        if kind in _LAST:
            record = Record()
            record.ParseFromString(pieces)
            yield record
        at += _HEADER + size
