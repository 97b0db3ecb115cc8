"""PCGrad against the algorithm written out on vectors, and what it promises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from train.gradient_projection import norms, projected, random_orders

EXACT = {"atol": 1e-12, "rtol": 1e-12}


def by_loop(gradients: list[Tensor], orders: list[list[int]], original: bool = True) -> tuple[Tensor, float]:
    """Algorithm 1 of 2001.06782 on vectors (P,); with `original` off, against what is projected already."""
    found, count = [g.clone() for g in gradients], 0
    for task, order in enumerate(orders):
        for other in order:
            against = gradients[other] if original else found[other]
            product = found[task] @ against
            if product < 0:
                found[task] = found[task] - product / (against @ against) * against
                count += 1
    return torch.stack(found).sum(0), count / max(1, sum(map(len, orders)))


def drawn(num_tasks: int, size: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(num_tasks)]


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_algorithm_written_out(seed: int) -> None:
    """On parameters of several shapes, as one vector."""
    gradients, orders = drawn(4, 7, seed), random_orders(4, seed, 3)
    parts = [[g[:3], g[3:].view(2, 2)] for g in gradients]
    summed, rate = projected(parts, orders)
    expected, expected_rate = by_loop(gradients, orders)
    torch.testing.assert_close(torch.cat([s.flatten() for s in summed]), expected, **EXACT)
    assert rate == expected_rate > 0


def test_the_others_gradients_are_the_original_ones() -> None:
    differences = 0
    for seed in range(5):
        gradients, orders = drawn(3, 4, seed), random_orders(3, seed, 0)
        found = projected([[g] for g in gradients], orders)[0][0]
        torch.testing.assert_close(found, by_loop(gradients, orders)[0], **EXACT)
        differences += not torch.allclose(found, by_loop(gradients, orders, original=False)[0])
    assert differences > 2  # so that the mistake would be seen


def test_the_order_matters_and_comes_from_seed_and_step() -> None:
    orders = {str(random_orders(4, 0, step)) for step in range(20)}
    assert len(orders) > 15
    assert random_orders(4, 1, 2) == random_orders(4, 1, 2) != random_orders(4, 2, 1)
    assert all(sorted([task, *order]) == [0, 1, 2, 3] for task, order in enumerate(random_orders(4, 0, 0)))
    gradients = drawn(4, 3, 0)
    sums = [projected([[g] for g in gradients], random_orders(4, 0, step))[0][0] for step in range(6)]
    assert any(not torch.allclose(sums[0], s) for s in sums)


def test_identical_gradients_stay_as_they_are() -> None:
    (g,) = drawn(1, 5, 0)
    (found,), rate = projected([[g], [g], [g]], random_orders(3, 0, 0))
    torch.testing.assert_close(found, 3 * g, **EXACT)
    assert rate == 0


def test_conflicting_gradients_end_orthogonal_to_each_other() -> None:
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0])
    (found,), rate = projected([[a], [b]], [[1], [0]])
    ours, theirs = a + b / 2, b + a  # each by hand, orthogonal to the other's original
    assert ours @ b == 0 and theirs @ a == 0
    torch.testing.assert_close(found, ours + theirs)
    assert rate == 1
    (nothing,), _ = projected([[a], [-2 * a]], [[1], [0]])
    torch.testing.assert_close(nothing, torch.zeros(2))


def test_one_task_is_plain_descent() -> None:
    (g,) = drawn(1, 5, 0)
    (found, absent), rate = projected([[g, None]], random_orders(1, 0, 0))
    assert torch.equal(found, g) and absent is None and rate == 0


def test_only_shared_parameters_are_touched() -> None:
    """The last two parameters are one task's each: they get its gradient, and have no say in what conflicts."""
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0])
    own, other = torch.tensor([5.0]), torch.tensor([-7.0])
    (shared, first, second, nobody), rate = projected([[a, own, None, None], [b, None, other, None]], [[1], [0]])
    torch.testing.assert_close(shared, projected([[a], [b]], [[1], [0]])[0][0])
    assert torch.equal(first, own) and torch.equal(second, other) and nobody is None and rate == 1


def test_a_parameter_that_some_tasks_do_not_reach_counts_as_zero_there() -> None:
    a, b, c = drawn(3, 4, 3)
    parts = [[a[:2], a[2:]], [b[:2], b[2:]], [c[:2], None]]
    summed, _ = projected(parts, orders := random_orders(3, 0, 0))
    c = torch.cat([c[:2], torch.zeros(2, dtype=torch.float64)])
    torch.testing.assert_close(torch.cat(summed), by_loop([a, b, c], orders)[0], **EXACT)


def test_a_task_without_gradient_does_no_harm() -> None:
    a, zero = torch.tensor([1.0, 2.0]), torch.zeros(2)
    (found,), rate = projected([[a], [zero]], [[1], [0]])
    assert torch.equal(found, a) and rate == 0


def test_norms_are_over_shared_parameters() -> None:
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])
    assert norms([[a, torch.ones(1)], [b, None]]).tolist() == [5.0, 2.0]
    assert norms([[a, None], [None, b]]).tolist() == [0.0, 0.0]
