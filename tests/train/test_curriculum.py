"""How many tokens ahead each curriculum trains, and that one which learns on the way goes on where it stopped."""

from __future__ import annotations

import numpy as np
import pytest

from conf.compose import ROOT, composed
from engine.stats import DecodingStats
from models.errors import UserError
from train.curriculum import check_reach, make_curriculum
from train.search_space import read
from train.settings import check


def stats(*acceptance: float) -> DecodingStats:
    """100 rounds in which the tokens were accepted so often, given the ones before."""
    made = DecodingStats.empty(1, len(acceptance))
    reached = 100.0
    for position, share in enumerate(acceptance):
        made.tested[0, position], made.accepted[0, position] = reached, share * reached
        reached *= share
    return made


def test_schedules_by_step_and_epoch() -> None:
    constant = make_curriculum(4, 100)
    steps = make_curriculum(4, 100, by="steps")  # 25 steps each
    every = make_curriculum(4, 100, by="steps", first=2, every=10)
    epochs = make_curriculum(4, 100, by="epochs", first=1, per_epoch=0.5)
    assert [constant.num_steps(s, 0) for s in (0, 99)] == [4, 4]
    assert [steps.num_steps(s, 9) for s in (0, 24, 25, 49, 50, 75, 99, 200)] == [1, 1, 2, 2, 3, 4, 4, 4]
    assert [every.num_steps(s, 0) for s in (0, 9, 10, 19, 20, 99)] == [2, 2, 3, 3, 4, 4]
    assert [epochs.num_steps(0, e) for e in range(8)] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_one_more_when_acceptance_stalls() -> None:
    curriculum = make_curriculum(3, 100, by="acceptance", first=1, patience=2, least_gain=0.05)
    seen = []
    for first in (0.3, 0.4, 0.42, 0.5, 0.5, 0.51, 0.5):
        curriculum.measured(stats(first, 0.9, 0.9))
        seen.append(curriculum.num_steps(0, 0))
    # 0.42 is no gain, 0.5 is; then 0.5 and 0.51 stall, and the next measurement is the first with two tokens
    assert seen == [1, 1, 1, 1, 1, 2, 2]
    for second, expected in ((0.2, 2), (0.2, 3), (0.2, 3), (0.2, 3), (0.2, 3)):
        curriculum.measured(stats(0.5, second, 0.9))
        assert curriculum.num_steps(0, 0) == expected


def test_acceptance_is_that_of_the_tokens_trained() -> None:
    """With one token trained, what becomes of the second does not matter; with two it does."""
    for first, gains in ((1, False), (2, True)):
        curriculum = make_curriculum(3, 100, by="acceptance", first=first, patience=1)
        curriculum.measured(stats(0.5, 0.1))
        curriculum.measured(stats(0.5, 0.9))
        assert curriculum.num_steps(0, 0) == (first if gains else first + 1)


def test_nothing_tested_is_a_stall() -> None:
    curriculum = make_curriculum(2, 100, by="acceptance", patience=1)
    curriculum.measured(DecodingStats.empty(1, 4))
    assert curriculum.num_steps(0, 0) == 2
    assert np.isnan(DecodingStats.empty(1, 4).acceptance_rate)


def test_a_restored_curriculum_goes_on_as_the_one_that_was_saved() -> None:
    first, second = (make_curriculum(5, 100, by="acceptance", patience=2) for _ in range(2))
    measured = [stats(0.5, x, x, x) for x in (0.1, 0.2, 0.2, 0.1, 0.3, 0.3, 0.2, 0.3, 0.1, 0.3)]
    for found in measured[:4]:
        first.measured(found)
    second.load_state_dict(first.state_dict())
    for found in measured[4:]:
        first.measured(found)
        second.measured(found)
        assert first.num_steps(0, 0) == second.num_steps(0, 0)
    assert first.num_steps(0, 0) > 3


@pytest.mark.parametrize(("num_steps", "first", "patience"), [(3, 1, 2), (4, 1, 1), (4, 2, 3), (2, 2, 2)])
def test_a_training_has_the_measurements_that_its_curriculum_needs(num_steps: int, first: int, patience: int) -> None:
    """Counted out with an acceptance that no more tokens raise; the one behind the last step changes nothing."""
    settings = {"by": "acceptance", "first": first, "patience": patience}
    curriculum, needed = make_curriculum(num_steps, 100, **settings), 0
    while curriculum.num_steps(0, 0) < num_steps:
        curriculum.measured(stats(0.5, 0.5, 0.5, 0.5))
        needed += 1
    check_reach(settings, num_steps, max_steps=10 * needed + 1, evaluate_every=10)
    if needed:
        enough = (
            rf"by {needed} measurements.* {needed - 1} before .*evaluate_every=9 or.*max_steps={10 * needed + 1} or"
        )
        with pytest.raises(UserError, match=enough):
            check_reach(settings, num_steps, max_steps=10 * needed, evaluate_every=10)
    check_reach({"by": "steps"}, num_steps, max_steps=1, evaluate_every=10)


def test_a_curriculum_that_cannot_end_is_refused_before_any_work() -> None:
    """As by the budget of the bundled target, which measures three times before its last step."""
    options = composed("train", ["+drafter=mtp", "drafter.training.curriculum.by=acceptance"])
    with pytest.raises(UserError, match=r"from 1 to 3 tokens ahead by 6 .* are 3 before .*evaluate_every=99 or"):
        check(options)
    check({**options, "fit": {**options["fit"], "evaluate_every": 99}})


@pytest.mark.parametrize("family", ["mtp", "mtp_parallel", "mtp_cascaded", "mtp_hierarchical"])
def test_sweeps_over_curricula_measure_often_enough_for_each(family: str) -> None:
    space = read(ROOT / "sweep" / f"{family}.yaml")
    swept = {p.name: p.examples for p in space.parameters}
    assert "acceptance" in swept["drafter.training.curriculum.by"]
    options = composed("train", [*space.settings, "drafter.training.curriculum.by=acceptance"])
    most = max([options["drafter"]["training"]["num_steps"], *swept.get("drafter.training.num_steps", ())])
    options["drafter"]["training"]["num_steps"] = most
    check(options)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"by": "backwards"}, "curriculum.by is 'backwards'"),
        ({"first": 0}, "curriculum.first is 0"),
        ({"first": 4}, "curriculum.first is 4"),
        ({"by": "steps", "every": 0}, "curriculum.every is 0"),
        ({"per_epoch": -1}, "curriculum.per_epoch is -1"),
        ({"patience": 0}, "curriculum.patience is 0"),
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_curriculum(3, 100, **settings)
    with pytest.raises(TypeError, match="pacience"):
        make_curriculum(3, 100, pacience=3)
