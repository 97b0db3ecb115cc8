"""Freed memory is used again, without the kernel's help."""

import subprocess
import sys

import pytest

_COUNT = """
import resource, torch
from models.allocator import keep_freed_memory
kept = {keep} and keep_freed_memory()
def work():
    held = [torch.ones(1 + number % 5, 1_000_000) for number in range(20)]
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(keep: bool) -> tuple[bool, int]:
    command = [sys.executable, "-c", _COUNT.format(keep=keep)]
    kept, count = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return kept == "1", int(count)


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted on Linux")
def test_large_tensors_are_made_without_page_faults():
    kept, with_memory = _faults(keep=True)
    if not kept:
        pytest.skip("this C library has no mallopt")
    _, without = _faults(keep=False)
    assert with_memory < without / 3
