"""Two processes of the CPU train as one does on the same batches: weights, metrics, checkpoints; by DDP and FSDP2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.compose import ROOT as CONF
from tests.helpers.several import largest_difference, tensors_of, train, written

ROOT = CONF.parent
CASES = {
    "eagle": ["+drafter=eagle"],
    "eagle3": ["+drafter=eagle3", "draft_vocab_size=512", "trainer.accumulate_grad_batches=2"],
    "mtp": [
        "+drafter=mtp", "drafter.training.projection=true", "drafter.training.weights.by=gradnorm",
        "drafter.training.num_steps=3",
    ],
    "parallel": ["+drafter=mtp_parallel"],
    "dspark": ["+drafter=dspark", "drafter.training.num_anchors=6"],
    "on_policy": ["+drafter=distilled_lm", "drafter.training.on_policy_ratio=0.5", "drafter.training.refresh_every=6"],
    "medusa2": ["+drafter=medusa2"],
}  # fmt: skip
EXACT = ["target.dtype=float64", "trainer.precision=32-true"]  # which leaves the weights as they are
DDP = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
FSDP = ["trainer=fsdp", "trainer.accelerator=cpu", "trainer.devices=2"]
RESUMED = ("eagle3", "mtp")  # with parameters in two groups, and with states of their own
Found = dict[str, dict[str, Any]]
pytestmark = pytest.mark.slow


def run(cases: dict[Path, list[str]], stopped: list[Path]) -> Found:
    """What two processes leave in the cases' folders, one after the other; of `stopped` they do half."""
    listed = [{"overrides": case, "folder": str(folder), "stop": folder in stopped} for folder, case in cases.items()]
    for folder in cases:
        folder.mkdir(parents=True, exist_ok=True)
    told = next(iter(cases)).parent / "cases.json"
    told.write_text(json.dumps(listed))
    command = [sys.executable, "-m", "tests.helpers.several", str(told)]
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return {folder.name: written(folder) for folder in cases}


def single(name: str) -> list[str]:
    return [*CASES[name], "trainer=cpu", *EXACT]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Path]:
    """What one process leaves, in float64, and where."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: train(single(name), folder / name) for name in CASES}, folder


def several(trainer: list[str], names: list[str], folder: Path) -> Found:
    """What two processes leave; of what is resumed one process does the first half, or the second."""
    for name in RESUMED:
        train(single(name), folder / f"one-two-{name}", stop=True)
    cases = {folder / name: [*CASES[name], *trainer, *EXACT] for name in names}
    resumed = {folder / f"{how}-{name}": cases[folder / name] for how in ("one-two", "two-one") for name in RESUMED}
    found = run(cases | resumed, [folder / f"two-one-{name}" for name in RESUMED])
    return found | {f"two-one-{name}": train(single(name), folder / f"two-one-{name}") for name in RESUMED}


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Path]:
    folder = tmp_path_factory.mktemp("ddp")
    return several(DDP, list(CASES), folder), folder


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Path]:
    """One of them with the target divided as well."""
    folder = tmp_path_factory.mktemp("fsdp")
    names = [name for name in CASES if name != "medusa2"]
    return several([*FSDP, "trainer.strategy.shard_target=false"], names, folder), folder


def check_equal(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert largest_difference(found["weights"], expected["weights"]) < tolerance
    assert found["score"] == expected["score"]
    assert found["metrics"].keys() == expected["metrics"].keys()
    for name, points in expected["metrics"].items():
        ours, theirs = (torch.tensor(p, dtype=torch.float64) for p in (found["metrics"][name], points))
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", CASES)
def test_ddp_trains_every_family_as_one_process_does(
    name: str, alone: tuple[Found, Path], ddp: tuple[Found, Path]
) -> None:
    check_equal(ddp[0][name], alone[0][name], 1e-8)


@pytest.mark.parametrize("name", [name for name in CASES if name != "medusa2"])
def test_fsdp_trains_every_family_as_one_process_does(
    name: str, alone: tuple[Found, Path], fsdp: tuple[Found, Path]
) -> None:
    check_equal(fsdp[0][name], alone[0][name], 1e-8)


@pytest.mark.parametrize("trainer", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("how", ["one-two", "two-one"])
def test_a_run_goes_on_with_another_number_of_processes(
    trainer: str, name: str, how: str, alone: tuple[Found, Path], request: pytest.FixtureRequest
) -> None:
    """Its last checkpoint is that of one process without a stop: weights, and the optimizer's states."""
    found, folder = request.getfixturevalue(trainer)
    ours, theirs = (tensors_of(at / "checkpoints" / "last.ckpt") for at in (folder / f"{how}-{name}", alone[1] / name))
    assert int(ours["step"]) == 20
    assert largest_difference(ours, theirs) < 1e-8
    assert largest_difference(found[f"{how}-{name}"]["weights"], alone[0][name]["weights"]) < 1e-8


def test_a_divided_target_changes_nothing(alone: tuple[Found, Path], tmp_path: Path) -> None:
    divided = [*CASES["eagle"], *FSDP, *EXACT, "trainer.strategy.shard_target=true", "fit.hidden_states=online"]
    check_equal(run({tmp_path / "eagle": divided}, [])["eagle"], alone[0]["eagle"], 1e-8)


def test_compiled_layers_train_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As graphs that torch traced forward and backward; without its code generator, which takes minutes."""
    compiled_by, traced = torch.nn.Module.compile, []

    def trace(layer: torch.nn.Module, **settings: Any) -> None:
        traced.append(layer)
        compiled_by(layer, backend="aot_eager", **settings)

    monkeypatch.setattr(torch.nn.Module, "compile", trace)
    shorter = ["+drafter=eagle", "trainer=cpu", "fit.max_steps=4"]
    plain, compiled = (train([*shorter, f"trainer.compile={on}"], tmp_path / on) for on in ("false", "true"))
    assert traced
    assert largest_difference(plain["weights"], compiled["weights"]) < 1e-5
