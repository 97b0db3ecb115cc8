"""What engines would count of our rounds: by hand, and by a loop over the same decoding."""

from __future__ import annotations

import pytest
import torch

from engine.loop import generate
from engine.settings import DecodeSettings
from eval.rounds import ASSISTANT, LOOKUP, VLLM, Counts, NearTie, Round, Trace, compare, count, logit_gap, trace
from models.drafter.eagle import EagleDrafter
from models.sampling import SamplingParams
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import shaken, tiny_target
from tests.helpers.scripted import ScriptedDrafter, knows

# Answer 10 11 12 13 14 15 16 17: the first from the prompt's pass, then rounds of 3, 1 and 4 tokens.
FOUND = Trace([10, 11, 12, 13, 14, 15, 16, 17, 18], [Round([11, 12, 7], 2), Round([8], 0), Round([15, 16, 17], 3)])


def counted(rule, max_new_tokens: int, stop: frozenset[int] = frozenset()) -> Counts:
    return count(FOUND, rule, max_new_tokens=max_new_tokens, positions=3, stop=stop)


def test_inside_an_answer_all_engines_count_alike() -> None:
    """The third round's tokens are the last but one: nothing is cut."""
    expected = Counts([10, 11, 12, 13, 14, 15, 16, 17, 18], 3, 7, [2, 2, 1])
    assert [counted(rule, 9) for rule in (VLLM, ASSISTANT, LOOKUP)] == [expected] * 3
    assert expected.histogram == [1, 0, 1, 1]


@pytest.mark.parametrize(
    ("rule", "drafted", "accepted"),
    [(VLLM, 7, [2, 2, 1]), (ASSISTANT, 5, [2, 1, 0]), (LOOKUP, 7, [2, 2, 0])],
)
def test_the_last_round_before_the_limit(rule, drafted: int, accepted: list[int]) -> None:
    """Seven tokens: the third round may give two, of which a draft model's draft is one."""
    assert counted(rule, 7) == Counts([10, 11, 12, 13, 14, 15, 16], 3, drafted, accepted)


def test_with_one_token_left_only_vllm_drafts() -> None:
    answer = [10, 11, 12, 13, 14, 15]
    assert counted(VLLM, 6) == Counts(answer, 3, 7, [2, 2, 1])
    assert counted(ASSISTANT, 6) == counted(LOOKUP, 6) == Counts(answer, 2, 4, [1, 1, 0])


@pytest.mark.parametrize(
    ("rule", "drafted", "accepted"),
    [(VLLM, 7, [2, 2, 1]), (ASSISTANT, 6, [2, 2, 0]), (LOOKUP, 5, [2, 1, 0])],
)
def test_a_stop_token_within_a_draft(rule, drafted: int, accepted: list[int]) -> None:
    """16 ends the answer: vLLM counts behind it, a draft model ends its draft with it, and look-up before it."""
    assert counted(rule, 9, frozenset({16})) == Counts([10, 11, 12, 13, 14, 15, 16], 3, drafted, accepted)


def test_a_round_without_a_draft_is_not_counted() -> None:
    found = Trace([1, 2, 3], [Round([], 0), Round([3], 1)])
    assert count(found, VLLM, max_new_tokens=3, positions=2, stop=frozenset()) == Counts([1, 2, 3], 1, 1, [1, 0])


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64, max_position_embeddings=64)


def test_a_trace_is_our_engines_own_rounds(target: Target) -> None:
    """Counts by the loop's own rule, which ends drafts as a draft model's does, are those of its statistics."""
    torch.manual_seed(0)
    drafter = shaken(EagleDrafter(target, DraftVocab(64)))
    context, settings = [5, 9, 33, 2], DecodeSettings(17, 3, stop_token_ids=frozenset())
    found = trace(target, drafter, context, settings)
    stats = generate(target, [context], settings, drafter).stats
    made = count(found, ASSISTANT, max_new_tokens=17, positions=3, stop=frozenset())
    assert made.drafted == stats.drafted.sum() and made.accepted == stats.accepted.sum(0).tolist()
    assert len(found.token_ids) == 17 + 3 + 1 and all(len(r.draft) == 3 for r in found.rounds[:-3])


def test_a_trace_of_known_drafts(target: Target) -> None:
    """Every second drafted token is right: each round gives two tokens, whatever comes."""
    context, settings = [1, 2, 3], DecodeSettings(9, 2, stop_token_ids=frozenset())
    answer = generate(target, [context], DecodeSettings(20, stop_token_ids=frozenset())).token_ids[0]
    right = knows([context], [answer])
    drafter = ScriptedDrafter(lambda text: right(text) if len(text) % 2 == 0 else (right(text) + 1) % 64)
    found = trace(target, drafter, context, settings)
    assert found.token_ids == answer[:12]
    assert found.rounds[0] == Round([answer[1], (answer[2] + 1) % 64], 1)
    assert all(r.accepted == 1 for r in found.rounds[:5])


def test_point_masses_at_a_temperature(target: Target) -> None:
    """The draft is greedy, and the answer is sampled."""
    torch.manual_seed(0)
    drafter = shaken(EagleDrafter(target, DraftVocab(64)))
    hot = DecodeSettings(12, 2, SamplingParams(3.0), stop_token_ids=frozenset())
    greedy = trace(target, drafter, [4, 4, 8], DecodeSettings(12, 2, stop_token_ids=frozenset()))
    pointed, drawn = (trace(target, drafter, [4, 4, 8], hot, point_mass=mass) for mass in (True, False))
    assert pointed.token_ids != greedy.token_ids
    if pointed.token_ids[0] == greedy.token_ids[0]:
        assert pointed.rounds[0].draft == greedy.rounds[0].draft
    assert drawn.rounds != pointed.rounds


def test_comparison_names_prompts_and_near_ties() -> None:
    a, b = Counts([1, 2, 3], 2, 4, [1, 0]), Counts([1, 2, 3], 2, 4, [1, 1])
    parted = Counts([1, 9, 3], 5, 5, [5, 5])
    asked = []

    def gap(prompt: int, position: int, token: int, other: int) -> float:
        asked.append((prompt, position, token, other))
        return 1e-5

    found = compare([a, a, a], [a, b, parted], gap, 1e-4)
    assert asked == [(2, 1, 2, 9)] and found.unequal == [1] and found.near_ties == [NearTie(2, 1, 1e-5)]
    assert not found.equal and not found.parted
    ours, theirs = found.totals()
    assert ours == {"drafts": 4, "drafted": 8, "accepted": 2, "accepted_per_position": [2, 0]}
    assert theirs == {"drafts": 4, "drafted": 8, "accepted": 3, "accepted_per_position": [2, 1]}
    assert compare([a, a], [a, parted], gap, 1e-4).equal
    assert not compare([a, a], [a, parted], gap, 1e-6).equal
    assert not compare([a], [parted], gap, 1e-4).equal  # nothing is left to compare
    shorter = compare([a], [Counts([1, 2], 2, 4, [1, 0])], gap, 1e-4)
    assert shorter.parted == [NearTie(0, 2, float("inf"))] and not shorter.equal


def test_the_gap_is_that_of_the_targets_logits(target: Target) -> None:
    logits = target.model(torch.tensor([[1, 2, 3, 4]])).logits[0, -1]
    assert logit_gap(target, [1, 2], [3, 4], 7, 9) == pytest.approx(float(abs(logits[7] - logits[9])))
