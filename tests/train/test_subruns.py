"""Runs in processes of their own: one signal ends both, and a budget in minutes is kept by a run that has begun."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from models.errors import UserError
from train.subruns import ROOT, budget, check_begun

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


def begin(folder: Path, run_name: str, **drafter: Any) -> None:
    """As a run does that has begun with 123 steps."""
    (folder / run_name).mkdir()
    config = {"fit": {"max_steps": 123}, "drafter": {"training": {}} | drafter}
    (folder / run_name / "config.json").write_text(json.dumps({"config": config}))


def test_a_run_that_has_begun_keeps_its_budget(tmp_path: Path) -> None:
    begin(tmp_path, "mine")
    assert budget(5.0, "eagle", [], tmp_path, "mine", tmp_path) == ["fit.max_steps=123"]
    check_begun(tmp_path, ["mine", "another"], 5, "minutes")
    begin(tmp_path, "without")
    assert budget(None, "eagle", [], tmp_path, "without", tmp_path) == []
    check_begun(tmp_path, ["without"], None, "minutes")


def test_a_run_that_has_begun_gets_no_other_budget(tmp_path: Path) -> None:
    """Whether the number of minutes changes, or there were none, or there are none now."""
    for run_name, minutes in (("mine", 5), ("without", None)):
        begin(tmp_path, run_name)
        budget(minutes, "eagle", [], tmp_path, run_name, tmp_path)
    for run_name, minutes, before in (("mine", 30, "5"), ("mine", None, "5"), ("without", 5, "null")):
        with pytest.raises(UserError, match=rf"{run_name}' has begun with compare\.minutes={before}, which "):
            check_begun(tmp_path, ["another", run_name], minutes, "compare.minutes")
    begin(tmp_path, "lookup", training=None)
    check_begun(tmp_path, ["lookup"], 5, "compare.minutes")


def test_a_run_that_never_began_takes_another_budget(tmp_path: Path) -> None:
    [probe] = {path.parent for path in _probe(tmp_path)}
    (probe / "training.json").write_text(json.dumps({"steps": 12, "seconds": 6.0}))
    for minutes in (0.5, 2):
        check_begun(tmp_path, ["mine"], minutes, "minutes")
        assert budget(minutes, "eagle", ["seed=1"], tmp_path, "mine", tmp_path) == [f"fit.max_steps={120 * minutes:g}"]
    begin(tmp_path, "mine")
    check_begun(tmp_path, ["mine"], 2, "minutes")
    with pytest.raises(UserError, match="begun with minutes=2"):
        check_begun(tmp_path, ["mine"], 0.5, "minutes")


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
