"""What the C library does with memory that a large tensor leaves behind."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's malloc.h
_MOST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let freed memory wait for the next tensor, for the life of this process.

    By default glibc hands large freed blocks back to the kernel, which gives them out again page by page, filled with
    zeros: a quarter of the CPU's time in training steps of large activations. What a process has ever held at once
    stays its own. Returns whether the C library took it: others than glibc have no such settings, and are left alone.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return False
    return bool(set_option(_M_MMAP_MAX, 0) and set_option(_M_TRIM_THRESHOLD, _MOST))
