"""Text that every machine with Python has: the standard library's source and its language documentation.

The bundled target is trained on these documents, and drafters for it are trained and measured on continuations of
them. Documents fall into train, validation and test by a hash of their name, so that the split is the same for
everybody and no test document was ever seen by the target or by a drafter.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SPLITS = ("train", "validation", "test")

# Folders that are no prose or code worth learning: tests, third-party packages, and tables of numbers.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}
)


@dataclass(frozen=True, slots=True)
class Document:
    """One text of the corpus: `name` is its path or topic, `split` one of `SPLITS`."""

    name: str
    text: str
    split: str


def split_of(name: str) -> str:
    """Assign a document to a split by a hash of its name: 5% test, 5% validation, the rest train."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100
    return "test" if bucket < 5 else "validation" if bucket < 10 else "train"


def documents(split: str | None = None) -> Iterator[Document]:
    """Yield the documents of `split` (all when None) in the order of their names.

    Files that are not valid UTF-8 are passed over. Raises ValueError for an unknown split.
    """
    if split is not None and split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
    for name, text in _sources():
        belongs_to = split_of(name)
        if split in (None, belongs_to):
            yield Document(name, text, belongs_to)


def _sources() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield relative.as_posix(), text
    from pydoc_data.topics import topics  # only here: it is a megabyte of text

    for topic in sorted(topics):
        yield f"topics/{topic}", topics[topic]
