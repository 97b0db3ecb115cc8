"""The main job as a user runs it: killed without warning, started again, finished; and measured from its export."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.checkpoint import native

ROOT = Path(__file__).parents[2]
SMALL = [
    "run_name=run",
    "data.sizes.train=48",
    "data.sizes.validation=4",
    "data.sizes.test=4",
    "data.answers.max_new_tokens=32",
    "data.answers.chunk_size=8",
    "fit.max_steps=60",
    "fit.checkpoint_every=5",
    "fit.evaluate_every=20",
    "fit.validation_prompts=4",
    "decode.max_new_tokens=32",
    "measure.num_prompts=3",
]


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def kill_when(process: subprocess.Popen[str], condition: Callable[[], bool], with_signal: int = signal.SIGKILL) -> int:
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, f"ended before it could be killed:\n{process.communicate()[0]}"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(with_signal)
    process.communicate(timeout=60)
    return process.returncode


def lines_of(root: Path) -> int:
    return sum(len(log.read_bytes().splitlines()) for log in root.glob("data/answers-*/answers.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle", "medusa2"])
def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(drafter: str, tmp_path: Path) -> None:
    """Medusa-2 is killed beside the frozen target, and terminated while that is trained too."""
    undisturbed, killed = tmp_path / "a", tmp_path / "b"
    output = finish(start("train/run.py", f"+drafter={drafter}", *SMALL, f"output_root={undisturbed}"))
    assert "greedy output identical to plain decoding on 3 of 3 prompts" in output
    assert "as before the export" in output

    again = ["train/run.py", f"+drafter={drafter}", *SMALL, f"output_root={killed}"]
    assert kill_when(start(*again), lambda: lines_of(killed) >= 2) == -signal.SIGKILL
    assert 2 <= lines_of(killed) < 6
    last = killed / "run" / "checkpoints" / "last.ckpt"
    assert kill_when(start(*again), last.exists) == -signal.SIGKILL
    assert kill_when(start(*again), lambda: last_step(last) >= 25, signal.SIGTERM) != 0
    assert 25 <= last_step(last) < 60
    finish(start(*again))
    names = ["export/model.safetensors", "checkpoints/best.safetensors"]
    names += ["export/target/model.safetensors"] if (undisturbed / "run" / "export" / "target").exists() else []
    assert (len(names) == 3) == (drafter == "medusa2")
    for name in names:
        ours, theirs = (native.read_tensors(root / "run" / name) for root in (killed, undisturbed))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)

    check_the_runs_folder(undisturbed / "run")
    check_acceptance_of_the_export(undisturbed / "run" / "export", tmp_path / "measured")


def last_step(checkpoint: Path) -> int:
    if not checkpoint.exists():
        return 0
    return int(torch.load(checkpoint, weights_only=True)["global_step"])


def check_the_runs_folder(run: Path) -> None:
    recorded = json.loads((run / "config.json").read_text())
    assert recorded["config"]["fit"]["max_steps"] == 60
    assert recorded["provenance"]["versions"]["torch"] == torch.__version__
    report = json.loads((run / "acceptance.json").read_text())
    assert [r["temperature"] for r in report["results"]] == [0, 1]
    assert all(1 <= r["block_efficiency"] <= 5 for r in report["results"])
    assert (run / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    card = (run / "export" / "README.md").read_text()
    assert f"{report['results'][0]['block_efficiency']:.3f}" in card
    metrics = (run / "metrics" / "version_0" / "metrics.csv").read_text()
    assert "val/block_efficiency" in metrics.splitlines()[0]


def check_acceptance_of_the_export(export: Path, folder: Path) -> None:
    arguments = [
        f"export={export}",
        f"output={folder}",
        "num_prompts=3",
        "temperatures=[0]",
        "decode.max_new_tokens=32",
    ]
    output = finish(start("eval/acceptance.py", *arguments))
    (result,) = json.loads((folder / "acceptance.json").read_text())["results"]
    assert result["identical_to_plain"] == result["prompts"] == 3
    assert f"{result['block_efficiency']:.3f}" in output
    stored = json.loads((export.parent / "acceptance.json").read_text())["results"][0]
    assert result["num_speculative_tokens"] == stored["num_speculative_tokens"] == 4
