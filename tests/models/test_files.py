"""A folder that one process works in is closed to others, for as long as that lives; what it left half done is seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conf.compose import ROOT
from models.errors import UserError
from models.files import alone_in, clear_leftovers, damaged_files, tensors_sha256, write_hashes

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


def test_what_a_killed_process_has_left_half_written_is_deleted(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in (f".a.json.{ended.pid}.tmp", f".b.json.{os.getpid()}.tmp", ".hidden.tmp", "c.tmp"):
        (tmp_path / name).write_text("half")
    for name in (f".export.{ended.pid}.tmp", f".export.{ended.pid}.old", f".other.{ended.pid}.old", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / f".current.{ended.pid}.tmp").symlink_to("other")
    clear_leftovers(tmp_path)
    left = {".b.json." + f"{os.getpid()}.tmp", ".hidden.tmp", "c.tmp", "export", "other"}
    assert {path.name for path in tmp_path.iterdir()} == left
    assert (tmp_path / "export" / "file").read_text().endswith(".old")  # it was to be replaced, and never was
    assert (tmp_path / "other" / "file").read_text() == "other"
    clear_leftovers(tmp_path / "none")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("a", "inner/b", "c"):
        (tmp_path / name).write_text(f"content of {name}")
    assert damaged_files(tmp_path) == []  # nothing is known of them
    write_hashes(tmp_path)
    assert damaged_files(tmp_path) == []
    (tmp_path / "inner" / "b").write_text("Content of inner/b")
    (tmp_path / "c").unlink()
    assert damaged_files(tmp_path) == ["c", "inner/b"]
    (tmp_path / "sha256.json").write_text("{")
    assert damaged_files(tmp_path) == ["sha256.json"]


def test_tensors_have_one_hash_for_names_types_shapes_and_values() -> None:
    tensors = {"a": torch.arange(6.0), "b": torch.tensor(2)}
    others = [
        {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(2)}, {"a": torch.arange(6.0), "c": torch.tensor(2)},
        {"a": torch.arange(6.0), "b": torch.tensor(2.0)}, {"a": -torch.arange(6.0), "b": torch.tensor(2)},
    ]  # fmt: skip
    known = tensors_sha256(tensors)
    assert tensors_sha256({"b": torch.tensor(2), "a": torch.arange(12.0).view(6, 2)[:, 0] / 2}) == known
    assert known not in map(tensors_sha256, others)


@pytest.mark.parametrize(("size", "said"), [(0, "allows no file of that size"), (None, "the disk is full")])
def test_a_disk_that_refuses_is_one_sentence(size: int | None, said: str, tmp_path: Path) -> None:
    """In a process of its own, whose files may not grow, or which writes to a device that is always full."""
    script = f"""
import resource
from pathlib import Path
from models.errors import UserError
from models.files import explain_disk_errors, write_tensors
import torch
if {size is not None}:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
try:
    if {size is not None}:
        write_tensors(Path({str(tmp_path / "a")!r}), {{"a": torch.ones(1000)}})
    with explain_disk_errors(Path("/dev/full")):
        Path("/dev/full").write_text("some")
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert said in done.stdout and "start again" in done.stdout
    assert not list(tmp_path.iterdir())
