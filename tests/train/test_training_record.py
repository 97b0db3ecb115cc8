"""The memory that a training took, and not what came before it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from train.callbacks import _forget_peak_memory, _peak_memory_bytes

_OF_MANY_BLOCKS = """
import numpy as np
from models.allocator import keep_freed_memory
from train.callbacks import _forget_peak_memory, _peak_memory_bytes
keep_freed_memory()
blocks = [np.ones(20_000_000, dtype=np.uint8) for _ in range(20)]
grown = _peak_memory_bytes()
del blocks
_forget_peak_memory()
print(grown - _peak_memory_bytes())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system keeps one peak for a process's whole life")
def test_the_peak_is_that_since_it_was_forgotten() -> None:
    before = _peak_memory_bytes()
    large = np.ones(300_000_000, dtype=np.uint8)
    assert _peak_memory_bytes() > before + 200_000_000 or before > 600_000_000
    grown = _peak_memory_bytes()
    del large
    _forget_peak_memory()
    assert _peak_memory_bytes() < grown - 200_000_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system keeps one peak for a process's whole life")
def test_freed_memory_that_waits_for_the_next_tensor_is_not_counted() -> None:
    found = subprocess.run([sys.executable, "-c", _OF_MANY_BLOCKS], capture_output=True, text=True, check=True)
    assert int(found.stdout) > 350_000_000
