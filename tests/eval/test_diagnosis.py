"""Causes by position for doctored counts, and the two-sample test on samples of known laws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eval.diagnosis import conditional, diagnose, two_samples
from eval.rounds import Compared, Counts, NearTie

OURS = Counts([1], 100, 300, [80, 60, 45])


def cause(theirs: Counts, **more: object) -> str:
    found = diagnose(Compared([OURS], [theirs], unequal=[0], **more))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_conditional_acceptance() -> None:
    assert conditional([80, 60, 45], 100) == [0.8, 0.75, 0.75]
    assert conditional([0, 0], 10)[0] == 0.0 and np.isnan(conditional([0, 0], 10)[1])


def test_nothing_is_wrong_with_equal_counts() -> None:
    assert diagnose(Compared([OURS], [OURS])) is None


def test_a_low_first_position_is_the_layers_fault() -> None:
    found = cause(Counts([1], 140, 420, [56, 42, 31]))
    assert found.startswith("position 0 accepts less (-40.0%): layer, norm, RoPE, mask")


def test_a_low_later_position_is_what_is_fed_back() -> None:
    found = cause(Counts([1], 120, 360, [96, 30, 3]))
    assert found.startswith("position 1 accepts less (-43.8%): what is fed back")
    assert cause(Counts([1], 101, 303, [81, 61, 20])).startswith("position 2 accepts less (-42.2%): what is fed back")


def test_more_can_be_as_wrong_as_less() -> None:
    assert cause(Counts([1], 90, 270, [88, 70, 50])).startswith("position 0 accepts more")


def test_small_differences_name_prompts() -> None:
    found = cause(Counts([1], 100, 300, [80, 60, 44]))
    assert found.startswith("no position's acceptance differs by more than 2%") and "(prompts 0)" in found
    assert "take more and longer answers (num_prompts, max_new_tokens)" in found


def of_rounds(rounds: list[int]) -> Counts:
    """An answer that was made by rounds of 3 drafted tokens, of which so many were accepted."""
    counts = [sum(accepted > place for accepted in rounds) for place in range(3)]
    return Counts([0] * (1 + len(rounds) + sum(rounds)), len(rounds), 3 * len(rounds), counts, rounds)


def test_only_rounds_behind_the_same_text_tell_the_cause() -> None:
    """Position 1 is what is wrong; behind other texts, position 0 happens to fare much worse."""
    ours = of_rounds([2, 2, 2, 2, 1, 1])  # begin at 1, 4, 7, 10, 13, 15
    theirs = of_rounds([1, 0, 1, 0, 1, 0, 1, 0, 1, 1])  # at 1, 3, 4, 6, 7, 9, 10, 12, 13, 15
    found = diagnose(Compared([ours], [theirs], unequal=[0]))
    assert found is not None and found.startswith("position 1 accepts less (-66.7%): what is fed back")
    silent = replace(theirs, rounds=[])  # an engine that does not tell
    found = diagnose(Compared([ours], [silent], unequal=[0]))
    assert found is not None and found.startswith("position 0 accepts less (-40.0%)")


def test_a_few_rounds_that_part_are_near_ties() -> None:
    ours, theirs = of_rounds([2] * 100), of_rounds([2] * 50 + [0, 1] + [2] * 49)
    found = diagnose(Compared([ours], [theirs], unequal=[0]))
    assert found is not None and found.startswith("no position's acceptance differs by more than 2%: near-ties")


def test_nothing_drafted_and_nothing_accepted() -> None:
    assert "drafted nothing" in cause(Counts([1], 0, 0, [0, 0, 0]))
    assert cause(Counts([1], 200, 600, [0, 0, 0])).startswith("position 0 accepts less (-80.0%)")


def test_parted_answers_are_the_targets_fault() -> None:
    found = cause(Counts([2], 100, 300, [80, 60, 45]), parted=[NearTie(0, 7, 0.25)])
    assert found.startswith("answers part (prompt 0, token 7, logits 0.25 apart): the target itself")


def test_only_near_ties_are_no_comparison() -> None:
    found = diagnose(Compared([OURS], [OURS], near_ties=[NearTie(0, 3, 1e-6)]))
    assert found is not None and found.startswith("every prompt's answers part at a near-tie")


def drawn(law: list[float], rounds: int, prompts: int, seed: int) -> list[Counts]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(prompts):
        lengths = rng.choice(len(law), size=rounds, p=law)
        found.append(Counts([], rounds, rounds * 3, [int((lengths > i).sum()) for i in range(len(law) - 1)]))
    return found


def test_one_law_passes_and_its_p_values_are_uniform() -> None:
    law = [0.4, 0.3, 0.2, 0.1]
    p_values = [two_samples(drawn(law, 20, 16, 2 * i), drawn(law, 20, 16, 2 * i + 1))[1] for i in range(60)]
    assert min(p_values) > 1e-3 and 0.3 < float(np.mean(p_values)) < 0.7
    assert 0.02 < float(np.mean([p < 0.25 for p in p_values])) < 0.5


def test_two_laws_are_told_apart() -> None:
    a, b = drawn([0.4, 0.3, 0.2, 0.1], 20, 64, 0), drawn([0.5, 0.28, 0.15, 0.07], 20, 64, 1)
    assert two_samples(a, b)[1] < 1e-3


def test_chi_square_is_that_of_the_pooled_table() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    a, b = drawn([0.4, 0.3, 0.2, 0.1], 20, 16, 0), drawn([0.3, 0.3, 0.3, 0.1], 20, 16, 1)
    table = np.array([np.sum([c.histogram for c in side], axis=0) for side in (a, b)])
    assert two_samples(a, b)[0] == pytest.approx(scipy_stats.chi2_contingency(table, correction=False).statistic)


def test_unequal_numbers_of_samples_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="2 and 1 answers"):
        two_samples([OURS, OURS], [OURS])


def test_prompts_of_their_own_laws_do_not_count_as_a_difference() -> None:
    """Rounds of one prompt resemble each other; a χ² over rounds would take that for a difference of the samples."""
    rng = np.random.default_rng(0)
    small = 0
    for repeat in range(40):
        sides: list[list[Counts]] = [[], []]
        for prompt in range(12):
            laws = [[0.95, 0.03, 0.01, 0.01], [0.02, 0.03, 0.05, 0.9]]
            for side in sides:  # an answer is easy or hard throughout
                side += drawn(laws[int(rng.integers(2))], 30, 1, int(rng.integers(10**9)) + repeat + prompt)
        small += two_samples(sides[0], sides[1])[1] < 0.01
    assert small <= 3
