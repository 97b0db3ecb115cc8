"""A folder that one process works in is closed to others, for as long as that lives."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conf.compose import ROOT
from models.errors import UserError
from models.files import alone_in, remove_temporaries

HOLD = """
import sys, time
from pathlib import Path
from models.files import alone_in, remove_temporaries
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


def test_what_a_killed_process_left_half_written_goes(tmp_path: Path) -> None:
    (tmp_path / ".000001.4711.tmp").mkdir()
    (tmp_path / ".000001.4711.tmp" / "model.safetensors").write_text("")
    (tmp_path / ".000002.4711.old").mkdir()
    (tmp_path / ".00000007.safetensors.4711.tmp").write_text("")
    kept = [".gitignore", ".note.tmp", "records.4711.tmp", "00000007.safetensors"]
    for name in kept:
        (tmp_path / name).write_text("")
    (tmp_path / ".current.4711.tmp").symlink_to("00000007.safetensors")
    remove_temporaries(tmp_path, tmp_path / "nowhere")
    assert {path.name for path in tmp_path.iterdir()} == set(kept)
