"""What each policy decides, against values that are written out; what it refuses; and that its yaml says the same."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import hydra
import pytest
import torch
from torch import Tensor

from conf.compose import ROOT, choices, plain
from engine.draft_length import (
    POLICIES,
    Confidence,
    CostAware,
    DraftLength,
    Entropy,
    Fallback,
    Fixed,
    Learnt,
    Lengths,
    Round,
    Window,
    policy_for,
    read_policy,
)
from engine.options import decode_settings
from engine.settings import DecodeSettings
from models.errors import UserError
from models.tree import StaticTree
from tests.helpers.scripted import ScriptedDrafter

DRAFTER: Any = ScriptedDrafter(lambda text: 0)


def rounds(lengths: Lengths, made: list[tuple[int, int]], request: int = 0, most: int = 8) -> list[int]:
    """What is asked before each round of (drafted, accepted), and after the last."""
    asked = []
    for drafted, accepted in made:
        asked += lengths.ask([request], [most])
        lengths.after(Round([request], [drafted], [accepted], drafted, 0.1))
    return asked + lengths.ask([request], [most])


def test_fixed_asks_for_what_there_is_room_for() -> None:
    assert Fixed().start(2, 4, DRAFTER).ask([0, 1], [4, 2]) == [4, 2]
    assert Fixed().start(2, 4, DRAFTER).rule([0, 1], [4, 2]) is None


def test_the_window_follows_recent_acceptance() -> None:
    start = Window(rounds=2, first=3).start(1, 5, DRAFTER)
    made = [
        (3, 3),  # 3 of 3: up
        (4, 4),  # 7 of 7: up, to the most
        (5, 5),  # 9 of 9: stays there
        (5, 2),  # 7 of 8 (2 of 3 were tested): 0.875, stays
        (5, 3),  # 5 of 7: 0.71, between the two
        (5, 0),  # 3 of 5: 0.6, not below
        (5, 0),  # 0 of 2: down
        (4, 0), (3, 0), (2, 0), (1, 0),  # to the least, and no further
        (0, 0),  # nothing was drafted: no sign
        (1, 1),  # 1 of 2 with the last that had a draft: 0.5, down
        (1, 1),  # 2 of 2: up
    ]  # fmt: skip
    assert rounds(start, made) == [3, 4, 5, 5, 5, 5, 5, 4, 3, 2, 1, 1, 1, 1, 2]


def test_the_window_is_each_requests_own_and_heeds_the_room() -> None:
    start = Window(first=2, least=2).start(3, 6, DRAFTER)
    start.after(Round([0, 2], [2, 2], [2, 0], 2, 0.1))
    assert start.ask([0, 1, 2], [6, 6, 6]) == [3, 2, 2]
    assert start.ask([2, 0], [1, 2]) == [1, 2]
    assert Window().start(1, 6, DRAFTER).ask([0], [6]) == [6]


def test_fallback_rests_after_repeated_rejections_and_tries_again() -> None:
    start = Fallback(patience=2, rest=3).start(1, 8, DRAFTER)
    made = [
        (8, 0), (8, 1), (8, 0), (0, 0), (8, 0),  # two in succession; a round without a draft is none
        (0, 0), (0, 0), (0, 0),
        (8, 0),  # a single try
        (0, 0), (0, 0), (0, 0),
        (8, 2), (8, 0), (8, 0), (0, 0),
    ]  # fmt: skip
    assert rounds(start, made) == [8] * 5 + [0] * 3 + [8] + [0] * 3 + [8] * 3 + [0] * 2


def test_fallback_is_each_requests_own() -> None:
    start = Fallback(patience=1, rest=2).start(3, 4, DRAFTER)
    start.after(Round([0, 1, 2], [4, 4, 4], [0, 1, 0], 4, 0.1))
    assert start.ask([1, 2], [4, 4]) == [4, 0]


def asked(rule: Any, laws: list[list[list[float]]], tokens: list[list[int]]) -> list[tuple[list[bool], list[bool]]]:
    """A rule's answers along chains: laws and tokens by depth, then by request."""
    answers = []
    for by_request, drawn in zip(laws, tokens, strict=True):
        law = torch.tensor(by_request, dtype=torch.float64)
        draws: Tensor = rule.draws(law)
        goes_on: Tensor = rule.goes_on(law.gather(1, torch.tensor(drawn)[:, None])[:, 0])
        answers.append((draws.tolist(), goes_on.tolist()))
    return answers


LAWS = [[[0.5, 0.3, 0.2], [0.9, 0.05, 0.05]], [[0.5, 0.3, 0.2], [0.6, 0.4, 0.0]], [[1.0, 0.0, 0.0], [0.6, 0.4, 0.0]]]
TOKENS = [[0, 0], [1, 0], [0, 1]]


def test_confidence_stops_behind_a_token_of_little_chance() -> None:
    rule = Confidence(token=0.4).start(2, 3, DRAFTER).rule([0, 1], [3, 3])
    yes = [True, True]
    assert asked(rule, LAWS, TOKENS) == [(yes, yes), (yes, [False, True]), (yes, yes)]
    assert rule is not None and rule.limits == [3, 3]


def test_confidence_stops_behind_a_chain_of_little_chance() -> None:
    rule = Confidence(token=0.0, chain=0.4).start(2, 3, DRAFTER).rule([0, 1], [3, 3])
    yes = [True, True]  # 0.5, 0.15, 0.15 and 0.9, 0.54, 0.216
    assert asked(rule, LAWS, TOKENS) == [(yes, yes), (yes, [False, True]), (yes, [False, False])]


def test_entropy_stops_before_an_undecided_token_whichever_it_would_be() -> None:
    entropies = [[-sum(p * math.log(p) for p in law if p) for law in laws] for laws in LAWS]
    assert entropies[0][1] < entropies[1][1] < 0.7 < entropies[0][0]
    yes = [True, True]
    for tokens in (TOKENS, [[2, 1], [0, 1], [0, 0]]):
        rule = Entropy(most=0.7).start(2, 3, DRAFTER).rule([0, 1], [3, 3])
        assert asked(rule, LAWS, tokens) == [([False, True], yes), ([False, True], yes), (yes, yes)]


# ---- how a policy is chosen ----


def test_every_policy_has_a_file_that_says_its_defaults() -> None:
    assert set(choices("decode/draft_length")) == {*POLICIES, "auto"}
    assert all(choices("decode/draft_length").values())
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        for name, policy in POLICIES.items():
            given = plain(hydra.compose("engine", overrides=[f"decode/draft_length={name}"]))["decode"]["draft_length"]
            assert read_policy(given) == policy()
            assert given.keys() == {"policy", *(f.name for f in fields(policy) if f.init)}
            assert read_policy(given).describe() == given  # type: ignore[union-attr]
        options = plain(hydra.compose("engine"))
    assert options["decode"]["draft_length"] == {"policy": "auto"}
    assert decode_settings(options["decode"], 0.0, 0, 4).draft_length is None


def test_a_name_alone_means_its_defaults() -> None:
    assert read_policy("window") == Window()
    assert read_policy({"policy": "window", "high": 0.9}) == Window(high=0.9)
    assert read_policy("auto") is None
    assert str(read_policy("cost_aware")) == "cost_aware"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("windw", "There is no decode.draft_length 'windw'. Did you mean 'window'? Choose auto, fixed, window,"),
        (None, "decode.draft_length is None: choose auto, fixed"),
        ({"high": 1}, "choose auto, fixed"),
        ({"policy": "window", "hi": 1}, "decode.draft_length=window has no setting 'hi'; it has: high, low, rounds"),
        ({"policy": "auto", "hi": 1}, "has no setting 'hi'; it has: none"),
        ({"policy": "cost_aware", "_known": {}}, "has no setting '_known'"),
        ({"policy": "window", "high": 2}, "decode.draft_length.high is 2: it must be a number from 0 to 1."),
        ({"policy": "window", "low": 0.9}, "low is 0.9 and high 0.85: low must not be above high"),
        ({"policy": "window", "rounds": 1.5}, "rounds is 1.5: it must be a whole number of at least 1."),
        ({"policy": "window", "least": True}, "least is True"),
        ({"policy": "window", "least": 3, "first": 2}, "first is 2: it must be a whole number of at least 3."),
        ({"policy": "fallback", "rest": 0}, "rest is 0"),
        ({"policy": "fallback", "patience": "few"}, "patience is 'few'"),
        ({"policy": "confidence", "token": float("nan")}, "token is nan"),
        ({"policy": "confidence", "chain": -1}, "chain is -1"),
        ({"policy": "entropy", "most": -0.5}, "most is -0.5: it must be a number of at least 0."),
        ({"policy": "cost_aware", "cost": -1}, "cost is -1"),
        ({"policy": "cost_aware", "explore": 1}, "explore is 1: it must be a whole number of at least 2."),
        ({"policy": "cost_aware", "memory": 1.5}, "memory is 1.5"),
    ],
)
def test_what_makes_no_sense_is_refused(given: Any, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        read_policy(given)
    assert sentence in str(error.value)


@pytest.mark.parametrize("policy", [Confidence(), Entropy(), CostAware(), Learnt()], ids=str)
def test_policies_that_read_laws_refuse_a_drafter_without_any(policy: DraftLength) -> None:
    with pytest.raises(UserError, match=f"decode.draft_length={policy.name}"):
        policy.check(DRAFTER)


def test_policies_are_for_chains() -> None:
    tree = StaticTree.chain(3)
    DecodeSettings(tree=tree, draft_length=Fixed())
    with pytest.raises(UserError, match=r"decode\.draft_length=window is for chains"):
        DecodeSettings(tree=tree, draft_length=Window())


def test_a_drafter_with_a_predictor_is_asked_unless_another_policy_is() -> None:
    class Predicting(ScriptedDrafter):
        length_predictor = object()

    assert policy_for(None, DRAFTER) == Fixed()
    assert policy_for(None, Predicting(lambda text: 0)) == Learnt()
    assert policy_for(Fixed(), Predicting(lambda text: 0)) == Fixed()
