"""Sensitivities of units against gradients taken one by one, and what leaving a unit out really does."""

from __future__ import annotations

import csv

import pytest
import torch
from torch import Tensor

from data.loader import Batch
from models.pruning import Kept, best_units
from models.target import Target
from tests.helpers.drafters import as_float64, tiny_target
from train.sensitivity import measured_loss_of_acceptance, report, sensitivity, summary


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(
        torch.float64, vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=3, sharpness=2.0
    )


def batch_of(seed: int) -> Batch:
    ids = torch.randint(20, (3, 11), generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros(3, 11, dtype=torch.bool)
    mask[0, 3:9], mask[1, 1:11], mask[2, 10:] = True, True, True
    return Batch(ids, mask, torch.tensor([9, 11, 11]), None)


BATCHES = [batch_of(0), batch_of(1)]


def gradients(target: Target, batch: Batch) -> dict[str, Tensor]:
    """Of the mean cross-entropy of every supervised token, for all weights of all layers."""
    target.model.requires_grad_(True)
    logits, losses = target.model(input_ids=batch.token_ids).logits, []
    for row in range(3):
        for t in range(1, 11):
            if batch.loss_mask[row, t]:
                losses.append(-logits[row, t - 1].log_softmax(-1)[batch.token_ids[row, t]])
    named = dict(target.model.get_decoder().layers.named_parameters())
    found = torch.autograd.grad(torch.stack(losses).mean(), list(named.values()))
    target.model.requires_grad_(False)
    return dict(zip(named, found, strict=True))


def weights_of(unit: str, layer: int, index: int) -> list[tuple[str, tuple[slice, ...]]]:
    """The parameters, and what of them, that a unit consists of: two groups of two heads of 4, channels of 1."""
    every = slice(None)
    if unit == "groups":
        heads, keys = slice(8 * index, 8 * index + 8), slice(4 * index, 4 * index + 4)
        parts = [("self_attn.q_proj", (heads,)), ("self_attn.k_proj", (keys,)), ("self_attn.v_proj", (keys,))]
        parts += [("self_attn.o_proj", (every, heads))]
    else:
        one = slice(index, index + 1)
        parts = [("mlp.gate_proj", (one,)), ("mlp.up_proj", (one,)), ("mlp.down_proj", (every, one))]
    return [(f"{layer}.{name}.weight", where) for name, where in parts]


def test_scores_are_those_of_gradients_taken_one_by_one(target: Target) -> None:
    found = sensitivity(target, BATCHES, chunk_rows=4)
    named = dict(target.model.get_decoder().layers.named_parameters())
    counts = {"groups": 2, "channels": 24}
    units = [(unit, layer, index) for unit, count in counts.items() for layer in range(3) for index in range(count)]
    by_batch = [gradients(target, batch) for batch in BATCHES]
    for unit, layer, index in units:
        parts = weights_of(unit, layer, index)
        weight = torch.cat([named[name][where].flatten() for name, where in parts])
        grads = [torch.cat([g[name][where].flatten() for name, where in parts]) for g in by_batch]
        ratio = sum(g.norm() / weight.norm() for g in grads) / 2
        taylor = sum((g * weight).sum().abs() for g in grads) / 2
        torch.testing.assert_close(found["gradient_ratio"][unit][layer, index], ratio.detach(), msg=f"{unit} {layer}")
        torch.testing.assert_close(found["taylor"][unit][layer, index], taylor.detach(), msg=f"{unit} {layer}")
    for layer in range(3):
        names = [name for name in named if name.startswith(f"{layer}.")]
        weight = torch.cat([named[name].flatten() for name in names])
        grads = [torch.cat([g[name].flatten() for name in names]) for g in by_batch]
        expected = sum((g * weight).sum().abs() for g in grads) / 2
        torch.testing.assert_close(found["taylor"]["layers"][layer], expected.detach())
    assert found["taylor"]["groups"].min() > 0
    assert not any(p.requires_grad or p.grad is not None for p in target.parameters())


def test_taylor_tells_what_the_loss_changes_by() -> None:
    """The derivative of the loss along a unit's own weights: to first order, what scaling it by 1 − ε takes away."""
    target = tiny_target(torch.float64, vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    found, step = sensitivity(target, BATCHES[:1])["taylor"]["groups"], 1e-3  # norms are in float32
    named = dict(target.model.get_decoder().layers.named_parameters())
    for index in range(2):
        values = []
        for sign in (1, -1):
            for name, where in weights_of("groups", 0, index):
                named[name].data[where] *= 1 + sign * step
            logits = target.model(input_ids=BATCHES[0].token_ids).logits[:, :-1].log_softmax(-1)
            said = -logits.gather(-1, BATCHES[0].token_ids[:, 1:, None])[..., 0]
            values.append(said[BATCHES[0].loss_mask[:, 1:]].mean().item())
            for name, where in weights_of("groups", 0, index):
                named[name].data[where] /= 1 + sign * step
        assert found[0, index].item() == pytest.approx(abs(values[0] - values[1]) / (2 * step), rel=1e-3)


def test_an_accelerated_target_has_the_same_scores_and_stays_as_it_was() -> None:
    plain, fast = tiny_target(), tiny_target()
    eager = tiny_target()
    eager.config._attn_implementation = "eager"
    for target in (fast, eager):
        target.accelerate()
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([9, 9]), None)
    expected = sensitivity(plain, [batch])
    for target in (fast, eager):
        before = target(ids).last
        found = sensitivity(target, [batch])
        for name, scores in expected.items():
            for kind in scores:
                torch.testing.assert_close(found[name][kind], scores[kind], atol=1e-4, rtol=1e-2)
        assert torch.equal(target(ids).last, before)


def test_measured_acceptance_is_that_of_the_target_without_a_unit(target: Target) -> None:
    batch = BATCHES[0]
    found = measured_loss_of_acceptance(target, batch)
    law = target.model(input_ids=batch.token_ids).logits.softmax(-1)
    for layer in range(3):
        for group in (None, 0, 1):
            other = as_float64(target)
            part = other.model.get_decoder().layers[layer]
            if group is None:
                part.mlp.down_proj.weight.data.zero_()
                part.self_attn.o_proj.weight.data.zero_()
            else:
                part.self_attn.v_proj.weight.data[4 * group : 4 * group + 4] = 0
            theirs = other.model(input_ids=batch.token_ids).logits.softmax(-1)
            alphas = torch.minimum(law, theirs).sum(-1)[:, :-1][batch.loss_mask[:, 1:]]
            value = found["layers"][layer] if group is None else found["groups"][layer, group]
            assert value.item() == pytest.approx(1 - alphas.mean().item(), abs=1e-9)
            assert value > 0


def test_the_report_has_a_row_for_every_unit(target: Target) -> None:
    scores = sensitivity(target, BATCHES[:1]) | {"acceptance_lost": measured_loss_of_acceptance(target, BATCHES[0])}
    kept: Kept = best_units(scores["taylor"], {"layers": 2, "groups": 1, "channels": 5})
    rows = list(csv.DictReader(report(scores, kept).splitlines()))
    assert len(rows) == 3 + 3 * 2 + 3 * 24
    for unit, count in (("layer", 2), ("group", 2), ("channel", 10)):
        assert sum(row["unit"] == unit and row["kept"] == "1" for row in rows) == count
    group = next(row for row in rows if row["unit"] == "group" and row["layer"] == "2" and row["index"] == "1")
    assert float(group["taylor"]) == pytest.approx(scores["taylor"]["groups"][2, 1].item(), rel=1e-4)
    assert float(group["acceptance_lost"]) == pytest.approx(scores["acceptance_lost"]["groups"][2, 1].item(), rel=1e-4)
    assert next(row for row in rows if row["unit"] == "channel")["acceptance_lost"] == ""
    printed = summary(scores, kept).splitlines()
    assert len(printed) == 4 and sum(" yes " in line for line in printed) == 2
