"""Greedy output is plain decoding's for every architecture, with chains and with trees, in float64.

Drafts have a right beginning of varying length, so that branches are kept from the middle of a draft.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from engine.loop import generate
from engine.settings import DecodeSettings
from models.drafter.eagle import EagleDrafter
from models.target import Target
from models.tree import DynamicTree, StaticTree
from models.vocab import DraftVocab
from tests.helpers.drafters import Observed, prompts, shaken
from tests.helpers.models import ARCHITECTURES, VOCAB_SIZE, random_target

SHAPES = {
    "chain": None,
    "static": StaticTree((-1, -1, 0, 0, 1, 2, 5), (0, 1, 0, 1, 0, 0, 0)),
    "dynamic": DynamicTree(depth=3, top_k=3, num_nodes=8),
}
PROMPTS = prompts([9, 4, 7], VOCAB_SIZE, seed=2)  # on both sides of the sliding windows


@cache
def prepared(architecture: str) -> tuple[Target, EagleDrafter, list[list[int]]]:
    target = random_target(architecture)
    torch.manual_seed(0)
    drafter = shaken(EagleDrafter(target, DraftVocab(target.vocab_size)))
    return target, drafter, generate(target, PROMPTS, DecodeSettings(14, stop_token_ids=frozenset())).token_ids


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_is_plain_decodings(architecture: str, shape: str) -> None:
    target, drafter, plain = prepared(architecture)
    observed = Observed(drafter, script=dict(enumerate(zip(PROMPTS, plain, strict=True))))
    settings = DecodeSettings(14, 4, stop_token_ids=frozenset(), tree=SHAPES[shape])
    made = generate(target, PROMPTS, settings, observed)
    assert made.token_ids == plain
    assert 1 in observed.committed_counts and len(observed.committed_counts) > 2
    for request, prompt in enumerate(PROMPTS):
        alone = generate(target, [prompt], settings, drafter)
        assert alone.token_ids == [plain[request]]
