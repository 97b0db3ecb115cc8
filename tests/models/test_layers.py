"""The drafters' decoder layers against transformers' Llama, and training's memory against plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from models.cache import KVCache
from models.errors import UserError
from models.layers import DecoderStack, RMSNorm, UnrolledMemory, layer_config, unrolled_mask
from tests.helpers.models import ARCHITECTURES, random_target

HIDDEN, ROWS = 32, 9
# Hugging Face takes its norms in float32 whatever the weights are; faults are some five orders of magnitude larger.
NEAR = {"atol": 1e-5, "rtol": 1e-5}
EXACT = {"atol": 1e-10, "rtol": 1e-10}


def config(num_layers: int = 2, **options: Any) -> LlamaConfig:
    shape = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(num_hidden_layers=num_layers, head_dim=6, vocab_size=11, rms_norm_eps=1e-3, **(shape | options))


def randomise(module: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3


def random_stack(num_layers: int = 2, *, first_input_norm: bool = True, **options: Any) -> DecoderStack:
    stack = DecoderStack(config(num_layers, **options), first_input_norm=first_input_norm)
    randomise(stack)
    return stack


def inputs(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def causal(num_rows: int) -> Tensor:
    return torch.ones(num_rows, num_rows, dtype=torch.bool).tril()[None, None]


@pytest.mark.parametrize(
    "mask", [None, causal(ROWS), torch.eye(ROWS, dtype=torch.bool) | (causal(ROWS) & (torch.arange(ROWS) % 3 == 0))]
)
@pytest.mark.parametrize("first_input_norm", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_stack_is_transformers_llama_in_values_and_gradients(
    num_layers: int, first_input_norm: bool, mask: Tensor | None
) -> None:
    theirs = LlamaModel(config(num_layers))
    randomise(theirs)
    if not first_input_norm:
        theirs.layers[0].input_layernorm = nn.Identity()
    ours = random_stack(num_layers, first_input_norm=first_input_norm)
    weights = {name: w for name, w in theirs.state_dict().items() if name.startswith("layers.")}
    ours.load_state_dict(weights)  # the same names, so that exports need no renaming

    x = inputs(2, ROWS).requires_grad_()
    positions = torch.arange(ROWS)[None] + torch.tensor([[0], [5]])
    result = ours(x, positions, UnrolledMemory(), mask)
    weight = inputs(2, ROWS, seed=2)
    gradients = torch.autograd.grad((result * weight).sum(), [x, *ours.parameters()])

    hidden = x
    rotary = theirs.rotary_emb(x, positions)
    for layer in theirs.layers:
        full_mask = causal(ROWS) if mask is None else mask
        hidden = layer(hidden, attention_mask=full_mask.expand(2, 1, -1, -1), position_embeddings=rotary)
    torch.testing.assert_close(result, hidden, **NEAR)
    parameters = [theirs.get_parameter(name) for name, _ in ours.named_parameters()]
    expected = torch.autograd.grad((hidden * weight).sum(), [x, *parameters])
    torch.testing.assert_close(gradients, expected, atol=1e-4, rtol=1e-4)
    assert all(gradient.abs().max() > 1e-2 for gradient in gradients)


def test_without_the_first_input_norm_it_is_gone_from_the_first_layer_alone() -> None:
    names = dict(random_stack(2, first_input_norm=False).named_parameters())
    assert "layers.0.input_layernorm.weight" not in names
    assert "layers.1.input_layernorm.weight" in names and "layers.0.post_attention_layernorm.weight" in names


def test_rms_norm_is_its_formula_in_values_and_gradients() -> None:
    norm = RMSNorm(HIDDEN, eps=0.1)
    randomise(norm)
    x = inputs(3).requires_grad_()
    expected = torch.stack([row / ((row * row).sum() / HIDDEN + 0.1) ** 0.5 for row in x]) * norm.weight
    torch.testing.assert_close(norm(x), expected, **EXACT)
    weight = inputs(3, seed=2)
    ours = torch.autograd.grad((norm(x) * weight).sum(), [x, norm.weight])
    theirs = torch.autograd.grad((expected * weight).sum(), [x, norm.weight])
    torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_the_unrolled_mask_equals_loops(num_rows: int, step: int) -> None:
    mask = unrolled_mask(num_rows, step, torch.device("cpu"))
    assert mask is not None and mask.shape == (1, 1, num_rows, (1 + step) * num_rows) and mask.dtype == torch.bool
    for query in range(num_rows):
        for at_step in range(step + 1):
            for row in range(num_rows):
                seen = row <= query if at_step == 0 else row == query
                assert mask[0, 0, query, at_step * num_rows + row] == seen


def test_step_0_is_causal() -> None:
    assert unrolled_mask(4, 0, torch.device("cpu")) is None
    stack, x, positions = random_stack(), inputs(2, ROWS), torch.arange(ROWS)[None]
    masked = stack(x, positions, UnrolledMemory(), causal(ROWS))
    torch.testing.assert_close(stack(x, positions, UnrolledMemory(), None), masked, **EXACT)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_unrolled_training_sees_what_decoding_sees(num_layers: int) -> None:
    """Row t of step s equals the last row of a plain sequence: inputs 0 to t, then the drafts at t of steps 1 to s."""
    stack, num_steps = random_stack(num_layers), 4
    steps = [inputs(1, ROWS, seed=10 + s) for s in range(num_steps)]
    memory, positions = UnrolledMemory(), torch.arange(ROWS)[None]
    for s in range(num_steps):
        unrolled = stack(steps[s], positions + s, memory, unrolled_mask(ROWS, s, torch.device("cpu")))
        for t in range(ROWS):
            sequence = torch.cat([steps[0][:, : t + 1], *(steps[i][:, t : t + 1] for i in range(1, s + 1))], dim=1)
            alone = stack(sequence, torch.arange(t + 1 + s)[None], UnrolledMemory(), None)
            torch.testing.assert_close(unrolled[:, t], alone[:, -1], **EXACT)


def test_gradients_reach_the_rows_of_earlier_steps() -> None:
    stack, first, second = random_stack(1), inputs(1, 3).requires_grad_(), inputs(1, 3, seed=2)
    memory, positions = UnrolledMemory(), torch.arange(3)[None]
    stack(first, positions, memory, None)
    unrolled = stack(second, positions + 1, memory, unrolled_mask(3, 1, torch.device("cpu")))
    (gradient,) = torch.autograd.grad(unrolled[0, 1].square().sum(), [first])  # row 1 reads rows 0 and 1 of step 0
    assert (gradient[0, :2].abs().max(-1).values > 1e-3).all() and (gradient[0, 2] == 0).all()


def test_cached_decoding_equals_one_pass() -> None:
    stack, x = random_stack(), inputs(2, ROWS)
    expected = stack(x, torch.arange(ROWS)[None], UnrolledMemory(), None)
    cache = KVCache(2, 2, ROWS)
    cache.begin(4)
    torch.testing.assert_close(stack(x[:, :4], torch.arange(4)[None], cache, None), expected[:, :4], **EXACT)
    cache.commit(torch.tensor([4, 4]))
    for row in range(4, ROWS):
        cache.begin(1)
        one = stack(x[:, row : row + 1], torch.tensor([[row]]), cache, None)
        torch.testing.assert_close(one, expected[:, row : row + 1], **EXACT)
        cache.commit(torch.tensor([1, 1]))


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 48},
}


@pytest.mark.parametrize("rope_type", ROPES)
def test_rope_turns_as_the_targets(rope_type: str) -> None:
    target = random_target("llama", rope_parameters=ROPES[rope_type])
    stack = DecoderStack(layer_config(target, 1))
    x, positions = torch.zeros(1, 90, HIDDEN, dtype=torch.float64), torch.arange(90)[None]
    ours, theirs = stack.rotary(x, positions), target.model.model.rotary_emb(x, positions)
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
    plain = DecoderStack(layer_config(random_target("llama", rope_parameters={**ROPES["default"]}), 1))
    assert (rope_type == "default") == torch.equal(ours[0], plain.rotary(x, positions)[0])


def test_longrope_keeps_the_targets_scaling() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.5] * 4, "long_factor": [4.0] * 4, "rope_theta": 500.0}
    target = random_target("phi3", original_max_position_embeddings=24, rope_parameters=rope)
    ours, theirs = DecoderStack(layer_config(target, 1)).rotary, target.model.model.rotary_emb
    x, positions = torch.zeros(1, 20, HIDDEN, dtype=torch.float64), torch.arange(20)[None]
    torch.testing.assert_close(ours(x, positions), theirs(x, positions), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "theta"),
    [("gpt2", 10000.0), ("opt", 10000.0), ("gemma3", 1000000.0), ("gpt_neox", 10000.0), ("stablelm", 10000.0)],
)
def test_rope_of_targets_that_have_none_or_several_or_turn_a_part_of_each_head(architecture: str, theta: float) -> None:
    made = layer_config(random_target(architecture), 1)
    assert made.rope_parameters == {"rope_type": "default", "rope_theta": theta}
    stack, x = DecoderStack(made), torch.zeros(1, 1, HIDDEN)
    cos, _ = stack.rotary(x, torch.tensor([[7]]))
    frequencies = torch.tensor([theta ** (-2 * i / made.head_dim) for i in range(made.head_dim // 2)])
    torch.testing.assert_close(cos[0, 0], torch.cos(7 * frequencies).repeat(2), atol=1e-5, rtol=1e-5)


def test_factors_of_longrope_that_fit_only_a_part_of_each_head_are_left_out() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.5] * 3, "long_factor": [4.0] * 3, "rope_theta": 500.0}
    options = {"original_max_position_embeddings": 24, "partial_rotary_factor": 0.75}
    target = random_target("phi3", rope_parameters=rope | {"partial_rotary_factor": 0.75}, **options)
    assert layer_config(target, 1).rope_parameters == {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("architecture", "heads", "key_value_heads", "head_dim", "intermediate_size", "eps"),
    [
        ("llama_biased", 4, 2, 12, 48, 1e-6),
        ("qwen2", 4, 2, 8, 48, 1e-6),
        ("gpt2", 4, 4, 8, 128, 1e-5),
        ("gpt_neox", 4, 4, 8, 48, 1e-5),
        ("granite", 4, 2, 8, 48, 1e-6),
    ],
)
def test_sizes_left_open_are_the_targets(
    architecture: str, heads: int, key_value_heads: int, head_dim: int, intermediate_size: int, eps: float
) -> None:
    made = layer_config(random_target(architecture), 2, num_attention_heads=None, head_dim=None)
    assert (made.hidden_size, made.vocab_size, made.max_position_embeddings, made.num_hidden_layers) == (32, 61, 96, 2)
    assert (made.num_attention_heads, made.num_key_value_heads, made.head_dim) == (heads, key_value_heads, head_dim)
    assert (made.intermediate_size, made.rms_norm_eps) == (intermediate_size, eps)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_can_be_built_for_every_target(architecture: str) -> None:
    stack = DecoderStack(layer_config(random_target(architecture), 1)).double()
    x = inputs(1, 5)
    out = stack(x, torch.arange(5)[None], UnrolledMemory(), None)
    torch.testing.assert_close(out[:, :3], stack(x[:, :3], torch.arange(3)[None], UnrolledMemory(), None), **EXACT)


def test_sizes_given_win() -> None:
    made = layer_config(random_target(), 1, num_attention_heads=8, num_key_value_heads=4, head_dim=6, rms_norm_eps=0.5)
    assert (made.num_attention_heads, made.num_key_value_heads, made.head_dim, made.rms_norm_eps) == (8, 4, 6, 0.5)
    assert layer_config(random_target(), 1, num_attention_heads=1).num_key_value_heads == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, "8 attention heads, which its 3 key-value heads cannot"),
        ({"head_dim": 7}, "cannot be built: .*even rotary dimension"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, "cannot be built: .*not a multiple"),
        ({"num_key_value_heads": 0}, "drafter.model.num_key_value_heads is 0: it must be at least 1"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        layer_config(random_target(), 1, **sizes)


def test_no_layers_and_unknown_sizes_are_refused() -> None:
    with pytest.raises(UserError, match=r"drafter\.model\.num_layers is 0: it must be at least 1"):
        layer_config(random_target(), 0)
    with pytest.raises(TypeError, match="have no head_dims"):
        layer_config(random_target(), 1, head_dims=8)
