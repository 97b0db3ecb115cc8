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
    "mtp": [  # whose states are not all on the disk
        "+drafter=mtp", "drafter.training.projection=true", "drafter.training.weights.by=gradnorm",
        "drafter.training.num_steps=3", "fit.cache.rows_per_shard=2", "fit.cache.budget_gb=0.0005",
    ],
    "parallel": ["+drafter=mtp_parallel", "data.packing=true"],
    "dspark": [
        "+drafter=dspark", "drafter.training.num_anchors=6", "fit.cache.top_k=16", "fit.cache.dtype=int8",
        "fit.activation_checkpointing=true",
    ],
    "on_policy": ["+drafter=distilled_lm", "drafter.training.on_policy_ratio=0.5", "drafter.training.refresh_every=6"],
    "medusa2": ["+drafter=medusa2"],
}  # fmt: skip
STATES = ("cached", "online")
EXACT = ["target.dtype=float64", "trainer.precision=32-true"]  # which leaves the weights as they are
DDP = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
FSDP = ["trainer=fsdp", "trainer.accelerator=cpu", "trainer.devices=2"]
DIVIDED = ("eagle3", "mtp", "dspark", "on_policy")
RESUMED = ("eagle3", "mtp")  # with parameters in two groups, and with states of their own
Found = dict[str, dict[str, Any]]
Case = tuple[Path, list[str], int | None]  # a folder, overrides, and the step behind which it stops
pytestmark = pytest.mark.slow


def run(cases: list[Case]) -> Found:
    """What two processes leave in the cases' folders, one case after the other; some go on where others stopped."""
    listed = [{"folder": str(folder), "overrides": overrides, "stop": stop} for folder, overrides, stop in cases]
    folders = {folder for folder, *_ in cases}
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    told = cases[0][0].parent / "cases.json"
    told.write_text(json.dumps(listed))
    command = [sys.executable, "-m", "tests.helpers.several", str(told)]
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return {folder.name: written(folder) for folder in folders}


def single(name: str) -> list[str]:
    return [*CASES[name], "trainer=cpu", *EXACT]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Path]:
    """What one process leaves, in float64, and where."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: train(single(name), folder / name) for name in CASES}, folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Path]:
    """What two leave. What is resumed begins and ends with one process, and has DDP and FSDP in between."""
    folder = tmp_path_factory.mktemp("two")
    often = "fit.checkpoint_every=2"
    for name in RESUMED:
        train([*single(name), often], folder / f"resumed-{name}", stop=10)
    cases: list[Case] = [(folder / f"ddp-{name}", [*CASES[name], *DDP, *EXACT], None) for name in CASES]
    cases += [(folder / f"fsdp-{name}", [*CASES[name], *FSDP, *EXACT], None) for name in DIVIDED]
    divided = [*CASES["eagle"], *FSDP, *EXACT, "trainer.strategy.shard_target=true"]
    cases += [(folder / f"divided-{how}", [*divided, f"fit.hidden_states={how}"], None) for how in STATES]
    for name in RESUMED:
        place, same = folder / f"resumed-{name}", [*CASES[name], *EXACT, often]
        cases += [(place, [*same, *DDP], 14), (place, [*same, *FSDP], 18)]
    found = run(cases)
    return found | {f"resumed-{n}": train([*single(n), often], folder / f"resumed-{n}") for n in RESUMED}, folder


def check_equal(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert largest_difference(found["weights"], expected["weights"]) < tolerance
    assert found["score"] == expected["score"]
    assert found["metrics"].keys() == expected["metrics"].keys()
    for name, points in expected["metrics"].items():
        ours, theirs = (torch.tensor(p, dtype=torch.float64) for p in (found["metrics"][name], points))
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", CASES)
def test_ddp_trains_every_family_as_one_process_does(
    name: str, alone: tuple[Found, Path], two: tuple[Found, Path]
) -> None:
    check_equal(two[0][f"ddp-{name}"], alone[0][name], 1e-8)


@pytest.mark.parametrize("name", DIVIDED)
def test_fsdp_trains_as_one_process_does(name: str, alone: tuple[Found, Path], two: tuple[Found, Path]) -> None:
    """In the other families nothing of it is different."""
    check_equal(two[0][f"fsdp-{name}"], alone[0][name], 1e-8)


@pytest.mark.parametrize("how", STATES)
def test_a_divided_target_changes_nothing(how: str, alone: tuple[Found, Path], two: tuple[Found, Path]) -> None:
    """Its first pass of all is one of the engine, with cached states."""
    check_equal(two[0][f"divided-{how}"], alone[0]["eagle"], 1e-8)


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_with_another_number_of_processes(
    name: str, alone: tuple[Found, Path], two: tuple[Found, Path]
) -> None:
    """Its last checkpoint is that of one process without a stop: weights, and the optimizer's states."""
    ours, theirs = (
        tensors_of(folder / "checkpoints" / "last.ckpt") for folder in (two[1] / f"resumed-{name}", alone[1] / name)
    )
    assert int(ours["step"]) == 20
    assert largest_difference(ours, theirs) < 1e-8
    assert largest_difference(two[0][f"resumed-{name}"]["weights"], alone[0][name]["weights"]) < 1e-8


def test_compiled_layers_train_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As graphs that torch traced forward and backward; without its code generator, which takes minutes."""
    compiled_by, traced = torch.nn.Module.compile, []

    def trace(layer: torch.nn.Module, **settings: Any) -> None:
        traced.append(layer)
        compiled_by(layer, backend="aot_eager", **settings)

    monkeypatch.setattr(torch.nn.Module, "compile", trace)
    shorter = [
        "+drafter=eagle", "trainer=cpu", "fit.max_steps=2", "fit.validation_prompts=1", "decode.max_new_tokens=2",
    ]  # fmt: skip
    plain, compiled = (train([*shorter, f"trainer.compile={on}"], tmp_path / on) for on in ("false", "true"))
    assert traced
    assert largest_difference(plain["weights"], compiled["weights"]) < 1e-5
