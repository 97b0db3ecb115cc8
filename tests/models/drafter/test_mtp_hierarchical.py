"""Class, then token: an exact law, by loops; and classes that are clusters of the unembedding's rows."""

from __future__ import annotations

import math

import pytest
import torch

from models.checkpoint import native
from models.drafter.mtp_hierarchical import cluster
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, tiny_target
from tests.helpers.models import random_target

MODEL = {"_target_": "models.drafter.mtp_hierarchical.HierarchicalMTP"}
KEPT = torch.arange(1, 64, 3)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)


@pytest.mark.parametrize("kept", [None, KEPT], ids=["full", "reduced"])
def test_the_law_is_the_class_times_the_token_in_it(kept: torch.Tensor | None, target: Target) -> None:
    drafter = build_shaken(MODEL | {"num_classes": 6}, target, DraftVocab(64, kept))
    hidden = torch.randn(2, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = drafter.logits(hidden)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(2, 3, dtype=torch.float64), atol=1e-12, rtol=0)
    tokens = range(64) if kept is None else kept.tolist()
    unembedding, class_of = target.model.get_output_embeddings().weight, drafter.token_class.tolist()
    w, bias = drafter.class_head.weight, drafter.class_head.bias
    expected = []
    for row in hidden.reshape(-1, 32):
        scores = [unembedding[token] @ row for token in tokens]
        classes = (w @ row + bias).exp()
        for place, own in enumerate(class_of):
            inside = sum(s.exp() for s, c in zip(scores, class_of, strict=True) if c == own)
            expected.append((classes[own] / classes.sum() * scores[place].exp() / inside).log())
    loop = torch.stack(expected).view_as(found)
    torch.testing.assert_close(found, loop, atol=1e-10, rtol=1e-10)
    upstream = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parameters = [hidden, *drafter.logit_parameters()]
    ours, theirs = (torch.autograd.grad((x * upstream).sum(), parameters) for x in (found, loop))
    for a, b in zip(ours, theirs, strict=True):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_logits_far_apart_do_not_overflow(target: Target) -> None:
    drafter = build_shaken(MODEL | {"num_classes": 4}, target, DraftVocab(64))
    law = drafter.logits(1e4 * torch.randn(5, 32, dtype=torch.float64))
    assert torch.isfinite(law).all()
    torch.testing.assert_close(law.exp().sum(-1), torch.ones(5, dtype=torch.float64))


def test_classes_are_clusters_and_none_is_empty() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 16, generator=generator)
    true = torch.arange(40) % 5
    rows = (centres[true] + 0.05 * torch.randn(40, 16, generator=generator)) * torch.rand(40, 1, generator=generator)
    found = cluster(rows, 5)
    assert len({(a, b) for a, b in zip(true.tolist(), found.tolist(), strict=True)}) == len(set(found.tolist())) == 5
    for count in (1, 7, 39, 40):
        assert sorted(set(cluster(rows, count).tolist())) == list(range(count))
    same = torch.ones(6, 3)
    assert sorted(set(cluster(same, 4).tolist())) == [0, 1, 2, 3]


def test_classes_start_near_the_mass_that_the_head_gives_them() -> None:
    """The head's scale counts, as Granite has one."""
    for architecture in ("llama", "granite"):
        target = random_target(architecture)
        drafter = native.build(MODEL | {"num_classes": 61}, target, DraftVocab(61))
        hidden = torch.randn(4, 32, dtype=torch.float64)
        expected = target.head(hidden).log_softmax(-1)  # each class is one token
        torch.testing.assert_close(drafter.logits(hidden), expected, atol=1e-9, rtol=1e-9)


def test_senseless_numbers_of_classes_are_refused(target: Target) -> None:
    for count in (0, 65):
        with pytest.raises(UserError, match=f"num_classes is {count}"):
            native.build(MODEL | {"num_classes": count}, target, DraftVocab(64))
    assert native.build(MODEL, target, DraftVocab(64)).class_head.out_features == math.isqrt(64)
