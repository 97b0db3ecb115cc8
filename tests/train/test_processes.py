"""What several processes add up and draw, against one process that has all rows; the others' end; what is refused."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from conf.compose import ROOT as CONF
from conf.compose import composed
from models.errors import UserError
from train import processes
from train.settings import run_folder
from train.strategies import DeepSpeed
from train.trainer import check_place, resume_point_of

ROOT = CONF.parent
CPU = ["+drafter=eagle", "trainer.accelerator=cpu"]


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, count: int, others: torch.Tensor | None = None) -> None:
    """Let this process be one of several, to whose sums the others add `others`."""
    monkeypatch.setattr(processes, "rank", lambda: rank)
    monkeypatch.setattr(processes, "count", lambda: count)
    if others is not None:
        monkeypatch.setattr(processes.dist, "all_reduce", lambda tensor: tensor.add_(others))


def test_each_draws_what_one_process_would_for_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = torch.rand((6, 5), generator=torch.Generator().manual_seed(3))
    parts = []
    for rank in range(3):
        as_rank(monkeypatch, rank, 3)
        parts.append(processes.drawn_for_all((2, 5), torch.Generator().manual_seed(3)))
    assert torch.equal(torch.stack(parts, dim=1).flatten(0, 1), expected)


def test_a_mean_of_sums_over_shares_is_the_mean_over_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (processes.share(0), processes.share(5)) == (1, 5)
    sums, numbers = (7.0, 2.0), (3, 1)
    shares = []
    for rank in range(2):
        as_rank(monkeypatch, rank, 2, torch.tensor(numbers[1 - rank]))
        shares.append(processes.share(numbers[rank]))
    assert sum(s / share for s, share in zip(sums, shares, strict=True)) / 2 == sum(sums) / sum(numbers)
    as_rank(monkeypatch, 0, 2, torch.tensor([2, 0]))
    assert torch.equal(processes.share(torch.tensor([3, 0])), torch.tensor([2.5, 0.5]))
    as_rank(monkeypatch, 0, 2, torch.tensor(0))
    assert processes.share(0) == 0.5  # nothing to learn anywhere: nothing is divided by 0


def test_means_leave_out_what_no_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 0, 2, torch.tensor([1.0, 1.0, 3.0]))
    found = processes.means([torch.tensor([[1.0, 3.0]]), None, torch.tensor(5.0)])
    assert found[1] is None
    assert torch.equal(found[0], torch.tensor([[1.0, 2.0]])) and torch.equal(found[2], torch.tensor(4.0))


_WAITS = """
import sys, threading, time
sys.path.insert(0, {root!r})
import os
from train.processes import _end_with
threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """Even where that one is killed."""
    (tmp_path / "waits.py").write_text(_WAITS.format(root=str(ROOT)))
    start = f"import subprocess, sys; subprocess.run([sys.executable, {str(tmp_path / 'waits.py')!r}])"
    parent = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = Path("/proc") / parent.stdout.readline().strip()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while child.exists() and "\nState:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    parent.stdout.close()


def test_the_number_of_processes_makes_no_other_run() -> None:
    one, ddp, two = (
        run_folder(composed("train", [*CPU, *more]))
        for more in ([], ["trainer=ddp"], ["trainer=ddp", "trainer.devices=2", "trainer.compile=true"])
    )
    assert one == ddp == two
    assert run_folder(composed("train", [*CPU, "trainer.gradient_clip_val=1.0"])) != one


def test_deepspeed_is_refused_without_its_package_or_cuda() -> None:
    options = composed("train", [*CPU, "trainer=deepspeed"])
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        told = r'pip install -e "\.\[deepspeed\]"'
    else:
        told = "trainer=deepspeed needs CUDA devices, and trainer.accelerator is cpu: use trainer=ddp"
    with pytest.raises(UserError, match=told):
        check_place(options)


def test_a_divided_target_has_no_budget_for_cached_states() -> None:
    divided = [*CPU, "trainer=fsdp", "trainer.devices=2", "trainer.strategy.shard_target=true"]
    with pytest.raises(UserError, match=r"fit\.cache\.budget_gb lets a process compute hidden states again by itself"):
        check_place(composed("train", [*divided, "fit.cache.budget_gb=1"]))
    check_place(composed("train", [*divided, "fit.cache.budget_gb=1", "fit.hidden_states=online"]))


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "last.ckpt"
    assert resume_point_of(folder, tmp_path / "best", None) == (None, 0)
    folder.mkdir()
    with pytest.raises(UserError, match="was written by DeepSpeed"):
        resume_point_of(folder, tmp_path / "best", None)


def deepspeeds(folder: Path) -> Path:
    """A checkpoint as DeepSpeed leaves it."""
    (folder / "checkpoint").mkdir(parents=True)
    torch.save({"weights": torch.arange(100.0)}, folder / "checkpoint" / "states.pt")
    (folder / "steps.json").write_text('{"global_step": 7, "processes": 1}')
    return folder / "checkpoint" / "states.pt"


def test_deepspeeds_checkpoint_that_was_being_replaced_is_gone_on_from(tmp_path: Path) -> None:
    """Killed between two names, it is the one before."""
    deepspeeds(tmp_path / ".last.ckpt.old")
    last = tmp_path / "last.ckpt"
    assert resume_point_of(last, tmp_path / "best", DeepSpeed.__new__(DeepSpeed)) == (last, 7)


def test_deepspeeds_checkpoint_is_looked_through(tmp_path: Path) -> None:
    last, strategy = tmp_path / "last.ckpt", DeepSpeed.__new__(DeepSpeed)
    states = deepspeeds(last)
    content = states.read_bytes()
    place = content.index(torch.arange(100.0).numpy().tobytes()) + 40
    states.write_bytes(content[:place] + b"x" + content[place + 1 :])
    with pytest.raises(UserError, match=r"is damaged: .*states.pt.* is not what was written. Delete the folder"):
        resume_point_of(last, tmp_path / "best", strategy)
    states.write_bytes(content)
    assert resume_point_of(last, tmp_path / "best", strategy) == (last, 7)
    (last / "steps.json").unlink()
    with pytest.raises(UserError, match=r"is damaged: .*steps.json.* Delete the folder"):
        resume_point_of(last, tmp_path / "best", strategy)
