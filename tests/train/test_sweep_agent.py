"""W&B's own `wandb sweep` and `wandb agent`, against a stand-in for its server: every parameter reaches Hydra."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from conf.compose import ROOT as CONF
from tests.helpers.wandb_server import sweep_server
from train.search_space import read

pytest.importorskip("wandb")


@pytest.mark.slow
def test_each_parameter_that_the_agent_is_given_is_in_the_runs_configuration(tmp_path: Path) -> None:
    """The sweep file as it is, but that runs only print their configuration (--cfg job)."""
    space = read(CONF / "sweep" / "eagle.yaml")
    trials = [{p.name: p.examples[i % len(p.examples)] for p in space.parameters} for i in range(2)]
    content = yaml.safe_load((CONF / "sweep" / "eagle.yaml").read_text())
    content["command"] += ["--cfg", "job"]
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(content))
    with sweep_server(trials) as server:
        environment = {
            **os.environ, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": "0" * 40, "WANDB_DIR": str(tmp_path),
            "WANDB_CONFIG_DIR": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path), "WANDB_ENTITY": "nobody",
            "WANDB_PROJECT": "sweeps", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip
        for command in (["sweep", str(tmp_path / "sweep.yaml")], ["agent", "nobody/sweeps/s1"]):
            done = subprocess.run(
                [sys.executable, "-m", "wandb", *command],
                cwd=CONF.parent, env=environment, capture_output=True, text=True, timeout=540,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
    assert server.config["metric"] == {"name": "val/block_efficiency", "goal": "maximize"}
    printed = [text for text in re.split(r"(?m)^(?=seed: )", done.stdout) if text.startswith("seed: ")]
    assert len(printed) == 2, done.stdout + done.stderr
    for text, values in zip(printed, trials, strict=True):
        config = OmegaConf.create(text)
        for name, value in values.items():
            assert OmegaConf.select(config, name) == value, name
        assert config.logger["_target_"] == "train.wandb_run.WandbRun"
