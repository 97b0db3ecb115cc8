"""Parallel multi-token prediction against loops over rows; what heads may read; chains no longer than the heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.drafter.mtp_parallel import ParallelMTP
from models.errors import UserError
from models.sampling import SamplingParams
from models.target import Target
from models.tree import StaticTree
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, check_unroll, prompts, propose_at_every_length, shaken, tiny_target
from tests.helpers.looped_layers import LoopedLayers, fused, rms_normed, under

MODEL = {"_target_": "models.drafter.mtp_parallel.ParallelMTP", "num_heads": 3}
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)


@pytest.fixture(scope="module")
def features(target: Target) -> TargetFeatures:
    ids = torch.tensor(prompts([7, 7], 64, seed=4))
    with torch.no_grad():
        hidden = target(ids[:, :-1], capture_layers=(-1,)).hidden
    return TargetFeatures(ids[:, :-1], ids[:, 1:], hidden, torch.tensor([6, 6]))


@torch.no_grad()
def test_unroll_is_the_loop_over_rows(target: Target, features: TargetFeatures) -> None:
    drafter = build_shaken(MODEL | {"num_layers": 2}, target, DraftVocab(64))
    weights, eps = drafter.state_dict(), drafter.config.rms_norm_eps
    embedding = target.model.get_input_embeddings().weight
    for step, hidden in enumerate(drafter.unroll(features, 3)):
        for b in range(2):
            rows = LoopedLayers(under(weights, f"heads.{step}.stack."), drafter.config)
            for t, token in enumerate(features.next_token_ids[b].tolist()):
                x = rows.row(fused(weights, "fusion.", embedding[token], features.hidden[b, t], eps), t)
                expected = rms_normed(x, weights[f"heads.{step}.norm.weight"], eps)
                torch.testing.assert_close(hidden[b, t], expected, atol=1e-6, rtol=0)  # RoPE is float32


def test_gradients_reach_the_head_and_the_trunk_alone(target: Target, features: TargetFeatures) -> None:
    drafter = build_shaken(MODEL, target, DraftVocab(64))
    for step, hidden in enumerate(drafter.unroll(features, 3)):
        grads = torch.autograd.grad(
            hidden.square().sum(), list(drafter.parameters()), retain_graph=True, allow_unused=True
        )
        for (name, _), grad in zip(drafter.named_parameters(), grads, strict=True):
            assert (grad is not None) == name.startswith(("fusion.", f"heads.{step}.")), (step, name)


def test_chains_are_no_longer_than_there_are_heads(target: Target) -> None:
    drafter = build_shaken(MODEL, target, DraftVocab(64))
    start = prompts([5, 2], 64)
    made = generate(target, start, DecodeSettings(12, 5, GREEDY, frozenset()), drafter)
    assert (made.stats.drafts.sum(0) > 0).tolist() == [True, True, True, False, False]
    assert made.token_ids == generate(target, start, DecodeSettings(12, 5, GREEDY, frozenset())).token_ids
    settings = replace(DecodeSettings(12, 5, GREEDY, frozenset()), tree=StaticTree.chain(4))
    with pytest.raises(UserError, match="4 tokens deep"):
        generate(target, start, settings, drafter)


def test_no_heads_are_refused(target: Target) -> None:
    with pytest.raises(UserError, match="num_heads is 0"):
        native.build(MODEL | {"num_heads": 0}, target, DraftVocab(64))


class HeadsLate(ParallelMTP):
    """Training's head s is decoding's head s − 1."""

    def ahead(self, trunk: torch.Tensor, features: TargetFeatures, step: int) -> torch.Tensor:
        return super().ahead(trunk, features, max(0, step - 1))


class TokensLate(ParallelMTP):
    """Training reads x_t beside the state at x_t, where decoding reads x_{t+1}."""

    def unroll(self, features: TargetFeatures, num_steps: int) -> object:
        return super().unroll(replace(features, next_token_ids=features.token_ids), num_steps)


@pytest.mark.parametrize("mutant", [HeadsLate, TokensLate])
def test_training_that_differs_from_decoding_by_one_is_noticed(mutant: type[ParallelMTP], target: Target) -> None:
    torch.manual_seed(0)
    drafter = shaken(mutant(target, DraftVocab(64), num_heads=3))
    with pytest.raises(AssertionError, match="not close"):
        propose_at_every_length(target, drafter, prompts([9], 64)[0], 3, GREEDY, [check_unroll])
