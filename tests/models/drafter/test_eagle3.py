"""EAGLE-3 against a loop over rows in plain tensors, its published names and shapes, and its options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.drafter.eagle3 import Eagle3Drafter, published_layers
from models.errors import UserError
from models.sampling import RequestRandom, SamplingParams
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import (
    build_shaken,
    check_draft,
    check_fresh,
    check_unroll,
    generate_observed,
    prompts,
    propose_at_every_length,
    shaken,
    tiny_target,
)
from tests.helpers.looped_layers import LoopedLayers, rms_normed
from tests.helpers.models import random_target

MODEL = {"_target_": "models.drafter.eagle3.Eagle3Drafter"}
CLOSE = {"atol": 1e-10, "rtol": 1e-10}
ROPE = {"atol": 1e-6, "rtol": 0}  # RoPE's angles are float32
GREEDY = SamplingParams()
KEPT = torch.arange(1, 64, 3)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"fc_norm": True, "norm_output": True, "head": "random"},
    {"num_layers": 2, "capture_layers": [0, -1], "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 10},
]
IDS = ["published", "3.1", "two-layers-two-states"]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64)


def features_of(target: Target, drafter: Eagle3Drafter, batch_size: int = 2, num_rows: int = 7) -> TargetFeatures:
    ids = torch.tensor(prompts([num_rows + 1] * batch_size, target.vocab_size, seed=4))
    with torch.no_grad():
        hidden = target(ids[:, :-1], capture_layers=drafter.capture_layers).hidden
    return TargetFeatures(ids[:, :-1], ids[:, 1:], hidden, torch.full((batch_size,), num_rows))


# The oracle: loops over rows, from the tensors that a checkpoint holds and Hugging Face's own states.


class LoopedEagle3(LoopedLayers):
    """One request, row by row."""

    def __init__(self, drafter: Eagle3Drafter, target: Target) -> None:
        weights = {name.removeprefix("stack."): tensor for name, tensor in drafter.state_dict().items()}
        super().__init__(weights, drafter.config)
        self.embedding, self.norm_output = target.model.get_input_embeddings().weight, drafter.norm_output

    def condensed(self, states: list[Tensor]) -> Tensor:
        norms = [self.weights.get(f"fc_norm.{i}.weight") for i in range(len(states))]
        read = [s if n is None else rms_normed(s, n, self.eps) for s, n in zip(states, norms, strict=True)]
        return self.weights["fc.weight"] @ torch.cat(read)

    def output(self, token: int, state: Tensor, position: int) -> Tensor:
        return self.row(torch.cat([self.embedding[token], state]), position)

    def fed_back(self, output: Tensor) -> Tensor:
        return self.normed(output) if self.norm_output else output

    def normed(self, output: Tensor) -> Tensor:
        return rms_normed(output, self.weights["norm.weight"], self.eps)

    def draft_logits(self, output: Tensor) -> Tensor:
        return self.weights["lm_head.weight"] @ self.normed(output)


def unrolled_by_loop(drafter: Eagle3Drafter, target: Target, features: TargetFeatures, num_steps: int) -> Tensor:
    """For every row: take in the rows up to it, then feed outputs back: (num_steps, B, S, D); NaN beyond the text."""
    states = target.model(input_ids=features.token_ids, output_hidden_states=True).hidden_states
    batch_size, num_rows = features.token_ids.shape
    out = states[0].new_full((num_steps, batch_size, num_rows, target.hidden_size), float("nan"))
    for b in range(batch_size):
        request, text = LoopedEagle3(drafter, target), features.next_token_ids[b].tolist()
        for t in range(num_rows):
            seen = [states[layer][b, t] for layer in drafter.capture_layers]
            out[0, b, t] = request.output(text[t], request.condensed(seen), t)
            drafted = 0
            for step in range(1, min(num_steps, num_rows - t)):
                out[step, b, t] = request.output(text[t + step], request.fed_back(out[step - 1, b, t]), t + step)
                drafted += 1
            request.forget(drafted)
    return out


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
@torch.no_grad()
def test_unroll_is_the_loop_over_rows(options: dict[str, Any], target: Target) -> None:
    """The training-time test: step s reads causal keys of step 0 and its own row's of steps 1 to s."""
    drafter = build_shaken(MODEL | options, target, DraftVocab(64))
    features = features_of(target, drafter)
    expected = unrolled_by_loop(drafter, target, features, 4)
    for step, hidden in enumerate(drafter.unroll(features, 4)):
        inside = hidden.shape[1] - step
        torch.testing.assert_close(hidden[:, :inside], expected[step, :, :inside], **ROPE)


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
@torch.no_grad()
def test_a_proposal_is_the_loop_and_the_drafters_own_head(options: dict[str, Any], target: Target) -> None:
    drafter = build_shaken(MODEL | options, target, DraftVocab(64, KEPT))
    features = features_of(target, drafter, 2, 6)
    lengths = torch.tensor([6, 4])
    ragged = TargetFeatures(features.token_ids, features.next_token_ids, features.hidden, lengths)
    draft = drafter.propose(
        drafter.new_state(2, 12), ragged, num_speculative_tokens=3, sampling=GREEDY, random=RequestRandom([0, 1], 3)
    )
    assert ragged.hidden is not None
    for b, length in enumerate(lengths.tolist()):
        request = LoopedEagle3(drafter, target)
        for t in range(length):
            seen = list(ragged.hidden[b, t].chunk(len(drafter.capture_layers)))
            output = request.output(int(ragged.next_token_ids[b, t]), request.condensed(seen), t)
        tokens: list[int] = []
        for position in range(length, length + 3):
            tokens.append(int(KEPT[request.draft_logits(output).argmax()]))
            output = request.output(tokens[-1], request.fed_back(output), position)
        assert draft.token_ids[b].tolist() == tokens


# What it consists of.


def test_parameters_have_the_published_names_and_shapes(target: Target) -> None:
    """formats.md, EAGLE-3: q, k and v twice as wide, a norm for each half, its own norm and head, no embedding."""
    drafter = native.build(MODEL, target, DraftVocab(64, KEPT))
    shapes = {name.removeprefix("stack."): tuple(t.shape) for name, t in drafter.state_dict().items()}
    assert shapes == {
        "fc.weight": (64, 3 * 64),
        "layers.0.input_layernorm.weight": (64,),
        "layers.0.hidden_norm.weight": (64,),
        "layers.0.self_attn.q_proj.weight": (64, 128),
        "layers.0.self_attn.k_proj.weight": (32, 128),
        "layers.0.self_attn.v_proj.weight": (32, 128),
        "layers.0.self_attn.o_proj.weight": (64, 64),
        "layers.0.post_attention_layernorm.weight": (64,),
        "layers.0.mlp.gate_proj.weight": (128, 64),
        "layers.0.mlp.up_proj.weight": (128, 64),
        "layers.0.mlp.down_proj.weight": (64, 128),
        "norm.weight": (64,),
        "lm_head.weight": (21, 64),
    }
    theirs = {parameter.data_ptr() for parameter in target.parameters()}
    assert not theirs & {parameter.data_ptr() for parameter in drafter.parameters()}
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    more = set(native.build(MODEL | {"fc_norm": True, "num_layers": 2}, target, DraftVocab(64)).state_dict())
    assert {"fc_norm.0.weight", "fc_norm.2.weight", "stack.layers.1.self_attn.q_proj.weight"} <= more
    assert "stack.layers.1.hidden_norm.weight" not in more


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [(1, (0, 1)), (2, (1,)), (3, (1, 2)), (4, (1, 2, 3)), (6, (1, 3, 5)), (7, (2, 3, 4)), (32, (2, 16, 29))],
)
def test_captured_layers_are_the_published_ones_or_spread_over_a_small_target(
    num_layers: int, layers: tuple[int, ...]
) -> None:
    assert published_layers(num_layers) == layers


def test_captured_layers_are_chosen_by_name(target: Target) -> None:
    assert native.build(MODEL, target, DraftVocab(64)).capture_layers == (1, 2, 3)
    assert native.build(MODEL | {"capture_layers": [2, -1]}, target, DraftVocab(64)).capture_layers == (2, 4)
    for layers, message in (([], "is empty"), ([9], "layer 9 does not exist")):
        with pytest.raises(UserError, match=message):
            native.build(MODEL | {"capture_layers": layers}, target, DraftVocab(64))
    with pytest.raises(UserError, match="target or random"):
        native.build(MODEL | {"head": "zero"}, target, DraftVocab(64))


def test_the_head_starts_from_the_targets_rows() -> None:
    """With the factor that the target puts before its logits."""
    target = random_target("granite")
    rows = torch.arange(0, target.vocab_size, 2)
    drafter = native.build(MODEL, target, DraftVocab(target.vocab_size, rows))
    hidden = torch.randn(5, target.hidden_size, dtype=torch.float64)
    normed = hidden / (hidden.square().mean(-1, keepdim=True) + drafter.config.rms_norm_eps).sqrt()
    torch.testing.assert_close(drafter.logits(hidden), target.head(normed)[:, ::2], **CLOSE)
    with torch.no_grad():
        drafter.lm_head.weight.zero_()
    assert target.head.weight.abs().max() > 0  # a copy
    torch.manual_seed(0)
    other = native.build(MODEL | {"head": "random"}, target, DraftVocab(target.vocab_size, rows))
    assert (other.lm_head.weight - target.head.scale * target.head.weight[rows]).abs().min(dim=1).values.max() > 1e-4


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
@torch.no_grad()
def test_every_tensor_has_a_say_in_the_logits(options: dict[str, Any], target: Target) -> None:
    drafter = build_shaken(MODEL | options, target, DraftVocab(64))
    features = features_of(target, drafter)
    before = [drafter.logits(hidden) for hidden in drafter.unroll(features, 2)]
    for name, parameter in drafter.named_parameters():
        kept = parameter.clone()
        parameter *= 1.1
        for hidden, theirs in zip(drafter.unroll(features, 2), before, strict=True):
            assert (drafter.logits(hidden) - theirs).abs().max() > 1e-3, name
        parameter.copy_(kept)


def test_gradients_of_all_steps_reach_all_parameters(target: Target) -> None:
    drafter = build_shaken(MODEL, target, DraftVocab(64))
    for step, hidden in enumerate(drafter.unroll(features_of(target, drafter), 3)):
        loss = drafter.logits(hidden).square().sum()
        grads = torch.autograd.grad(loss, list(drafter.parameters()), retain_graph=True)
        assert all(grad.abs().max() > 1e-3 for grad in grads), step
    assert {id(p) for p in drafter.logit_parameters()} == {id(drafter.norm.weight), id(drafter.lm_head.weight)}


@pytest.mark.parametrize("options", OPTIONS[1:], ids=IDS[1:])
def test_options_decode_as_they_train(options: dict[str, Any], target: Target) -> None:
    """The contract's checks 1, 3 and 4, which run on the published settings."""
    drafter = build_shaken(MODEL | options, target, DraftVocab(64, KEPT))
    start, settings = prompts([5, 11, 3], 64), DecodeSettings(12, 4, GREEDY, frozenset())
    made, seen = generate_observed(target, drafter, start, settings, [check_draft, check_unroll, check_fresh])
    assert made.token_ids == generate(target, start, settings).token_ids
    assert len(seen.committed_counts) > 2


@pytest.mark.parametrize("architecture", ["llama_tied", "qwen3", "gemma3", "gpt2", "phi", "granite"])
def test_other_architectures(architecture: str) -> None:
    target = random_target(architecture)
    drafter = build_shaken(MODEL, target, DraftVocab(target.vocab_size, torch.arange(0, target.vocab_size, 2)))
    start, settings = prompts([5, 11, 3], target.vocab_size), DecodeSettings(12, 4, GREEDY, frozenset())
    made, seen = generate_observed(target, drafter, start, settings, [check_draft, check_unroll, check_fresh])
    assert made.token_ids == generate(target, start, settings).token_ids
    assert len(seen.committed_counts) > 2


# The least-squares start.


def moments_by_rows(read: Tensor) -> Tensor:
    return torch.stack([torch.outer(row, row) for row in read]).mean(0)


@pytest.mark.parametrize(("key_heads", "rank"), [(2, 32), (4, 64)], ids=["two-key-heads", "as-many-as-heads"])
@torch.no_grad()
def test_layers_start_as_a_linear_map_of_what_the_row_itself_reads(key_heads: int, rank: int, target: Target) -> None:
    """A row that sees itself alone adds the map's principal components, as many as keys have numbers; others nearly."""
    options = {"num_key_value_heads": key_heads, "num_layers": 2}
    drafter = native.build(MODEL | options, target, DraftVocab(64))
    features = features_of(target, drafter, 40, 20)
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(2), dtype=torch.float64) / 10
    assert features.hidden is not None
    h = drafter.condense(features.hidden)
    read = drafter.stack.layers[0].read(drafter.fuse(features.next_token_ids, h))
    moments = moments_by_rows(read.flatten(0, 1))
    drafter.start_layers(weight, moments)
    (output,) = drafter.unroll(features, 1)
    wanted = read @ weight.t()
    directions = torch.linalg.svd(weight @ moments @ weight.t()).U[:, :rank]
    torch.testing.assert_close((output - h)[:, 0], (wanted @ directions @ directions.t())[:, 0], **CLOSE)
    missed = (output - h - wanted @ directions @ directions.t()).square().mean() / wanted.square().mean()
    assert missed < 0.05


@torch.no_grad()
def test_heads_that_share_keys_do_not_start_alike(target: Target) -> None:
    """They would have the same gradients for ever. One of them reads the row itself; the others add nothing yet."""
    drafter = native.build(MODEL | {"num_key_value_heads": 2}, target, DraftVocab(64))
    drafter.start_layers(torch.randn(64, 128, dtype=torch.float64), torch.eye(128, dtype=torch.float64))
    attention = drafter.stack.layers[0].self_attn
    queries = attention.q_proj.weight.view(2, 2, -1)  # (key heads, heads of each, ·)
    assert not torch.isclose(queries[:, 0], queries[:, 1]).any()
    outputs = attention.o_proj.weight.t().reshape(2, 2, -1)
    assert outputs[:, 0].abs().amax() > 0.1 and outputs[:, 1].abs().amax() == 0


@torch.no_grad()
def test_states_start_in_units_that_the_final_norm_puts_back(target: Target) -> None:
    drafter = native.build(MODEL, target, DraftVocab(64))
    weight, scale = torch.randn(64, 192, dtype=torch.float64), torch.rand(64, dtype=torch.float64) + 0.5
    drafter.start_states(weight, scale)
    read = torch.randn(2, 3, 192, dtype=torch.float64)
    torch.testing.assert_close(drafter.condense(read) * scale, read @ weight.t(), **CLOSE)
    assert torch.equal(drafter.norm.weight, scale)


# The contract's checks notice what is peculiar to EAGLE-3.


class FeedsBackNormed(Eagle3Drafter):
    """Training feeds back what the head reads, decoding the output itself."""

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        self.norm_output = True
        steps = list(super().unroll(features, num_steps))
        self.norm_output = False
        return iter(steps)


class LayersSwapped(Eagle3Drafter):
    """Training reads the captured states in another order."""

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        assert features.hidden is not None
        low, middle, high = features.hidden.chunk(3, dim=-1)
        swapped = torch.cat([high, middle, low], dim=-1)
        return super().unroll(
            TargetFeatures(features.token_ids, features.next_token_ids, swapped, features.lengths), num_steps
        )


@pytest.mark.parametrize("mutant", [FeedsBackNormed, LayersSwapped])
def test_training_that_differs_from_decoding_is_noticed(mutant: type[Eagle3Drafter], target: Target) -> None:
    torch.manual_seed(0)
    drafter = shaken(mutant(target, DraftVocab(64)))
    with pytest.raises(AssertionError, match="not close"):
        propose_at_every_length(target, drafter, prompts([12], 64)[0], 4, GREEDY, [check_unroll])


def test_a_bfloat16_target_has_a_float32_drafter() -> None:
    target = random_target("llama", dtype=torch.bfloat16)
    drafter = Eagle3Drafter(target, DraftVocab(target.vocab_size))
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    ids = torch.tensor([[3, 4, 5]])
    hidden = target(ids, capture_layers=drafter.capture_layers).hidden
    (output,) = drafter.unroll(TargetFeatures(ids, ids, hidden, torch.tensor([3])), 1)
    assert (output.dtype, drafter.logits(output).dtype) == (torch.float32, torch.float32)
