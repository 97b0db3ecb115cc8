"""Serve, collect, learn, prove, undo: one request after the other, and from any moment on again after a kill.

A served request is a record on disk before anything is learnt from it. All else follows from the records and the last
`state.ckpt`, which is written whole after every change of the weights, and every so many requests: what a kill took is
done again, and comes to the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from data.progress import Progress
from data.streams import Request, Stream
from engine.loop import generate
from engine.settings import DecodeSettings
from models.errors import UserError
from models.target import Target
from train.adaptation.drift import Drift
from train.adaptation.guard import Guard, GuardSettings
from train.adaptation.learner import Learner, Updates
from train.adaptation.pool import Pool
from train.adaptation.records import Record, Recorder, RecordLog
from train.adaptation.replay import ReplayBuffer
from train.adaptation.timeline import Row, counts, write_csv
from train.adaptation.versions import Observers, Swap, Versions
from train.callbacks import AtomicCheckpoints

ADAPTED = "adapted"  # the pool's member that learns
_FRESH_UPDATES = 4  # as many fresh texts are kept as a step reads, so many times


@dataclass(frozen=True)
class WhenSettings:
    """`when` always: learn throughout; drift: only for `after_alarm` requests behind an alarm."""

    when: str = "always"
    after_alarm: int = 100

    def __post_init__(self) -> None:
        if self.when not in ("always", "drift"):
            raise UserError(f"adaptation.when is {self.when!r}: choose always or drift.")
        if self.after_alarm < 1:
            raise UserError(f"adaptation.after_alarm is {self.after_alarm}: it must be at least 1.")


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
    good_after: int = -1  # the last request that the last drafter that passed the guard has learnt from
    paused_until: int = 0
    alarmed_until: int = 0
    rows: list[Row] = field(default_factory=list)


class Session:
    """A run over a stream in `folder`; `run` serves what is not served yet."""

    def __init__(self, parts: Parts, stream: Stream, folder: Path) -> None:
        self.parts, self.stream, self.folder = parts, stream, folder
        self._at = _Progress()
        self._swap = Swap(parts.serving)
        self._fresh: list[Record] = []
        self._good: dict[str, Any] = {}
        self._checkpoint = folder / "state.ckpt"
        self._begin()

    @property
    def rows(self) -> list[Row]:
        """Those of all requests so far."""
        return self._at.rows

    @property
    def version(self) -> int:
        """The version that is served."""
        return self._at.version

    def run(self, told: Callable[[Row], None] | None = None) -> list[Row]:
        """Serve the rest of the stream; `told` is called with every new row."""
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
                if told is not None:
                    told(row)
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
        return recorder.record(0, made.token_ids[0], request=number, domain=request.domain, about=about)

    def absorb(self, record: Record) -> Row:
        """Take in a served request: the same records always come to the same weights."""
        parts, at = self.parts, self._at
        nothing = dict.fromkeys(("frozen_rounds", "frozen_emitted", "frozen_tested", "frozen_accepted", "identical"))
        about = {**dict.fromkeys(nothing, float("nan")), **record.about}
        about.pop("hash", None)
        parts.pool.served(about["member"], record)
        row = Row(record.request, record.domain, version=at.version, **about)
        alarms = parts.drift.update(record.acceptance_rate)
        if alarms:
            at.alarmed_until = record.request + parts.when.after_alarm
        parts.buffer.expire(record.request)
        learnable = [] if record.domain in parts.keep_out else [record]
        for each in learnable:
            parts.buffer.add(each)
        self._fresh = self._still_fresh(record.request, learnable)
        at.next = record.request + 1
        changed = self._learn(record.request) if self._is_due(record.request) else {}
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
        return wanted and request >= at.paused_until and at.next % self.parts.updates.every == 0

    def _learn(self, request: int) -> dict[str, Any]:
        """One update, and the guard's verdict where it is due; what of it a row tells."""
        parts, at = self.parts, self._at
        told = parts.learner.update(self._fresh, parts.buffer)
        self._fresh = []
        if "loss" not in told:
            return {}
        at.updates += 1
        row: dict[str, Any] = {"updated": 1, "update_s": told["seconds"], "loss": told["loss"]}
        weights = parts.learner.weights()
        if parts.guard.due(at.updates):
            started = time.perf_counter()
            parts.serving.load_state_dict(weights)
            found = parts.guard.measure(parts.serving)
            row |= {"guard_acceptance": found.adapted, "guard_change": found.difference}
            row |= {"guard_low": found.interval[0], "guard_high": found.interval[1]}
            row["guard_s"] = time.perf_counter() - started
            if parts.guard.settings.refuses(found):
                self._roll_back(request)
                weights, row["rolled_back"] = parts.learner.weights(), 1
            else:
                self._good, at.good_after = parts.learner.state(), request
        at.version += 1
        self._swap.offer(weights)
        return row

    def _roll_back(self, request: int) -> None:
        """Back to the last drafter that passed; what was served since is no longer learnt."""
        parts, at = self.parts, self._at
        parts.learner.load_state(self._good)
        at.paused_until = request + 1 + parts.guard.rolled_back()
        if parts.guard.settings.forget:
            parts.buffer.forget(at.good_after)

    def _publish(self) -> None:
        """Make the version that was committed last an export that others can read."""
        parts, at = self.parts, self._at
        self._swap.before_round()  # no draft is under way
        told = {"requests": at.next, "updates": at.updates, "rollbacks": parts.guard.rollbacks}
        parts.versions.publish(parts.serving, at.version, told)
        if parts.publish_deltas is not None:
            parts.publish_deltas(parts.learner, at.version, at.next)

    def _begin(self) -> None:
        """Go on from the last checkpoint, or begin: the drafter as it was handed in is version 0."""
        parts = self.parts
        if self._checkpoint.exists():
            self._restore(AtomicCheckpoints().load_checkpoint(self._checkpoint))
        else:
            parts.guard.measure(parts.serving)
            self._good = parts.learner.state()
            self._commit()
        self._publish()

    def _commit(self) -> None:
        parts, at = self.parts, self._at
        rows = json.dumps([asdict(row) for row in at.rows])
        state = {
            "at": {**vars(at), "rows": rows},
            "learner": parts.learner.state(),
            "good": self._good,
            "buffer": {"requests": parts.buffer.requests, "seen": parts.buffer.seen},
            "fresh": [record.request for record in self._fresh],
            "drift": parts.drift.state(),
            "guard": parts.guard.state(),
            "pool": parts.pool.state(),
        }
        AtomicCheckpoints().save_checkpoint(state, self._checkpoint)
        write_csv(at.rows, self.folder / "timeline.csv")
        parts.log.keep_only([*parts.buffer.requests, *(record.request for record in self._fresh)])

    def _restore(self, state: Mapping[str, Any]) -> None:
        parts = self.parts
        rows = [Row(**row) for row in json.loads(state["at"]["rows"])]
        self._at = _Progress(**{**state["at"], "rows": rows})
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
