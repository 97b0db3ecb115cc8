"""Penalty, bias, min-p, stop strings, trees and other verifications through the whole loop."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.loop import generate
from engine.options import decode_settings, describe_tree, read_tree
from engine.settings import DecodeSettings
from models.drafter.eagle import EagleDrafter
from models.errors import UserError
from models.sampling import SamplingParams
from models.target import Target, load_target
from models.tree import DynamicTree, StaticTree
from models.vocab import DraftVocab
from tests.helpers.drafters import Observed
from tests.helpers.laws import adjusted_by_loop, chi_square_p_value, law_by_loop
from tests.helpers.models import random_target
from tests.helpers.scripted import ScriptedDrafter, knows

PROMPTS = [[3, 4, 5], [10, 11, 12, 13, 14, 15, 16, 17], [30], [21, 20, 20, 20, 21]]
TREE = StaticTree((-1, -1, 0, 0, 1, 2, 5), (0, 1, 0, 1, 0, 0, 0))
CONTROLS = SamplingParams(0.0, repetition_penalty=1.4, logit_bias=((7, 1.5), (11, float("-inf")), (2, -2.0)))


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(vocab_size=50, max_position_embeddings=48, initializer_range=0.4)


def eagle(target: Target) -> EagleDrafter:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return EagleDrafter(target, DraftVocab(target.vocab_size)).eval()


def test_greedy_with_penalty_and_bias_is_transformers_generate(target: Target) -> None:
    plain = DecodeSettings(20, 4, CONTROLS, frozenset())
    theirs = []
    for prompt in PROMPTS:
        out = target.model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=50,
            pad_token_id=0,
            repetition_penalty=1.4,
            sequence_bias={(7,): 1.5, (11,): float("-inf"), (2,): -2.0},
        )
        theirs.append(out[0, len(prompt) :].tolist())
    without = generate(target, PROMPTS, DecodeSettings(20, 4, stop_token_ids=frozenset())).token_ids
    assert theirs != without and not any(11 in answer for answer in theirs)
    assert generate(target, PROMPTS, plain).token_ids == theirs
    right = knows(PROMPTS, theirs)
    for drafter in (
        eagle(target),
        ScriptedDrafter(right),
        ScriptedDrafter(lambda text: right(text) if len(text) % 3 else 0),
    ):
        assert generate(target, PROMPTS, plain, drafter).token_ids == theirs
    for tree in (TREE, DynamicTree(3, 3, 9)):
        made = generate(target, PROMPTS, replace(plain, tree=tree), eagle(target))
        assert made.token_ids == theirs


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_sampling_with_all_controls_has_the_adjusted_joint_law(tree: StaticTree | None) -> None:
    target = random_target(vocab_size=6, hidden_size=16, initializer_range=0.15, bos_token_id=None, eos_token_id=None)
    sampling = SamplingParams(0.9, top_k=5, top_p=0.97, min_p=0.03, repetition_penalty=1.5, logit_bias=((1, 0.7),))
    prompt, length, requests = [3, 0, 4], 3, 4000
    settings = DecodeSettings(length, 2, sampling, frozenset(), tree=tree, children="independent")
    made = generate(target, [prompt] * requests, settings, eagle(target))
    assert 0.05 < made.stats.acceptance_rate < 0.95
    counts, law = np.zeros([6] * length), np.ones([6] * length)
    for answer in made.token_ids:
        counts[tuple(answer)] += 1
    for text in itertools.product(range(6), repeat=length):
        for n, token in enumerate(text):
            context = [*prompt, *text[:n]]
            logits = target.model(torch.tensor([context])).logits[0, -1].tolist()
            adjusted = adjusted_by_loop(logits, 1.5, [(1, 0.7)], set(context))
            law[text] *= law_by_loop(adjusted, 0.9, 5, 0.97, 0.03)[token]
    for axes in ((), (0,), (0, 1), (1, 2)):
        assert chi_square_p_value(counts.sum(axes), law.sum(axes)) > 1e-3


def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it() -> None:
    tiny = load_target("tiny", device="cpu")
    prompts = [tiny.encode("import os\n\ndef main(", special_tokens=True), tiny.encode("class A:", special_tokens=True)]
    settings = DecodeSettings(40, 4, stop_token_ids=frozenset())
    plain = generate(tiny, prompts, settings).token_ids
    text = tiny.decode(plain[0])
    for start in range(2, len(text) - 6, 16):
        string = text[start : start + 4]
        expected = [next((a[:n] for n in range(1, len(a) + 1) if string in tiny.decode(a[:n])), a) for a in plain]
        stopping = replace(settings, stop_strings=(string, "never said"))
        for drafter in (None, eagle(tiny), ScriptedDrafter(knows(prompts, plain))):
            made = generate(tiny, prompts, stopping, drafter)
            assert made.token_ids == expected
            assert made.stopped == [string in tiny.decode(answer) for answer in plain]


@pytest.mark.parametrize("tree", [TREE, DynamicTree(3, 3, 8)], ids=["static", "dynamic"])
def test_a_stop_token_inside_an_accepted_branch_ends_the_answer(target: Target, tree: Any) -> None:
    settings = DecodeSettings(20, stop_token_ids=frozenset(), tree=tree)
    plain = generate(target, PROMPTS, replace(settings, tree=None)).token_ids
    for position in range(1, 12):
        stop = frozenset({plain[0][position], plain[2][position + 3]})
        expected = [next((a[: i + 1] for i, t in enumerate(a) if t in stop), a) for a in plain]
        right = Observed(eagle(target), script=dict(enumerate(zip(PROMPTS, plain, strict=True))))
        made = generate(target, PROMPTS, replace(settings, stop_token_ids=stop), right)
        assert made.token_ids == expected
        assert made.stopped == [answer[-1] in stop for answer in expected]
    assert max(right.committed_counts) > 2


def test_typical_acceptance_is_another_law_and_says_so(target: Target) -> None:
    small = random_target(vocab_size=6, hidden_size=16, initializer_range=0.4, bos_token_id=None, eos_token_id=None)
    settings = DecodeSettings(3, 1, SamplingParams(1.0), frozenset(), verification="typical")
    assert not settings.lossless and replace(settings, verification="block").lossless
    assert replace(settings, sampling=SamplingParams(0.0)).lossless, "at temperature 0 it is exact"
    made = generate(small, [[3, 0, 4]] * 4000, settings, eagle(small))
    counts = np.zeros([6, 6])
    for answer in made.token_ids:
        counts[answer[0], answer[1]] += 1
    laws = [small.model(torch.tensor([[3, 0, 4, token]])).logits[0, -1].softmax(0) for token in range(6)]
    first = small.model(torch.tensor([[3, 0, 4]])).logits[0, -1].softmax(0)
    law = torch.stack([p * q for p, q in zip(first, laws, strict=True)]).numpy()
    assert chi_square_p_value(counts.sum(1), law.sum(1)) > 1e-3, "the first token comes from the prompt"
    assert chi_square_p_value(counts, law) < 1e-6


def test_statistics_of_trees_count_depths(target: Target) -> None:
    settings = DecodeSettings(20, 4, stop_token_ids=frozenset(), tree=TREE)
    stats = generate(target, PROMPTS, settings, eagle(target)).stats
    assert stats.drafts.shape == (4, 4)
    assert (stats.drafted >= stats.drafts).all() and (stats.tested <= stats.drafts).all()
    assert (stats.accepted <= stats.tested).all()
    assert stats.emitted.tolist() == [19] * 4
    full_rounds = stats.drafts[:, 3]  # those that had room for the whole depth
    assert (full_rounds > 5).all()
    assert (stats.drafted[:, 0] == 2 * stats.drafts[:, 0]).all() and (
        stats.drafted[:, 1] == 3 * stats.drafts[:, 1]
    ).all()


def test_what_does_not_go_together_is_refused(target: Target) -> None:
    chains_only = ScriptedDrafter(lambda text: 0)
    with pytest.raises(UserError, match=r"ScriptedDrafter drafts chains only: leave decode\.tree out"):
        generate(target, PROMPTS, DecodeSettings(tree=TREE), chains_only)
    with pytest.raises(UserError, match="Block verification is for chains"):
        DecodeSettings(tree=TREE, verification="block")
    with pytest.raises(UserError, match="'tokens': choose token, block, typical"):
        DecodeSettings(verification="tokens")
    with pytest.raises(UserError, match="'some': choose top, independent, without_replacement"):
        DecodeSettings(children="some")
    with pytest.raises(UserError, match="token 50, but the vocabulary ends at 49"):
        generate(target, PROMPTS, DecodeSettings(sampling=SamplingParams(logit_bias=((50, 1.0),))))


OPTIONS: dict[str, Any] = {
    "num_speculative_tokens": None, "max_new_tokens": 9, "top_k": 3, "top_p": 0.9, "min_p": 0.1,
    "repetition_penalty": 1.2, "logit_bias": {5: -1}, "stop": "END", "tree": {"depth": 2, "top_k": 2, "num_nodes": 4},
    "children": "top", "verification": "token", "draft_length": "auto",
}  # fmt: skip


def test_options_become_settings(tmp_path: Any) -> None:
    settings = decode_settings(OPTIONS, 0.5, 7, 3)
    sampling = SamplingParams(0.5, 3, 0.9, 0.1, 1.2, ((5, -1.0),))
    tree = DynamicTree(2, 2, 4)
    assert settings == DecodeSettings(9, 3, sampling, None, ("END",), 7, tree)
    path = tmp_path / "tree.json"
    path.write_text('{"parents": [-1, 0], "ranks": [0, 1], "expected_tokens": 1.5}')
    assert read_tree(str(path)) == read_tree({"parents": [-1, 0], "ranks": [0, 1]}) == StaticTree((-1, 0), (0, 1))
    for bad in ({"depth": 2}, {"parents": [0]}, 3, str(tmp_path / "none.json"), {"parents": 3, "ranks": 0}):
        with pytest.raises(UserError, match=r"decode\.tree"):
            read_tree(bad)
    for tree in (StaticTree((-1, 0), (0, 1)), DynamicTree(2, 2, 4), None):
        assert read_tree(json.loads(json.dumps(describe_tree(tree)))) == tree
    bad_values: list[tuple[str, Any]] = [
        ("logit_bias", {"the": 1}), ("logit_bias", {5: "x"}), ("stop", [""]), ("stop", [5]),
        ("num_speculative_tokens", 0), ("tree", {"depth": "a", "top_k": 2, "num_nodes": 4}),
    ]  # fmt: skip
    for name, value in bad_values:
        with pytest.raises(UserError, match=f"{name}|draft tree"):
            decode_settings(OPTIONS | {name: value}, 0.5, 7)


def test_more_children_than_the_drafter_has_tokens_are_refused(target: Target) -> None:
    small = EagleDrafter(target, DraftVocab(target.vocab_size, torch.tensor([3, 9]))).eval()
    wide = DecodeSettings(tree=StaticTree((-1, -1, -1), (0, 1, 2)))
    with pytest.raises(UserError, match="3 children of a node, but the drafter proposes 2 tokens"):
        generate(target, PROMPTS, wide, small)
    assert generate(target, PROMPTS, replace(wide, tree=DynamicTree(2, 3, 9)), small).token_ids
