"""Weights of the tokens ahead, by hand; GradNorm against a step that autograd takes."""

from __future__ import annotations

import math

import pytest
import torch

from models.errors import UserError
from train.task_weights import make_weights


def test_fixed_weights_add_up_to_one() -> None:
    uniform, exponential = make_weights(4), make_weights(4, by="exponential", beta=0.6)
    assert [uniform.factor(i, 3) for i in range(3)] == [1 / 3] * 3
    total = 1 + 0.6 + 0.36
    assert [exponential.factor(i, 3) for i in range(3)] == pytest.approx([1 / total, 0.6 / total, 0.36 / total])
    assert exponential.factor(0, 1) == 1
    assert float(exponential.weigh(torch.tensor(2.0), 1, 3)) == pytest.approx(1.2 / total)
    assert not uniform.needs_gradients and not exponential.needs_gradients


def test_uncertainty_learns_its_log_variances() -> None:
    weights = make_weights(3, by="uncertainty")
    with torch.no_grad():
        weights.log_variance.copy_(torch.tensor([0.0, 1.0, -2.0]))
    losses = torch.tensor([0.5, 3.0, 0.2], requires_grad=True)
    total = sum(weights.weigh(losses[i], i, 3) for i in range(3))
    assert total.item() == pytest.approx(0.5 + 3 * math.exp(-1) + 1 + 0.2 * math.exp(2) - 2)
    total.backward()
    assert losses.grad.tolist() == pytest.approx([1, math.exp(-1), math.exp(2)])
    assert weights.log_variance.grad.tolist() == pytest.approx([1 - 0.5, 1 - 3 * math.exp(-1), 1 - 0.2 * math.exp(2)])


def gradnorm_by_autograd(
    weights: torch.Tensor, losses: torch.Tensor, first: torch.Tensor, bare: torch.Tensor, alpha: float, lr: float
) -> torch.Tensor:
    """One step of 1711.02257, algorithm 1, with Ḡ·r^α held constant, for weights that add up to T."""
    w = weights.clone().requires_grad_()
    lengths = w * bare
    ratios = losses / first
    wanted = (lengths.mean() * (ratios / ratios.mean()) ** alpha).detach()
    (lengths - wanted).abs().sum().backward()
    stepped = w.detach() - lr * w.grad
    return stepped * len(stepped) / stepped.sum()


def test_gradnorm_is_the_step_written_out() -> None:
    weights = make_weights(3, by="gradnorm", asymmetry=1.5, lr=0.1)
    assert weights.needs_gradients
    expected, first = torch.ones(3, dtype=torch.float64), torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    bare = torch.tensor([0.3, 1.0, 0.5], dtype=torch.float64)
    for shares in ([1.0, 1.0, 1.0], [0.5, 0.9, 0.7], [0.4, 0.9, 0.6]):
        losses = first * torch.tensor(shares, dtype=torch.float64)
        told = torch.tensor([weights.factor(i, 3) for i in range(3)], dtype=torch.float64) * bare
        weights.update(losses, told)
        expected = gradnorm_by_autograd(expected, losses, first, bare, 1.5, 0.1)
        found = [weights.factor(i, 3) for i in range(3)]
        assert found == pytest.approx((expected / 3).tolist(), abs=1e-12)
    assert len(set(found)) == 3


def test_gradnorm_helps_what_lags_and_what_pulls_weakly() -> None:
    weights = make_weights(2, by="gradnorm", lr=0.05)
    for _ in range(200):
        weights.update(torch.ones(2), torch.tensor([weights.factor(0, 2) * 1.0, weights.factor(1, 2) * 4.0]))
    assert weights.factor(0, 2) / weights.factor(1, 2) == pytest.approx(4, rel=0.3)


def test_gradnorm_takes_in_a_task_that_comes_later_and_is_restored() -> None:
    weights, again = (make_weights(3, by="gradnorm", lr=0.1) for _ in range(2))
    weights.update(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 0.2]))
    assert weights.first.isnan().tolist() == [False, False, True]
    assert sum(weights.factor(i, 2) for i in range(2)) == pytest.approx(1)
    weights.update(torch.tensor([2.0, 1.0, 7.0]), torch.tensor([1.0, 0.2, 0.1]))
    assert weights.first.tolist() == [2.0, 1.0, 7.0]
    assert sum(weights.factor(i, 3) for i in range(3)) == pytest.approx(1)
    again.load_state_dict(weights.state_dict())
    assert [again.factor(i, 3) for i in range(3)] == [weights.factor(i, 3) for i in range(3)]


def test_senseless_settings_are_refused() -> None:
    with pytest.raises(UserError, match=r"weights\.by is 'fair'"):
        make_weights(2, by="fair")
    with pytest.raises(UserError, match=r"weights\.beta is 0"):
        make_weights(2, beta=0)
    with pytest.raises(TypeError, match="betta"):
        make_weights(2, betta=0.6)
