"""logger=wandb as a user runs it offline: one W&B run for a folder, killed or not, with its figures and its export.

What W&B is handed while it is online goes to a stand-in for its run.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.checkpoint import native
from tests.helpers.wandb_records import records
from tests.train.test_run import SMALL, finish, kill_when, start
from train.wandb_run import WandbRun

wandb = pytest.importorskip("wandb")
RESULT = {"drafter": "eagle", "temperature": 0.0, "block_efficiency": 1.9, "acceptance_rate": 0.56, "speedup": 1.2}
EXPORT = native.Export("eagle", {}, {"name": "tiny", "fingerprint": "f0"}, 3, {})


class Online:
    """A stand-in for W&B's run: it keeps what it is handed."""

    offline = False

    def __init__(self, folder: Path) -> None:
        self.dir = str(folder / "wandb" / "run-1" / "files")
        self.told: dict[str, Any] = {}
        self.config = SimpleNamespace(update=lambda new, **_: self.told.update(new))
        self.summary: dict[str, Any] = {}
        self.used: list[Any] = []
        self.logged: list[Any] = []
        self.closed = 0

    def use_artifact(self, artifact: Any) -> None:
        self.used.append(artifact)

    def log_artifact(self, artifact: Any) -> Any:
        self.logged.append(artifact)
        return SimpleNamespace(wait=lambda: None, qualified_name=f"nobody/draftsmith/{artifact.name}:v0")

    def finish(self) -> None:
        self.closed += 1


def opened(folder: Path) -> tuple[WandbRun, Online]:
    """A logger of a run's folder, online."""
    folder.mkdir(parents=True, exist_ok=True)
    logger, online = WandbRun(str(folder), "draftsmith"), Online(folder)
    logger._experiment = online  # type: ignore[assignment]
    return logger, online


def told(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "wandb.json").read_text()))


def finished(folder: Path) -> None:
    (folder / "export").mkdir(parents=True)
    (folder / "export" / "config.json").write_text("{}")
    (folder / "acceptance.json").write_text(json.dumps({"results": [RESULT]}))
    (folder / "data.json").write_text('{"weights": "bb40"}')


def test_an_agent_names_the_run_and_a_folder_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    own, online = opened(tmp_path / "run")
    own.begin({"seed": 3})
    assert told(tmp_path / "run") == {"id": own.run_id} and len(own.run_id) == 8
    assert online.told["seed"] == 3 and "torch" in online.told["provenance"]["versions"]
    assert opened(tmp_path / "run")[0].run_id == own.run_id != opened(tmp_path / "other")[0].run_id
    monkeypatch.setenv("WANDB_RUN_ID", "trial7")
    agents, _ = opened(tmp_path / "run")
    assert agents.run_id == agents._wandb_init["id"] == "trial7"
    agents.begin({})
    assert told(tmp_path / "run") == {"id": "trial7"}


def test_a_finished_run_is_told_to_the_run_of_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As W&B writes it offline: its figures, and where it was trained; the folder stays its own run's."""
    run = tmp_path / "run"
    finished(run)
    (run / "wandb.json").write_text('{"id": "first", "finished": true}')
    for name, value in (("RUN_ID", "trial7"), ("MODE", "offline"), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    WandbRun(str(run), "draftsmith").again({}, EXPORT, 1.75)
    wandb.teardown()  # its service has written all then
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    assert f"W&B was offline: wandb sync {file.parent}\n" in capsys.readouterr().out
    found = list(records(file))
    assert [r.run.run_id for r in found if r.HasField("run")] == ["trial7"]
    config = {update.key: json.loads(update.value_json) for r in found for update in r.config.update}
    assert config["finished_in"] == "first"
    summary = {i.key: json.loads(i.value_json) for r in found for i in r.summary.update if i.key}
    assert summary["val/block_efficiency"] == 1.75 and summary["test/block_efficiency, T=0"] == 1.9
    assert told(run) == {"id": "first", "finished": True}


def test_a_finished_run_without_a_wandb_run_gets_one_and_its_own_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    run = tmp_path / "run"
    finished(run)
    logger, online = opened(run)
    logger.again({}, EXPORT, None)
    assert online.told == {"finished_in": None} and online.closed == 1
    assert online.summary == {
        f"test/{key}, T=0": RESULT[key] for key in ("block_efficiency", "acceptance_rate", "speedup")
    }
    assert told(run) == {"id": logger.run_id, "finished": True}
    again, online = opened(run)
    again.again({}, EXPORT, None)
    assert (online.told, online.summary, online.closed) == ({}, {}, 0)
    (run / "wandb.json").write_text(json.dumps({"id": logger.run_id}))  # cut off before it had all
    cut, _ = opened(run)
    given: list[Any] = []
    monkeypatch.setattr(cut, "finish", lambda *arguments: given.append(arguments))
    cut.again({"seed": 3}, EXPORT, 1.75)
    assert given == [({"seed": 3}, EXPORT, 1.75)]


def test_an_export_is_handed_over_with_what_it_was_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staging"))
    options: dict[str, Any] = {"target": {"source": "tiny"}, "init_from": None, "drafter": {"model": {}}}
    finished(tmp_path / "first")
    logger, online = opened(tmp_path / "first")
    logger._hand_over(options, EXPORT, [RESULT])
    (answers,) = online.used
    assert (answers.name, answers.type, list(answers.manifest.entries)) == ("answers-tiny", "dataset", ["data.json"])
    name = f"nobody/draftsmith/eagle-{logger.run_id}:v0"
    assert told(tmp_path / "first")["artifact"] == name

    finished(tmp_path / "second")
    (tmp_path / "plain" / "export").mkdir(parents=True)  # of a run without W&B
    made_of = {"first_export": str(tmp_path / "first/export"), "second_export": str(tmp_path / "plain/export")}
    logger, online = opened(tmp_path / "second")
    logger._hand_over({**options, "drafter": {"model": made_of}}, EXPORT, [RESULT])
    assert online.used[1:] == [name]
    (drafter,) = online.logged
    assert drafter.type == "drafter" and list(drafter.manifest.entries) == ["config.json"]
    assert drafter.metadata["made_of"] == {"first/export": name, "plain/export": None}
    assert drafter.metadata["data"] == {"weights": "bb40"}
    assert drafter.metadata["measured"] == [{"temperature": 0.0, "block_efficiency": 1.9, "acceptance_rate": 0.56}]

    finished(tmp_path / "third")
    logger, online = opened(tmp_path / "third")
    online.offline = True
    logger._hand_over({**options, "init_from": str(tmp_path / "first/export")}, EXPORT, [RESULT])
    assert online.used == [] and online.logged[0].metadata["made_of"] == {"first/export": name}
    assert not (tmp_path / "third" / "wandb.json").exists()  # there is no name yet


@pytest.mark.slow
def test_a_killed_run_goes_on_in_the_same_wandb_run_which_holds_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    small = [*SMALL, "trainer=cpu", "fit.max_steps=8", "fit.evaluate_every=4", "fit.checkpoint_every=2"]
    command = ["train/run.py", "+drafter=eagle", *small, "logger=wandb", "logger.group=g", f"output_root={tmp_path}"]
    run = tmp_path / "run"
    kill_when(start(*command), (run / "checkpoints" / "last.ckpt").exists)
    output = finish(start(*command))
    wandb_id = json.loads((run / "wandb.json").read_text())["id"]
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2 and {path.stem for path in files} == {f"run-{wandb_id}"}
    assert f"wandb sync {files[0].parent} {files[1].parent}\n" in output

    found = list(records(files[-1]))
    (opened,) = [r.run for r in found if r.HasField("run")]
    assert (opened.run_id, opened.project, opened.run_group, opened.display_name) == (
        wandb_id,
        "draftsmith",
        "g",
        "run",
    )
    config = {update.key: json.loads(update.value_json) for r in found for update in r.config.update}
    told = json.loads((run / "config.json").read_text())["config"]
    assert {key: config[key] for key in told} == told and "torch" in json.dumps(config["provenance"])
    history = [{".".join(i.nested_key): json.loads(i.value_json) for i in r.history.item} for r in found]
    measured = [row["val/block_efficiency"] for row in history if "val/block_efficiency" in row]
    best = json.loads((run / "validation.json").read_text())["block_efficiency"]
    assert measured and best >= max(measured)
    assert any("test/prompts.path" in row and "test/positions.path" in row for row in history)
    summary = {i.key: json.loads(i.value_json) for r in found for i in r.summary.update if i.key}
    results = json.loads((run / "acceptance.json").read_text())["results"]
    for result in results:
        assert summary[f"test/block_efficiency, T={result['temperature']:g}"] == result["block_efficiency"]
    assert summary["val/block_efficiency"] == best
    (artifact,) = [r.artifact for r in found if r.artifact.type == "drafter"]
    told = json.loads(artifact.metadata)
    assert artifact.name == f"eagle-{wandb_id}" and len(artifact.manifest.contents) == 3
    assert told["drafter"] == "eagle" and [m["temperature"] for m in told["measured"]] == [0.0, 1.0]
    assert told["data"] == json.loads((run / "data.json").read_text())
    tables = [json.loads(path.read_text()) for path in files[-1].parent.glob("files/media/table/test/prompts*.json")]
    assert [len(table["data"]) for table in tables] == [6]  # three prompts at two temperatures

    assert "this run is finished" in finish(start(*command))
    assert len(list(run.glob("wandb/offline-run-*"))) == 2
