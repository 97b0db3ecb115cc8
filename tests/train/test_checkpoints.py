"""Damage to checkpoints is found, byte by byte, and what is whole is gone on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from models.errors import UserError
from train.callbacks import AtomicCheckpoints
from train.checkpoints import load, previous, read_kept, resume_point, write_kept


def checkpoint(step: int) -> dict[str, Any]:
    return {"global_step": step, "weights": torch.arange(40.0) + step, "name": "some", "none": None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The last of two checkpoints, of steps 1 and 2."""
    path = tmp_path / "checkpoints" / "last.ckpt"
    for step in (1, 2):
        AtomicCheckpoints().save_checkpoint(checkpoint(step), path)
    return path


def test_the_last_two_checkpoints_are_kept(path: Path) -> None:
    assert [load(place)["global_step"] for place in (path, previous(path))] == [2, 1]
    assert sorted(p.name for p in path.parent.iterdir()) == ["last.ckpt", "previous-last.ckpt"]
    assert resume_point(path) == (path, 2)
    path.rename(path.with_name("moved"))  # a kill between two names
    assert resume_point(path) == (previous(path), 1)
    assert resume_point(path.with_name("none")) == (None, 0)


def test_every_byte_that_counts_is_checked(path: Path) -> None:
    """A flipped bit anywhere is found, or changes nothing of what is loaded."""
    whole, found = path.read_bytes(), 0
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            loaded = load(path)
        except UserError as error:
            assert str(error).startswith(f"{str(path)!r} is damaged: ")
            found += 1
            continue
        assert loaded.keys() == checkpoint(2).keys() and torch.equal(loaded["weights"], checkpoint(2)["weights"])
        assert (loaded["global_step"], loaded["name"], loaded["none"]) == (2, "some", None)
    assert found > 20  # most of so small an archive is names, dates and padding


@pytest.mark.parametrize("size", [0, 1, 500, -1])
def test_a_checkpoint_that_was_cut_gives_way_to_the_one_before(
    size: int, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_bytes(path.read_bytes()[:size])
    assert resume_point(path) == (previous(path), 1)
    told = capsys.readouterr().out
    assert "last.ckpt' is damaged" in told and "goes on from step 1" in told
    previous(path).write_bytes(b"")
    with pytest.raises(UserError, match=r"previous-last\.ckpt.*delete the folder '.*checkpoints', and the same"):
        resume_point(path)


def test_kept_tensors_have_a_checksum(tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3), "c": torch.ones(5, dtype=torch.bfloat16)}
    write_kept(path, tensors)
    found = read_kept(path)
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], t) for name, t in tensors.items())
    whole = path.read_bytes()
    for place in [*range(8, len(whole), 5), len(whole) - 1]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match=r"Delete the folder"):
            read_kept(path)
    path.unlink()
    with pytest.raises(UserError, match=r"is missing\. Delete the folder"):
        read_kept(path)
