"""Serve, collect, learn, prove, undo: one request after the other, and from any moment on again after a kill.

A served request is a record on disk before anything is learnt from it. All else follows from the records and the last
`state.ckpt`, which is written whole after every change of the weights, and every so many requests: what a kill took is
done again, and comes to the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.progress import Progress
from data.streams import Request, Stream
from engine.loop import generate
from engine.settings import DecodeSettings
from models.errors import UserError
from models.files import clear_leftovers
from models.target import Target
from train import checkpoints
from train.adaptation.drift import Drift
from train.adaptation.guard import Guard, GuardSettings
from train.adaptation.learner import Learner, Updates
from train.adaptation.pool import ADAPTED, Pool
from train.adaptation.records import Record, Recorder, RecordLog
from train.adaptation.replay import ReplayBuffer
from train.adaptation.sections import WhenSettings
from train.adaptation.timeline import Row, append_csv, counts, paired, read_csv, write_csv
from train.adaptation.versions import Observers, Swap, Versions
from train.adaptation.versus import Versus, versus

_FRESH_UPDATES = 4  # as many fresh texts are kept as a step reads, so many times
_NOT_ALWAYS = ("frozen_rounds", "frozen_emitted", "frozen_tested", "frozen_accepted", "identical", "as_plain")
_PLAIN_EVERY = 10  # requests of which one is answered by plain decoding too


@dataclass
class Parts:
    """All that a session is made of; `serving` answers requests, `frozen` is the drafter as it was handed in."""

    target: Target
    serving: Any
    frozen: Any | None
    learner: Learner
    buffer: ReplayBuffer
    log: RecordLog
    drift: Drift
    guard: Guard
    versions: Versions
    pool: Pool
    decode: DecodeSettings
    law_tokens: int
    when: WhenSettings
    updates: Updates
    keep_out: tuple[str, ...] = ()
    publish_deltas: Callable[[Learner, int, int], None] | None = None


@dataclass
class _Progress:
    """What a restart needs beside the parts' own states."""

    next: int = 0  # the first request that is not in the rows
    version: int = 0
    updates: int = 0
    looked: int = 0  # updates that the guard has seen the end of
    learnt: int = 0  # requests that the drafter has learnt from
    good_learnt: int = 0  # and the last that passed the guard
    good_after: int = -1  # the last request that that one has learnt from
    paused_until: int = 0
    alarmed_until: int = 0
    judged_from: int = 0  # the first request whose answers say what the adapted drafter is worth on the traffic
    rows: list[Row] = field(default_factory=list)


class Session:
    """A run over a stream in `folder`; `run` serves what is not served yet."""

    def __init__(self, parts: Parts, stream: Stream, folder: Path) -> None:
        self.parts, self.stream, self.folder = parts, stream, folder
        self._at = _Progress()
        self._swap = Swap(parts.serving)
        self._fresh: list[Record] = []
        self._good: dict[str, Any] = {}
        self._start = folder / "start.ckpt"  # the learner's state before it learnt anything
        self._told: Callable[[list[Row]], None] | None = None
        self._checkpoint, self._timeline = folder / "state.ckpt", folder / "timeline.csv"
        self._committed = 0  # rows that are on disk
        self._begin()

    @property
    def rows(self) -> list[Row]:
        """Those of all requests so far."""
        return self._at.rows

    @property
    def version(self) -> int:
        """The version that is served."""
        return self._at.version

    def run(self, told: Callable[[list[Row]], None] | None = None) -> list[Row]:
        """Serve the rest of the stream; `told` is called with new rows once no kill takes them away."""
        self._told = told
        requests = self.stream.requests
        with Progress("requests served", len(requests)) as progress:
            progress.advance(self._at.next)
            while self._at.next < len(requests):
                number = self._at.next
                record = self.parts.log.read(number)
                if record is None:
                    record = self.serve(number, requests[number])
                    if record.domain in self.parts.keep_out:
                        record = self.parts.log.redacted(record)
                    self.parts.log.write(record)
                row = self.absorb(record)
                progress.advance(1, f"version {self._at.version}  α {row.accepted / max(1.0, row.tested):.2f}")
        self._commit()
        return self.rows

    def serve(self, number: int, request: Request) -> Record:
        """Answer a request by the pool's choice, and by the frozen drafter where there is one to compare with."""
        parts, prompt = self.parts, request.token_ids
        member, drafter = parts.pool.choose(prompt, number)
        recorder = Recorder([prompt], parts.law_tokens)
        seeds = [parts.decode.seed + number]
        started = time.perf_counter()
        made = generate(
            parts.target, [prompt], parts.decode, drafter, seeds=seeds, observer=Observers([self._swap, recorder])
        )
        about: dict[str, Any] = {"member": member, "seconds": time.perf_counter() - started, **counts(made.stats)}
        if parts.frozen is not None:
            frozen = generate(parts.target, [prompt], parts.decode, parts.frozen, seeds=seeds)
            about |= counts(frozen.stats, "frozen_")
            if parts.decode.sampling.greedy:  # else equal laws, not equal answers
                about["identical"] = float(frozen.token_ids == made.token_ids)
        if parts.decode.sampling.greedy and number % _PLAIN_EVERY == 0:
            plain = generate(parts.target, [prompt], parts.decode, seeds=seeds)
            about["as_plain"] = float(plain.token_ids == made.token_ids)
        return recorder.record(0, made.token_ids[0], request=number, domain=request.domain, about=about)

    def absorb(self, record: Record) -> Row:
        """Take in a served request: the same records always come to the same weights."""
        parts, at = self.parts, self._at
        about = {**dict.fromkeys(_NOT_ALWAYS, float("nan")), **record.about}
        about.pop("hash", None)
        parts.pool.served(about["member"], record)
        row = Row(record.request, record.domain, version=at.version, **about)
        alarms = parts.drift.update(record.acceptance_rate) if row.member == ADAPTED else []
        if alarms:
            at.alarmed_until = record.request + parts.when.after_alarm
        parts.buffer.expire(record.request)
        learnable = [] if record.domain in parts.keep_out else [record]
        for each in learnable:
            parts.buffer.add(each)
        self._fresh = self._still_fresh(record.request, learnable)
        at.next = record.request + 1
        changed = self._change(record.request)
        row = replace(row, alarms=" ".join(alarms), buffer=len(parts.buffer), **changed)
        at.rows.append(row)
        if changed or at.next % parts.updates.every == 0:  # what may go from the disk goes, though nothing be learnt
            self._commit()
        if changed:
            self._publish()
        return row

    def _still_fresh(self, request: int, learnable: list[Record]) -> list[Record]:
        """What is not learnt yet, with new records: no more than some updates take, nor older than what is kept."""
        limit = self.parts.buffer.retention_requests
        kept = [r for r in self._fresh if limit is None or r.request > request - limit]
        return [*kept, *learnable][-_FRESH_UPDATES * self.parts.updates.requests :]

    def _is_due(self, request: int) -> bool:
        at, when = self._at, self.parts.when
        wanted = when.when == "always" or request < at.alarmed_until
        enough = len(self.parts.buffer) >= self.parts.updates.wait
        return wanted and enough and request >= at.paused_until and at.next % self.parts.updates.every == 0

    def _change(self, request: int) -> dict[str, Any]:
        """What is due behind a request: an update, the guard's look, new weights to serve; what of it a row tells."""
        parts, at = self.parts, self._at
        row = self._learn() if self._is_due(request) else {}
        last = at.next == len(self.stream.requests)  # no update stays that nobody looked at
        if at.updates > at.looked and (last or (row and parts.guard.due(at.updates))):
            row |= self._look(request)
        if "updated" in row or "rolled_back" in row:
            at.version += 1
            self._swap.offer(parts.learner.weights())
        return row

    def _learn(self) -> dict[str, Any]:
        """One update, where there is something to learn from."""
        parts, at = self.parts, self._at
        told = parts.learner.update(self._fresh, parts.buffer)
        at.learnt += sum(not record.redacted and len(record.place) > 0 for record in self._fresh)
        self._fresh = []
        if "loss" not in told:
            return {}
        at.updates += 1
        return {"updated": 1, "update_s": told["seconds"], "loss": told["loss"]}

    def _look(self, request: int) -> dict[str, Any]:
        """The guard's verdict on what was learnt since it looked last; what it refuses is undone."""
        parts, at = self.parts, self._at
        started = time.perf_counter()
        with parts.learner.candidate() as drafter:
            found = parts.guard.measure(drafter)
        row: dict[str, Any] = {"guard_acceptance": found.adapted, "guard_change": found.difference}
        row |= {"guard_low": found.interval[0], "guard_high": found.interval[1]}
        row["guard_s"] = time.perf_counter() - started
        served = self._on_served()
        if served is not None:
            row["served_change"] = served.difference
        at.looked = at.updates
        if served is not None and parts.guard.settings.refuses(served):
            self._good, at.good_after, at.good_learnt = checkpoints.load(self._start), -1, 0
            row["rolled_back"] = self._roll_back(request)
        elif parts.guard.settings.refuses(found):
            row["rolled_back"] = self._roll_back(request)
        else:
            self._good, at.good_after, at.good_learnt = parts.learner.state(), request, at.learnt
        return row

    def _on_served(self) -> Versus | None:
        """The adapted drafter on the requests that it answered last, beside the one that was handed in.

        Of as many as the guard holds out, and since weights were last undone; None before there are as many.
        """
        wanted = self.parts.guard.settings.num_prompts
        since = [r for r in self._at.rows if r.version > 0 and r.request >= self._at.judged_from]
        table = paired([row for row in since if row.frozen_tested == row.frozen_tested], "acceptance_rate")[-wanted:]
        return versus("served", table) if len(table) == wanted else None

    def _roll_back(self, request: int) -> int:
        """Back to the last drafter that passed; what was served since is no longer learnt. Returns 1, for the row."""
        parts, at = self.parts, self._at
        parts.learner.load_state(self._good)
        at.learnt, at.judged_from = at.good_learnt, request + 1
        at.paused_until = request + 1 + parts.guard.rolled_back()
        if parts.guard.settings.forget:
            parts.buffer.forget(at.good_after)
        return 1

    def _publish(self) -> None:
        """Make the version that was committed last an export that others can read."""
        parts, at = self.parts, self._at
        self._swap.before_round()  # no draft is under way
        told = {"requests": at.next, "updates": at.updates, "rollbacks": parts.guard.rollbacks}
        if parts.publish_deltas is not None:
            parts.publish_deltas(parts.learner, at.version, at.learnt)
        parts.versions.publish(parts.serving, at.version, told)

    def _begin(self) -> None:
        """Go on from the last checkpoint, or begin: the drafter as it was handed in is version 0."""
        parts = self.parts
        for name in (".", "records", "versions", "deltas"):
            clear_leftovers(self.folder / name)
        if self._checkpoint.exists():
            self._restore(checkpoints.load(self._checkpoint))
        else:
            write_csv([], self._timeline)
            parts.guard.measure(parts.serving)
            self._good = parts.learner.state()
            checkpoints.save(self._good, self._start)
            self._commit()
        self._publish()

    def _commit(self) -> None:
        """Rows before the state that counts them: those that a kill leaves behind it are done again."""
        parts, at, new = self.parts, self._at, self._at.rows[self._committed :]
        append_csv(new, self._timeline)
        state = {
            "at": {name: value for name, value in vars(at).items() if name != "rows"},
            "learner": parts.learner.state(),
            "good": self._good,
            "buffer": {"requests": parts.buffer.requests, "seen": parts.buffer.seen},
            "fresh": [record.request for record in self._fresh],
            "drift": parts.drift.state(),
            "guard": parts.guard.state(),
            "pool": parts.pool.state(),
        }
        checkpoints.save(state, self._checkpoint)
        self._committed = len(at.rows)
        parts.log.keep_only([*parts.buffer.requests, *(record.request for record in self._fresh)])
        if new and self._told is not None:
            self._told(new)

    def _restore(self, state: Mapping[str, Any]) -> None:
        parts = self.parts
        rows = read_csv(self._timeline, state["at"]["next"])
        write_csv(rows, self._timeline)
        self._at, self._committed = _Progress(**state["at"], rows=rows), len(rows)
        parts.learner.load_state(state["learner"])
        self._good = state["good"]
        parts.buffer.restore(self._read(state["buffer"]["requests"]), state["buffer"]["seen"])
        self._fresh = self._read(state["fresh"])
        parts.drift.load_state(state["drift"])
        parts.guard.load_state(state["guard"])
        parts.pool.load_state(state["pool"])
        parts.serving.load_state_dict(parts.learner.weights())

    def _read(self, requests: list[int]) -> list[Record]:
        """Records that are on disk with their texts."""
        found = (self.parts.log.read(request) for request in requests)
        return [record for record in found if record is not None and not record.redacted]


def guard_of(settings: GuardSettings, target: Target, stream: Stream, decode: DecodeSettings) -> Guard:
    """The guard over the held-out requests of the stream's first domain."""
    prompts = stream.of(stream.old)[: settings.num_prompts]
    if not prompts:
        raise UserError(f"The stream holds out no request of {stream.old!r} for the guard to measure.")
    return Guard(settings, target, prompts, decode)
