"""Writing files so that nothing half written is ever taken for whole, nor what was damaged since."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from models.errors import UserError

_HASHES = "sha256.json"
_UNFINISHED = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.(?P<state>tmp|old)")  # what is written, or replaced


def cache_folder() -> Path:
    """Where things are kept between runs: $DRAFTSMITH_CACHE, or ~/.cache/draftsmith."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or "~/.cache/draftsmith").expanduser()


@contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk or a missing permission into one sentence that names `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            reason = "the disk is full; what was finished before is kept, so free some space and start again"
        elif number == errno.EFBIG or "File too large" in str(error):
            reason = (
                "the system allows no file of that size (ulimit -f); what was finished before is kept, so raise the "
                "limit and start again"
            )
        elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason = "there is no permission to write there"
        else:
            raise
        raise UserError(f"Cannot write {str(path)!r}: {reason}.") from error


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Give a temporary sibling folder to write into; flush it and rename it to `path` when the block succeeds."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_disk_errors(path):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    with file.open("rb") as handle:
                        os.fsync(handle.fileno())
            if path.exists():
                old = path.with_name(f".{path.name}.{os.getpid()}.old")
                path.rename(old)
                temporary.rename(path)
                shutil.rmtree(old)
            else:
                temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder that is worked in; a lock beside it ends with the process, killed or not.

    Raises UserError where another process is at work there, or the disk refuses.
    """
    with explain_disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f".{folder.name}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(
                f"Another process is at work in {str(folder)!r}: wait until it has finished, or end it."
            ) from error
    try:
        yield
    finally:
        lock.release()


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all. Raises UserError where the disk refuses."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all; it knows no nan, so that a rate of which nothing was counted is null."""
    write_text(path, json.dumps(_without_nan(value), indent=1) + "\n")


def flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings, by the keys that lead to them, as "decode.top_k"."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if value != value else value


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all. Raises UserError where the disk refuses."""
    found = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(found, temporary, metadata)


@contextmanager
def replacing(path: Path, previous: Path | None = None) -> Iterator[Path]:
    """Give a temporary name to write to; flush the file and rename it to `path` when the block succeeds.

    What was at `path` before is then called `previous`, where that is given.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            if previous is not None and path.exists():
                path.rename(previous)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """Hash of a file's content, read piece by piece."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def clear_leftovers(folder: Path) -> None:
    """Delete what killed processes have left half written in `folder`, and give back what one was replacing."""
    for path in folder.glob(".*.*.*"):
        found = _UNFINISHED.fullmatch(path.name)
        if found is None or _runs(int(found["pid"])):
            continue
        if found["state"] == "old" and not (whole := folder / found["name"]).exists():
            path.rename(whole)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hash of names, types, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_hashes(folder: Path) -> None:
    """Write the sha256 of every file in `folder` beside them."""
    found = {str(path.relative_to(folder)): sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / _HASHES).write_text(json.dumps(found, indent=1) + "\n")


def damaged_files(folder: Path) -> list[str]:
    """Files of `folder` that are gone or not what `write_hashes` saw; none where it was never called."""
    path = folder / _HASHES
    if not path.exists():
        return []
    try:
        told = json.loads(path.read_text())
        return [name for name, known in told.items() if not (folder / name).exists() or sha256(folder / name) != known]
    except (ValueError, AttributeError):
        return [_HASHES]
