"""The command as a user runs it, on the bundled target: killed without warning, started again, compared, merged."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from models.checkpoint import native
from models.target import Target, load_target
from tests.helpers.adaptation import equal, tiny_export
from train.checkpoints import load

ROOT = Path(__file__).parents[3]
SMALL = [
    "adaptation.requests=18",
    "decode.max_new_tokens=12",
    "adaptation.guard.num_prompts=2",
    "adaptation.updates.every=3",
    "adaptation.updates.steps=1",
    "adaptation.updates.requests=2",
    "adaptation.updates.wait=0",
    "adaptation.buffer.capacity=6",
]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("tiny")


@pytest.fixture(scope="module")
def export(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_export(target, tmp_path_factory.mktemp("drafter") / "export")


def start(*arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def rows_of(folder: Path) -> list[dict[str, str]]:
    clock = ("seconds", "update_s", "guard_s")
    with (folder / "timeline.csv").open() as file:
        return [{k: v for k, v in row.items() if k not in clock} for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_session_ends_as_an_undisturbed_one(export: Path, target: Target, tmp_path: Path) -> None:
    def command(name: str) -> list[str]:
        return ["train/adapt.py", f"export={export}", f"output={tmp_path / name}", "stream=shift", *SMALL]

    output = finish(start(*command("whole")))
    assert "answers identical to the frozen drafter's: 18 of 18" in output
    for least in (2, 8, 13):  # requests that were served when the kill comes
        process = start(*command("killed"))
        records = tmp_path / "killed" / "records"
        deadline = time.monotonic() + 600
        while not any(int(path.stem) >= least for path in records.glob("*.safetensors")):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
    finish(start(*command("killed")))
    whole, killed = (tmp_path / name for name in ("whole", "killed"))
    assert rows_of(killed) == rows_of(whole) and len(rows_of(whole)) == 18
    drafters = [native.load(folder / "current", target).state_dict() for folder in (whole, killed)]
    assert equal(*drafters) and not equal(drafters[0], native.load(export, target).state_dict())
    states = [load(folder / "state.ckpt") for folder in (whole, killed)]
    for key in ("buffer", "fresh", "drift", "guard"):
        assert states[0][key] == states[1][key]
    for ours, theirs in zip(*(s["learner"]["optimizer"]["state"].values() for s in states), strict=True):
        assert all(torch.equal(torch.as_tensor(ours[k]), torch.as_tensor(theirs[k])) for k in ours)
    assert (killed / "timeline.png").stat().st_size > 10_000
    found = json.loads((killed / "adaptation.json").read_text())
    assert [entry["acceptance_rate"]["what"] for entry in found["compared"]][:2] == [
        "code, as served",
        "prose, as served",
    ]


@pytest.mark.slow
def test_two_nodes_are_merged(export: Path, target: Target, tmp_path: Path) -> None:
    for seed in (0, 1):
        finish(start("train/adapt.py", f"export={export}", f"output={tmp_path / str(seed)}", f"seed={seed}",
                     "adaptation.lora={rank: 2}", "adaptation.compare=false", *SMALL))  # fmt: skip
    newest = [max((tmp_path / str(seed) / "deltas").iterdir()) for seed in (0, 1)]
    output = tmp_path / "merged"
    finish(start("train/merge.py", f"export={export}", f"deltas=[{newest[0]},{newest[1]}]", f"output={output}"))
    base, merged = (native.load(folder, target).state_dict() for folder in (export, output))
    nodes = [native.load(tmp_path / str(seed) / "current", target).state_dict() for seed in (0, 1)]
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, (nodes[0][name] + nodes[1][name]) / 2, atol=1e-6, rtol=1e-5)
    assert not equal(base, merged)
    other = start("train/merge.py", f"export={output}", f"deltas=[{newest[0]}]", f"output={tmp_path / 'wrong'}")
    assert "not learnt from" in other.communicate(timeout=120)[0] and other.returncode == 2


@pytest.mark.slow
def test_a_run_trains_then_adapts(tmp_path: Path) -> None:
    trained = ["run_name=run", "data.sizes.train=32", "data.sizes.validation=4", "data.sizes.test=4",
               "data.answers.max_new_tokens=16", "fit.max_steps=10", "fit.evaluate_every=10",
               "fit.validation_prompts=2", "measure.num_prompts=2", "measure.temperatures=[0]"]  # fmt: skip
    command = ["train/run.py", "+drafter=medusa", "+adaptation=replay", f"output_root={tmp_path}", *trained, *SMALL]
    output = finish(start(*command))
    assert "Frozen and adapted drafter on the same requests" in output
    assert "answers identical to the frozen drafter's: 18 of 18" in output
    assert len(rows_of(tmp_path / "run" / "adapted-shift")) == 18
    again = finish(start(*command))  # nothing is trained or served twice
    assert "this run is finished" in again and "18 requests of shift, 18 of them served before" in again


@pytest.mark.slow
def test_a_start_is_learnt_over_domains(export: Path, target: Target, tmp_path: Path) -> None:
    sizes = ["adaptation.requests=24", "decode.max_new_tokens=12", "requests=6", "batch=2", "meta.outer_steps=4"]
    command = ["train/meta.py", f"export={export}", f"output={tmp_path / 'start'}", "meta.inner_steps=1", *sizes]
    output = finish(start(*command))
    assert "code: loss after 1 steps" in output and "prose: loss after 1 steps" in output
    learnt = native.load(tmp_path / "start", target).state_dict()
    assert not equal(learnt, native.load(export, target).state_dict())
    assert native.read(tmp_path / "start").provenance["adaptation"]["domains"] == ["code", "prose"]
