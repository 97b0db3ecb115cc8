"""Cascaded multi-token prediction against loops over rows and tokens; what heads may read."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.checkpoint import native
from models.drafter.mtp_cascaded import CascadedMTP
from models.errors import UserError
from models.sampling import SamplingParams
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, check_unroll, prompts, propose_at_every_length, shaken, tiny_target
from tests.helpers.looped_layers import LoopedLayers, fused, rms_normed, under

MODEL = {
    "_target_": "models.drafter.mtp_cascaded.CascadedMTP", "num_heads": 3, "attention_size": 12, "attention_heads": 3,
}  # fmt: skip
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)


@pytest.fixture(scope="module")
def features(target: Target) -> TargetFeatures:
    ids = torch.tensor(prompts([7, 7], 64, seed=4))
    with torch.no_grad():
        hidden = target(ids[:, :-1], capture_layers=(-1,)).hidden
    return TargetFeatures(ids[:, :-1], ids[:, 1:], hidden, torch.tensor([6, 6]))


def headed(w: dict[str, Tensor], trunk: Tensor, embedded: list[Tensor], eps: float, heads: int) -> Tensor:
    """What a head with the tensors `w` makes of the trunk's row (D,) and the tokens' embeddings, in order."""
    query = (w["q_proj.weight"] @ rms_normed(trunk, w["input_norm.weight"], eps)).view(heads, -1)
    read = [rms_normed(e, w["token_norm.weight"], eps) for e in embedded]
    back = [w["distance"][len(read) - 1 - place] for place in range(len(read))]  # the last token is at distance 0
    keys = [(w["k_proj.weight"] @ r + d).view(heads, -1) for r, d in zip(read, back, strict=True)]
    values = [(w["v_proj.weight"] @ r).view(heads, -1) for r in read]
    nothing = w["nothing"].view(heads, -1)
    out = []
    for head in range(heads):
        scores = torch.stack([query[head] @ k[head] for k in (*keys, nothing)]) / math.sqrt(query.shape[1])
        out.append(sum(p * v[head] for p, v in zip(scores.softmax(0), values, strict=False)))
    x = trunk + w["o_proj.weight"] @ torch.cat(out)
    read_again = rms_normed(x, w["post_norm.weight"], eps)
    gate, up = w["mlp.gate_proj.weight"] @ read_again, w["mlp.up_proj.weight"] @ read_again
    return x + w["mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)


@torch.no_grad()
def test_unroll_is_the_loop_over_rows(target: Target, features: TargetFeatures) -> None:
    drafter = build_shaken(MODEL, target, DraftVocab(64))
    weights, eps = drafter.state_dict(), drafter.config.rms_norm_eps
    embedding = target.model.get_input_embeddings().weight
    steps = list(drafter.unroll(features, 3))
    for b in range(2):
        rows = LoopedLayers(under(weights, "stack."), drafter.config)
        text = features.next_token_ids[b].tolist()
        for t in range(len(text)):
            trunk = rows.row(fused(weights, "fusion.", embedding[text[t]], features.hidden[b, t], eps), t)
            for step in range(min(3, len(text) - t)):
                read = [embedding[token] for token in text[t : t + step + 1]]
                x = headed(under(weights, f"heads.{step}."), trunk, read, eps, heads=3)
                expected = rms_normed(x, weights["norm.weight"], eps)
                torch.testing.assert_close(steps[step][b, t], expected, atol=1e-6, rtol=0)  # RoPE is float32


def test_gradients_reach_the_head_and_the_trunk_alone(target: Target, features: TargetFeatures) -> None:
    drafter = build_shaken(MODEL, target, DraftVocab(64))
    for step, hidden in enumerate(drafter.unroll(features, 3)):
        grads = torch.autograd.grad(
            hidden[..., 0].sum(), list(drafter.parameters()), retain_graph=True, allow_unused=True
        )
        for (name, _), grad in zip(drafter.named_parameters(), grads, strict=True):
            own = name.startswith(("fusion.", "stack.", "norm.", f"heads.{step}."))
            assert (grad is not None) == own, (step, name)
            assert grad is None or grad.abs().max() > 1e-9, (step, name)


@pytest.mark.parametrize(
    ("arguments", "said"), [({"num_heads": 0}, "num_heads is 0"), ({"attention_heads": 5}, "cannot share evenly")]
)
def test_senseless_sizes_are_refused(arguments: dict[str, int], said: str, target: Target) -> None:
    with pytest.raises(UserError, match=said):
        native.build(MODEL | arguments, target, DraftVocab(64))


class ReadsOneTokenFurther(CascadedMTP):
    """Training's heads read the tokens x_{t+2} .. x_{t+2+s}: the one that is to be told among them."""

    def ahead(self, trunk: Tensor, features: TargetFeatures, step: int) -> Tensor:
        later = torch.cat([features.next_token_ids[:, 1:], features.next_token_ids[:, -1:]], dim=1)
        return super().ahead(trunk, replace(features, next_token_ids=later), step)


class PathsBackwards(CascadedMTP):
    """Decoding forgets in what order the tokens came."""

    def expander(self, state: object, committed: TargetFeatures) -> object:
        made = super().expander(state, committed)
        told = made._told

        def reversed_told() -> Tensor:
            made._paths = made._paths.flip(-1)
            logits = told()
            made._paths = made._paths.flip(-1)
            return logits

        made._told = reversed_told
        return made


@pytest.mark.parametrize("mutant", [ReadsOneTokenFurther, PathsBackwards])
def test_training_that_differs_from_decoding_is_noticed(mutant: type[CascadedMTP], target: Target) -> None:
    torch.manual_seed(0)
    drafter = shaken(mutant(target, DraftVocab(64), num_heads=3))
    with pytest.raises(AssertionError, match="not close"):
        propose_at_every_length(target, drafter, prompts([9], 64)[0], 3, GREEDY, [check_unroll])
