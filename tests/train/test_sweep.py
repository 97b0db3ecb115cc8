"""A small sweep as a user starts it: two trials at a time, one family, the table; a failure is kept and named.

Grids are gone through with a stand-in for train/trial.py, whose trials take no time.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf.compose import ROOT as CONF
from tests.train.test_run import finish, start
from train.search_space import read
from train.sweep import make_lacking
from train.sweep_summary import Study, Trial, draw

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


@pytest.mark.slow
def test_trials_of_equal_settings_share_one_run(tmp_path: Path) -> None:
    """Two that begin together, as equal random draws do: one is the other's run, and neither fails."""
    folder = tmp_path / "sweep-prompt_lookup-tiny"
    folder.mkdir()
    equal = {"drafter.model.max_ngram": 3, "drafter.model.prefer": "latest"}
    for _ in range(2):
        Study(folder).enqueue(equal)
    finish(start(*sweep(tmp_path, "trials=2", "jobs=2", "sampler=random")))
    first, second = json.loads((folder / "trials.json").read_text())["trials"]
    assert first["settings"] == second["settings"] == equal and first["failed"] is second["failed"] is None
    assert first["block_efficiency"] == second["block_efficiency"] >= 1
    assert len(list((folder / "trials").glob("trial-*"))) == 1 and not list(folder.glob("trials/*/failed.txt"))


STAND_IN = """
import os
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig

def job(config):
    path = Path(config.output_root).parent / "tried.txt"
    tried = path.read_text().splitlines() if path.exists() else []
    settings = " ".join(sorted(o for o in HydraConfig.get().overrides.task if o.startswith("drafter.model.")))
    path.write_text("\\n".join([*tried, settings]))
    if len(tried) == 2:
        os.kill(os.getpid(), 9)
    return float(len(tried))

hydra.main(version_base="1.3", config_path=CONFIG, config_name="train")(job)()
"""


def test_a_grid_has_each_point_once_however_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed in its third trial; the next start makes that and the rest, and a third one nothing."""
    (tmp_path / "trial.py").write_text(STAND_IN.replace("CONFIG", repr(str(CONF))))
    monkeypatch.setattr("train.sweep._TRIAL", tmp_path / "trial.py")
    space = read(CONF / "sweep" / "prompt_lookup.yaml")
    names = [parameter.name for parameter in space.parameters]
    options = {"trials": 20, "jobs": 1, "sampler": None, "seed": 0}
    settings = ["+drafter=prompt_lookup", f"output_root={tmp_path}/trials"]
    study = Study(tmp_path)
    for said, tried in (("8 of 8 trials to make", 3), ("6 of 8 trials to make", 9), ("", 9)):
        study.take_up(names)
        make_lacking(study, options, settings, space)
        printed = capsys.readouterr().out
        assert printed.startswith(said) and bool(printed) == bool(said)
        made = (tmp_path / "tried.txt").read_text().splitlines()
        assert len(made) == tried
    every = {f"{names[0]}={n} {names[1]}={p}" for n in (2, 3, 4, 5) for p in ("latest", "earliest")}
    assert set(made) == every and made.count(made[2]) == 2  # the interrupted one was taken up again
    assert len(study.trials()) == study.finished == 8


def test_a_part_of_a_grid_is_added_to(tmp_path: Path) -> None:
    points = read(CONF / "sweep" / "prompt_lookup.yaml").grid()
    study = Study(tmp_path)
    assert study.queue(points, 3) == 3 and study.queue(points, 3) == 3  # those that are queued are not queued again
    assert study._queued() == points[:3]
    begun = study._study.ask()  # and killed before it had any of its settings
    study.take_up(list(points[0]))
    assert begun.number == 0 and study._queued() == [points[1], points[2], points[0]]
    assert study.queue(points, 8) == 8 and len(study._queued()) == 8


def test_settings_are_drawn_as_numbers_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import pyplot

    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    settings = [(1, "0.5", "b", 3e-4), (3, "0.1", "a", 3e-3), (2, "1", "b", 1e-3)]
    names = ("num_steps", "w_reg", "start", "lr")
    trials = [
        Trial(i, "t", dict(zip(names, values, strict=True)), 1.5 + i, 1.0, None) for i, values in enumerate(settings)
    ]
    draw(trials, tmp_path / "sweep.png")
    _, *axes = kept[0].axes
    drawn = {axis.get_xlabel(): axis.lines[0].get_xydata().tolist() for axis in axes if axis.get_visible()}
    assert drawn["num_steps"] == [[1, 1.5], [2, 3.5], [3, 2.5]] and drawn["w_reg"] == [[0.1, 2.5], [0.5, 1.5], [1, 3.5]]
    assert [y for _, y in drawn["start"]] == [2.5, 1.5, 3.5]
    assert [axis.get_xscale() for axis in axes[:4]] == ["linear", "log", "linear", "log"]


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
    assert not list(tmp_path.iterdir())
