"""From options to a session: everything is opened, and what makes no sense is refused, before the first request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.streams import PRESETS, Stream, open_stream
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
from train.adaptation.learner import Learner
from train.adaptation.pool import ADAPTED, Pool, PoolSettings
from train.adaptation.records import RecordLog
from train.adaptation.regime import check_adaptable
from train.adaptation.sections import Options, sections_of
from train.adaptation.session import Parts, Session, guard_of
from train.adaptation.successors import card_of
from train.adaptation.versions import Versions

_FREE = ("debug", "logger", "output")  # may differ between a session and its resumption
_COUNT = "adaptation.requests"


@dataclass(frozen=True, slots=True)
class Opened:
    """A session, and what its result is compared with."""

    session: Session
    target: Target
    frozen: Any
    stream: Stream
    decode: DecodeSettings


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
    learner = Learner(
        load(), target, updates, sections.loss, sections.optimizer, given["lora"], depth=decode.depth, seed=seed
    )
    parts = Parts(
        target=target,
        serving=serving,
        frozen=load() if given["compare"] else None,
        learner=learner,
        buffer=kept.empty(seed),
        log=RecordLog(folder / "records", kept.persist),
        drift=sections.drift,
        guard=guard_of(guard, target, stream, decode),
        versions=Versions(folder, described, card_of(source), sections.versions.keep),
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


def record(options: Options, folder: Path) -> None:
    """Write what the session is. Raises UserError where the folder holds one with other settings."""
    path, now = folder / "config.json", {key: value for key, value in options.items() if key not in _FREE}
    if path.exists() and (folder / "state.ckpt").exists():
        before = json.loads(path.read_text())["config"]
        pair = [dict(flat(json.loads(json.dumps(o)))) for o in (before, now)]
        different = sorted(key for key in pair[0].keys() | pair[1].keys() if pair[0].get(key) != pair[1].get(key))
        if options["stream"] not in PRESETS and pair[1][_COUNT] > pair[0][_COUNT]:  # a file goes on as it began
            different.remove(_COUNT)
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


def _pool(settings: PoolSettings, serving: Any, target: Target, stream: Stream, decode: DecodeSettings) -> Pool:
    members = {ADAPTED: serving}
    for name, place in settings.experts.items():
        expert = Path(place).expanduser()
        members[name] = detect(expert).load(expert, target)
        check_settings(target, members[name], decode)
    whole = _size(target.model)
    shares = {name: _size(member) / whole for name, member in members.items()}
    detector = DomainDetector(target.vocab_size, ((request.token_ids, request.domain) for request in stream.held_out))
    settings.check(detector.domains)
    return Pool(members, shares, detector, settings, decode.depth)


def _size(module: Any) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _deltas(folder: Path, base: str) -> Callable[[Learner, int, int], None]:
    def publish(learner: Learner, version: int, requests: int) -> None:
        place = folder / "deltas" / f"{version:06d}"
        if not place.exists():
            with learner.averaged() as drafter:
                deltas.save(deltas.delta_of(drafter, base, requests), place)

    return publish
