"""Merged deltas are the weighted average of what the nodes' adapters add."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from models.errors import UserError
from models.lora import add_adapters, merge_adapters
from train.adaptation.deltas import Delta, apply, delta_of, load, merge, save


class Two(nn.Module):
    """A linear layer and GPT-2's, which is the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 4), Conv1D(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def node(base: nn.Module, rank: int, seed: int, names: list[str] | None = None) -> nn.Module:
    adapted = copy.deepcopy(base)
    torch.manual_seed(seed)
    add_adapters(adapted, {"rank": rank, "alpha": 3 * rank, "target_modules": names}, "lora")
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter)
    return adapted


@pytest.mark.parametrize("weights", [None, [1.0, 5.0]])
def test_the_average_is_that_of_the_products(weights: list[float] | None) -> None:
    torch.manual_seed(0)
    base = Two()
    nodes, requests = [node(base, 2, 1, ["one"]), node(base, 3, 2, ["one"])], [10, 30]
    found = merge([delta_of(n, "b", r) for n, r in zip(nodes, requests, strict=True)], weights)
    shares = [w / sum(weights or requests) for w in (weights or requests)]
    wholes = [copy.deepcopy(n) for n in nodes]
    for whole in wholes:
        merge_adapters(whole)
    expected = base.one.weight + sum(s * (w.one.weight - base.one.weight) for s, w in zip(shares, wholes, strict=True))
    merged = copy.deepcopy(base)
    apply(found, merged)
    torch.testing.assert_close(merged.one.weight, expected)
    assert torch.equal(merged.two.weight, base.two.weight) and found.requests == 40
    averaged = [
        sum(s * delta_of(n, "b", 1).factors["one"][i].mean() for s, n in zip(shares, nodes, strict=True))
        for i in (0, 1)
    ]
    assert float(averaged[0] * averaged[1]) != pytest.approx(float((expected - base.one.weight).mean()), rel=0.1)


def test_layers_the_other_way_round_and_layers_of_some_nodes_only() -> None:
    torch.manual_seed(0)
    base = Two()
    adapted = node(base, 2, 1, ["two"])
    found = merge([delta_of(adapted, "b", 4), Delta("b", 4.0, {})])
    merged, whole = copy.deepcopy(base), copy.deepcopy(adapted)
    apply(found, merged)
    merge_adapters(whole)
    torch.testing.assert_close(merged.two.weight, (base.two.weight + whole.two.weight) / 2)


def test_a_delta_on_disk_is_the_same(tmp_path: Path) -> None:
    delta = delta_of(node(Two(), 2, 1, ["one"]), "base", 7)
    save(delta, tmp_path / "delta")
    found = load(tmp_path / "delta")
    assert (found.base, found.requests) == ("base", 7.0)
    assert all(torch.equal(a, b) for a, b in zip(found.factors["one"], delta.factors["one"], strict=True))
    (tmp_path / "delta" / "delta.json").write_text("{}")
    with pytest.raises(UserError, match="holds no delta"):
        load(tmp_path / "delta")


def test_what_does_not_belong_together_is_refused() -> None:
    one = delta_of(node(Two(), 2, 1, ["one"]), "a", 1)
    with pytest.raises(UserError, match="different drafters"):
        merge([one, Delta("b", 1.0, {})])
    for weights in ([1.0], [-1.0, 2.0], [0.0, 0.0], 3, ["a", "b"], "ab"):
        with pytest.raises(UserError, match="weights"):
            merge([one, one], weights)
    with pytest.raises(UserError, match="nothing to merge"):
        merge([])
    with pytest.raises(UserError, match="'three'"):
        apply(Delta("a", 1.0, {"three": one.factors["one"]}), Two())
    with pytest.raises(UserError, match="weight"):
        apply(Delta("a", 1.0, {"two": (torch.ones(1, 9), torch.ones(4, 1))}), Two())
