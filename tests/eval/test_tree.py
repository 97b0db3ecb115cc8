"""Acceptance by depth and rank, measured with drafters whose ranks are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.loop import generate
from engine.settings import DecodeSettings
from eval.tree import comb, measure_ranks, round_seconds
from models.drafter.eagle import EagleDrafter
from models.errors import UserError
from models.target import Target
from models.tree import StaticTree
from models.types import Draft, TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.models import random_target
from tests.helpers.scripted import ScriptedDrafter, ScriptedState

PROMPTS = [[3, 4, 5], [10, 11, 12, 13]]
SETTINGS = DecodeSettings(25, stop_token_ids=frozenset())


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(vocab_size=50, max_position_embeddings=64, initializer_range=0.4)


class RankedDrafter(ScriptedDrafter):
    """Puts the true token at a rank that depends on the text's length alone; the others are wrong."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], ranks: int) -> None:
        super().__init__(lambda text: 0)
        self.answers, self.ranks = answers, ranks

    def propose_tree(self, state: ScriptedState, committed: TargetFeatures, *, shape: StaticTree, **_: Any) -> Draft:
        self.propose(state, committed, num_speculative_tokens=0, sampling=None, random=None)  # type: ignore[arg-type]
        tokens = torch.zeros(len(state.texts), shape.num_nodes, dtype=torch.int64)
        for row, text in enumerate(state.texts):
            prompt, answer = next((p, a) for p, a in self.answers.items() if text[: len(p)] == list(p))
            for node in range(shape.num_nodes):
                position = len(text) + node // self.ranks
                right = answer[position - len(prompt)] if position - len(prompt) < len(answer) else 0
                is_right = shape.ranks[node] == self.rank(position)
                tokens[row, node] = right if is_right else (right + 1 + shape.ranks[node]) % 50
        return Draft(tokens, torch.tensor(shape.parents).expand(len(tokens), -1), None, branches=True)

    def rank(self, position: int) -> int:
        return (0, 0, 1, 0, 5)[position % 5]  # 5 is none of them


def test_a_comb_is_a_path_with_siblings() -> None:
    assert comb(3, 2) == StaticTree((-1, -1, 0, 0, 2, 2), (0, 1, 0, 1, 0, 1))
    assert comb(2, 1) == StaticTree.chain(2)


def test_ranks_are_counted_behind_the_likeliest_path(target: Target) -> None:
    answers = {tuple(p): a for p, a in zip(PROMPTS, generate(target, PROMPTS, SETTINGS).token_ids, strict=True)}
    drafter = RankedDrafter(answers, ranks=3)
    measured = measure_ranks(target, drafter, PROMPTS, SETTINGS, depth=4, ranks=3)
    taken, tested = [[0.0] * 3 for _ in range(4)], [0] * 4
    for prompt, answer in answers.items():
        position, end = len(prompt) + 1, len(prompt) + len(answer)
        while True:  # a round starts behind a known token at `position` - 1
            accepted, rounds = 0, []
            for depth in range(min(4, end - position - 1)):
                rank = drafter.rank(position + depth)
                rounds.append((depth, rank))
                accepted += rank < 3
                if rank != 0:
                    break
            if position + accepted + 1 >= end:  # the last round's outcome is not looked at any more
                break
            for depth, rank in rounds:
                tested[depth] += 1
                if rank < 3:
                    taken[depth][rank] += 1
            position += accepted + 1
    assert min(tested[:3]) > 2
    assert measured == [[t / max(1, n) for t in row] for row, n in zip(taken, tested, strict=True)]


def test_every_size_of_tree_gets_a_time(target: Target) -> None:
    torch.manual_seed(0)
    eagle = EagleDrafter(target, DraftVocab(50)).eval()
    acceptance = [[0.5, 0.2, 0.1]] * 3
    seconds = round_seconds(target, eagle, PROMPTS[0], SETTINGS, acceptance, 9)
    assert len(seconds) == 10 and all(s > 0 for s in seconds)
    assert StaticTree.for_time(acceptance, seconds, 9).num_nodes >= 1


def test_answers_of_one_token_measure_nothing(target: Target) -> None:
    drafter = RankedDrafter({tuple(PROMPTS[0]): [1]}, ranks=2)
    with pytest.raises(UserError, match="too short to measure anything"):
        measure_ranks(target, drafter, PROMPTS[:1], DecodeSettings(1, stop_token_ids=frozenset()), 2, 2)
