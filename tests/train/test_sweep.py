"""A small sweep as a user starts it: two trials at a time, one family, the table; a failure is kept and named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.test_run import finish, start

pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
SMALL = [
    "data.sizes.validation=4", "data.sizes.test=4", "fit.validation_prompts=2", "decode.max_new_tokens=16",
    "measure.num_prompts=2", "trainer=cpu",
]  # fmt: skip


def sweep(root: Path, *arguments: str) -> list[str]:
    return ["train/sweep.py", "sweep=prompt_lookup", *SMALL, f"output_root={root}", *arguments]


@pytest.mark.slow
def test_trials_are_made_once_ranked_and_added_to(tmp_path: Path) -> None:
    output = finish(start(*sweep(tmp_path, "trials=2", "jobs=2", "sampler=random")))
    folder = tmp_path / "sweep-prompt_lookup-tiny"
    found = json.loads((folder / "trials.json").read_text())["trials"]
    assert len(found) == 2 and all(t["failed"] is None for t in found)
    assert found[0]["block_efficiency"] >= found[1]["block_efficiency"]
    for trial in found:
        run = folder / "trials" / trial["folder"]
        assert trial["block_efficiency"] == json.loads((run / "validation.json").read_text())["block_efficiency"]
        model = json.loads((run / "config.json").read_text())["config"]["drafter"]["model"]
        for name, value in trial["settings"].items():
            assert str(model[name.removeprefix("drafter.model.")]) == str(value)
        assert f"{trial['block_efficiency']:.3f}" in (folder / "sweep.md").read_text()
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert f"best: τ {found[0]['block_efficiency']:.3f}" in output and "no trial failed" in output

    again = finish(start(*sweep(tmp_path, "trials=3", "sampler=random")))
    assert "1 of 3 trials to make" in again
    assert {t["number"] for t in json.loads((folder / "trials.json").read_text())["trials"]} == {0, 1, 2}


@pytest.mark.slow
def test_a_failed_trial_is_kept_and_named(tmp_path: Path) -> None:
    """No trial can have a split that the few prompts of the file do not fill."""
    prompts = tmp_path / "few.jsonl"
    prompts.write_text('{"prompt": "def f(x):"}\n')
    few = ["data=file", f"data.source.path={prompts}", "trials=1"]
    output = finish(start(*sweep(tmp_path, *few)))
    (trial,) = json.loads((tmp_path / "sweep-prompt_lookup-tiny" / "trials.json").read_text())["trials"]
    assert trial["block_efficiency"] is None and "The source gave 1 distinct prompts" in trial["failed"]
    assert f"({trial['folder']}) failed: The source gave 1 distinct prompts" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trials=0"], "trials is 0: it must be a whole number of at least 1."),
        (["sampler=best"], "sampler is 'best': choose tpe, random or grid."),
        (["overrides=['drafter.model.max_ngram=2']"], "drafter.model.max_ngram is searched"),
        (["overrides=['drafter.model.max_ngrm=2']"], "Did you mean 'drafter.model.max_ngram'?"),
        (["fit.max_step=2"], "Did you mean 'fit.max_steps'?"),
        (["sweep=cascade"], "put DRAFT_EXPORT=FOLDER in front of the command."),
    ],
)
def test_a_mistake_is_answered_before_any_trial(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    own = [a for a in sweep(tmp_path) if not (arguments[0].startswith("sweep=") and a.startswith("sweep="))]
    process = start(*own, *arguments)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    assert sentence in output and output.count("error: ") == 1
    assert not (tmp_path / "sweep-prompt_lookup-tiny").exists()
