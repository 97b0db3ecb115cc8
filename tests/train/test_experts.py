"""Experts in training: what is logged of them, and a gate that learns which domain a text is of.

B batch, S rows, D hidden size, X experts.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from data.loader import Batch
from models.checkpoint import native
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, tiny_target
from tests.train.test_feature_regression import PUBLISHED
from train.feature_regression import FeatureRegression

MODEL = {"_target_": "models.drafter.experts.ExpertsDrafter", "num_experts": 3, "num_layers": 2, "memory": 0.8}
PER_DOMAIN = 8  # texts of a batch


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64, hidden_size=16, intermediate_size=24)


@pytest.mark.parametrize("route", ["soft", "top1"])
def test_shares_are_those_of_loops(route: str, target: Target, batch: Batch) -> None:
    """Over the rows that the first step supervises; a text's experts by what it was about so far."""
    drafter = build_shaken({**MODEL, "route": route}, target, DraftVocab(64))
    for layer in drafter.layers:
        layer.gate.weight.data *= 5
    module = FeatureRegression(drafter, target, **(PUBLISHED | {"num_steps": 2}))
    features, _ = module.features(batch)
    assert features.hidden is not None
    logged = module.losses(features, batch.loss_mask)
    x = drafter.fc(drafter.window(features.next_token_ids, features.hidden)).detach()
    for number, layer in enumerate(drafter.layers):
        shares, rows = torch.zeros(3, dtype=torch.float64), 0
        for text in range(len(x)):
            about: Tensor = torch.zeros(16, dtype=torch.float64)
            weight = 0.0
            for t in range(x.shape[1] - 2):
                about, weight = 0.8 * about + layer.norm(x[text, t]), 0.8 * weight + 1
                if not batch.loss_mask[text, t + 2]:
                    continue
                gates = (layer.gate.weight @ (about / weight)).softmax(0).detach()
                shares += gates if route == "soft" else torch.eye(3)[int(gates.argmax())]
                rows += 1
        place = f"_of_layer_{number}" if number else ""
        found = torch.stack([logged[f"share_of_expert_{expert}{place}"] for expert in range(3)])
        torch.testing.assert_close(found.double(), shares / rows, atol=1e-6, rtol=1e-6)
        assert found.max() - found.min() > 0.05
        with torch.no_grad():
            x, _ = layer.scan(x, x.new_zeros(len(x), 17))
    assert not any(logged[name].requires_grad for name in logged if name.startswith("share"))


def texts_of_two_domains(rules: Tensor, generator: torch.Generator) -> tuple[TargetFeatures, Tensor]:
    """Eight texts of tokens below 40, and eight of those from 24 on; and which of their tokens are supervised.

    Tokens that both have are followed by other states in each: `rules` (2, V, D).
    """
    below, above = (torch.randint(low, low + 40, (PER_DOMAIN, 24), generator=generator) for low in (0, 24))
    ids, domain = torch.cat([below, above]), torch.arange(2 * PER_DOMAIN) // PER_DOMAIN
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, 8:] = True
    lengths = torch.full((2 * PER_DOMAIN,), 24)
    return TargetFeatures(ids, ids.roll(-1, 1), rules[domain[:, None], ids], lengths), mask


@pytest.mark.parametrize(("route", "least"), [("soft", 0.3), ("top1", 0.9)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_gate_learns_to_send_domains_to_different_experts(
    route: str, least: float, seed: int, target: Target
) -> None:
    """Nothing tells it which domain a text is of, and no row by itself does."""
    torch.manual_seed(seed)
    model = {**MODEL, "num_experts": 2, "num_layers": 1, "route": route, "memory": 0.95, "intermediate_size": 32}
    drafter = native.build(model, target, DraftVocab(64))
    settings = {"max_steps": 300, "lr": 1e-2, "w_cls": 0.0, "start": "random", "chunk_rows": 512}
    module = FeatureRegression(drafter, target, **(PUBLISHED | settings))
    generator = torch.Generator().manual_seed(0)
    rules = torch.randn(2, 64, 16, generator=generator, dtype=torch.float64)

    def shares() -> list[float]:
        """Of the first expert in each domain."""
        features, mask = texts_of_two_domains(rules, torch.Generator().manual_seed(1))
        parts = [mask.clone() for _ in range(2)]
        parts[0][PER_DOMAIN:], parts[1][:PER_DOMAIN] = False, False
        return [float(drafter.usage(features, part)["share_of_expert_0"] / part.sum()) for part in parts]

    first, second = shares()
    assert abs(first - second) < least, "before it learns, domains are not told apart"
    made = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for _ in range(settings["max_steps"]):
        found = module.losses(*texts_of_two_domains(rules, generator))
        optimizer.zero_grad()
        found["loss"].backward()
        optimizer.step()
        schedule.step()
    first, second = shares()
    assert abs(first - second) > least and (first > 0.5) != (second > 0.5)
    assert found["regression"] < 0.2  # what is alike in both domains alone would leave half of the variance, which is 1
