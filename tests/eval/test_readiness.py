"""Readiness against loops over positions, for a drafter that reads the target and one that reads text alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from eval.readiness import ceiling_block_efficiency, readiness
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, prompts, tiny_target

EAGLE = {"_target_": "models.drafter.eagle.EagleDrafter"}
DRAFT_LM = {"_target_": "models.drafter.draft_lm.DraftLM", "num_layers": 1}
KEPT = torch.tensor([0, 2, 3, 4, 7, 9, 10, 13, 14, 15, 16, 18])


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, sharpness=2.0)


@pytest.mark.parametrize("model", [EAGLE, DRAFT_LM], ids=["eagle", "draft_lm"])
@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
def test_readiness_is_the_means_written_out(model: Any, reduced: bool, target: Target) -> None:
    drafter = build_shaken(model, target, DraftVocab(20, KEPT if reduced else None)).float()
    texts = list(zip(prompts([9, 7, 12], 20), [4, 1, 6], strict=True))
    kept = KEPT if reduced else torch.arange(20)
    said = [token for ids, start in texts for token in ids[start:]]
    found = readiness(target, drafter, texts, 3)
    assert found is not None
    agree, frequent, covered, p_entropy, q_entropy, kl, count = 0, 0, 0, 0.0, 0.0, 0.0, 0
    masses = []
    for ids, start in texts:
        text = torch.tensor([ids])
        out = target.model(input_ids=text, output_hidden_states=True)
        hidden = out.hidden_states[-1] if drafter.capture_layers else None
        features = TargetFeatures(text, torch.cat([text[:, 1:], text[:, :1]], 1), hidden, torch.tensor([len(ids)]))
        (first,) = drafter.unroll(features, 1)
        masses.append([])
        for about in range(max(2, start), len(ids)):
            masses[-1].append(float(out.logits[0, about - 1].softmax(-1)[kept].sum()))
            p = out.logits[0, about - 1, kept].softmax(-1)
            q = drafter.logits(first[0, about - 2]).softmax(-1)
            choice = int(p.argmax())
            count += 1
            if int(kept[choice]) in said:  # fewer than a hundred tokens were said: all of them are frequent
                frequent += 1
                agree += int(q.argmax()) == choice
            covered += choice in q.topk(10).indices
            p_entropy -= float((p * p.log()).sum())
            q_entropy -= float((q * q.log()).sum())
            kl += float((p * (p / q).log()).sum())
    assert found.positions == count
    assert 0 < frequent < count or not reduced
    assert found.top1_agreement == pytest.approx(agree / frequent)
    assert found.top10_coverage == pytest.approx(covered / count)
    assert found.entropy_ratio == pytest.approx(q_entropy / p_entropy, rel=1e-4)
    assert found.kl == pytest.approx(kl / count, rel=1e-4)
    accepted = [0.0, 0.0, 0.0]
    for length in (1, 2, 3):
        runs = [m[t : t + length] for m in masses for t in range(len(m) - length + 1)]
        accepted[length - 1] = sum(math.prod(run) for run in runs) / len(runs)
    assert found.ceiling == pytest.approx(accepted[0], rel=1e-5) and (found.ceiling < 0.95) == reduced
    assert found.ceiling_block_efficiency == pytest.approx(1 + sum(accepted), rel=1e-5)
    assert found.num_speculative_tokens == 3


def test_the_ceiling_of_a_draft_is_that_of_what_its_tokens_can_reach() -> None:
    """Half of the mass at every token: 1 + 1/2 + 1/4 + 1/8; and a text of two tokens tells of no third one."""
    half = torch.full((5,), 0.5, dtype=torch.float64)
    assert ceiling_block_efficiency([half], 3) == 1.875
    assert ceiling_block_efficiency([half[:2], half[:0]], 3) == 1.75
    assert ceiling_block_efficiency([torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64)], 2) == 1 + 2.5 / 3 + 0.5


def test_a_drafter_without_laws_has_no_readiness(target: Target) -> None:
    assert readiness(target, object(), [([1, 2, 3, 4], 1)], 4) is None
