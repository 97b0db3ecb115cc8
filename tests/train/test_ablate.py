"""Ablations as a user starts them: what is refused, what is trained, and that nothing is done twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from conf.compose import choices, composed
from models.errors import UserError
from models.target import Target
from tests.train.test_run import SMALL, finish, start
from train import subruns
from train.ablate import check, job, read

FEW = [o for o in SMALL if not o.startswith(("run_name=", "fit.max_steps=", "measure."))]


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    return composed("ablate", ["name=labels"])


def ended(*arguments: str) -> str:
    """What a command that is refused prints."""
    process = start("train/ablate.py", *arguments)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    return output


def test_without_a_name_all_are_listed() -> None:
    output = ended()
    assert output.startswith("error: Say which ablation to run:\n")
    for name, what in choices("ablation").items():
        assert f"  name={name:<20} {what}\n" in output


def test_a_mistake_is_named_before_any_work(tmp_path: Path) -> None:
    output = ended("name=labels", "fit.batchsize=8", f"output_root={tmp_path}")
    assert output == "error: There is no setting 'fit.batchsize'. Did you mean 'fit.batch_size'?\n"
    assert ended("name=label").startswith("error: There is no ablation 'label'. Choose from: curriculum, labels, ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", choices("ablation"))
def test_every_ablation_can_be_meant(name: str, options: dict[str, Any]) -> None:
    """On both targets; and arms that are trained otherwise have another configuration."""
    ablation = read(name)
    check(ablation, options, ["target=smollm2"])
    made = check(ablation, options, [])
    assert len({json.dumps(found, sort_keys=True) for found in made.values()}) == len(ablation.arms)
    trained = {ablation.run_of(arm) for arm in ablation.arms}
    assert set(ablation.measured) | trained == set(ablation.arms)


@pytest.mark.parametrize(
    ("changes", "shared", "message"),
    [
        ({"seeds": []}, [], r"seeds is \[\]: give one or more"),
        ({"seeds": [1, 1]}, [], r"seeds is \[1, 1\]: give one or more, each once"),
        ({"seeds": [0.5]}, [], "whole numbers of 0 or more"),
        ({"minutes": 0}, [], "minutes is 0: it must be a number above 0"),
        ({"minutes": "abc"}, [], "minutes is 'abc': it must be a number above 0"),
        ({"minutes": 3}, ["fit.max_steps=5"], "minutes and fit.max_steps are two budgets"),
        ({}, ["seed=3"], r"give an ablation seeds=\[0,1,2\]"),
        ({}, ["measure.temperatures=[0]"], "is about temperature 1, which measure.temperatures"),
        ({}, ["fit.batch_size=0"], "fit.batch_size is 0"),
    ],
)
def test_senseless_settings_are_refused(
    changes: dict[str, Any], shared: list[str], message: str, options: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=message):
        check(read("labels"), options | changes, shared)


def test_a_file_that_makes_no_sense_is_named(options: dict[str, Any]) -> None:
    good = read("labels")
    with pytest.raises(UserError, match=r"conf/ablation/labels.yaml: an ablation has two arms"):
        replace(good, arms={"soft": []})
    with pytest.raises(UserError, match=r"labels.yaml: claim has of: give of and temperature"):
        replace(good, claim={"of": "block_efficiency"})
    with pytest.raises(UserError, match=r"labels.yaml: measured names sof, which is no arm"):
        replace(good, measured={"sof": {}})
    with pytest.raises(UserError, match=r"labels.yaml: claim.of is 'tau': choose block_efficiency, "):
        check(replace(good, claim={"of": "tau", "temperature": 1.0}), options, [])
    with pytest.raises(UserError, match=r"labels.yaml: decode has no trees"):
        check(replace(good, measured={"soft": {"trees": 1}}), options, [])


def test_an_unknown_part_of_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("conf.compose", "train.ablate"):
        monkeypatch.setattr(f"{module}.ROOT", tmp_path)
    (tmp_path / "ablation").mkdir()
    (tmp_path / "ablation" / "some.yaml").write_text("drafter: medusa\narm: {a: [], b: []}\nclaim: {}\n")
    with pytest.raises(UserError, match=r"conf/ablation/some.yaml: got an unexpected keyword argument 'arm'"):
        read("some")


def write_result(run: Path, measure: dict[str, Any], rounds: int) -> None:
    """As a run leaves it: two prompts whose 60 tokens each took so many target passes."""
    counts = {"emitted": [60, 60], "rounds": [rounds] * 2, "accepted": [[5, 3]] * 2, "tested": [[9, 5]] * 2}
    results = [{"temperature": t, "counts": counts} for t in (0.0, 1.0)]
    run.mkdir(parents=True, exist_ok=True)
    (run / "acceptance.json").write_text(json.dumps({"config": {"measure": measure}, "results": results}))


def test_every_arm_and_seed_is_a_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, started = ["fit.max_steps=7", "measure.num_prompts=2"], []
    given = ["name=labels", "seeds=[4,7]", f"output_root={tmp_path}", *shared]
    own = ["drafter.training.lr=3e-4"]
    options = composed("ablate", [*given, "settings=['drafter.training.lr=3e-4']"])
    rounds = {"soft-4": 20, "hard-4": 30, "soft-7": 24, "hard-7": 40}

    def run(drafter: str, overrides: list[str], folder: Path, run_name: str, data: Path) -> None:
        started.append((drafter, overrides, run_name))
        assert folder == tmp_path / "ablate-labels-tiny" and data == tmp_path / "data"
        write_result(folder / run_name, options["measure"], rounds[run_name])

    monkeypatch.setattr(subruns, "run", run)
    monkeypatch.setattr(subruns, "handed_on", lambda ours: [o for o in given if not o.startswith(ours)])
    job(OmegaConf.create(options))
    labels = read("labels")
    assert started == [
        ("medusa", [*labels.settings, *own, *shared, *labels.arms[arm], f"seed={seed}"], f"{arm}-{seed}")
        for seed in (4, 7)
        for arm in ("soft", "hard")
    ]
    told = json.loads((tmp_path / "ablate-labels-tiny" / "ablation.json").read_text())
    (claimed,) = [d for d in told["differences"] if (d["statistic"], d["temperature"]) == ("block_efficiency", 1.0)]
    assert claimed["arm"] == "hard" and claimed["by_seed"] == pytest.approx([60 / 20 - 60 / 30, 60 / 24 - 60 / 40])
    assert told["command"] == f"python train/ablate.py {' '.join(given)}".replace("seeds=[4,7]", "'seeds=[4,7]'")

    write_result(tmp_path / "ablate-labels-tiny" / "hard-7", options["measure"] | {"num_prompts": 3}, 40)
    monkeypatch.setattr(subruns, "run", lambda *given: pytest.fail("one was run"))
    with pytest.raises(UserError, match="hard-7' was measured on other prompts or at other temperatures"):
        job(OmegaConf.create(options))


@pytest.mark.parametrize("name", choices("ablation"))
def test_every_ablation_runs_dry(name: str, tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is built that its runs will build, and what they would find comes to a verdict; but nothing is trained."""
    started: list[str] = []
    given = [f"name={name}", "seeds=[0,3]", f"output_root={tmp_path}"]
    options = composed("ablate", given)

    def run(drafter: str, overrides: list[str], folder: Path, run_name: str, data: Path) -> None:
        started.append(run_name)
        write_result(folder / run_name, options["measure"], 20)

    def measure(run: Path, asked: dict[str, Any], target: Target, prompts: list[Any], path: Path) -> None:
        write_result(run, options["measure"], 30)
        (run / "acceptance.json").rename(path)

    monkeypatch.setattr(subruns, "run", run)
    monkeypatch.setattr(subruns, "handed_on", lambda ours: [])
    monkeypatch.setattr(subruns, "measured_prompts", lambda options, target: [])
    monkeypatch.setattr("train.ablate._measure", measure)
    monkeypatch.setattr("train.pipeline.open_target", lambda options: tiny)
    job(OmegaConf.create(options))
    ablation = read(name)
    trained = [arm for arm in ablation.arms if ablation.run_of(arm) == arm]
    assert started == [f"{arm}-{seed}" for seed in (0, 3) for arm in trained]
    told = json.loads((tmp_path / f"ablate-{name}-tiny" / "ablation.json").read_text())
    assert list(told["counts"]) == list(ablation.arms) and len(told["verdicts"]) == len(ablation.arms) - 1
    assert all(f"T={ablation.claim['temperature']:g}" in verdict for verdict in told["verdicts"])


def test_what_the_literature_says_has_its_ablations() -> None:
    """Labels, own answers, training-time test, curriculum, projection, LK against KL where sampled, and trees."""
    known = {"labels", "text", "training_time_test", "curriculum", "projection", "lk", "tree"}
    assert known <= set(choices("ablation"))
    assert read("training_time_test").claim["of"] == "later_acceptance"
    assert read("lk").claim["temperature"] == 1.0


@pytest.mark.slow
def test_arms_and_seeds_are_trained_once_and_measured_on_the_same_prompts(tmp_path: Path) -> None:
    """Arms that are trained alike are one run; a further seed later leaves what was made as it is."""
    command = [
        "train/ablate.py", "name=tree", "fit.max_steps=6", "measure.num_prompts=2", "measure.temperatures=[0]", *FEW,
        f"output_root={tmp_path}",
    ]  # fmt: skip
    finish(start(*command, "seeds=[0]"))
    folder = tmp_path / "ablate-tree-tiny"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["calibrated-0"]
    alone = json.loads((folder / "ablation.json").read_text())
    made = {p: p.stat().st_mtime_ns for p in (folder / "calibrated-0").glob("*.json")}
    assert {p.name for p in made} >= {"measured-calibrated.json", "measured-wide.json", "measured-deep.json"}

    output = finish(start(*command, "seeds=[0,1]"))
    assert "this run is finished" in output and "tree: calibrated, seed 1 (2 of 2)" in output
    both = json.loads((folder / "ablation.json").read_text())
    kept = {p: p.stat().st_mtime_ns for p in made if p.name != "config.json"}
    assert kept.items() <= made.items()
    for arm, first in alone["counts"].items():
        assert both["counts"][arm]["0"][0] == first["0"][0]
    ids = [json.loads((folder / f"calibrated-{seed}" / "data.json").read_text())["prompts"] for seed in (0, 1)]
    assert ids[0] != ids[1]  # a seed has data of its own, which lie where every other run finds them
    assert len(list((tmp_path / "data").glob("answers-*"))) == 2
    nodes = json.loads((folder / "calibrated-0" / "measured-wide.json").read_text())["results"][0]
    assert nodes["num_nodes"] == 20 and nodes["counts"]["rounds"] == alone["counts"]["wide"]["0"][0]["rounds"]

    other = [o for o in command if not o.startswith("measure.num_prompts")]
    finish(start(*other, "seeds=[0,1]", "measure.num_prompts=3"))
    again = json.loads((folder / "ablation.json").read_text())
    assert len(again["counts"]["deep"]["0"][0]["rounds"]) == 3


def test_what_an_arms_export_would_refuse_is_refused_before_any_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree of more tokens in a row than there are heads; and a drafter's setting that there is not."""
    monkeypatch.setattr(subruns, "run", lambda *given: pytest.fail("one was run"))
    monkeypatch.setattr(subruns, "handed_on", lambda ours: [])
    for setting, message in (
        ("drafter.model.num_heads=3", "tree is 5 tokens deep, but MedusaDrafter looks 3"),
        ("drafter.model.heads=3", "There is no setting 'drafter.model.heads'"),
    ):
        options = composed("ablate", ["name=tree", "seeds=[0]", f"output_root={tmp_path}", f"settings=['{setting}']"])
        with pytest.raises(UserError, match=message):
            job(OmegaConf.create(options))
    with pytest.raises(UserError, match="settings is 'lr=3': give a list"):
        job(OmegaConf.create({**options, "settings": "lr=3"}))
