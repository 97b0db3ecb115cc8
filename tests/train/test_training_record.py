"""What a training took: its seconds, tokens and memory, and not those of what came before or in between."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from train.callbacks import TrainingRecord, _forget_peak_memory, _peak_memory_bytes

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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_seconds_are_those_of_batches_once_all_that_they_started_is_done(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, a batch's second has passed when it has been waited for; loading and measuring are not counted."""
    now, ready = [100.0], [0.0]

    def synchronize(which: torch.device) -> None:
        assert which == torch.device(device)
        now[0] = max(now[0], ready[0])

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    module: Any = SimpleNamespace(device=torch.device(device))
    trainer: Any = SimpleNamespace(global_step=3)
    record = TrainingRecord(tmp_path / "training.json")
    for lengths in ([3, 5], [4, 4], [1, 7]):
        record.on_train_batch_start()
        if device == "cuda":
            ready[0], now[0] = now[0] + 1.0, now[0] + 0.01
        else:
            now[0] += 1.0
        record.on_train_batch_end(trainer, module, None, SimpleNamespace(lengths=torch.tensor(lengths)))
        now[0] += 50.0
    record.on_train_end(trainer, module)
    found = json.loads((tmp_path / "training.json").read_text())
    assert (found["steps"], found["tokens"]) == (3, 24)
    assert found["seconds"] == pytest.approx(3.0) and found["tokens_per_s"] == pytest.approx(8.0)


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
