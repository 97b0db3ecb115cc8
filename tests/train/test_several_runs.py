"""The main job in two processes as a user starts it: by itself, by torchrun's and SLURM's scripts; killed, refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from models.checkpoint import native
from tests.helpers.several import largest_difference
from tests.train.test_run import ROOT, SMALL, finish, kill_when, start

SHORT = [
    *SMALL, "fit.max_steps=20", "fit.evaluate_every=20", "data.sizes.train=16", "data.sizes.validation=2",
    "data.sizes.test=2", "fit.validation_prompts=2", "measure.num_prompts=2", "measure.temperatures=[0]",
]  # fmt: skip
TWO = ["trainer.accelerator=cpu", "trainer.devices=2"]
SRUN = """#!/bin/sh
# srun's part here: every task has its number
shift
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NODEID=0 "$@" &
done
wait
"""


def shell(script: str, *arguments: str, **variables: str) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    command = ["bash", str(ROOT / "scripts" / script), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def processes_of(text: str) -> list[int]:
    """Those whose command line holds `text`."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [int(place.parent.name)] if text in place.read_text() else []
        except OSError:
            continue
    return found


def weights(root: Path) -> dict[str, object]:
    return native.read_tensors(root / "run" / "export" / "model.safetensors")


@pytest.mark.slow
def test_two_processes_export_what_one_does(tmp_path: Path) -> None:
    """By torchrun's script with DDP; by this command alone with FSDP, killed, and to its end by SLURM's script."""
    one, ddp, fsdp = (tmp_path / name for name in ("one", "ddp", "fsdp"))
    # With 16 answers, the start fits their rows so well that their gradients are of the size of Adam's epsilon: from
    # step to step every rounding grows a hundredfold.
    exact = ["target.dtype=float64", "trainer.precision=32-true", "data.sizes.train=96"]
    common = ["+drafter=eagle3", *SHORT, *exact, f"data.folder={tmp_path / 'data'}"]
    finish(start("train/run.py", *common, "trainer=cpu", f"output_root={one}"))
    told = [shell("torchrun.sh", *common, "trainer=ddp", TWO[0], f"output_root={ddp}", PROCESSES="2")]
    divided = [*common, "trainer=fsdp", f"output_root={fsdp}"]
    last = fsdp / "run" / "checkpoints" / "last.ckpt"
    assert kill_when(start("train/run.py", *divided, *TWO), last.exists) == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while processes_of(f"output_root={fsdp}"):
        assert time.monotonic() < deadline, "the other process outlived the first"
        time.sleep(0.2)
    told.append(shell("slurm.sh", *divided, TWO[0], **by_srun(tmp_path)))
    assert [text.count("greedy output identical to plain decoding on 2 of 2 prompts") for text in told] == [1, 1]
    for root in (ddp, fsdp):
        assert largest_difference(weights(root), weights(one)) < 1e-5
        assert (root / "run" / "acceptance.json").exists() and (root / "run" / "training.json").exists()
    tokens = [json.loads((root / "run" / "training.json").read_text())["tokens"] for root in (one, ddp, fsdp)]
    assert len(set(tokens)) == 1
    assert "finished" in finish(start("train/run.py", *divided, *TWO))


def by_srun(folder: Path) -> dict[str, str]:
    """What SLURM tells a job of two tasks, and a double of srun in front of others."""
    (folder / "srun").write_text(SRUN)
    (folder / "srun").chmod(0o755)
    return {
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}", "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "draftsmith",
        "SLURM_NODELIST": "127.0.0.1", "SLURM_SUBMIT_DIR": str(ROOT),
    }  # fmt: skip


@pytest.mark.slow
def test_what_is_refused_is_said_once_and_all_end(tmp_path: Path) -> None:
    wrong = ["data=file", f"data.source.path={tmp_path / 'no.jsonl'}"]
    process = start("train/run.py", "+drafter=eagle", *SHORT, *wrong, "trainer=ddp", *TWO, f"output_root={tmp_path}")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 2
    assert output.count("error: Cannot read the prompt file") == output.count("error: ") == 1
    assert "Traceback" not in output


def test_without_a_gpu_the_gpu_check_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check.sh"), str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 3
    assert "torch finds no CUDA device: nothing was checked." in done.stdout
    assert not list(tmp_path.iterdir())
