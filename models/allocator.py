"""What the C library does with memory that large tensors leave behind."""

from __future__ import annotations

import ctypes
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGEST = 2**25  # the most that glibc takes for M_MMAP_THRESHOLD on 64 bits
_KEPT = 2**30


def keep_freed_memory() -> bool:
    """Let up to 1 GiB of freed memory wait for the next tensor, for the life of this process.

    By default glibc hands freed blocks of many megabytes back to the kernel, which gives them out again page by page,
    filled with zeros: a fifth of the CPU's time in training steps of large activations. Blocks above 32 MiB still go
    back, so that what tensors of many sizes leave does not add up. Returns whether the C library took it: others than
    glibc have no such settings, and are left alone.
    """
    set_option = _of_c_library("mallopt")
    return set_option is not None and bool(
        set_option(_M_MMAP_THRESHOLD, _LARGEST) and set_option(_M_TRIM_THRESHOLD, _KEPT)
    )


def give_back_freed_memory() -> None:
    """Hand what waits back to the kernel, where the C library is glibc."""
    if (trim := _of_c_library("malloc_trim")) is not None:
        trim(0)


def _of_c_library(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, TypeError, AttributeError):
        return None
