"""The memory that a training took, and not what came before it."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from train.callbacks import _forget_peak_memory, _peak_memory_bytes


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system keeps one peak for a process's whole life")
def test_the_peak_is_that_since_it_was_forgotten() -> None:
    before = _peak_memory_bytes()
    large = np.ones(300_000_000, dtype=np.uint8)
    assert _peak_memory_bytes() > before + 200_000_000 or before > 600_000_000
    grown = _peak_memory_bytes()
    del large
    _forget_peak_memory()
    assert _peak_memory_bytes() < grown - 200_000_000
