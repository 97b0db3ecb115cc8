"""Every drafter that can learn from what verification teaches: one contract, whatever its family."""

import copy
from typing import Any

import pytest
import torch

from engine.loop import generate
from engine.settings import DecodeSettings
from models.errors import UserError
from models.sampling import SamplingParams
from models.target import Target
from models.types import TargetFeatures
from tests.helpers.adaptation import learner_of, records_of
from tests.helpers.drafters import prompts
from train.adaptation.regime import check_adaptable
from train.adaptation.replay import ReplayBuffer

LENGTHS = [4, 7, 3, 9, 5, 6]


@pytest.fixture
def adaptable(drafter: Any) -> Any:
    try:
        check_adaptable(drafter)
    except (UserError, AttributeError):
        pytest.skip("this drafter has no weights that draft by themselves")
    return drafter


def test_what_is_learnt_at_a_position_is_the_law_that_was_tested_there(target: Target, adaptable: Any) -> None:
    """The chance of acceptance that the engine saw is Σ min(p, q), p the law before the position and q that of `unroll`
    at the depth and row which learning takes: a shift by one in either shows."""
    decode = DecodeSettings(14, 3, SamplingParams(1.0), frozenset())
    seen = set()
    asked = [prompt for seed in range(5, 9) for prompt in prompts(LENGTHS, target.vocab_size, seed)]
    for record in records_of(target, adaptable, asked, decode):
        ids = record.token_ids[None]
        out = target(ids, capture_layers=(*adaptable.capture_layers, target.num_layers))
        parts = out.hidden.chunk(len(adaptable.capture_layers) + 1, dim=-1)[:-1]
        hidden = torch.cat(parts, dim=-1) if parts else None
        following = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
        features = TargetFeatures(ids, following, hidden, torch.tensor([ids.shape[1]]))
        p = target.head(out.last[0]).softmax(-1)
        with torch.no_grad():
            steps = list(adaptable.unroll(features, int(record.depth.max()) + 1))
            for place, depth, chance in zip(
                record.place.tolist(), record.depth.tolist(), record.chance.tolist(), strict=True
            ):
                q = adaptable.vocab.widen(adaptable.logits(steps[depth][0, place - 2 - depth], depth).softmax(-1))
                assert chance == pytest.approx(float(torch.minimum(p[place - 1], q).sum()), abs=1e-5)
                seen.add(depth)
    assert {0, 1} <= seen


def test_learning_from_what_was_tested_raises_acceptance(target: Target, adaptable: Any, recipe: Any) -> None:
    """By all weights, and with a reduced draft vocabulary by adapters."""
    lora = {"rank": 8, "alpha": 32} if recipe.reduced else None
    decode, asked = DecodeSettings(14, 3, stop_token_ids=frozenset()), prompts(LENGTHS, target.vocab_size, seed=5)
    records = records_of(target, adaptable, asked, decode, law_tokens=16)
    before = generate(target, asked, decode, adaptable).stats.acceptance_rate
    learner = learner_of(copy.deepcopy(adaptable), target, lora, updates={"steps": 40, "requests": 6})
    learner.update(records, ReplayBuffer(6, "reservoir"))
    adaptable.load_state_dict(learner.weights())
    after = generate(target, asked, decode, adaptable.eval()).stats.acceptance_rate
    assert after > before + 0.15
