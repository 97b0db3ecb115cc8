"""The search spaces: every setting exists, and Hydra takes every value in the words of both sweepers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from conf.compose import ROOT, choices, explain_overrides
from models.errors import UserError
from tests.helpers.documents import shipped_drafters
from train.search_space import Parameter, read, trial_name

FAMILIES = sorted(choices("sweep"))


def test_every_drafter_that_comes_with_the_project_has_a_search_space() -> None:
    shipped = set(shipped_drafters(ROOT.parent))
    assert {"prompt_lookup", "hass", "mtp_parallel", "dspark", "draft_length"} <= shipped
    assert shipped - set(FAMILIES) == set() == set(FAMILIES) - choices("drafter").keys()
    assert all(choices("sweep").values())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_every_parameter_composes(family: str) -> None:
    space = read(ROOT / "sweep" / f"{family}.yaml")
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        usual = hydra.compose("train", overrides=list(space.settings))
        for i in range(max(len(p.examples) for p in space.parameters)):
            given = [(p, p.examples[i % len(p.examples)]) for p in space.parameters]
            overrides = [p.override(value) for p, value in given]
            config = hydra.compose("train", overrides=[*space.settings, *overrides])
            for parameter, value in given:
                taken = OmegaConf.select(config, parameter.name)
                assert taken == (pytest.approx(value) if isinstance(value, float) else value), parameter.name
                before = OmegaConf.select(usual, parameter.name)
                assert before is None or isinstance(taken, type(before)) or isinstance(value, float), parameter.name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_what_wandb_and_train_run_understand(family: str) -> None:
    content = yaml.safe_load((ROOT / "sweep" / f"{family}.yaml").read_text())
    assert content["program"] == "train/run.py"
    assert content["metric"] == {"name": "val/block_efficiency", "goal": "maximize"}
    assert content["early_terminate"]["type"] == "hyperband"
    assert content["command"][:5] == ["${env}", "${interpreter}", "${program}", f"+drafter={family}", "logger=wandb"]
    assert content["command"][-1] == "${args_no_hyphens}"
    if content["method"] == "grid":
        assert all("values" in given for given in content["parameters"].values())
    drafter = yaml.safe_load((ROOT / "drafter" / f"{family}.yaml").read_text())
    untrained = "training" in drafter and drafter["training"] is None
    assert ("measure.validation=true" in content["command"]) == untrained


@pytest.mark.parametrize("family", FAMILIES)
def test_hydras_sweepers_read_the_same_space(family: str) -> None:
    for parameter in read(ROOT / "sweep" / f"{family}.yaml").parameters:
        (override,) = OverridesParser.create().parse_overrides([parameter.swept()])
        value: Any = override.value()
        assert override.is_sweep_override() and override.get_key_element() == parameter.name
        if parameter.values is None:
            assert (value.start, value.end, "log" in value.tags) == (parameter.low, parameter.high, parameter.log)
            assert isinstance(value.start, float) and isinstance(value.end, float)
        else:
            assert len(value.list) == len(parameter.values)


def test_a_misspelt_parameter_would_be_refused() -> None:
    with pytest.raises(UserError, match=r"Did you mean 'drafter\.training\.lr'"):
        explain_overrides("train", ["+drafter=eagle", Parameter("drafter.training.lrr", (1,)).override(1)])


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ({"values": [1, None]}, "may be null, which W&B's agent would write as the word None"),
        ({"distribution": "normal", "mu": 0, "sigma": 1}, "give values, or min and max"),
        ({"distribution": "log_uniform_values", "min": 0, "max": 1}, "goes from 0 to 1"),
    ],
)
def test_what_only_one_sweeper_could_read_is_refused(parameter: dict[str, Any], message: str, tmp_path: Path) -> None:
    content = yaml.safe_load((ROOT / "sweep" / "eagle.yaml").read_text())
    content["parameters"]["drafter.training.lr"] = parameter
    (tmp_path / "eagle.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=message):
        read(tmp_path / "eagle.yaml")


def test_trials_of_the_same_settings_have_the_same_folder() -> None:
    assert trial_name({"a": 1, "b": "x"}) == trial_name({"b": "x", "a": "1"}) != trial_name({"a": 1, "b": "y"})
