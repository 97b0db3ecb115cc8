"""What models attend to: found for every architecture that tells it, without a trace in the model."""

from __future__ import annotations

import pytest
import torch

from models.attention_maps import check_maps, common_groups, grouped, states_and_maps
from models.errors import UserError
from tests.helpers.models import random_target

IDS = torch.randint(61, (2, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gpt2", "mistral", "mixtral"])
def test_states_are_those_of_usual_attention_and_maps_are_causal_laws(architecture: str) -> None:
    target = random_target(architecture)
    usual = target.config._attn_implementation
    check_maps(target, "here")
    before = target(IDS, capture_layers=(1, 2, 3)).hidden
    states, maps = states_and_maps(target, IDS)
    torch.testing.assert_close(torch.cat(states[1:], dim=-1), before, atol=1e-5, rtol=1e-5)
    assert target.config._attn_implementation == usual
    assert torch.equal(target(IDS, capture_layers=(1, 2, 3)).hidden, before)
    assert [m.shape for m in maps] == [(2, 4, 8, 8)] * 3
    for m in maps:
        torch.testing.assert_close(m.sum(-1), torch.ones(2, 4, 8).to(m), atol=1e-6, rtol=0)
        assert m.triu(1).abs().max() == 0 and (m.tril() > 0).sum() > 2 * 4 * 8


def test_a_model_whose_attention_is_no_law_is_refused() -> None:
    with pytest.raises(UserError, match=r"here: 'gpt_oss' \(gpt_oss\) does not tell .* do not sum to 1"):
        check_maps(random_target("gpt_oss"), "here")


def test_heads_are_averaged_in_groups_that_both_models_have() -> None:
    four, two = random_target("llama", num_key_value_heads=4), random_target("llama")
    three = random_target("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
    assert [common_groups(a, b) for a, b in ((four, four), (four, two), (two, three))] == [4, 2, 1]
    assert common_groups(random_target("gpt2"), two) == 2
    maps = torch.randn(2, 6, 3, 3)
    for groups in (1, 2, 3, 6):
        size = 6 // groups
        expected = [sum(maps[:, g * size + h] for h in range(size)) / size for g in range(groups)]
        torch.testing.assert_close(grouped(maps, groups), torch.stack(expected, dim=1))
