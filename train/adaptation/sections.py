"""The sections of `conf/adaptation`, read and checked before an export or a target is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from data.streams import Stream
from models.checkpoint import detect
from models.errors import UserError
from models.lora import check_lora
from models.sampling import SamplingParams
from train.adaptation.drift import Drift
from train.adaptation.guard import GuardSettings
from train.adaptation.learner import Updates
from train.adaptation.pool import PoolSettings
from train.adaptation.regime import LossSettings, OptimizerSettings
from train.adaptation.replay import ReplayBuffer
from train.adaptation.versions import VersionsSettings

Options = dict[str, Any]
PERSISTED = ("ids", "hashes")
Kind = TypeVar("Kind")


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
        self.empty(0)

    def empty(self, seed: int) -> ReplayBuffer:
        """A buffer with nothing in it. Raises UserError for settings that make no sense."""
        return ReplayBuffer(self.capacity, self.keep, self.retention_requests, seed)

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
    """The sections, as far as they make sense by themselves."""

    updates: Updates
    guard: GuardSettings
    pool: PoolSettings
    buffer: BufferSettings
    drift: Drift
    versions: VersionsSettings
    loss: LossSettings
    optimizer: OptimizerSettings
    when: WhenSettings


def sections_of(given: Options) -> Sections:
    """Read and check what can be checked without an export, in no time: a run may train before it adapts.

    Raises UserError for settings that make no sense, and for folders without an export.
    """
    kinds: dict[str, Any] = {"requests": int, "compare": bool, "temperature": float}
    for name, kind in kinds.items():
        _check(f"adaptation.{name}", given[name], kind)
    SamplingParams(float(given["temperature"]))
    if given["lora"] is not None:
        check_lora(given["lora"], "adaptation.lora")
    sections = Sections(
        read(Updates, given["updates"], "adaptation.updates"),
        read(GuardSettings, given["guard"], "adaptation.guard"),
        read(PoolSettings, given["pool"], "adaptation.pool"),
        read(BufferSettings, given["buffer"], "adaptation.buffer"),
        read(Drift, given["drift"], "adaptation.drift"),
        read(VersionsSettings, given["versions"], "adaptation.versions"),
        read(LossSettings, given["loss"], "adaptation.loss"),
        read(OptimizerSettings, given["optimizer"], "adaptation.optimizer"),
        read(WhenSettings, {key: given[key] for key in ("when", "after_alarm")}, "adaptation"),
    )
    limits = {"capacity": sections.buffer.capacity, "retention_requests": sections.buffer.retention_requests}
    for name, limit in limits.items():
        if limit is not None and limit < sections.updates.wait:
            raise UserError(
                f"adaptation.updates.wait is {sections.updates.wait}, and adaptation.buffer.{name} {limit}: nothing "
                "would ever be learnt."
            )
    for place in sections.pool.experts.values():
        detect(Path(place).expanduser())
    return sections


def read(kind: Callable[..., Kind], given: Mapping[str, Any], name: str) -> Kind:
    """Settings of the section `name`. Raises UserError for one that there is not, and for values of another kind."""
    hints = get_type_hints(kind.__init__ if inspect.isclass(kind) else kind)
    for key, value in given.items():
        if key in hints:
            _check(f"{name}.{key}", value, hints[key])
    try:
        return kind(**given)
    except TypeError as error:
        raise UserError(f"{name}: {str(error).split('__init__() ')[-1]}.") from error


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    Sequence[str]: "a list of words, as [one, two]",
    Sequence[float]: "a list of numbers",
    Mapping[str, str]: "names with values, as {one: value}",
}


def _check(name: str, value: Any, hint: Any) -> None:
    """Raise UserError where a value is none of the annotated kind, or of an optional one neither that nor null."""
    kinds = [kind for kind in getattr(hint, "__args__", ()) if hint not in _WORDS] or [hint]
    if not any(_fits(value, kind) for kind in kinds):
        words = " or ".join(_WORDS.get(kind, "null") for kind in kinds)
        raise UserError(f"{name} is {value!r}: it must be {words}.")


def _fits(value: Any, kind: Any) -> bool:
    if kind in (Sequence[str], Sequence[float]):
        return isinstance(value, list | tuple) and all(_fits(item, kind.__args__[0]) for item in value)
    if kind == Mapping[str, str]:
        return isinstance(value, Mapping) and all(isinstance(item, str) for item in value.values())
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)
