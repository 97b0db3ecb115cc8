"""What one engine counted beside what another did: rounds of our own decoding, cut by the other engine's rule.

Our loop is run one request at a time and without an end, and remembers each round: what was drafted, and how much of it
was accepted. What an engine would have counted of these rounds is then a matter of its `Rule`, for engines differ at an
answer's end alone:

- vLLM 0.32 drafts whole chains up to the end, and counts what a draft had accepted behind it too;
- transformers' draft model drafts no more than may be given out but one, and nothing behind a stop token of its draft;
- transformers' look-up copies whole chains, but none where one token is left, and ends a copy before a stop token.

A round without a draft is a plain step, and no engine counts it.

P prompts, K drafted positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from engine.draft_length import Fixed
from engine.loop import generate
from engine.settings import DecodeSettings
from models.sampling import RequestRandom, SamplingParams
from models.target import Target
from models.types import Draft, TargetFeatures, max_depth


@dataclass(frozen=True, slots=True)
class Round:
    """A draft, and how many of its tokens were accepted; one more than those was given out."""

    draft: list[int]
    accepted: int


@dataclass(frozen=True, slots=True)
class Trace:
    """An answer that goes on behind its end, the first token of which came from the prompt's pass."""

    token_ids: list[int]
    rounds: list[Round]


@dataclass(frozen=True, slots=True)
class Counts:
    """An answer, and what an engine counted of it; `accepted` is by position (K).

    `rounds` are the accepted tokens of each round, as far as the engine tells: they are for the diagnosis alone.
    """

    token_ids: list[int]
    drafts: int
    drafted: int
    accepted: list[int]
    rounds: list[int] = field(default_factory=list, compare=False)

    @property
    def histogram(self) -> list[int]:
        """Drafts of which 0, 1, .. K tokens were accepted (K + 1)."""
        reached = [self.drafts, *self.accepted, 0]
        return [reached[i] - reached[i + 1] for i in range(len(reached) - 1)]


@dataclass(frozen=True, slots=True)
class Rule:
    """What an engine counts near an answer's end.

    `cut(draft, room, stop)` is what it drafts of a chain where `room` tokens may still be given out; accepted tokens
    behind the answer's end count where `behind_the_end` says so.
    """

    cut: Callable[[list[int], int, frozenset[int]], list[int]]
    behind_the_end: bool


def _whole(draft: list[int], room: int, stop: frozenset[int]) -> list[int]:
    return draft


def _up_to_stop(draft: list[int], room: int, stop: frozenset[int]) -> list[int]:
    draft = draft[: max(0, room - 1)]
    return draft[: next((i + 1 for i, token in enumerate(draft) if token in stop), None)]


def _before_stop(draft: list[int], room: int, stop: frozenset[int]) -> list[int]:
    return [] if room == 1 else draft[: next((i for i, token in enumerate(draft) if token in stop), None)]


VLLM = Rule(_whole, behind_the_end=True)
ASSISTANT = Rule(_up_to_stop, behind_the_end=False)
LOOKUP = Rule(_before_stop, behind_the_end=False)


class Recorder:
    """Another drafter of chains, which keeps what it proposed to one request.

    With `point_mass` it drafts its likeliest tokens at any temperature, as engines do that have no laws of drafts.
    """

    def __init__(self, drafter: Any, point_mass: bool = False) -> None:
        self.capture_layers, self.vocab, self.max_depth = drafter.capture_layers, drafter.vocab, max_depth(drafter)
        self.new_state = drafter.new_state
        self._drafter, self._point_mass = drafter, point_mass
        self.drafts: list[list[int]] = []

    def propose(
        self,
        state: Any,
        committed: TargetFeatures,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams,
        random: RequestRandom,
    ) -> Draft:
        """What the other drafter proposes to a batch of one."""
        draft: Draft = self._drafter.propose(
            state,
            committed,
            num_speculative_tokens=num_speculative_tokens,
            sampling=SamplingParams(0.0) if self._point_mass else sampling,
            random=random,
        )
        length = draft.token_ids.shape[1] if draft.lengths is None else int(draft.lengths[0])
        self.drafts.append(draft.token_ids[0, :length].tolist())
        return draft


def trace(
    target: Target, drafter: Any, context: list[int], settings: DecodeSettings, *, point_mass: bool = False
) -> Trace:
    """Decode `settings.max_new_tokens` tokens and a round more, whatever stop tokens come.

    The context must leave room for `settings.num_speculative_tokens` + 1 tokens behind the answer.
    """
    recorder = Recorder(drafter, point_mass)
    given: list[int] = []

    def on_tokens(request: int, tokens: list[int], accepted: int) -> None:
        given.append(accepted)

    endless = replace(
        settings,
        max_new_tokens=settings.max_new_tokens + settings.num_speculative_tokens + 1,
        stop_token_ids=frozenset(),
        draft_length=Fixed(),
    )
    made = generate(target, [context], endless, recorder, on_tokens=on_tokens)
    rounds = [Round(*pair) for pair in zip(recorder.drafts, given[1:], strict=False)]  # the last may draft nothing
    return Trace(made.token_ids[0], rounds)


def ended(token_ids: list[int], max_new_tokens: int, stop: frozenset[int]) -> list[int]:
    """The first `max_new_tokens` tokens, up to and including the first that is a stop token."""
    end = next((i + 1 for i, token in enumerate(token_ids) if token in stop), max_new_tokens)
    return token_ids[: min(end, max_new_tokens)]


def count(found: Trace, rule: Rule, *, max_new_tokens: int, positions: int, stop: frozenset[int]) -> Counts:
    """What an engine with that rule counts of a trace, whose answer ends at a stop token or `max_new_tokens`."""
    answer = ended(found.token_ids, max_new_tokens, stop)
    given, drafts, drafted, by_position, rounds = 1, 0, 0, [0] * positions, list[int]()
    for done in found.rounds:
        left = len(answer) - given
        if left <= 0:
            break
        draft = rule.cut(done.draft, max_new_tokens - given, stop)
        accepted = min(done.accepted, len(draft))
        for position in range(accepted if rule.behind_the_end else min(accepted, left)):
            by_position[position] += 1
        drafts += bool(draft)
        drafted += len(draft)
        given += done.accepted + 1
        rounds.append(done.accepted)
    return Counts(answer, drafts, drafted, by_position, rounds)


@dataclass(frozen=True, slots=True)
class NearTie:
    """A prompt whose answers part where the logits of the two tokens differ by `gap`."""

    prompt: int
    position: int
    gap: float


@dataclass(slots=True)
class Compared:
    """Counts of two engines on the same P prompts, ours first.

    A prompt among `near_ties` is left out of all sums. `unequal` names the prompts whose counts differ, and `parted`
    those whose answers part at a gap that is no rounding.
    """

    ours: list[Counts]
    theirs: list[Counts]
    near_ties: list[NearTie] = field(default_factory=list)
    parted: list[NearTie] = field(default_factory=list)
    unequal: list[int] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """True where all answers, and all counts of prompts without a near-tie, are the same, and there is one."""
        return not self.parted and not self.unequal and len(self.near_ties) < len(self.ours)

    def totals(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sums of ours and of theirs over the prompts that are compared."""
        tied = {tie.prompt for tie in self.near_ties}
        ours, theirs = (
            total([counts for prompt, counts in enumerate(side) if prompt not in tied])
            for side in (self.ours, self.theirs)
        )
        return ours, theirs


def total(counts: Sequence[Counts]) -> dict[str, Any]:
    """Sums over prompts: drafts, drafted and accepted tokens, and accepted ones by position."""
    by_position = [sum(column) for column in zip(*(c.accepted for c in counts), strict=True)]
    return {
        "drafts": sum(c.drafts for c in counts),
        "drafted": sum(c.drafted for c in counts),
        "accepted": sum(by_position),
        "accepted_per_position": by_position,
    }


def compare(
    ours: list[Counts], theirs: list[Counts], gap: Callable[[int, int, int, int], float], tolerance: float
) -> Compared:
    """Compare prompt by prompt. `gap(prompt, position, token, other)` is how far the logits of two tokens are apart.

    Where two answers part at a gap below `tolerance`, what follows is of other texts, and is not compared.
    """
    result = Compared(ours, theirs)
    for prompt, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.token_ids != b.token_ids:
            place = _first_difference(a.token_ids, b.token_ids)
            pair = [side.token_ids[place : place + 1] for side in (a, b)]
            apart = gap(prompt, place, pair[0][0], pair[1][0]) if all(pair) else float("inf")
            (result.near_ties if apart < tolerance else result.parted).append(NearTie(prompt, place, apart))
        elif a != b:
            result.unequal.append(prompt)
    return result


def _first_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def logit_gap(target: Target, context: list[int], answer: list[int], token: int, other: int) -> float:
    """How far the target's logits of two tokens are apart behind `context` and `answer`."""
    ids = torch.tensor([context + answer], device=target.device)
    with torch.inference_mode():
        logits = target.head(target(ids).last[0, -1])
    return abs(float(logits[token] - logits[other]))
