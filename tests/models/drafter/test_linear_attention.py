"""Linear attention against the sums over all pairs of rows, values and gradients."""

from __future__ import annotations

import torch

from models.drafter.linear_attention import LinearAttentionDrafter, LinearAttentionLayer
from models.layers import layer_config
from models.vocab import DraftVocab
from tests.helpers.drafters import EXACT, shaken, tiny_target

SIZES = {"hidden_size": 16, "intermediate_size": 24}


def test_mixing_is_that_of_pairs_of_rows() -> None:
    target = tiny_target(torch.float64, **SIZES)
    torch.manual_seed(0)
    layer = shaken(LinearAttentionLayer(layer_config(target, 1), 0).double())
    heads, size, _ = layer.state_shape
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)

    def phi(y: torch.Tensor) -> torch.Tensor:
        return torch.where(y > 0, y + 1, y.exp())

    found, states = layer.mix(x, x.new_zeros(2, *layer.state_shape), each=True)
    rows = []
    for text in range(2):
        q, k, v = (p(x[text]) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        for t in range(5):
            parts = []
            for head in range(heads):
                mine = slice(head * size, (head + 1) * size)
                weights = torch.stack([phi(q[t, mine]) @ phi(k[s, mine]) for s in range(t + 1)])
                parts.append((weights / weights.sum()) @ v[: t + 1, mine])
                total = sum(torch.outer(phi(k[s, mine]), v[s, mine]) for s in range(t + 1))
                torch.testing.assert_close(states[text, t, head, :, :-1], total, **EXACT)
            rows.append(layer.o_proj.weight @ torch.cat(parts))
    expected = torch.stack(rows).view(2, 5, 16)
    torch.testing.assert_close(found, expected, **EXACT)
    upstream = torch.randn(2, 5, 16, dtype=torch.float64)
    leaves = [x, *(p.weight for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj))]
    ours, theirs = (torch.autograd.grad((made * upstream).sum(), leaves) for made in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b, **EXACT)


def test_heads_may_be_others_than_the_targets() -> None:
    target = tiny_target(**SIZES)
    drafter = LinearAttentionDrafter(target, DraftVocab(64), num_attention_heads=2, head_dim=6)
    assert [layer.state_shape for layer in drafter.layers] == [(2, 6, 7)]


def test_keys_far_below_zero_still_count() -> None:
    """elu + 1 rounds to 0 there, and 0 / 0 is no number."""
    target = tiny_target(torch.float32, **SIZES)
    layer = LinearAttentionLayer(layer_config(target, 1), 0)
    x = torch.ones(1, 3, 16)
    with torch.no_grad():
        layer.q_proj.weight.fill_(-20 / 16)
        layer.k_proj.weight.fill_(-20 / 16)
        for each in (True, False):
            found, _ = layer.mix(x, x.new_zeros(1, *layer.state_shape), each)
            torch.testing.assert_close(found, layer.o_proj(layer.v_proj(x)))
