"""Traffic: requests in the order in which they come, each of a domain, and held-out requests of the same domains."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from data.answers import context_ids
from data.instructions import Instructions
from data.prompts import Prompt, StandardLibrary, read_prompts
from models.errors import UserError
from models.target import Target


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt's token ids, and where it comes from."""

    token_ids: list[int]
    domain: str


@dataclass(frozen=True, slots=True)
class Stream:
    """`requests` as they come, and `held_out` ones that are never served; the first domain is the old traffic.

    `left_out` of a file's requests come behind the last that was asked for.
    """

    requests: list[Request]
    held_out: list[Request]
    left_out: int = 0

    @property
    def old(self) -> str:
        """The domain that the traffic begins with."""
        return self.requests[0].domain

    def of(self, domain: str) -> list[list[int]]:
        """The held-out prompts of a domain."""
        return [request.token_ids for request in self.held_out if request.domain == domain]


def open_stream(name: str, target: Target, count: int, held_out: int, seed: int) -> Stream:
    """The stream called `name`, one of `PRESETS`, or a JSONL file of prompts whose categories are the domains.

    Of a preset `count` requests, and `held_out` of each domain. Of a file all, in its order, at most `count`; the first
    `held_out` of its first domain are set aside, and as many of each other one, but of these no more than a quarter.
    Raises UserError for a name that is neither, and where there are too few.
    """
    if held_out < 1 or count < 2:
        raise UserError(f"A stream of {count} requests with {held_out} held out: give at least 2 and 1.")
    if name in PRESETS:
        return PRESETS[name](target, count, held_out, seed)
    check_stream(name)
    path = Path(name).expanduser()
    asked = _requests(target, list(read_prompts(path)))
    places: dict[str, list[int]] = {}
    for place, request in enumerate(asked):
        places.setdefault(request.domain, []).append(place)
    old = next(iter(places), "")
    aside = [p for d, own in places.items() for p in own[: held_out if d == old else min(held_out, len(own) // 4)]]
    served = [request for place, request in enumerate(asked) if place not in set(aside)]
    if len(served) < 2 or served[0].domain != old:
        raise UserError(
            f"stream={name}: it has {len(asked)} prompts that leave room for an answer, and the first {held_out} of "
            f"{old!r} are set aside to be held out: that leaves too few. Add some, or lower "
            "adaptation.guard.num_prompts."
        )
    return Stream(served[:count], [asked[place] for place in aside], max(0, len(served) - count))


def check_stream(name: str) -> None:
    """Raise UserError for a name that is neither of `PRESETS` nor of a file."""
    if name not in PRESETS and not Path(name).expanduser().is_file():
        raise UserError(f"stream={name}: there is no such file; choose {', '.join(PRESETS)} or a JSONL file.")


def shift(target: Target, count: int, held_out: int, seed: int) -> Stream:
    """The standard library's source, then half way its prose documentation.

    Source is of documents that neither the target nor a drafter was trained on. What is held out is of the test split,
    so that no document is both served and held out.
    """
    (held_code, code), (held_prose, prose) = (
        _shuffled(target, kind, name, seed) for kind, name in (("code", "code"), ("docs", "prose"))
    )
    first = count // 2
    return Stream(
        [*_some(code, first, "code"), *_some(prose, count - first, "prose")],
        [*_some(held_code, held_out, "code"), *held_prose[:held_out]],
    )


def instructions(target: Target, count: int, held_out: int, seed: int) -> Stream:
    """Of an instruct target: edits of code, then half way summaries, questions and translations."""
    asked = _requests(target, Instructions().prompts(target, 10 * (count + held_out), seed))
    old, new = ([r for r in asked if (r.domain == "code") == code] for code in (True, False))
    new = [Request(r.token_ids, "prose") for r in new]
    first = count // 2
    return Stream(
        [*_some(old, first, "code"), *_some(new, count - first, "prose")],
        [*_some(old[first:], held_out, "code"), *_some(new[count - first :], held_out, "prose")],
    )


def hostile(target: Target, count: int, held_out: int, seed: int) -> Stream:
    """The standard library's source, then half way random tokens."""
    held_code, code = _shuffled(target, "code", "code", seed)
    first = count // 2
    generator = torch.Generator().manual_seed(seed)
    noise = [
        Request(torch.randint(target.vocab_size, (48,), generator=generator).tolist(), "noise")
        for _ in range(count - first + held_out)
    ]
    return Stream(
        [*_some(code, first, "code"), *noise[held_out:]],
        [*_some(held_code, held_out, "code"), *noise[:held_out]],
    )


PRESETS: dict[str, Callable[[Target, int, int, int], Stream]] = {
    "shift": shift,
    "instructions": instructions,
    "hostile": hostile,
}


def _shuffled(target: Target, kind: str, name: str, seed: int) -> tuple[list[Request], list[Request]]:
    """Different prompts of one kind of the standard library's documents: of the test split, and of the others."""
    unique = list({prompt.id: prompt for prompt in StandardLibrary(kind=kind).prompts(target, 0, seed)}.values())
    random.Random(seed).shuffle(unique)
    found: dict[bool, list[Request]] = {True: [], False: []}
    for prompt in unique:
        if prompt.split != "train" or kind == "docs":  # no drafter need have seen it; prose is new to one of code
            found[prompt.split == "test"].append(Request(context_ids(target, prompt), name))
    return found[True], found[False]


def _requests(target: Target, prompts: list[Prompt]) -> list[Request]:
    """The first turn of each, as far as it leaves room for an answer."""
    found = [Request(context_ids(target, prompt), prompt.category) for prompt in prompts]
    return [request for request in found if len(request.token_ids) < target.max_positions]


def _some(requests: list[Request], count: int, what: str) -> list[Request]:
    if len(requests) < count:
        raise UserError(
            f"There are {len(requests)} requests of {what}, and {count} are asked for: lower adaptation.requests."
        )
    return requests[:count]
