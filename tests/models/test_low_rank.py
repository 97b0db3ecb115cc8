"""Shared factors against the singular value decomposition of numpy, and their products against the factors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models.errors import UserError
from models.low_rank import LowRankLinear, factor, multiply_out, principal

EXACT = {"atol": 1e-10, "rtol": 1e-10}


def layers(count: int, seed: int, *, wide: int = 5, bias: bool = False) -> nn.ModuleList:
    """Layers of two linear layers in a part, `a` 8 × 5 and `b` 5 × 8, and one beside it, 6 × 5."""
    torch.manual_seed(seed)
    made = nn.ModuleList()
    for _ in range(count):
        part = nn.ModuleDict({"a": nn.Linear(wide, 8, bias=bias), "b": nn.Linear(8, 5, bias=bias)})
        made.append(nn.ModuleDict({"part": part, "c": nn.Linear(5, 6, bias=bias), "norm": nn.LayerNorm(5)}))
    return made.double()


def weights(of: nn.ModuleList, name: str) -> list[Tensor]:
    return [dict(layer.named_modules())[name].weight.detach().clone() for layer in of]


@pytest.mark.parametrize("rank", [1, 3, 6, 100])
@pytest.mark.parametrize("from_source", [False, True])
def test_fitted_factors_are_truncated_singular_value_decompositions(from_source: bool, rank: int) -> None:
    ours, theirs = layers(2, 0), layers(4, 1)
    before = {name: weights(ours, name) for name in ("part.a", "part.b", "c")}
    basis = {name: weights(theirs, name) for name in before} if from_source else before
    shared = factor(ours, rank, fitted=True, source=theirs if from_source else None, where="here")
    assert set(shared) == {"part_a", "part_b", "c"}
    for name, dense in before.items():
        left, values, right = np.linalg.svd(np.concatenate([w.numpy() for w in basis[name]], axis=1))
        kept = left[:, :rank]
        outer = shared[name.replace(".", "_")].weight
        assert outer.shape == (len(left), min(rank, len(left)))
        for found, wanted in zip(weights(ours, name), dense, strict=True):
            torch.testing.assert_close(found, torch.from_numpy(kept @ kept.T @ wanted.numpy()), **EXACT)
        if not from_source:  # together they are the best matrix of that rank
            best = (kept * values[:rank][: kept.shape[1]]) @ right[: kept.shape[1]]
            torch.testing.assert_close(torch.cat(weights(ours, name), dim=1), torch.from_numpy(best), **EXACT)
        if rank >= len(left):
            for found, wanted in zip(weights(ours, name), dense, strict=True):
                torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize("bias", [False, True])
def test_a_factored_layer_computes_what_its_product_does(bias: bool) -> None:
    model, x = layers(2, 0, bias=bias), torch.randn(4, 5, dtype=torch.float64)
    shared = factor(model, 2, fitted=True, where="here")
    part = model[1]["part"]["a"]
    assert isinstance(part, LowRankLinear) and part.weight.shape == (8, 5)
    expected = x @ part.weight.t() + (part.bias if bias else 0)
    torch.testing.assert_close(part(x), expected, **EXACT)
    assert torch.linalg.matrix_rank(part.weight) == 2
    held = set(model.state_dict())
    assert {n for n in held if "part.a" in n} == {
        f"{j}.part.a.{n}" for j in (0, 1) for n in (["own.weight", "bias"] if bias else ["own.weight"])
    }
    part(x).square().sum().backward()
    outer = shared["part_a"].weight
    assert outer.grad is not None and part.own.weight.grad is not None and shared["c"].weight.grad is None
    multiply_out(model)
    assert type(model[1]["part"]["a"]) is nn.Linear
    torch.testing.assert_close(model[1]["part"]["a"](x), expected, **EXACT)
    assert {n.replace(".own", "") for n in held} == set(model.state_dict())


@pytest.mark.parametrize("from_source", [False, True])
def test_random_factors_are_as_large_as_the_weights_that_they_replace(from_source: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.ModuleList(nn.ModuleDict({"a": nn.Linear(300, 200)}) for _ in range(2)) for _ in range(2))
    spread = weights(ours, "a")[0].std()
    shared = factor(ours, 20, fitted=False, source=theirs if from_source else None, where="here")
    for found in weights(ours, "a"):
        assert 0.9 < found.std() / spread < 1.1
    outer = shared["a"].weight
    torch.testing.assert_close(outer.t() @ outer, torch.eye(20), atol=1e-5, rtol=1e-5)
    if from_source:
        whole = torch.cat(weights(theirs, "a"), dim=1)
        torch.testing.assert_close(outer @ outer.t(), (p := principal([whole.t()], 20).float()).t() @ p)


def test_layers_that_cannot_share_are_refused() -> None:
    with pytest.raises(UserError, match=r"share=target: c has 6 rows in the draft model, and none"):
        theirs = nn.ModuleList(nn.ModuleDict({"part": layer["part"]}) for layer in layers(2, 0))
        factor(layers(2, 0), 2, fitted=True, source=theirs, where="here")
    with pytest.raises(UserError, match="c has 6 rows in the draft model, and 7 in the target: use share=layers"):
        theirs = layers(2, 0)
        for layer in theirs:
            layer["c"] = nn.Linear(5, 7)
        factor(layers(2, 0), 2, fitted=True, source=theirs, where="here")
    with pytest.raises(UserError, match="here: c has 6 or 7 rows: layers cannot share it"):
        uneven = layers(2, 0)
        uneven[0]["c"] = nn.Linear(5, 7)
        factor(uneven, 2, fitted=True, where="here")
    with pytest.raises(UserError, match="no linear layers in a form that can be factored"):
        factor(nn.ModuleList([nn.LayerNorm(3)]), 2, fitted=True, where="here")
