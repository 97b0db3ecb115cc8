"""From options to a session: everything is opened, and what makes no sense is refused, before the first request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from data.streams import Stream, open_stream
from engine.loop import check_prompts, check_settings
from engine.options import decode_settings
from engine.settings import DecodeSettings
from eval.provenance import provenance
from models.checkpoint import detect, target_options
from models.errors import UserError
from models.files import flat, write_json
from models.target import Target, load_target
from train.adaptation import deltas
from train.adaptation.domains import DomainDetector
from train.adaptation.drift import Drift
from train.adaptation.guard import GuardSettings
from train.adaptation.learner import Learner, Updates
from train.adaptation.pool import Pool, PoolSettings
from train.adaptation.records import RecordLog
from train.adaptation.regime import check_adaptable
from train.adaptation.replay import ReplayBuffer
from train.adaptation.session import ADAPTED, Parts, Session, WhenSettings, guard_of
from train.adaptation.versions import Versions

Options = dict[str, Any]
PERSISTED = ("ids", "hashes")
_FREE = ("debug", "logger", "output")  # may differ between a session and its resumption
Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Opened:
    """A session, and what its result is compared with."""

    session: Session
    target: Target
    frozen: Any
    stream: Stream
    decode: DecodeSettings


@dataclass(frozen=True)
class BufferSettings:
    """What is kept of requests (`train.adaptation.replay`, `train.adaptation.records`), and what never is."""

    capacity: int
    keep: str
    law_tokens: int
    retention_requests: int | None
    persist: str
    keep_out: Sequence[str]

    def __post_init__(self) -> None:
        if self.law_tokens < 1:
            raise UserError(f"adaptation.buffer.law_tokens is {self.law_tokens}: it must be at least 1.")
        if self.persist not in PERSISTED:
            raise UserError(f"adaptation.buffer.persist is {self.persist!r}: choose {' or '.join(PERSISTED)}.")

    def check(self, stream: Stream) -> None:
        """Raise UserError for a domain to keep out that the stream does not have: a slip would let it in."""
        domains = sorted({request.domain for request in stream.requests})
        for domain in self.keep_out:
            if domain not in domains:
                raise UserError(
                    f"adaptation.buffer.keep_out has {domain!r}: the stream's domains are {', '.join(domains)}."
                )


@dataclass(frozen=True, slots=True)
class Sections:
    """The sections of `conf/adaptation` that make sense by themselves."""

    updates: Updates
    guard: GuardSettings
    pool: PoolSettings
    buffer: BufferSettings
    drift: Drift
    when: WhenSettings


def sections_of(given: Options) -> Sections:
    """Read and check what can be checked without an export, in no time: a run may train before it adapts.

    Raises UserError for settings that make no sense, and for folders without an export.
    """
    sections = Sections(
        read(Updates, given["updates"], "updates"),
        read(GuardSettings, given["guard"], "guard"),
        read(PoolSettings, given["pool"], "pool"),
        read(BufferSettings, given["buffer"], "buffer"),
        read(Drift, given["drift"], "drift"),
        WhenSettings(given["when"], given["after_alarm"]),
    )
    ReplayBuffer(sections.buffer.capacity, sections.buffer.keep, sections.buffer.retention_requests)
    for place in sections.pool.experts.values():
        detect(Path(place).expanduser())
    return sections


def open_session(options: Options) -> Opened:
    """Load export and target, open the stream, and begin or resume in the output folder.

    Raises UserError for settings that make no sense, and where the folder holds a session with others.
    """
    given, source, folder = options["adaptation"], Path(options["export"]).expanduser(), output_folder(options)
    sections = sections_of(given)
    updates, guard, kept = sections.updates, sections.guard, sections.buffer
    module = detect(source)
    described = module.read(source.resolve())
    target = load_target(**target_options(described, options["target"], source))
    load: Callable[[], Any] = lambda: module.load(source, target)  # noqa: E731 (each user has weights of its own)
    serving = load()
    check_adaptable(serving)
    tokens, tree, seed = described.num_speculative_tokens, described.tree, options["seed"]
    decode = decode_settings(options["decode"], float(given["temperature"]), seed, tokens, tree)
    check_settings(target, serving, decode)
    stream = open_stream(options["stream"], target, given["requests"], guard.num_prompts, seed)
    check_prompts(target, [request.token_ids for request in (*stream.requests, *stream.held_out)])
    kept.check(stream)
    learner = _learner(given, load(), target, decode, updates, seed)
    card = (source / "README.md").read_text() if (source / "README.md").exists() else ""
    parts = Parts(
        target=target,
        serving=serving,
        frozen=load() if given["compare"] else None,
        learner=learner,
        buffer=ReplayBuffer(kept.capacity, kept.keep, kept.retention_requests, seed),
        log=RecordLog(folder / "records", kept.persist),
        drift=sections.drift,
        guard=guard_of(guard, target, stream, decode),
        versions=Versions(folder, described, card, given["versions"]["keep"]),
        pool=_pool(sections.pool, serving, target, stream, decode),
        decode=decode,
        law_tokens=kept.law_tokens,
        when=sections.when,
        updates=updates,
        keep_out=tuple(kept.keep_out),
        publish_deltas=_deltas(folder, base_of(serving)) if learner.adapted else None,
    )
    record(options, folder)
    target.accelerate()
    return Opened(Session(parts, stream, folder), target, load(), stream, decode)


def output_folder(options: Options) -> Path:
    """Where the session lies: beside the export, under the stream's name, where nothing else is asked for."""
    if options["output"]:
        return Path(options["output"]).expanduser()
    return Path(options["export"]).expanduser().parent / f"adapted-{Path(options['stream']).stem}"


def read(kind: Callable[..., Kind], given: Mapping[str, Any], name: str) -> Kind:
    """Settings of a section. Raises UserError for one that there is not."""
    try:
        return kind(**given)
    except TypeError as error:
        raise UserError(f"adaptation.{name}: {str(error).split('__init__() ')[-1]}.") from error


def record(options: Options, folder: Path) -> None:
    """Write what the session is. Raises UserError where the folder holds one with other settings."""
    path, now = folder / "config.json", {key: value for key, value in options.items() if key not in _FREE}
    if path.exists() and (folder / "state.ckpt").exists():
        before = json.loads(path.read_text())["config"]
        pair = [dict(flat(json.loads(json.dumps(o)))) for o in (before, now)]
        different = sorted(key for key in pair[0].keys() | pair[1].keys() if pair[0].get(key) != pair[1].get(key))
        if different:
            raise UserError(
                f"{str(folder)!r} holds a session with another {', '.join(different)}: choose another output, or "
                "delete it."
            )
    write_json(path, {"config": now, "provenance": provenance()})


def base_of(drafter: Any) -> str:
    """Hash of a drafter's weights: what a delta is for."""
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.state_dict().items()):
        digest.update(name.encode() + tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _learner(
    given: Options, drafter: Any, target: Target, decode: DecodeSettings, updates: Updates, seed: int
) -> Learner:
    loss = {**given["loss"], "num_steps": given["loss"]["num_steps"] or decode.depth}
    try:
        return Learner(drafter, target, updates, loss, given["optimizer"], given["lora"], seed)
    except TypeError as error:
        raise UserError(f"adaptation.loss or adaptation.optimizer: {str(error).split('__init__() ')[-1]}.") from error


def _pool(settings: PoolSettings, serving: Any, target: Target, stream: Stream, decode: DecodeSettings) -> Pool:
    members = {ADAPTED: serving}
    for name, place in settings.experts.items():
        expert = Path(place).expanduser()
        members[name] = detect(expert).load(expert, target)
        check_settings(target, members[name], decode)
    whole = _size(target.model)
    shares = {name: _size(member) / whole for name, member in members.items()}
    examples = ((request.token_ids, request.domain) for request in stream.held_out)
    return Pool(members, shares, DomainDetector(target.vocab_size, examples), settings, decode.depth)


def _size(module: Any) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _deltas(folder: Path, base: str) -> Callable[[Learner, int, int], None]:
    def publish(learner: Learner, version: int, requests: int) -> None:
        place = folder / "deltas" / f"{version:06d}"
        if not place.exists():
            with learner.averaged() as drafter:
                deltas.save(deltas.delta_of(drafter, base, requests), place)

    return publish
