"""Runs in processes of their own: one signal ends both, and a budget in minutes is kept by a run that has begun."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from train.subruns import ROOT, budget

PARENT = """
import sys
from train.subruns import finished
try:
    finished([sys.executable, "-c", sys.argv[1], sys.argv[2]])
except KeyboardInterrupt:
    print("interrupted")
"""
CHILD = """
import signal, sys, time
from pathlib import Path
def end(*_):
    time.sleep(0.5)
    Path(sys.argv[1]).write_text("ended")
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
Path(sys.argv[1]).write_text("running")
time.sleep(60)
"""


def test_a_child_is_ended_and_waited_for(tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = [sys.executable, "-c", PARENT, CHILD, str(told)]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not told.exists() or told.read_text() != "running":
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(signal.SIGTERM)
    output, _ = parent.communicate(timeout=60)
    assert output == "interrupted\n" and told.read_text() == "ended"


def test_a_run_that_has_begun_keeps_its_budget(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps({"config": {"fit": {"max_steps": 123}}}))
    assert budget(5.0, "eagle", [], tmp_path, "mine", tmp_path) == ["fit.max_steps=123"]
    assert budget(None, "eagle", [], tmp_path, "mine", tmp_path) == []


def test_a_budget_in_minutes_is_the_pace_of_a_short_run(tmp_path: Path) -> None:
    [probe] = {path.parent for path in _probe(tmp_path)}
    (probe / "training.json").write_text(json.dumps({"steps": 12, "seconds": 6.0}))
    assert budget(0.5, "eagle", ["seed=1"], tmp_path, "mine", tmp_path) == ["fit.max_steps=60"]


def _probe(folder: Path) -> list[Path]:
    """Where the short run of these settings would be, as if it had begun."""
    import hashlib

    asked = hashlib.sha256(json.dumps(["seed=1"]).encode()).hexdigest()[:8]
    place = folder / "probes" / f"eagle-{asked}"
    place.mkdir(parents=True)
    return [place / "training.json"]
