"""Sequential multi-token prediction against loops over rows, with one block and with several; and faults by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.drafter import mtp
from models.drafter.mtp import SequentialMTP
from models.errors import UserError
from models.layers import UnrolledMemory
from models.multi_token import LayersFrom, MultiTokenState
from models.sampling import SamplingParams
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
    five_token_target,
    generate_observed,
    prompts,
    propose_at_every_length,
    shaken,
    tiny_target,
)
from tests.helpers.looped_layers import LoopedLayers, fused, rms_normed, under
from tests.helpers.models import random_target

MODEL = {"_target_": "models.drafter.mtp.SequentialMTP"}
CLOSE = {"atol": 1e-10, "rtol": 1e-10}
GREEDY, SAMPLED = SamplingParams(), SamplingParams(1.0)
TREES = {
    "static": StaticTree((-1, -1, 0, 0, 1, 2, 3, 5), (0, 1, 0, 1, 0, 0, 0, 0)),
    "dynamic": DynamicTree(depth=4, top_k=2, num_nodes=7),
}


@pytest.fixture(scope="module")
def target() -> Target:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return tiny_target(torch.float64, **sizes)


def features_of(target: Target, layers: tuple[int, ...], batch_size: int = 2, num_rows: int = 7) -> TargetFeatures:
    ids = torch.tensor(prompts([num_rows + 1] * batch_size, target.vocab_size, seed=4))
    with torch.no_grad():
        hidden = target(ids[:, :-1], capture_layers=layers).hidden
    return TargetFeatures(ids[:, :-1], ids[:, 1:], hidden, torch.full((batch_size,), num_rows))


def unrolled_by_loop(drafter: SequentialMTP, target: Target, features: TargetFeatures, num_steps: int) -> Tensor:
    """Row by row and block by block: (num_steps, B, S, D); NaN where the text ends before the token that is read."""
    weights, eps = drafter.state_dict(), drafter.config.rms_norm_eps
    embedding, last = target.model.get_input_embeddings().weight, len(drafter.blocks) - 1
    captured = features.hidden
    if "scales.weight" in weights:
        captured = captured @ weights["scales.weight"].T
    batch_size, num_rows, size = captured.shape
    out = torch.full((num_steps, batch_size, num_rows, size), float("nan"), dtype=captured.dtype)
    for b in range(batch_size):
        text = features.next_token_ids[b].tolist()
        for step in range(min(last + 1, num_steps)):
            rows = LoopedLayers(under(weights, f"blocks.{step}.stack."), drafter.config)

            for t in range(num_rows - step):
                state = captured[b, t] if step == 0 else out[step - 1, b, t]
                further = range(last + 1, min(num_steps, num_rows - t)) if step == last else range(0)
                for at in (step, *further):
                    x = fused(weights, f"blocks.{step}.", embedding[text[t + at]], state, eps)
                    state = rms_normed(rows.row(x, t + at), weights[f"blocks.{step}.norm.weight"], eps)
                    out[at, b, t] = state
                rows.forget(len(further))
    return out


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_blocks": 3},
        {"num_blocks": 2, "num_layers": 2, "intermediate_size": 20, "capture_layers": [1, -1]},
    ],
    ids=["one-block", "three-blocks", "two-deep-blocks-over-two-layers"],
)
@torch.no_grad()
def test_unroll_is_the_loop_over_rows(arguments: dict[str, Any], target: Target) -> None:
    drafter = build_shaken(MODEL | arguments, target, DraftVocab(64))
    features = features_of(target, drafter.capture_layers)
    expected = unrolled_by_loop(drafter, target, features, 5)
    for step, hidden in enumerate(drafter.unroll(features, 5)):
        inside = hidden.shape[1] - step
        torch.testing.assert_close(hidden[:, :inside], expected[step, :, :inside], atol=1e-6, rtol=0)  # RoPE is float32


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_several_blocks_draft_what_they_unroll(num_blocks: int, target: Target) -> None:
    """At every length of text, chains beyond the number of blocks; then through rounds, and along trees."""
    drafter = build_shaken(MODEL | {"num_blocks": num_blocks}, target, DraftVocab(64))
    for sampling in (GREEDY, SAMPLED):
        propose_at_every_length(target, drafter, prompts([9], 64)[0], 5, sampling, [check_draft, check_unroll])
    start = prompts([1, 6, 3], 64, seed=1)
    settings = DecodeSettings(20, 4, GREEDY, frozenset())
    plain = generate(target, start, settings).token_ids
    checks = [check_draft, check_unroll, check_fresh]
    made, seen = generate_observed(target, drafter, start, settings, checks)
    assert made.token_ids == plain and seen.committed_counts > {1, 5}
    script = dict(enumerate(zip(start, plain, strict=True)))
    for tree in TREES.values():
        observed = Observed(drafter, script=script)
        assert generate(target, start, replace(settings, tree=tree), observed).token_ids == plain
        assert len(observed.committed_counts) > 2
        for prompt in start:  # chains and lone rows need no mask
            generate(target, [prompt], replace(settings, tree=tree), Observed(drafter))


def test_gradients_of_all_steps_reach_what_they_use(target: Target) -> None:
    drafter = build_shaken(MODEL | {"num_blocks": 2}, target, DraftVocab(64))
    features = features_of(target, drafter.capture_layers)
    names = [name for name, _ in drafter.named_parameters()]
    for step, hidden in enumerate(drafter.unroll(features, 3)):
        grads = torch.autograd.grad(
            hidden.square().sum(), list(drafter.parameters()), retain_graph=True, allow_unused=True
        )
        for name, grad in zip(names, grads, strict=True):
            reached = grad is not None and grad.abs().max() > 1e-6
            assert reached == (step > 0 or name.startswith("blocks.0.")), (step, name)


def test_parameters_have_deepseeks_names_and_nothing_of_the_target_is_among_them(target: Target) -> None:
    drafter = native.build(MODEL, target, DraftVocab(64))
    names = {name.removeprefix("blocks.0.").replace("stack.layers.0.", "") for name in drafter.state_dict()}
    attention, layer = {f"self_attn.{x}_proj.weight" for x in "qkvo"}, {f"mlp.{x}_proj.weight" for x in ("gate", "up")}
    assert names == attention | layer | {
        "mlp.down_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
        "enorm.weight", "hnorm.weight", "eh_proj.weight", "norm.weight",
    }  # fmt: skip
    theirs = {parameter.data_ptr() for parameter in target.parameters()}
    assert not theirs & {parameter.data_ptr() for parameter in drafter.parameters()}


def test_several_captured_layers_begin_as_the_last_of_them(target: Target) -> None:
    torch.manual_seed(0)
    one = native.build(MODEL, target, DraftVocab(64))
    several = native.build(MODEL | {"capture_layers": [0, 1, -1]}, target, DraftVocab(64))
    assert (one.capture_layers, several.capture_layers) == ((2,), (0, 1, 2))
    several.blocks.load_state_dict(one.blocks.state_dict())
    ours = next(several.unroll(features_of(target, several.capture_layers), 1))
    torch.testing.assert_close(ours, next(one.unroll(features_of(target, (2,)), 1)), **CLOSE)


def test_a_linear_start_is_the_linear_map(target: Target) -> None:
    drafter = native.build(MODEL | {"num_blocks": 2}, target, DraftVocab(64))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 64, generator=generator, dtype=torch.float64)
    scale = torch.rand(32, generator=generator, dtype=torch.float64) + 0.5
    drafter.start_linear(weight, scale)
    features = features_of(target, (2,))
    embedded = target.model.get_input_embeddings().weight[features.next_token_ids]
    ones, eps = torch.ones(32, dtype=torch.float64), drafter.config.rms_norm_eps
    first, second = drafter.unroll(features, 2)
    cases = [(features.hidden[0, 3], embedded[0, 3], first[0, 3]), (first[0, 3], embedded[0, 4], second[0, 3])]
    for state, token, found in cases:
        read = torch.cat([rms_normed(token, ones, eps), rms_normed(state, ones, eps)])
        torch.testing.assert_close(found, rms_normed(weight @ read, scale, eps), **CLOSE)


@pytest.mark.parametrize("architecture", ["llama_tied", "qwen3", "gemma2", "gpt2", "granite"])
def test_other_architectures(architecture: str) -> None:
    target = random_target(architecture)
    drafter = build_shaken(MODEL, target, DraftVocab(target.vocab_size, torch.arange(0, target.vocab_size, 2)))
    start = prompts([5, 3], target.vocab_size)
    settings = DecodeSettings(8, 3, GREEDY, frozenset())
    made, _ = generate_observed(target, drafter, start, settings, [check_draft, check_unroll, check_fresh])
    assert made.token_ids == generate(target, start, settings).token_ids


def test_no_blocks_are_refused(target: Target) -> None:
    with pytest.raises(UserError, match="num_blocks is 0"):
        native.build(MODEL | {"num_blocks": 0}, target, DraftVocab(64))


# The contract's checks notice a drafter that is wrong by one.


class TokensLate(SequentialMTP):
    """Training reads x_t beside the state at x_t, where decoding reads x_{t+1}."""

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        return super().unroll(replace(features, next_token_ids=features.token_ids), num_steps)


class StatesLate(SequentialMTP):
    """Training reads the state at x_{t−1} beside x_{t+1}."""

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        late = torch.cat([features.hidden[:, :1], features.hidden[:, :-1]], dim=1)
        return super().unroll(replace(features, hidden=late), num_steps)


class PositionsStay(SequentialMTP):
    """Training places the rows of a later step where those of the first were, though they read keys of both."""

    def block(self, step: int) -> Any:
        found = super().block(step)
        if not self.training:
            return found

        class Stays:
            @staticmethod
            def step(embedded: Tensor, hidden: Tensor, positions: Tensor, memory: Any, mask: Any) -> Tensor:
                return found.step(embedded, hidden, positions - step, memory, mask)

        return Stays

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        self.training = True
        yield from super().unroll(features, num_steps)
        self.training = False


class BlocksReadNothingElse(SequentialMTP):
    """Decoding forgets which states the later blocks read of the last confirmed row: all get the first block's."""

    def expander(self, state: MultiTokenState, committed: TargetFeatures) -> Any:
        made: Any = super().expander(state, committed)
        state.last[:, 1:] = state.last[:, :1]
        return made


@pytest.mark.parametrize(
    ("mutant", "num_blocks"), [(TokensLate, 1), (StatesLate, 2), (PositionsStay, 1), (BlocksReadNothingElse, 3)]
)
def test_training_that_differs_from_decoding_by_one_is_noticed(
    mutant: type[SequentialMTP], num_blocks: int, target: Target
) -> None:
    torch.manual_seed(0)
    drafter = shaken(mutant(target, DraftVocab(64), num_blocks=num_blocks))
    with pytest.raises(AssertionError, match="not close"):
        propose_at_every_length(target, drafter, prompts([9], 64)[0], 4, GREEDY, [check_unroll])


@pytest.mark.parametrize("fault", ["no rows are hidden", "own key is hidden"])
def test_slots_without_a_row_must_be_hidden(fault: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = build_shaken(MODEL | {"num_blocks": 3}, target, DraftVocab(64))
    original = mtp._without_first

    def wrong(mask: Tensor | None, positions: Tensor, width: int, count: int) -> Tensor:
        return original(mask, positions, width, 0 if fault == "no rows are hidden" else count + 1)

    monkeypatch.setattr(mtp, "_without_first", wrong)
    with pytest.raises(AssertionError, match="not close"):
        propose_at_every_length(target, drafter, prompts([9], 64)[0], 4, GREEDY, [check_unroll])


def test_a_request_is_answered_in_a_batch_as_alone() -> None:
    small = five_token_target()
    drafter = build_shaken(MODEL | {"num_blocks": 2}, small, DraftVocab(5))
    start = prompts([3, 9, 1, 6], 5)
    settings = DecodeSettings(12, 4, SamplingParams(0.9, top_k=3), frozenset())
    together = generate(small, start, settings, drafter)
    for index, prompt in enumerate(start):
        alone = generate(small, [prompt], settings, drafter, seeds=[index])
        assert alone.token_ids[0] == together.token_ids[index]
        assert (alone.stats.accepted[0] == together.stats.accepted[index]).all()


def test_memory_is_read_through_a_window() -> None:
    """Two blocks over one memory do not see each other's keys."""
    memory, keys = UnrolledMemory(), torch.ones(1, 1, 2, 3)
    LayersFrom(memory, 0).update(keys, keys, 0)
    found, _ = LayersFrom(memory, 1).update(2 * keys, keys, 0)
    assert torch.equal(found, 2 * keys)
