"""Readiness against loops over positions, for a drafter that reads the target and one that reads text alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eval.readiness import readiness
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
    found = readiness(target, drafter, texts)
    assert found is not None
    agree, frequent, covered, p_entropy, q_entropy, kl, count = 0, 0, 0, 0.0, 0.0, 0.0, 0
    for ids, start in texts:
        text = torch.tensor([ids])
        out = target.model(input_ids=text, output_hidden_states=True)
        hidden = out.hidden_states[-1] if drafter.capture_layers else None
        features = TargetFeatures(text, torch.cat([text[:, 1:], text[:, :1]], 1), hidden, torch.tensor([len(ids)]))
        (first,) = drafter.unroll(features, 1)
        for about in range(max(2, start), len(ids)):
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


def test_a_drafter_without_laws_has_no_readiness(target: Target) -> None:
    assert readiness(target, object(), [([1, 2, 3, 4], 1)]) is None
