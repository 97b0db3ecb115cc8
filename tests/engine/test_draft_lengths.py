"""Drafts of which only the first `lengths` tokens are meant: what is checked, what is counted, and the law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from engine.loop import DecodeSettings, generate
from models.drafter.eagle import EagleDrafter
from models.sampling import SamplingParams
from models.target import Target
from models.types import Draft
from models.vocab import DraftVocab
from tests.helpers.drafters import LEAST_P_VALUE, five_token_target, sampled_p_value, shaken
from tests.helpers.scripted import ScriptedDrafter, ScriptedState, knows

PROMPTS = [[3, 4, 1], [0, 1, 2, 3, 4, 0, 2, 1], [3], [2, 1, 1, 1, 2]]
SETTINGS = DecodeSettings(20, 4, stop_token_ids=frozenset())


@pytest.fixture(scope="module")
def target() -> Target:
    return five_token_target()


@pytest.fixture(scope="module")
def plain(target: Target) -> list[list[int]]:
    return generate(target, PROMPTS, SETTINGS).token_ids


class ShortDrafts(ScriptedDrafter):
    """Drafts the true answer throughout, of which length(text) tokens are meant."""

    def __init__(self, plain: list[list[int]], length: Callable[[list[int]], int]) -> None:
        super().__init__(knows(PROMPTS, plain))
        self.length = length

    def propose(self, state: ScriptedState, committed: Any, **options: Any) -> Draft:
        draft = super().propose(state, committed, **options)
        lengths = [min(self.length(text), options["num_speculative_tokens"]) for text in state.texts]
        return replace(draft, lengths=torch.tensor(lengths))


def varied(text: list[int]) -> int:
    return (len(text) + sum(text)) % 5


def test_only_what_is_meant_is_accepted_and_counted(target: Target, plain: list[list[int]]) -> None:
    """A loop over each request's own rounds; behind the meant tokens the padding is right, and still not taken."""
    made = generate(target, PROMPTS, SETTINGS, ShortDrafts(plain, varied))
    assert made.token_ids == plain
    for request, (prompt, answer) in enumerate(zip(PROMPTS, plain, strict=True)):
        done, rounds, counted = 1, 0, [0] * 4
        while done < len(answer):
            meant = min(varied(prompt + answer[:done]), 4, len(answer) - done - 1)
            counted = [count + (i < meant) for i, count in enumerate(counted)]
            done, rounds = done + meant + 1, rounds + 1
        assert made.stats.rounds[request] == rounds
        for name in ("drafted", "tested", "accepted", "expected"):
            assert getattr(made.stats, name)[request].tolist() == counted, name


def test_where_nothing_is_meant_the_round_is_a_plain_step(target: Target, plain: list[list[int]]) -> None:
    widths = []

    def step(token_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        widths.append(token_ids.shape[1])
        return Target.step(target, token_ids, *args, **kwargs)

    for length, width in ((0, {1}), (2, {1, 3})):
        widths.clear()
        with mock.patch.object(target, "step", step):
            made = generate(target, PROMPTS, SETTINGS, ShortDrafts(plain, lambda text, n=length: n))
        assert made.token_ids == plain
        assert set(widths[1:]) == width  # the first is the prompts' own; no column holds padding alone
        assert made.stats.drafted.sum() == (0 if length == 0 else made.stats.accepted.sum())
    assert made.stats.drafted[:, 2:].sum() == 0


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0)], ids=["greedy", "sampled"])
def test_a_request_is_answered_in_a_batch_as_alone(
    target: Target, plain: list[list[int]], sampling: SamplingParams
) -> None:
    drafter = context_cut(target)
    settings = replace(SETTINGS, sampling=sampling)
    together = generate(target, PROMPTS, settings, drafter)
    for index, prompt in enumerate(PROMPTS):
        alone = generate(target, [prompt], settings, drafter, seeds=[index])
        assert alone.token_ids[0] == together.token_ids[index]
        assert (alone.stats.drafted[0] == together.stats.drafted[index]).all()


class CutByContext(EagleDrafter):
    """How many tokens are meant follows from the last two committed ones."""

    def propose(self, state: Any, committed: Any, **options: Any) -> Draft:
        draft = super().propose(state, committed, **options)
        last = committed.lengths[:, None] - 1
        pair = committed.token_ids.gather(1, last) + committed.next_token_ids.gather(1, last)
        return replace(draft, lengths=(pair[:, 0] % 4).clamp(max=draft.token_ids.shape[1]))


class CutByTokens(EagleDrafter):
    """The mistake: a token is left out because of what it is."""

    def propose(self, state: Any, committed: Any, **options: Any) -> Draft:
        draft = super().propose(state, committed, **options)
        unwanted = torch.cat([draft.token_ids < 2, torch.ones_like(draft.token_ids[:, :1], dtype=torch.bool)], dim=1)
        return replace(draft, lengths=unwanted.int().argmax(1))


def context_cut(target: Target, drafter_class: type[EagleDrafter] = CutByContext) -> EagleDrafter:
    torch.manual_seed(0)
    return shaken(drafter_class(target, DraftVocab(5)))


def test_a_length_that_the_context_decides_leaves_the_law_alone(target: Target) -> None:
    assert sampled_p_value(target, context_cut(target), SamplingParams(1.0)) > LEAST_P_VALUE


def test_a_length_that_looks_at_the_tokens_is_noticed(target: Target) -> None:
    assert sampled_p_value(target, context_cut(target, CutByTokens), SamplingParams(1.0)) < LEAST_P_VALUE
