"""logger=wandb as a user runs it offline: one W&B run for a folder, killed or not, with its figures and its export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.wandb_records import records
from tests.train.test_run import SMALL, finish, kill_when, start

pytest.importorskip("wandb")


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
    assert f"wandb sync {files[-1].parent}" in output

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
