"""Attention of blocks over a context: against loops over single rows, values and gradients, and what reads what."""

from __future__ import annotations

import torch
from torch import Tensor

from models.block_attention import BlockStack, attend
from models.layers import layer_config
from tests.helpers.drafters import EXACT, shaken, tiny_target

B, H, K, A, Q, W, E = 2, 4, 2, 3, 3, 5, 6
ALLOWED = torch.tensor([
    [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]],
    [[1, 0, 0, 0, 0], [1, 0, 1, 0, 1], [1, 1, 1, 1, 0]],
], dtype=torch.bool)  # fmt: skip


def numbers(*shape: int, seed: int) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.requires_grad_()


def attend_by_loops(
    query: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], allowed: Tensor | None
) -> Tensor:
    """Every query by itself, over a list of the rows that it may read."""
    rows = []
    for b in range(B):
        for h in range(H):
            k = h // (H // K)
            for block in range(A):
                for q in range(Q):
                    read = [(context, w) for w in range(W) if allowed is None or allowed[b % len(allowed), block, w]]
                    read += [(own, block * Q + other) for other in range(Q)]
                    keys = torch.stack([source[0][b, k, place] for source, place in read])
                    values = torch.stack([source[1][b, k, place] for source, place in read])
                    weights = (keys @ query[b, h, block, q] / E**0.5).softmax(0)
                    rows.append(weights @ values)
    return torch.stack(rows).view(B, H, A, Q, E)


def test_attention_is_that_of_loops() -> None:
    for allowed in (ALLOWED, ALLOWED[:1], None):
        query = numbers(B, H, A, Q, E, seed=0)
        context = (numbers(B, K, W, E, seed=1), numbers(B, K, W, E, seed=2))
        own = (numbers(B, K, A * Q, E, seed=3), numbers(B, K, A * Q, E, seed=4))
        upstream = numbers(B, H, A, Q, E, seed=5).detach()
        leaves = [query, *context, *own]
        ours, theirs = attend(query, context, own, allowed), attend_by_loops(query, context, own, allowed)
        torch.testing.assert_close(ours, theirs, **EXACT)
        found, expected = (torch.autograd.grad((out * upstream).sum(), leaves) for out in (ours, theirs))
        for ours, theirs in zip(found, expected, strict=True):
            assert theirs.abs().max() > 0.01
            torch.testing.assert_close(ours, theirs, **EXACT)


def test_a_stack_reads_the_whole_block_and_the_context_that_is_allowed() -> None:
    """By derivatives: the rows that each row of the output depends on, through several layers."""
    torch.manual_seed(0)
    stack = shaken(BlockStack(layer_config(tiny_target(), 2)).double())
    states, x = numbers(1, W, 64, seed=6), numbers(1, A, Q, 64, seed=7)
    positions, places = torch.arange(W)[None], torch.tensor([[[2, 3, 4], [5, 6, 7], [0, 1, 2]]])
    out = stack.blocks(x, places, stack.context(states, positions), ALLOWED[:1])
    for block in range(A):
        for row in range(Q):
            of_states, of_x = torch.autograd.grad(out[0, block, row].sum(), [states, x], retain_graph=True)
            assert torch.equal(of_states[0].abs().amax(-1) > 1e-12, ALLOWED[0, block])
            own = torch.zeros(A, Q, dtype=torch.bool)
            own[block] = True
            assert torch.equal(of_x[0].abs().amax(-1) > 1e-12, own)


def test_rows_are_told_apart_by_their_distance_alone() -> None:
    """RoPE: the same block and context further on give the same; with another distance between them, something else."""
    torch.manual_seed(0)
    stack = shaken(BlockStack(layer_config(tiny_target(), 2)).double())
    states, x = numbers(1, W, 64, seed=6), numbers(1, 1, Q, 64, seed=7)

    def made(context: int, block: int) -> Tensor:
        rows = stack.context(states, torch.arange(W)[None] + context)
        return stack.blocks(x, torch.arange(Q)[None, None] + block, rows, None)

    torch.testing.assert_close(made(0, 5), made(9, 14), atol=1e-5, rtol=1e-5)  # angles are in float32
    assert (made(0, 5) - made(0, 6)).abs().max() > 1e-3
