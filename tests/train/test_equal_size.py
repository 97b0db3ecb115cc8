"""Drafters of one size, on the bundled target and on others."""

from __future__ import annotations

from typing import Any

import pytest

from conf.compose import composed
from models.errors import UserError
from models.target import Target
from tests.helpers.models import random_target
from train.equal_size import equal_settings, equal_width, parameters_of

LIGHT = ("conv", "linear_attention", "experts")


def options_of(name: str, *settings: str) -> dict[str, Any]:
    return composed("train", [f"+drafter={name}", *settings])


def test_light_drafters_are_as_large_as_eagle_on_the_bundled_target(
    tiny: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing that they share with the target is counted: its embedding and head alone have 393,216."""
    runs = {name: options_of(name) for name in ("eagle", *LIGHT)}
    settings = equal_settings(runs, tiny, "eagle")
    assert settings == {
        "eagle": [],
        "conv": ["drafter.model.intermediate_size=236"],
        "linear_attention": ["drafter.model.intermediate_size=346"],
        "experts": ["drafter.model.intermediate_size=150"],
    }
    eagle = parameters_of(runs["eagle"], tiny)
    assert eagle == 2 * 192 * 192 + 192 * (192 + 64 + 64 + 192) + 3 * 192 * 432 + 192
    counts = [parameters_of(options_of(name, *settings[name]), tiny) for name in LIGHT]
    assert all(abs(count - eagle) < 0.03 * eagle for count in counts)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"eagle: {eagle:,} parameters"
    assert shown[1] == f"conv: {counts[0]:,}, with drafter.model.intermediate_size=236"


@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize("settings", [[], ["drafter.model.num_layers=3", "draft_vocab_size=40"]])
def test_the_width_is_the_nearest_of_all(name: str, settings: list[str]) -> None:
    target = random_target(hidden_size=32, intermediate_size=96)
    options, wanted = options_of(name, *settings), 60_000
    width, found = equal_width(options, target, wanted)
    counts = {w: parameters_of(options, target, w) for w in range(width - 2, width + 3)}
    assert counts[width] == found
    assert min(abs(count - wanted) for count in counts.values()) == abs(found - wanted)


def test_what_has_no_such_size_is_refused() -> None:
    target = random_target(hidden_size=32, intermediate_size=96)
    with pytest.raises(UserError, match=r"drafter 'prompt_lookup' has no drafter\.model\.intermediate_size"):
        equal_width(options_of("prompt_lookup"), target, 1000)
    with pytest.raises(UserError, match=r"drafter 'conv' cannot have 1,000 parameters\. The nearest, with "):
        equal_width(options_of("conv"), target, 1000)
