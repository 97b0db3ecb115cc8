"""Serving and learning as one: a kill takes nothing, hostile traffic is undone, answers stay the target's."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.streams import Request, Stream
from engine.loop import generate
from models.checkpoint import native
from tests.helpers.adaptation import equal, random_stream, session_of, taught
from tests.helpers.drafters import tiny_target
from train import checkpoints
from train.adaptation import deltas
from train.adaptation.guard import Guard, GuardSettings
from train.adaptation.learner import Learner
from train.adaptation.records import Record, RecordLog
from train.adaptation.replay import ReplayBuffer
from train.adaptation.sections import WhenSettings
from train.adaptation.session import Session
from train.adaptation.versions import Versions

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def target():
    return tiny_target(torch.float64)


@pytest.fixture(scope="module")
def stream(target) -> Stream:
    return random_stream(target.vocab_size)


def told(session: Session) -> list[Any]:
    """What rows tell, but for the clock; and answers were plain decoding's, where that was asked."""
    assert {row.request: row.as_plain for row in session.rows if row.as_plain == row.as_plain} == {0: 1.0}
    return [json.dumps(vars_of(replace(r, seconds=0.0, update_s=0.0, guard_s=0.0))) for r in session.rows]


def vars_of(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__slots__}


@pytest.fixture(scope="module")
def undisturbed(target, stream, tmp_path_factory) -> Session:
    session = session_of(target, tmp_path_factory.mktemp("undisturbed"), stream)
    session.run()
    return session


def test_answers_are_plain_decodings_over_the_whole_stream(target, stream, tmp_path: Path) -> None:
    session = session_of(target, tmp_path, stream)
    decode = session.parts.decode
    versions = set()
    for number, request in enumerate(stream.requests):
        versions.add(session.version)
        record = session.serve(number, request)
        plain = generate(target, [request.token_ids], decode).token_ids[0]
        assert record.token_ids[record.prompt_tokens :].tolist() == plain
        session.absorb(record)
    assert len(versions) > 3


def test_the_current_version_is_the_drafter_that_serves(target, undisturbed: Session) -> None:
    loaded = native.load(undisturbed.parts.versions.current, target)
    assert equal(loaded.state_dict(), undisturbed.parts.serving.state_dict())
    assert equal(loaded.state_dict(), undisturbed.parts.learner.weights())
    assert not equal(loaded.state_dict(), undisturbed.parts.frozen.state_dict())
    lines = (undisturbed.folder / "timeline.csv").read_text().splitlines()
    assert len(lines) == 11 and lines[0].startswith("request,domain,member,version")
    assert undisturbed.version == len(undisturbed.rows) // 2 == sum(r.updated for r in undisturbed.rows)


class Killed(BaseException):
    """A kill, but for what `finally` does: temporaries do not stay. `test_a_sigkill_leaves_nothing` is a real one."""


PLACES = {
    "before a record is written": (RecordLog, "write", False),
    "behind a record": (RecordLog, "write", True),
    "before a checkpoint": (checkpoints, "save", False),
    "behind a checkpoint": (checkpoints, "save", True),
    "before records are deleted": (RecordLog, "keep_only", False),
    "before a version is written": (Versions, "publish", False),
    "before the link is exchanged": (Versions, "_point", False),
    "before old versions are deleted": (Versions, "_prune", False),
    "amid an update": (Learner, "learn", True),
    "before the guard has looked": (Guard, "measure", False),
}


def killed(
    place: str,
    kill_at: int,
    session: Callable[[], Session],
    monkeypatch: pytest.MonkeyPatch,
    told: Callable[[list[Any]], None] | None = None,
) -> None:
    """Make a session and run it until it comes to this place the `kill_at`-th time."""
    owner, name, behind = PLACES[place]
    real, count = getattr(owner, name), 0

    def killing(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == kill_at and not behind:
            raise Killed
        found = real(*arguments)
        if count == kill_at:
            raise Killed
        return found

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killing)
        with pytest.raises(Killed):
            session().run(told)


def assert_same_end(session: Session, expected: Session) -> None:
    """Rows, weights, optimizer, buffer, version and what lies on disk are as in the session that was left alone."""
    assert told(session) == told(expected)
    assert equal(session.parts.serving.state_dict(), expected.parts.serving.state_dict())
    assert session.parts.buffer.requests == expected.parts.buffer.requests
    ours, theirs = (checkpoints.load(s.folder / "state.ckpt") for s in (session, expected))
    for part in ("learner", "good", "buffer", "fresh", "drift", "guard"):
        _same(ours[part], theirs[part])
    assert session.parts.versions.current.resolve().name == f"{expected.version:06d}"
    kept = {int(p.stem) for p in (session.folder / "records").glob("*.safetensors")}
    assert kept == set(session.parts.buffer.requests)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_kills_at_every_place_in_turn_change_nothing(lora: Any, target, stream, undisturbed, tmp_path, monkeypatch):
    """One session, killed at one place after the other and restarted each time."""
    again = lambda: session_of(target, tmp_path / "killed", stream, lora=lora)  # noqa: E731
    for place in PLACES:
        killed(place, 1, again, monkeypatch)
    session = again()
    session.run()
    expected = undisturbed
    if lora is not None:
        expected = session_of(target, tmp_path / "whole", stream, lora=lora)
        expected.run()
    assert_same_end(session, expected)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_kill_changes_nothing(place: str, target, stream, undisturbed, tmp_path, monkeypatch) -> None:
    """Killed the first time that it comes there, and restarted the second, it ends as one that was left alone."""
    again = lambda: session_of(target, tmp_path, stream)  # noqa: E731
    for kill_at in (1, 2):
        killed(place, kill_at, again, monkeypatch)
    session = again()
    session.run()
    assert_same_end(session, undisturbed)


def _same(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            _same(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            _same(x, y)
    else:
        assert a == b


def hostile(stream: Stream) -> Stream:
    """The same old traffic; then one and the same token, which teaches the drafter nothing that is worth having."""
    old = [r for r in stream.requests if r.domain == "old"]
    return Stream([*old, *[Request([7] * 6, "hostile")] * 8], stream.held_out)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_guard_undoes_what_costs_old_traffic(enabled: bool, target, stream, tmp_path: Path) -> None:
    guard = GuardSettings(enabled=enabled, every=1, max_loss=0.02, stop_loss=0.04, pause=2)
    spoilt = {"learner": {"lr": 1.0, "updates": {"fresh_share": 1.0}}, "buffer": ReplayBuffer(4, "recency")}
    weights = taught(target, stream)
    session = session_of(target, tmp_path, hostile(stream), guard=guard, weights=weights, **spoilt)
    assert session.parts.guard.measure(session.parts.serving).frozen > 0.3
    rows = session.run()
    change = session.parts.guard.measure(session.parts.serving).difference
    rollbacks = [row.request for row in rows if row.rolled_back]
    if not enabled:
        assert not rollbacks and change < -0.04
        return
    assert rollbacks and change >= -0.04
    updated = [row.request for row in rows if row.updated]
    for count, place in enumerate(rollbacks):
        pause = range(place + 1, place + 1 + 2 * 2**count)
        assert not set(pause) & set(updated), "no update within the pause, which is twice as long each time"


def test_a_rollback_brings_weights_and_optimizer_back(target, stream, tmp_path: Path) -> None:
    guard = GuardSettings(every=1, max_loss=0.0, stop_loss=0.0, pause=1)
    session = session_of(target, tmp_path, stream, guard=guard)
    start = session.parts.learner.state()
    session.parts.guard.baseline = np.array([[9.0, 9.0], [9.0, 9.0]])  # all accepted: nothing passes
    for number in range(2):
        session.absorb(session.serve(number, stream.requests[number]))
    assert session.rows[-1].rolled_back and session.version == 1
    _same(session.parts.learner.state(), start)
    assert equal(session.parts.serving.state_dict(), session.parts.frozen.state_dict())
    assert len(session.parts.buffer) == 0 and session._at.learnt == 0


def test_what_is_worse_on_the_traffic_itself_is_undone_altogether(target, stream, tmp_path: Path) -> None:
    """Held-out old requests let all pass; yet the served ones say that the handed-in drafter was better."""
    guard = GuardSettings(every=1, max_loss=0.02, stop_loss=0.04, pause=2, num_prompts=4)
    weights = taught(target, stream)
    spoilt = {"learner": {"lr": 1.0, "updates": {"fresh_share": 1.0}}}
    known = [Request(prompt, "old") for prompt in stream.of("old")] * 4
    session = session_of(target, tmp_path, Stream(known, stream.held_out), guard=guard, weights=weights, **spoilt)
    start = session.parts.learner.state()
    session.parts.guard.baseline = 0 * session.parts.guard.baseline + [0, 9]  # of the old ones nothing was accepted
    first = None
    for number, request in enumerate(known):
        row = session.absorb(session.serve(number, request))
        if row.rolled_back:
            first = row
            break
        assert not row.guard_change < 0
    assert first is not None and first.served_change < -0.02
    judged = [r for r in session.rows if r.version > 0 and r.request < first.request][-4:]
    assert len(judged) == 4
    _same(session.parts.learner.state(), start)
    assert equal(session.parts.serving.state_dict(), session.parts.frozen.state_dict())
    assert len(session.parts.buffer) == 0 and session._at.learnt == 0 and session._on_served() is None


@pytest.mark.parametrize("count", [10, 11])
def test_no_weights_stay_that_the_guard_never_saw(count: int, target, tmp_path: Path) -> None:
    """The last of five updates is no fourth one: it is looked at behind the last request, be that its own or not."""
    guard = GuardSettings(every=4, max_loss=0.0, stop_loss=0.0, pause=1)
    session = session_of(target, tmp_path, random_stream(target.vocab_size, count), guard=guard)
    looks: list[dict[str, torch.Tensor]] = []
    real, good = session.parts.guard.measure, session.parts.guard.baseline

    def measure(drafter: Any) -> Any:
        looks.append({name: t.clone() for name, t in drafter.state_dict().items()})
        assert len(looks) > 1 or not equal(looks[0], session.parts.serving.state_dict()), "unproven weights serve"
        session.parts.guard.baseline = 0 * good + ([0, 9] if len(looks) == 1 else [9, 9])  # the first passes
        return real(drafter)

    session.parts.guard.measure = measure  # type: ignore[method-assign]
    rows = session.run()
    assert [row.request for row in rows if row.guard_change == row.guard_change] == [7, count - 1]
    assert [row.request for row in rows if row.rolled_back] == [count - 1]
    assert equal(session.parts.serving.state_dict(), looks[0])
    assert equal(native.load(session.parts.versions.current, target).state_dict(), looks[0])
    assert len(rows) == count and rows[7].guard_change >= 0


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_what_the_guard_looks_at_is_what_is_then_served(lora: Any, target, stream, tmp_path: Path) -> None:
    session = session_of(target, tmp_path, stream, lora=lora)
    seen = []
    real = session.parts.guard.measure
    session.parts.guard.measure = lambda drafter: (seen.append(drafter.training), real(drafter))[1]  # type: ignore
    rows = session.run()
    assert seen == [False] * 3 and session.parts.learner.drafter.training
    stats = real(session.parts.serving)
    assert (rows[-1].guard_acceptance, rows[-1].guard_change) == (stats.adapted, stats.difference)


def test_rows_are_told_once_and_lie_in_no_checkpoint(target, stream, undisturbed, tmp_path, monkeypatch) -> None:
    told: list[int] = []
    for place, kill_at in (("behind a record", 4), ("before a version is written", 3), ("before a checkpoint", 2)):
        killed(place, kill_at, lambda: session_of(target, tmp_path, stream), monkeypatch, lambda rows: note(rows, told))
    session = session_of(target, tmp_path, stream)
    session.run(lambda rows: note(rows, told))
    assert told == list(range(10))
    state = checkpoints.load(tmp_path / "state.ckpt")
    assert state["at"]["next"] == 10 and "rows" not in state["at"]
    lines = (tmp_path / "timeline.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["request", *map(str, range(10))]


def note(rows: list[Any], told: list[int]) -> None:
    told += [row.request for row in rows]


SIGKILLED = """
import os, signal, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from tests.helpers.adaptation import random_stream, session_of
from tests.helpers.drafters import tiny_target
from train.adaptation import records

def killed(tensors, path, metadata):
    save_file(tensors, path, metadata=metadata)
    if path.name.startswith(".00000003"):
        os.kill(os.getpid(), signal.SIGKILL)

records.save_file = killed
target = tiny_target(torch.float64)
session_of(target, Path(sys.argv[1]), random_stream(target.vocab_size)).run()
"""


def test_a_sigkill_leaves_nothing(target, stream, undisturbed, tmp_path: Path) -> None:
    """Amid a record: its ids lie in a temporary file, which the next start deletes; then all ends as undisturbed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SIGKILLED, str(tmp_path)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = (tmp_path / "records").glob(".*")
    assert left.name.startswith(".00000003.safetensors.") and left.stat().st_size > 0
    for place in (".state.ckpt.4194305.tmp", "versions/.000001.4194305.tmp", "deltas/.000001.4194305.old"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text("weights")
    session = session_of(target, tmp_path, stream)
    assert not [path for path in tmp_path.rglob(".*") if path.suffix in (".tmp", ".old")]
    session.run()
    assert not list(tmp_path.glob("previous-*"))  # a state is replaced at one stroke: no moment is without one
    assert_same_end(session, undisturbed)


def test_requests_of_experts_are_no_sign_of_drift(target, stream, tmp_path: Path) -> None:
    session = session_of(target, tmp_path, stream)
    seen: list[float] = []
    session.parts.drift.update = lambda rate: seen.append(rate) or []  # type: ignore[method-assign, func-returns-value]
    real = session.parts.pool.choose
    session.parts.pool.choose = lambda prompt, number: (  # type: ignore[method-assign]
        real(prompt, number) if number % 2 else ("expert", session.parts.frozen)
    )
    rows = session.run()
    assert seen == pytest.approx([row.accepted / row.tested for row in rows if row.member == "adapted"])
    assert len(seen) == 5


def test_with_drift_only_what_follows_an_alarm_is_learnt(target, stream, tmp_path: Path) -> None:
    session = session_of(target, tmp_path, stream, when=WhenSettings("drift", after_alarm=3))
    session.parts.drift.update = lambda rate: ["cusum"] if len(session.rows) == 5 else []  # type: ignore[method-assign]
    rows = session.run()
    assert [row.request for row in rows if row.alarms] == [5]
    assert [row.request for row in rows if row.updated] == [5, 7]


def test_nothing_is_learnt_before_there_is_enough_to_learn_from(target, stream, tmp_path: Path) -> None:
    rows = session_of(target, tmp_path, stream, learner={"updates": {"wait": 4}}).run()
    assert [row.request for row in rows if row.updated] == [3, 5, 7, 9]


def test_domains_that_are_kept_out_leave_no_trace(target, stream, tmp_path: Path, monkeypatch) -> None:
    session = session_of(target, tmp_path, stream, keep_out=("new",))
    written: list[Record] = []
    monkeypatch.setattr(
        RecordLog, "write", lambda self, record, real=RecordLog.write: (written.append(record), real(self, record))
    )
    session.run()
    assert [record.redacted for record in written] == [False] * 5 + [True] * 5
    assert session._at.learnt == 5
    assert all(request < 5 for request in session.parts.buffer.requests)
    assert {int(p.stem) for p in (tmp_path / "records").glob("*")} <= set(range(5))


def test_old_requests_go_from_the_disk_though_nothing_is_learnt(target, stream, tmp_path: Path) -> None:
    buffer = ReplayBuffer(8, "reservoir", retention_requests=3)
    session = session_of(target, tmp_path, stream, buffer=buffer, when=WhenSettings("drift"))
    session.parts.drift.update = lambda rate: []  # type: ignore[method-assign]
    for number, request in enumerate(stream.requests):
        record = session.serve(number, request)
        session.parts.log.write(record)
        session.absorb(record)
        kept = {int(path.stem) for path in (tmp_path / "records").glob("*")}
        newest = set(range(max(0, number - 2), number + 1))
        assert newest <= kept <= newest | {number - 3}, "gone at the next checkpoint, each second request"
        assert number % 2 == 0 or kept == newest
    assert session.version == 0 and not any(row.updated for row in session.rows)


def test_hashed_records_let_a_session_go_on(target, stream, tmp_path: Path) -> None:
    first = session_of(target, tmp_path, stream, log=RecordLog(tmp_path / "records", "hashes"))
    for number in range(5):
        record = first.serve(number, stream.requests[number])
        first.parts.log.write(record)
        first.absorb(record)
    again = session_of(target, tmp_path, stream, log=RecordLog(tmp_path / "records", "hashes"))
    assert equal(again.parts.serving.state_dict(), first.parts.serving.state_dict())
    assert len(again.parts.buffer) == 0
    rows = again.run()
    assert [row.request for row in rows] == list(range(10))


def test_adapters_are_handed_over_with_every_version(target, stream, tmp_path: Path) -> None:
    written = []

    def publish(learner: Any, version: int, requests: int) -> None:
        written.append((version, requests, deltas.delta_of(learner.drafter, "base", requests)))

    session = session_of(target, tmp_path, stream, lora={"rank": 2}, publish_deltas=publish)
    session.run()
    version, requests, delta = written[-1]
    assert (version, requests) == (session.version, 10)
    rebuilt = session_of(target, tmp_path / "other", stream).parts.frozen
    deltas.apply(delta, rebuilt)
    for name, tensor in rebuilt.state_dict().items():
        torch.testing.assert_close(tensor, session.parts.serving.state_dict()[name], atol=1e-6, rtol=1e-5)
