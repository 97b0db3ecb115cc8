"""What is asked of a target, whoever lets it answer: settings, contexts as token ids, and the rows that come of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data.prompts import Prompt
from data.template import messages_of, render_prompt
from models.errors import UserError
from models.sampling import SamplingParams
from models.target import Target

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How answers are made. `answers` is "target" (generated) or "given" (the data set's own)."""

    answers: str = "target"
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 128
    max_prompt_tokens: int = 512
    chunk_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.answers not in ("target", "given"):
            raise UserError(f"data.answers.answers is {self.answers!r}: choose target or given.")
        for name in ("max_new_tokens", "max_prompt_tokens", "chunk_size"):
            if getattr(self, name) < 1:
                raise UserError(f"data.answers.{name} is {getattr(self, name)}: it must be at least 1.")
        SamplingParams(self.temperature, top_p=self.top_p)

    def longest_context(self, target: Target) -> int:
        """The most tokens of a context that is still answered: at least one must fit behind it."""
        return min(self.max_prompt_tokens, target.max_positions - 1)

    def seed_of(self, prompt: Prompt, turn: int) -> int:
        """The seed of one answer: another for every prompt and turn, and the same however answers are scheduled."""
        return (int(prompt.id, 16) + self.seed * 7919 + turn) % 2**40


def context_text(target: Target, prompt: Prompt, answers: tuple[str, ...] = ()) -> str:
    """The text that the target reads before it says its next answer, without what its tokenizer puts around a text."""
    if prompt.continuation:
        return prompt.turns[0]
    turns = prompt.turns[: len(answers) + 1]
    return render_prompt(target, messages_of(turns, answers, prompt.system), prompt.tools)


def context_ids(target: Target, prompt: Prompt, answers: tuple[str, ...] = ()) -> list[int]:
    """Token ids that the target reads before it says its next answer.

    A chat template writes all special tokens itself; around a text to be continued they are the tokenizer's.
    """
    return target.encode(context_text(target, prompt, answers), special_tokens=prompt.continuation)


def answerable(target: Target, prompts: list[Prompt], settings: AnswerSettings) -> list[Prompt]:
    """Prompts that are not too long, the shortest first. The others are counted in a printed line.

    Raises UserError when none is left.
    """
    lengths = {p.id: len(context_ids(target, p)) for p in prompts}
    short = [p for p in prompts if lengths[p.id] <= settings.longest_context(target)]
    if len(short) < len(prompts):
        left_out = len(prompts) - len(short)
        print(f"{left_out} of {len(prompts)} prompts are longer than data.answers.max_prompt_tokens: left out")
    if not short:
        raise UserError("Every prompt is longer than data.answers.max_prompt_tokens.")
    return sorted(short, key=lambda p: (lengths[p.id], p.id))  # neighbours of equal length waste no padding


def row_of(prompt: Prompt, turn: int, token_ids: list[int], loss_mask: list[int]) -> Row:
    """One row of a data set of answers."""
    return {
        "prompt_id": prompt.id,
        "turn": turn,
        "category": prompt.category,
        "source": prompt.source,
        "token_ids": token_ids,
        "loss_mask": loss_mask,
    }
