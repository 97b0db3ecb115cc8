"""Every stage of a run struck by every fault: it ends in one clear line or goes on, and ends as an undisturbed one.

Stages are the answers, the training, the measurement and the export; faults are real signals, a disk that is really
full, and files that were damaged. Runs are of the bundled target, and small; see `tests.helpers.fork_server`.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fork_server import Ended, Fault, Forks, can_mount

pytestmark = pytest.mark.slow

RUN = Path("outputs") / "run"
TRAIN = (
    "train", "+drafter=eagle", "run_name=run", "trainer=cpu", "+data.source.kind=docs", "+data.source.per_document=4",
    "data.sizes.train=12", "data.sizes.validation=2", "data.sizes.test=2", "data.answers.max_new_tokens=12",
    "data.answers.chunk_size=4", "fit.max_steps=6", "fit.batch_size=2", "fit.checkpoint_every=2",
    "fit.evaluate_every=3", "fit.validation_prompts=1", "decode.max_new_tokens=8", "measure.num_prompts=1",
    "measure.temperatures=[0]",
)  # fmt: skip
EXPORT = f"export={RUN / 'export'}"
MEASURE = ("acceptance", EXPORT, "prompts=stdlib", "num_prompts=1", "temperatures=[0]", "decode.max_new_tokens=8")
CONVERT = ("export", EXPORT, "format=vllm_eagle")
STEP = "train.callbacks:LastCheckpoint.on_train_batch_end"
CHUNK = "data.engine_generator:_answer_chunk"
PLACES = {  # where a fault strikes: before the second of three chunks, behind step 4, before the table, in writing
    "data": (CHUNK, 2),
    "training": (STEP, 5),
    "measurement": ("train.exporting:measure", 1),
    "export": ("models.checkpoint.native:sha256", 1),
}
DISK_PLACES = PLACES | {  # ... and a full disk, so that something is to be written next
    "training": ("train.callbacks:AtomicCheckpoints.save_checkpoint", 2),
    "export": ("models.checkpoint.native:save_file", 1),
}
FINISHED = {"data": {CHUNK: 2, STEP: 6}, "training": {STEP: 2}, "measurement": {}, "export": {}}  # calls that are left


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    server = Forks()
    yield server
    server.close()


def train(forks: Forks, folder: Path, fault: Fault | None = None, *more: str) -> Ended:
    return forks.run(folder, *TRAIN, *more, fault=fault, counted=(CHUNK, STEP))


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = train(forks, folder)
    assert ended.code == 0, ended.output
    assert ended.calls == {CHUNK: 3, STEP: 6}
    return folder


@pytest.fixture(scope="module")
def half(forks: Forks, undisturbed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed behind step 4, with checkpoints of steps 4 and 2."""
    folder = tmp_path_factory.mktemp("half")
    assert train(forks, folder, Fault("SIGKILL", STEP, 5)).code == -signal.SIGKILL
    return folder


def results(folder: Path) -> dict[str, Any]:
    """What a run has found, without what the clock said."""
    run = folder / RUN
    (result,) = json.loads((run / "acceptance.json").read_text())["results"]
    rates = {k: v for k, v in result.items() if "speedup" not in k and k not in ("counts", "by_category")}
    counts = {k: v for k, v in result["counts"].items() if not k.endswith("_s")}
    files = ("export/model.safetensors", "checkpoints/best.safetensors", "validation.json")
    return {"rates": rates, "counts": counts} | {name: (run / name).read_bytes() for name in files}


def check_same(folder: Path, undisturbed: Path) -> None:
    found, expected = results(folder), results(undisturbed)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == value, name


def check_clear(ended: Ended, *said: str, code: int = 2) -> None:
    """It ended in one line that says what, where and what to do."""
    assert ended.code == code, ended.output
    errors = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in ended.output and "Unexpected" not in ended.output, ended.output
    assert all(part in errors[0] for part in said), errors[0]


@pytest.mark.parametrize("what", ["SIGKILL", "SIGTERM", "SIGINT", "full disk", "small files"])
@pytest.mark.parametrize("stage", PLACES)
def test_a_run_that_is_struck_goes_on_where_it_stopped(
    stage: str, what: str, forks: Forks, undisturbed: Path, tmp_path: Path
) -> None:
    """Nothing that was finished is done again, and the end is that of the undisturbed run."""
    if what == "full disk" and not can_mount():
        pytest.skip("no disk of its own can be mounted here: files are limited instead")
    disk = what in ("full disk", "small files")
    where, call = (DISK_PLACES if disk else PLACES)[stage]
    ended = train(forks, tmp_path, Fault(what, where, call))
    if what == "SIGKILL":
        assert ended.code == -signal.SIGKILL
    elif disk:
        check_clear(ended, "Cannot write", "outputs", "start again")
    else:
        check_clear(ended, "The same command goes on where it stopped", code=143 if what == "SIGTERM" else 130)
    assert not (tmp_path / RUN / "acceptance.json").exists()
    again = train(forks, tmp_path)
    assert again.code == 0, again.output
    left = dict(FINISHED[stage])
    if stage == "training" and what in ("SIGTERM", "SIGINT"):
        left[STEP] = 1  # a checkpoint was written behind the step that was under way
    if stage == "training" and disk:
        left[STEP] = 4  # the second checkpoint, of step 4, was not written
    if stage == "data" and what == "full disk" and again.calls[CHUNK] == 1:
        left[CHUNK] = 1  # what is small still found room in the file's last block
    assert again.calls == left
    check_same(tmp_path, undisturbed)
    assert not list((tmp_path / RUN).rglob(".*.tmp"))


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = bytes([content[middle] ^ 1])
    path.write_bytes(
        {"empty": b"", "cut": content[:middle], "flipped": content[:middle] + flipped + content[middle + 1 :]}[how]
    )


DAMAGES = ["empty", "cut", "flipped"]


@pytest.fixture
def copy(half: Path, tmp_path: Path) -> Path:
    shutil.copytree(half, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def finished(undisturbed: Path, tmp_path: Path) -> Path:
    """A finished run that was cut off before its table."""
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    (tmp_path / RUN / "acceptance.json").unlink()
    return tmp_path


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_answers_are_made_again(how: str, forks: Forks, copy: Path, undisturbed: Path) -> None:
    """Of the finished data set, from the log; of the log too, by the target, but not those chunks that are whole."""
    (data,) = copy.glob("outputs/data/answers-*/dataset/*.arrow")
    damage(data, how)
    log = data.parents[1] / "answers.jsonl"
    if how == "flipped":
        lines = log.read_bytes().splitlines(keepends=True)
        middle = len(lines[0]) + len(lines[1]) // 2
        content = bytearray(b"".join(lines))
        content[middle] ^= 1
        log.write_bytes(content)
    before = log.read_bytes()
    again = train(forks, copy)
    assert again.code == 0, again.output
    assert "is damaged" in again.output and again.calls == {STEP: 2} | ({CHUNK: 1} if how == "flipped" else {})
    assert set(before.splitlines()) - set(log.read_bytes().splitlines()) <= {before.splitlines()[1]}
    check_same(copy, undisturbed)


def test_a_damaged_line_of_the_log_is_made_again(forks: Forks, undisturbed: Path, tmp_path: Path) -> None:
    """In the middle of generation: the only checkpoint that there is of it."""
    assert train(forks, tmp_path, Fault("SIGKILL", CHUNK, 3)).code == -signal.SIGKILL
    (log,) = tmp_path.glob("outputs/data/answers-*/answers.jsonl")
    content = bytearray(log.read_bytes())
    content[content.index(b"\n") // 2] ^= 1
    log.write_bytes(content)
    again = train(forks, tmp_path)
    assert "of 2 finished pieces 1 are damaged" in again.output
    assert again.calls == {CHUNK: 2, STEP: 6}
    check_same(tmp_path, undisturbed)


@pytest.mark.parametrize("how", DAMAGES)
def test_training_goes_on_from_the_checkpoint_before_a_damaged_one(
    how: str, forks: Forks, copy: Path, undisturbed: Path
) -> None:
    damage(copy / RUN / "checkpoints" / "last.ckpt", how)
    again = train(forks, copy)
    assert again.code == 0, again.output
    assert "last.ckpt' is damaged" in again.output and "Training goes on from step 2" in again.output
    assert again.calls == {STEP: 4}
    check_same(copy, undisturbed)


def test_without_a_whole_checkpoint_it_is_said_what_to_delete(forks: Forks, copy: Path, undisturbed: Path) -> None:
    folder = copy / RUN / "checkpoints"
    for name in ("last.ckpt", "previous-last.ckpt"):
        damage(folder / name, "cut")
    check_clear(train(forks, copy), "last.ckpt", "previous-last.ckpt", "delete the folder 'outputs/run/checkpoints'")
    shutil.rmtree(folder)
    again = train(forks, copy)
    assert again.calls == {STEP: 6}  # the answers are kept
    check_same(copy, undisturbed)


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_hidden_states_are_computed_again(how: str, forks: Forks, copy: Path, undisturbed: Path) -> None:
    shard = sorted(copy.glob("outputs/data/features-*/*.safetensors"))[0]
    damage(shard, how)
    again = train(forks, copy)
    assert again.code == 0, again.output
    assert again.calls == {STEP: 2}
    check_same(copy, undisturbed)


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_best_weights_are_named_and_not_exported(
    how: str, forks: Forks, finished: Path, undisturbed: Path
) -> None:
    shutil.rmtree(finished / RUN / "export")
    folder = finished / RUN / "checkpoints"
    damage(folder / "best.safetensors", how)
    check_clear(train(forks, finished), "best.safetensors' is damaged", "Delete the folder 'outputs/run/checkpoints'")
    assert not (finished / RUN / "export").exists()
    shutil.rmtree(folder)
    assert train(forks, finished).code == 0
    check_same(finished, undisturbed)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_export_is_not_measured_but_written_again(
    how: str, forks: Forks, finished: Path, undisturbed: Path
) -> None:
    weights = finished / RUN / "export" / "model.safetensors"
    damage(weights, how)
    check_clear(forks.run(finished, *MEASURE), "model.safetensors")
    again = train(forks, finished)
    assert again.code == 0 and again.calls == {}
    check_same(finished, undisturbed)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_export_is_not_converted(how: str, forks: Forks, finished: Path) -> None:
    export = finished / RUN / "export"
    damage(export / "model.safetensors", how)
    check_clear(forks.run(finished, *CONVERT), "model.safetensors")
    assert not (finished / RUN / "vllm_eagle").exists()


@pytest.mark.parametrize("what", ["SIGKILL", "SIGTERM", "full disk", "small files"])
def test_a_conversion_that_is_struck_leaves_nothing_half_written(
    what: str, forks: Forks, undisturbed: Path, tmp_path: Path
) -> None:
    if what == "full disk" and not can_mount():
        pytest.skip("no disk of its own can be mounted here: files are limited instead")
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    ended = forks.run(tmp_path, *CONVERT, fault=Fault(what, "models.checkpoint.layout:save_file"))
    assert ended.code == {"SIGKILL": -signal.SIGKILL, "SIGTERM": 143}.get(what, 2)
    assert not (tmp_path / RUN / "vllm_eagle").exists()
    assert forks.run(tmp_path, *CONVERT).code == 0
    assert (tmp_path / RUN / "vllm_eagle" / "model.safetensors").exists()
