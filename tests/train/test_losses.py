"""Chunked losses against plain autograd, and each loss against loops."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import Tensor, nn

from train import losses
from train.divergences import Divergence
from train.losses import chunked_loss, law_loss, regression

ROWS, SIZE, VOCAB = 11, 5, 7
EXACT = {"atol": 1e-12, "rtol": 1e-12}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def soft_cross_entropy(draft: Tensor, target: Tensor) -> Tensor:
    """As EAGLE is trained by it, whose labels nobody looks at: (..., Vd), (..., Vd) → (...)."""
    q, p = draft.flatten(0, -2), target.flatten(0, -2)
    return Divergence({"soft_cross_entropy": 1.0})(q, p, torch.full((len(q),), -1)).view(draft.shape[:-1])


def soft_cross_entropy_by_loop(draft: list[list[float]], target: list[list[float]]) -> list[float]:
    losses = []
    for q, p in zip(draft, target, strict=True):
        p_sum, q_sum = sum(map(math.exp, p)), sum(map(math.exp, q))
        losses.append(-sum(math.exp(a) / p_sum * math.log(math.exp(b) / q_sum) for a, b in zip(p, q, strict=True)))
    return losses


def test_soft_cross_entropy_is_the_sum_written_out() -> None:
    draft, target = randn(ROWS, VOCAB), 3 * randn(ROWS, VOCAB, seed=1)
    expected = torch.tensor(soft_cross_entropy_by_loop(draft.tolist(), target.tolist()), dtype=torch.float64)
    torch.testing.assert_close(soft_cross_entropy(draft, target), expected, **EXACT)


def test_soft_cross_entropy_gradient_is_q_minus_p() -> None:
    draft, target = randn(ROWS, VOCAB).requires_grad_(), 3 * randn(ROWS, VOCAB, seed=1)
    (grad,) = torch.autograd.grad(soft_cross_entropy(draft, target).sum(), draft)
    torch.testing.assert_close(grad, draft.detach().softmax(-1) - target.softmax(-1), **EXACT)


def test_soft_cross_entropy_is_least_at_the_target_itself() -> None:
    target = 3 * randn(ROWS, VOCAB)
    law = target.softmax(-1)
    entropy = -(law * law.log()).sum(-1)
    torch.testing.assert_close(
        soft_cross_entropy(target + 17.0, target), entropy, **EXACT
    )  # a constant changes nothing
    assert (soft_cross_entropy(target + 0.1 * randn(ROWS, VOCAB, seed=1), target) > entropy).all()


def test_soft_cross_entropy_of_half_precision_logits_is_computed_in_float32() -> None:
    draft, target = randn(ROWS, VOCAB).bfloat16(), (3 * randn(ROWS, VOCAB, seed=1)).bfloat16()
    loss = soft_cross_entropy(draft, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), soft_cross_entropy(draft.double(), target.double()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["mse", "smooth_l1"])
def test_regression_is_the_sum_written_out(kind: str) -> None:
    estimate, true = 2 * randn(ROWS, SIZE), 2 * randn(ROWS, SIZE, seed=1)
    total = 0.0
    for row in range(ROWS):
        for i in range(SIZE):
            x = abs(float(estimate[row, i] - true[row, i]))
            huber = 0.5 * x * x if x < 1 else x - 0.5
            total += (x * x if kind == "mse" else huber) / SIZE
    assert float(regression(kind)(estimate, true)) == pytest.approx(total, rel=1e-12)
    assert ((estimate - true).abs() < 1).any() and (
        (estimate - true).abs() > 1
    ).any()  # both branches of the Huber loss


@pytest.mark.parametrize("kind", ["mse", "smooth_l1"])
def test_regression_of_no_rows_is_zero(kind: str) -> None:
    estimate = torch.zeros(0, SIZE, requires_grad=True)
    loss = regression(kind)(estimate, torch.zeros(0, SIZE))
    loss.backward()
    assert loss.item() == 0.0


class Problem:
    """A row loss with a trained head, in which every row has targets and a weight of its own."""

    def __init__(self, rows: int = ROWS) -> None:
        self.hidden = randn(rows, SIZE).requires_grad_()
        self.weight, self.bias = nn.Parameter(randn(VOCAB, SIZE, seed=1)), nn.Parameter(randn(VOCAB, seed=2))
        self.targets, self.scale = 2 * randn(rows, VOCAB, seed=3), randn(rows, seed=4)
        self.seen: list[tuple[int, int]] = []

    def row_loss(self, hidden: Tensor, rows: slice) -> Tensor:
        self.seen.append((rows.start, rows.stop))
        assert len(hidden) == rows.stop - rows.start
        logits = nn.functional.linear(hidden, self.weight, self.bias)
        return (soft_cross_entropy(logits, self.targets[rows]) * self.scale[rows]).sum()

    @property
    def inputs(self) -> list[Tensor]:
        return [self.hidden, self.weight, self.bias]


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 4, 10, 11, 12, 512])
@pytest.mark.parametrize("upstream", [1.0, -0.37])
def test_chunked_value_and_gradients_are_those_of_plain_autograd(chunk_rows: int, upstream: float) -> None:
    problem = Problem()
    whole = problem.row_loss(problem.hidden, slice(0, ROWS))
    expected = torch.autograd.grad(upstream * whole, problem.inputs)
    problem.seen.clear()
    chunked = chunked_loss(problem.row_loss, problem.hidden, [problem.weight, problem.bias], chunk_rows)
    assert problem.seen == [(start, min(start + chunk_rows, ROWS)) for start in range(0, ROWS, chunk_rows)]
    torch.testing.assert_close(chunked, whole, **EXACT)
    found = torch.autograd.grad(upstream * chunked, problem.inputs)
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 0.1
        torch.testing.assert_close(ours, theirs, **EXACT)
    assert len(problem.seen) == math.ceil(ROWS / chunk_rows)  # nothing is computed twice


def test_gradients_flow_on_through_what_made_the_rows() -> None:
    """Rows picked by a mask out of a tensor that carries a graph, as the training modules do it."""
    problem = Problem()
    source, mixing = randn(20, SIZE, seed=5).requires_grad_(), randn(SIZE, SIZE, seed=6).requires_grad_()
    mask = torch.zeros(20, dtype=torch.bool)
    mask[[0, 2, 3, 5, 6, 7, 11, 12, 15, 18, 19]] = True

    def total(chunk_rows: int | None) -> Tensor:
        rows = torch.tanh(source @ mixing)[mask]
        if chunk_rows is None:
            return problem.row_loss(rows, slice(0, ROWS)) + rows.square().sum()
        return chunked_loss(problem.row_loss, rows, (), chunk_rows) + rows.square().sum()

    expected = torch.autograd.grad(total(None), [source, mixing])
    for ours, theirs in zip(torch.autograd.grad(total(4), [source, mixing]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)
    assert (expected[0][~mask] == 0).all()


def test_a_parameter_that_is_not_named_gets_no_gradient() -> None:
    problem = Problem()
    chunked_loss(problem.row_loss, problem.hidden, [problem.bias], 4).backward()
    assert problem.weight.grad is None
    assert problem.bias.grad is not None and problem.bias.grad.abs().max() > 0.1


def test_parameters_alone_can_be_trained() -> None:
    problem = Problem()
    expected = torch.autograd.grad(problem.row_loss(problem.hidden, slice(0, ROWS)), [problem.weight, problem.bias])
    loss = chunked_loss(problem.row_loss, problem.hidden.detach(), [problem.weight, problem.bias], 3)
    for ours, theirs in zip(torch.autograd.grad(loss, [problem.weight, problem.bias]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def test_no_rows_give_zero_and_zero_gradients() -> None:
    problem = Problem(rows=0)
    loss = chunked_loss(problem.row_loss, problem.hidden, [problem.weight, problem.bias], 4)
    assert loss.item() == 0.0 and loss.requires_grad
    loss.backward()
    assert problem.seen == []
    assert problem.hidden.grad is not None and problem.hidden.grad.shape == (0, SIZE)
    assert (problem.weight.grad == 0).all() and (problem.bias.grad == 0).all()


def test_gradients_accumulate_over_two_losses_and_two_backward_passes() -> None:
    problem = Problem()
    once = torch.autograd.grad(problem.row_loss(problem.hidden, slice(0, ROWS)), problem.inputs)
    for _ in range(2):
        chunked_loss(problem.row_loss, problem.hidden, [problem.weight, problem.bias], 5).backward()
    for tensor, grad in zip(problem.inputs, once, strict=True):
        torch.testing.assert_close(tensor.grad, 2 * grad, **EXACT)


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    problem = Problem()
    loss = chunked_loss(problem.row_loss, problem.hidden, (), 5)
    (grad,) = torch.autograd.grad(loss, problem.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        grad.sum().backward()


def test_bfloat16_rows_are_summed_in_float32() -> None:
    """4096 rows of loss 1: taken 4 at a time, a bfloat16 sum stops growing at 1024."""
    hidden = torch.ones(4096, 2, dtype=torch.bfloat16, requires_grad=True)
    loss = chunked_loss(lambda rows, _: rows.mean(-1).sum(), hidden, (), 4)
    assert loss.dtype == torch.float32 and loss.item() == 4096
    loss.backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16 and (hidden.grad == 0.5).all()


def test_no_more_than_a_chunk_of_logits_is_alive() -> None:
    """Follows what autograd keeps for the backward pass: the graph of a chunk is gone before the next one is made."""
    problem, most_rows = Problem(), 0
    alive: weakref.WeakSet[Kept] = weakref.WeakSet()

    def keep(tensor: Tensor) -> Kept:
        alive.add(kept := Kept(tensor))
        return kept

    def row_loss(hidden: Tensor, rows: slice) -> Tensor:
        nonlocal most_rows
        assert not alive
        loss = problem.row_loss(hidden, rows)
        most_rows = max(most_rows, sum(len(kept.tensor) for kept in alive if kept.tensor.shape[-1] == VOCAB))
        return loss

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
        loss = chunked_loss(row_loss, problem.hidden, [problem.weight, problem.bias], 3)
    assert 3 <= most_rows <= 3 * 4 + SIZE  # logits, laws, and the head's weight
    assert not alive
    assert sum(grad.numel() for grad in loss.grad_fn.grads) == ROWS * SIZE + VOCAB * SIZE + VOCAB


@pytest.mark.parametrize("numbers", [1, VOCAB, 3 * VOCAB + 1, 10**6])
@pytest.mark.parametrize("shape", [(ROWS, VOCAB), (ROWS, 2, VOCAB)])
def test_losses_of_laws_a_few_rows_at_a_time_are_those_of_all_at_once(
    numbers: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a chunked loss too, as trainings have it."""
    monkeypatch.setattr(losses, "_CACHED_NUMBERS", numbers)
    targets, weight, seen = 2 * randn(*shape, seed=1), randn(VOCAB, VOCAB, seed=2).requires_grad_(), []
    start = randn(*shape).requires_grad_()

    def compare(logits: Tensor, rows: slice) -> Tensor:
        seen.append(len(logits))
        return soft_cross_entropy(logits, targets[rows]).square().sum()

    def chunk(hidden: Tensor, rows: slice) -> Tensor:
        def within(logits: Tensor, part: slice) -> Tensor:
            return compare(logits, slice(rows.start + part.start, rows.start + part.stop))

        return law_loss(within, hidden @ weight)

    whole = compare(start @ weight, slice(0, ROWS))
    expected = torch.autograd.grad(whole, [start, weight])
    seen.clear()
    for loss in (law_loss(compare, start @ weight), chunked_loss(chunk, start, [weight], 5)):
        torch.testing.assert_close(loss, whole, **EXACT)
        for ours, theirs in zip(torch.autograd.grad(0.5 * loss, [start, weight]), expected, strict=True):
            torch.testing.assert_close(2 * ours, theirs, **EXACT)
    assert sum(seen) == 2 * ROWS
    assert max(seen) == min(ROWS, max(1, numbers // math.prod(shape[1:])))
    assert law_loss(compare, start[:0] @ weight).item() == 0


class Kept:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
