"""The comparison as a user starts it: mistakes are refused at once, and what is done is not done again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.compose import composed
from models.errors import UserError
from tests.train.test_run import SMALL, finish, start
from train import subruns
from train.compare import job

FEW = [o for o in SMALL if not o.startswith(("run_name=", "fit.max_steps=", "measure."))]


def test_a_mistake_in_one_drafters_settings_is_named_before_any_work(tmp_path: Path) -> None:
    """Hydra runs the job in which they are composed."""
    wrong = "compare.overrides={prompt_lookup:['fit.batchsize=8']}"
    process = start("train/compare.py", "compare.drafters=[prompt_lookup]", wrong, f"output_root={tmp_path}")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output == "error: There is no setting 'fit.batchsize'. Did you mean 'fit.batch_size'?\n"
    assert not list(tmp_path.iterdir())


def test_what_would_make_the_comparison_another_one_is_refused(tmp_path: Path) -> None:
    other = "compare.overrides={prompt_lookup:['decode.num_speculative_tokens=2','drafter.model.max_ngram=2']}"
    process = start("train/compare.py", "compare.drafters=[prompt_lookup]", other, f"output_root={tmp_path}")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and output.count("error: ") == 1
    assert "prompt_lookup has decode.num_speculative_tokens=2, which must be the same for all" in output


def test_drafters_of_one_size_are_trained_with_the_widths_that_make_them_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the drafter's own settings, which the width depends on; the one that all are to equal is as it was."""
    started: dict[str, list[str]] = {}

    def run(drafter: str, overrides: list[str], folder: Path, run_name: str, data: Path) -> None:
        started[drafter] = overrides
        if len(started) == 2:
            raise UserError("that is enough")

    monkeypatch.setattr(subruns, "run", run)
    monkeypatch.setattr(subruns, "handed_on", lambda ours: ["fit.max_steps=6"])
    own = "compare.overrides={conv:['drafter.model.num_layers=1']}"
    given = ["compare.drafters=[conv,eagle]", "compare.equal_to=eagle", own, f"output_root={tmp_path}"]
    with pytest.raises(UserError, match="that is enough"):
        job(OmegaConf.create(composed("compare", given)))
    width = round((421_056 - 2 * 192**2 - 192**2 - 6 * 192) / (3 * 192))  # without its kernel, matrices and norms
    assert started == {
        "conv": ["fit.max_steps=6", "drafter.model.num_layers=1", f"drafter.model.intermediate_size={width}"],
        "eagle": ["fit.max_steps=6"],
    }


@pytest.mark.slow
def test_drafters_are_trained_measured_and_put_side_by_side_once(tmp_path: Path) -> None:
    command = [
        "train/compare.py", "compare.drafters=[prompt_lookup,medusa]", "fit.max_steps=6", "measure.num_prompts=2",
        "measure.temperatures=[0]", "compare.overrides={medusa:['drafter.model.num_heads=2']}", *FEW,
        f"output_root={tmp_path}",
    ]  # fmt: skip
    output = finish(start(*command))
    folder = tmp_path / "compare-tiny"
    compared = json.loads((folder / "compare.json").read_text())["drafters"]
    assert [c["name"] for c in compared] == ["prompt_lookup", "medusa"]
    assert [[r["tree"] is not None for r in c["results"]] for c in compared] == [[False], [False, True]]
    assert compared[0]["about"]["parameters"] == 0 and compared[0]["about"]["training"] is None
    assert compared[1]["about"]["training"]["steps"] == 6
    recorded = json.loads((folder / "medusa" / "config.json").read_text())["config"]
    assert recorded["drafter"]["model"]["num_heads"] == 2
    for c in compared:
        chain = json.loads((folder / c["name"] / "acceptance.json").read_text())["results"][0]
        assert c["results"][0] == chain
        assert f"{chain['block_efficiency']:.2f}" in (folder / "compare.md").read_text()
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")

    weights = folder / "medusa" / "export" / "model.safetensors"
    made = [path.stat().st_mtime_ns for path in (weights, folder / "medusa" / "compared.json")]
    again = finish(start(*command))
    assert [path.stat().st_mtime_ns for path in (weights, folder / "medusa" / "compared.json")] == made
    assert json.loads((folder / "compare.json").read_text())["drafters"] == compared
    assert "measuring" in output and "measuring" not in again
