"""A folder that one process works in is closed to others, for as long as that lives."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conf.compose import ROOT
from models.errors import UserError
from models.files import alone_in

HOLD = """
import sys, time
from pathlib import Path
from models.files import alone_in
with alone_in(Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(60)
"""


def test_another_process_is_kept_out_until_the_first_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], cwd=ROOT.parent, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "in\n"
    try:
        with pytest.raises(UserError, match="Another process is at work in"), alone_in(folder):
            raise AssertionError("let in")
        with alone_in(folder.with_name("other")):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate(timeout=60)
    for _ in range(2):  # a lock is not left behind, neither by a kill nor by an end
        with alone_in(folder):
            assert not folder.exists()
