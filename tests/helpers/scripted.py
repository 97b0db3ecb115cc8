"""A drafter without a model: it proposes whatever a function says, and checks what the engine tells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.sampling import RequestRandom, SamplingParams
from models.tree import chain_parents
from models.types import Draft, TargetFeatures

Choose = Callable[[list[int]], int]  # the text so far → the next token


@dataclass
class ScriptedState:
    """Each request's text, and the states (S, L·D) of all its tokens but the last, from committed rows alone."""

    texts: list[list[int]]
    hidden: list[Tensor]

    def select(self, rows: list[int]) -> None:
        self.texts = [list(self.texts[row]) for row in rows]
        self.hidden = [self.hidden[row] for row in rows]


class ScriptedDrafter:
    """Proposes `choose(text)`, appended again and again, as a deterministic draft.

    `observe` is called with each request's text and states whenever new rows have come in.
    """

    vocab = None

    def __init__(
        self,
        choose: Choose,
        *,
        capture_layers: tuple[int, ...] = (),
        observe: Callable[[list[int], Tensor], None] | None = None,
    ) -> None:
        self.choose, self.capture_layers, self.observe = choose, capture_layers, observe

    def new_state(self, batch_size: int, max_len: int) -> ScriptedState:
        return ScriptedState([[] for _ in range(batch_size)], [torch.zeros(0)] * batch_size)

    def propose(
        self,
        state: ScriptedState,
        committed: TargetFeatures,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams,
        random: RequestRandom,
    ) -> Draft:
        drafts = []
        assert len(state.texts) == len(committed.token_ids)
        for row, text in enumerate(state.texts):
            length = int(committed.lengths[row])
            tokens = committed.token_ids[row, :length].tolist()
            following = committed.next_token_ids[row, :length].tolist()
            assert tokens[1:] == following[:-1]
            assert not text or tokens[0] == text[-1]
            text += following if text else [tokens[0], *following]
            if committed.hidden is not None:
                state.hidden[row] = torch.cat([state.hidden[row].to(committed.hidden), committed.hidden[row, :length]])
            if self.observe is not None:
                self.observe(text, state.hidden[row])
            drafted: list[int] = []
            for _ in range(num_speculative_tokens):
                drafted.append(self.choose(text + drafted))
            drafts.append(drafted)
        return Draft(torch.tensor(drafts), chain_parents(len(drafts), num_speculative_tokens), None)


def knows(prompts: list[list[int]], answers: list[list[int]]) -> Choose:
    """Continue each prompt with its answer; no prompt may begin another. Behind an answer's end comes token 0."""

    def choose(text: list[int]) -> int:
        for prompt, answer in zip(prompts, answers, strict=True):
            if text[: len(prompt)] == prompt:
                return answer[len(text) - len(prompt)] if len(text) < len(prompt) + len(answer) else 0
        raise AssertionError(f"no prompt begins {text}")

    return choose
