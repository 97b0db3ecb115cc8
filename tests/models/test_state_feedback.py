"""Windows of states and several estimates for each pass, against a loop over rows in plain tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.drafter.eagle import EagleDrafter
from models.errors import UserError
from models.sampling import RequestRandom, SamplingParams
from models.target import Target
from models.tree import DynamicTree, StaticTree
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import (
    Observed,
    build_shaken,
    check_draft,
    check_fresh,
    check_unroll,
    generate_observed,
    prompts,
    tiny_target,
)
from tests.helpers.looped_layers import LoopedLayers

MODEL = {"_target_": "models.drafter.eagle.EagleDrafter"}
SHAPES = [(1, 1), (3, 1), (1, 2), (2, 2), (3, 3), (4, 2)]
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)


def build(target: Target, window: int, future: int, num_layers: int = 1) -> EagleDrafter:
    options = {"feature_window": window, "num_future": future, "num_layers": num_layers}
    drafter: EagleDrafter = build_shaken(MODEL | options, target, DraftVocab(64))
    return drafter


def features_of(target: Target) -> TargetFeatures:
    ids = torch.tensor(prompts([8, 8], 64, seed=4))
    with torch.no_grad():
        hidden = target(ids[:, :-1], capture_layers=(-1,)).hidden
    return TargetFeatures(ids[:, :-1], ids[:, 1:], hidden, torch.tensor([7, 7]))


class LoopedWindows(LoopedLayers):
    """One request: its pairs [emb; state] so far, of which a pass reads the last k, and zeros before the first."""

    def __init__(self, drafter: EagleDrafter, target: Target) -> None:
        weights = {name.removeprefix("stack."): tensor for name, tensor in drafter.state_dict().items()}
        super().__init__(weights, drafter.config)
        self.embedding = target.model.get_input_embeddings().weight
        self.window, self.pairs = drafter.feature_window, [torch.zeros(2 * 32, dtype=torch.float64)] * 9

    def append(self, token: int, state: Tensor) -> None:
        self.pairs.append(torch.cat([self.embedding[token], state]))

    def run(self, position: int) -> Tensor:
        return self.row(self.weights["fc.weight"] @ torch.cat(self.pairs[-self.window :]), position)

    def estimate(self, output: Tensor, ahead: int) -> Tensor:
        return output if ahead == 0 else self.weights[f"further.{ahead - 1}.weight"] @ output


def unrolled_by_loop(drafter: EagleDrafter, target: Target, features: TargetFeatures, num_steps: int) -> Tensor:
    assert features.hidden is not None
    batch_size, num_rows, size = features.hidden.shape
    out = torch.full((num_steps, batch_size, num_rows, size), float("nan"), dtype=features.hidden.dtype)
    for b in range(batch_size):
        request, text = LoopedWindows(drafter, target), features.next_token_ids[b].tolist()
        for t in range(num_rows):
            request.append(text[t], features.hidden[b, t])
            output = request.run(t)
            out[0, b, t] = output
            drafted = passes = 0
            for step in range(1, min(num_steps, num_rows - t)):
                request.append(text[t + step], out[step - 1, b, t])
                drafted += 1
                if step % drafter.num_future == 0:
                    output = request.run(t + step)
                    passes += 1
                out[step, b, t] = request.estimate(output, step % drafter.num_future)
            request.forget(passes)
            request.pairs = request.pairs[: len(request.pairs) - drafted]
    return out


@pytest.mark.parametrize(("window", "future"), SHAPES)
@torch.no_grad()
def test_unroll_is_the_loop_over_rows(window: int, future: int, target: Target) -> None:
    drafter = build(target, window, future, num_layers=2)
    features = features_of(target)
    expected = unrolled_by_loop(drafter, target, features, 6)
    for step, found in enumerate(drafter.unroll(features, 6)):
        inside = found.shape[1] - step
        torch.testing.assert_close(found[:, :inside], expected[step, :, :inside], atol=1e-6, rtol=0)  # float32 RoPE


@pytest.mark.parametrize(("window", "future"), SHAPES)
def test_chains_are_drafted_as_they_are_trained(window: int, future: int, target: Target) -> None:
    """Through rounds of 1 to 6 committed rows of a ragged batch, whose requests finish one by one."""
    drafter = build(target, window, future)
    start, settings = prompts([9, 1, 14, 3], 64), DecodeSettings(1000, 5, GREEDY, frozenset())
    made, seen = generate_observed(target, drafter, start, settings, [check_draft, check_unroll, check_fresh])
    assert made.token_ids == generate(target, start, settings).token_ids
    assert seen.committed_counts == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize(
    "shape",
    [StaticTree((-1, -1, 0, 0, 1, 2, 5, 5), (0, 1, 0, 1, 0, 0, 0, 1)), DynamicTree(depth=4, top_k=2, num_nodes=7)],
    ids=["static", "dynamic"],
)
@pytest.mark.parametrize(("window", "future"), SHAPES)
def test_trees_are_drafted_as_they_are_trained(
    window: int, future: int, shape: StaticTree | DynamicTree, target: Target
) -> None:
    """`Observed` compares every tree with a fresh state's, and a static one's logits with `unroll` along each path."""
    drafter = build(target, window, future)
    start = prompts([9, 1, 14, 3], 64)
    plain = generate(target, start, DecodeSettings(1000, 4, GREEDY, frozenset())).token_ids
    observed = Observed(drafter, script=dict(enumerate(zip(start, plain, strict=True))))
    settings = replace(DecodeSettings(1000, 4, GREEDY, frozenset()), tree=shape)
    assert generate(target, start, settings, observed).token_ids == plain
    assert observed.proposals > 3 and len(observed.committed_counts) > 2


def test_a_pass_is_made_for_every_mth_token_only(target: Target) -> None:
    features = features_of(target)
    for future, passes in ((1, 6), (2, 3), (3, 2), (6, 1)):
        drafter = build(target, 2, future)
        with mock.patch.object(drafter.stack, "forward", wraps=drafter.stack.forward) as stack:
            random = RequestRandom([0, 1], 6)
            state = drafter.new_state(2, 20)
            drafter.propose(state, features, num_speculative_tokens=6, sampling=GREEDY, random=random)
        assert stack.call_count == passes


def test_windows_and_futures_add_what_they_need_and_nothing_else(target: Target) -> None:
    plain = dict(native.build(MODEL, target, DraftVocab(64)).named_parameters())
    more: dict[str, Any] = dict(build(target, 3, 4).named_parameters())
    assert more.keys() - plain.keys() == {f"further.{i}.weight" for i in range(3)}
    assert more["fc.weight"].shape == (32, 3 * 2 * 32) and more["further.0.weight"].shape == (32, 32)
    for options, message in (({"feature_window": 0}, "feature_window is 0"), ({"num_future": -1}, "num_future is -1")):
        with pytest.raises(UserError, match=message):
            native.build(MODEL | options, target, DraftVocab(64))
