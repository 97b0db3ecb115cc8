"""Cutting a model out of a target against the target with what is left out set to zero, or its layers taken out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.drafter.draft_lm import new_lm
from models.errors import UserError
from models.pruning import (
    Kept,
    best_units,
    check_shape,
    copy_embeddings,
    copy_kept,
    cut_config,
    even_layers,
    squared_norms,
    unit_counts,
    unit_sums,
    whole_layers,
)
from models.target import Target
from tests.helpers.models import random_target

SHAPED = ["llama", "llama_tied", "llama_biased", "qwen2", "qwen2_mixed", "qwen3", "mistral", "ministral"]
IDS = torch.randint(61, (2, 14), generator=torch.Generator().manual_seed(0))
EXACT = {"atol": 1e-10, "rtol": 1e-10}


def cut(target: Target, kept: Kept) -> Target:
    lm = new_lm(cut_config(target, kept), target, target.dtype)
    copy_kept(target, lm, kept)
    copy_embeddings(target, lm)
    return lm


def logits(model: Target) -> Tensor:
    with torch.no_grad():
        return model.model(input_ids=IDS).logits


@pytest.mark.parametrize("architecture", SHAPED)
def test_all_units_make_the_target(architecture: str) -> None:
    target = random_target(architecture)
    torch.testing.assert_close(logits(cut(target, whole_layers(target, (0, 1, 2)))), logits(target), **EXACT)


@pytest.mark.parametrize("architecture", SHAPED)
def test_chosen_layers_are_the_target_without_the_others(architecture: str) -> None:
    target = random_target(architecture)
    found = logits(cut(target, whole_layers(target, (0, 2))))
    layers: Any = target.model.get_decoder().layers[1]
    for parameter in (layers.self_attn.o_proj, layers.mlp.down_proj):  # a residual layer that adds nothing
        for part in parameter.parameters():
            part.data.zero_()
    torch.testing.assert_close(found, logits(target), **EXACT)


@pytest.mark.parametrize("architecture", SHAPED)
def test_chosen_groups_and_channels_are_the_target_with_the_others_at_zero(architecture: str) -> None:
    target = random_target(architecture)
    groups = torch.tensor([[1], [0], [1]])
    channels = torch.stack([torch.randperm(48, generator=torch.Generator().manual_seed(i))[:20] for i in range(3)])
    found = logits(cut(target, Kept((0, 1, 2), groups, channels.sort().values)))
    size = target.model.get_decoder().layers[0].self_attn.head_dim
    for index, layer in enumerate(target.model.get_decoder().layers):
        out, down = layer.self_attn.o_proj.weight.data, layer.mlp.down_proj.weight.data
        for head in range(4):
            if head // 2 != int(groups[index]):
                out[:, head * size : (head + 1) * size] = 0
        for channel in range(48):
            if channel not in channels[index].tolist():
                down[:, channel] = 0
    torch.testing.assert_close(found, logits(target), **EXACT)


def test_layers_at_even_distances() -> None:
    assert [even_layers(6, count) for count in (1, 2, 3, 6)] == [(0,), (0, 5), (0, 2, 5), (0, 1, 2, 3, 4, 5)]
    assert even_layers(30, 4) == (0, 10, 19, 29)


def test_the_best_units_are_kept_in_order() -> None:
    scores = {
        "layers": torch.tensor([3.0, 1.0, 2.0]),
        "groups": torch.tensor([[0.0, 1.0], [5.0, 4.0], [2.0, 3.0]]),
        "channels": torch.tensor([[1.0, 9.0, 5.0], [7.0, 8.0, 1.0], [4.0, 0.0, 6.0]]),
    }
    kept = best_units(scores, {"layers": 2, "groups": 1, "channels": 2})
    assert kept.layers == (0, 2)
    assert kept.groups.tolist() == [[1], [1]] and kept.channels.tolist() == [[1, 2], [0, 2]]
    assert best_units(scores, {"groups": 1, "channels": 1}, (1, 2)).groups.tolist() == [[0], [1]]


def test_sums_over_units_are_loops_over_their_weights() -> None:
    target = random_target("llama_biased")
    counts = unit_counts(target)
    assert counts == {"layers": 3, "groups": 2, "channels": 48}
    sums = squared_norms(target)
    for index, layer in enumerate(target.model.get_decoder().layers):
        attention, mlp = layer.self_attn, layer.mlp
        for group in range(2):
            heads = range(24 * group, 24 * (group + 1))  # two heads of 12
            keys = range(12 * group, 12 * (group + 1))
            total = sum(float(attention.q_proj.weight[i].square().sum() + attention.q_proj.bias[i] ** 2) for i in heads)
            for part in (attention.k_proj, attention.v_proj):
                total += sum(float(part.weight[i].square().sum() + part.bias[i] ** 2) for i in keys)
            total += sum(float(attention.o_proj.weight[:, i].square().sum()) for i in heads)
            assert float(sums["groups"][index, group]) == pytest.approx(total)
        for channel in (0, 17, 47):
            total = sum(
                float(part.weight[channel].square().sum() + part.bias[channel] ** 2)
                for part in (mlp.gate_proj, mlp.up_proj)
            )
            total += float(mlp.down_proj.weight[:, channel].square().sum())
            assert float(sums["channels"][index, channel]) == pytest.approx(total)
        whole = sum(float(parameter.square().sum()) for parameter in layer.parameters())
        assert float(sums["layers"][index]) == pytest.approx(whole)
    assert unit_sums("input_layernorm.weight", torch.ones(32), counts).keys() == {"layers"}


@pytest.mark.parametrize("architecture", ["gpt2", "cohere", "gemma2"])
def test_other_layers_are_refused(architecture: str) -> None:
    with pytest.raises(UserError, match=r"cannot be cut: .* Use drafter\.model\.start=random"):
        check_shape(random_target(architecture))
