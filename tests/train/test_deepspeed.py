"""DeepSpeed in two processes of the CPU: the weights of one process by ZeRO 2 and 3, and a run that goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.several import largest_difference, train
from tests.train.test_several_processes import CASES, run

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow
ON_CPU = [
    "trainer=deepspeed", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.precision=32-true",
    "trainer.strategy._target_=tests.helpers.deepspeed_cpu.DeepSpeedOnCPU",
]  # fmt: skip
NAMES = {"eagle": 1e-5, "eagle3": 1e-4, "mtp": 1e-4}  # and how near weights are: DeepSpeed has no float64


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, Any]], Path]:
    """What stages 2 and 3 leave; the last is stopped half-way, and goes on."""
    folder = tmp_path_factory.mktemp("deepspeed")
    patch = pytest.MonkeyPatch()
    patch.setenv("DS_ACCELERATOR", "cpu")
    # It compiles something at its first start, and where that was killed its lock stays.
    patch.setenv("TORCH_EXTENSIONS_DIR", os.environ.get("TORCH_EXTENSIONS_DIR") or str(folder / "extensions"))
    cases = {
        folder / f"{name}-{stage}": [*CASES[name], *ON_CPU, f"trainer.strategy.stage={stage}"]
        for name in NAMES
        for stage in (2, 3)
    }
    stopped = {folder / f"stopped-{stage}": cases[folder / f"eagle3-{stage}"] for stage in (2, 3)}
    made = run(cases | stopped, list(stopped))
    made |= run(stopped, [])
    patch.undo()
    return made, folder


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_zero_trains_as_one_process_does(
    name: str, stage: int, found: tuple[dict[str, dict[str, Any]], Path], tmp_path: Path
) -> None:
    """AdamW makes the most of a rounded gradient near 0, up to its learning rate, which is 1e-3 here."""
    expected = train([*CASES[name], "trainer=cpu"], tmp_path / name)
    ours = found[0][f"{name}-{stage}"]
    assert largest_difference(ours["weights"], expected["weights"]) < NAMES[name]
    assert ours["metrics"].keys() == expected["metrics"].keys()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_goes_on_with_as_many_processes(stage: int, found: tuple[dict[str, dict[str, Any]], Path]) -> None:
    made, folder = found
    assert largest_difference(made[f"stopped-{stage}"]["weights"], made[f"eagle3-{stage}"]["weights"]) == 0
    assert sorted(p.name for p in (folder / f"stopped-{stage}" / "checkpoints").iterdir()) == [
        "best.safetensors", "last.ckpt",
    ]  # fmt: skip
