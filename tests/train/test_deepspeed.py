"""DeepSpeed in two processes of the CPU: the weights of one process by ZeRO 2 and 3, and a run that goes on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.several import largest_difference, train
from tests.train.test_several_processes import CASES, Case, run
from train.strategies import DeepSpeed

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow
ON_CPU = [
    "trainer=deepspeed", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.precision=32-true",
    "trainer.strategy._target_=tests.helpers.deepspeed_cpu.DeepSpeedOnCPU",
]  # fmt: skip
NEAR = {"eagle": 1e-5, "eagle3": 1e-4, "mtp": 1e-4}  # how near weights are: DeepSpeed has no float64
TRAINED = [("eagle", 2), ("eagle", 3), ("eagle3", 2), ("eagle3", 3), ("mtp", 3)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, Any]], Path]:
    """What stages 2 and 3 leave; the last is stopped half-way, and goes on."""
    folder = tmp_path_factory.mktemp("deepspeed")
    patch = pytest.MonkeyPatch()
    patch.setenv("DS_ACCELERATOR", "cpu")
    # It compiles something at its first start, and where that was killed its lock stays.
    patch.setenv("TORCH_EXTENSIONS_DIR", os.environ.get("TORCH_EXTENSIONS_DIR") or str(folder / "extensions"))
    cases = {f"{name}-{stage}": [*CASES[name], *ON_CPU, f"trainer.strategy.stage={stage}"] for name, stage in TRAINED}
    listed: list[Case] = [(folder / name, case, None) for name, case in cases.items()]
    for stage in (2, 3):
        listed += [(folder / f"stopped-{stage}", cases[f"eagle3-{stage}"], stop) for stop in (10, None)]
    made = run(listed)
    patch.undo()
    return made, folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one process leaves, in float32."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: train([*CASES[name], "trainer=cpu"], folder / name) for name in NEAR}


@pytest.mark.parametrize(("name", "stage"), TRAINED)
def test_zero_trains_as_one_process_does(
    name: str, stage: int, found: tuple[dict[str, dict[str, Any]], Path], alone: dict[str, dict[str, Any]]
) -> None:
    """AdamW makes the most of a rounded gradient near 0, up to its learning rate, which is 1e-3 here."""
    ours = found[0][f"{name}-{stage}"]
    assert largest_difference(ours["weights"], alone[name]["weights"]) < NEAR[name]
    assert ours["metrics"].keys() == alone[name]["metrics"].keys()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_goes_on_with_as_many_processes(stage: int, found: tuple[dict[str, dict[str, Any]], Path]) -> None:
    made, folder = found
    assert largest_difference(made[f"stopped-{stage}"]["weights"], made[f"eagle3-{stage}"]["weights"]) == 0
    assert sorted(p.name for p in (folder / f"stopped-{stage}" / "checkpoints").iterdir()) == [
        "best.safetensors", "last.ckpt",
    ]  # fmt: skip


def test_the_optimizers_states_can_be_offloaded() -> None:
    """DeepSpeed refuses that for optimizers of others otherwise."""
    config: Any = DeepSpeed(offload_optimizer=True).config
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert config["zero_force_ds_cpu_optimizer"] is False
