"""A rollback follows from a sure loss or a great one, not from noise; values by hand."""

import copy

import numpy as np
import pytest
import torch

from engine.loop import generate
from models.errors import UserError
from models.vocab import DraftVocab
from tests.helpers.adaptation import DECODE, EAGLE
from tests.helpers.drafters import build_shaken, prompts, shaken, tiny_target
from train.adaptation.guard import Guard, GuardSettings
from train.adaptation.versus import Versus, versus

SETTINGS = GuardSettings(max_loss=0.03, stop_loss=0.06)


def look(changes: list[float], tested: int = 100) -> Versus:
    """Prompts of equally many tested tokens, half of which the first drafter had, and of them so much of all more."""
    rows = [[0.5 * tested, tested, (0.5 + change) * tested, tested] for change in changes]
    return versus("held out", np.array(rows))


def test_the_interval_is_that_of_paired_prompts() -> None:
    found = look([0.1, -0.2])  # drawn with replacement: both of one in a quarter of the cases each
    assert (found.frozen, found.adapted) == (0.5, 0.45)
    assert found.difference == pytest.approx(-0.05) and found.interval == pytest.approx((-0.2, 0.1))
    same = look([-0.04] * 16)
    assert same.difference == pytest.approx(-0.04) and same.interval == pytest.approx((-0.04, -0.04))
    weighty = versus("", np.array([[30.0, 60, 15, 60], [5, 10, 10, 10]]))  # of 70 tokens, not of two prompts
    assert weighty.difference == pytest.approx(25 / 70 - 35 / 70)
    assert weighty.interval == pytest.approx((-0.25, 0.5))


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ([-0.04] * 16, True),  # a real loss beyond the limit: every prompt has it
        ([-0.02] * 16, False),  # within it
        ([0.04] * 16, False),  # a gain
        ([-0.18, 0.10] * 8, False),  # as much lost on average as in the first case, but by noise
        ([-0.05, -0.03] * 8, True),  # a real loss and some noise
        ([-0.33, 0.19] * 8, True),  # noisy, but beyond twice the limit
        ([-0.31, 0.21] * 8, False),  # just not
        ([-0.2, 0.1], False),  # two prompts can hardly tell
    ],
)
def test_a_sure_loss_or_a_great_one_is_refused_and_noise_is_not(changes: list[float], refused: bool) -> None:
    assert SETTINGS.refuses(look(changes)) is refused
    assert not GuardSettings(enabled=False, max_loss=0.03).refuses(look(changes))


def test_looks_at_an_equal_drafter_hardly_ever_roll_back() -> None:
    """24 prompts of which each moves by 0.1 either way: the mean alone passes the limit in one look of fourteen."""
    rng = np.random.default_rng(0)
    looks = [look(list(rng.normal(0, 0.1, 24))) for _ in range(400)]
    assert sum(found.difference < -0.03 for found in looks) > 20
    assert sum(SETTINGS.refuses(found) for found in looks) <= 2
    lost = [look(list(rng.normal(-0.08, 0.1, 24))) for _ in range(100)]
    assert sum(SETTINGS.refuses(found) for found in lost) > 75


def test_the_first_drafter_is_what_others_are_measured_against() -> None:
    target = tiny_target(torch.float64)
    first = build_shaken(EAGLE, target, DraftVocab(target.vocab_size), seed=3)
    other = shaken(copy.deepcopy(first), seed=9)
    asked = prompts([5, 7, 4], target.vocab_size, seed=2)
    guard = Guard(SETTINGS, target, asked, DECODE)
    assert guard.baseline is None
    start = guard.measure(first)
    assert start.difference == 0.0 and start.interval == (0.0, 0.0) and start.requests == 3
    stats = [generate(target, asked, DECODE, drafter).stats for drafter in (first, other)]
    found = guard.measure(other)
    assert (found.frozen, found.adapted) == tuple(each.acceptance_rate for each in stats)
    pairs = [each.tested.sum(1) for each in stats] + [each.accepted.sum(1) for each in stats]
    tested, its_tested, accepted, its_accepted = pairs
    assert found == versus("held out", np.stack([accepted, tested, its_accepted, its_tested], axis=1).astype(float))
    again = Guard(SETTINGS, target, asked, DECODE)
    guard.rolled_back()
    again.load_state(guard.state())
    assert again.measure(other) == found and again.rolled_back() == 2 * SETTINGS.pause


def test_pauses_grow_up_to_sixteen_times() -> None:
    guard = Guard(GuardSettings(pause=3), tiny_target(), [], DECODE)
    assert [guard.rolled_back() for _ in range(7)] == [3, 6, 12, 24, 48, 48, 48]


@pytest.mark.parametrize("wrong", [{"every": 0}, {"num_prompts": 0}, {"max_loss": -0.1}, {"pause": -1}])
def test_senseless_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(UserError, match=rf"adaptation\.guard\.{next(iter(wrong))}"):
        GuardSettings(**wrong)
    with pytest.raises(UserError, match=r"stop_loss is 0\.02: it must not be below max_loss, 0\.03"):
        GuardSettings(max_loss=0.03, stop_loss=0.02)
