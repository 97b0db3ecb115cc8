"""The promises of DESIGN.md that every drafter of conf/drafter keeps, numbered as there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.beam import beam_search
from engine.beam_step import BeamSettings
from engine.draft_length import POLICIES
from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.errors import UserError
from models.sampling import SamplingParams
from models.target import Target
from models.tree import DynamicTree, StaticTree
from models.vocab import DraftVocab
from tests.contract.conftest import Recipe
from tests.helpers.drafters import (
    LEAST_P_VALUE,
    Observed,
    check_draft,
    check_fresh,
    check_unroll,
    generate_observed,
    prompts,
    propose_at_every_length,
    recorded_logits,
    sampled_p_value,
)
from tests.helpers.memorising import LEAST_ACCEPTANCE, Text, Trained

LENGTHS = [9, 1, 20, 31, 4, 3, 14, 6]  # 31 leaves room for a single token
GREEDY, SAMPLED = SamplingParams(), SamplingParams(1.0)
FILTERED = SamplingParams(0.8, top_k=4, top_p=0.85)


def settings(num_speculative_tokens: int, sampling: SamplingParams = GREEDY, stop: set[int] | None = None) -> Any:
    """Answers run up to the end of the context, but for stop tokens."""
    return DecodeSettings(1000, num_speculative_tokens, sampling, frozenset(stop or ()))


# 1. Greedy output is plain decoding's, token for token.


@pytest.fixture(scope="module")
def start(target: Target) -> list[list[int]]:
    return prompts(LENGTHS, target.vocab_size, seed=1)


@pytest.fixture(scope="module")
def plain(target: Target, start: list[list[int]]) -> list[list[int]]:
    answers = generate(target, start, settings(1)).token_ids
    assert [len(p) + len(a) for p, a in zip(start, answers, strict=True)] == [target.max_positions] * len(start)
    return answers


@pytest.mark.parametrize("num_speculative_tokens", [1, 4, 7])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_1_greedy_is_plain_decoding(
    batch_size: int, num_speculative_tokens: int, target: Target, drafter: Any, start: Any, plain: Any
) -> None:
    """Drafts of random weights, and such as are right up to anywhere; up to the last token that the context holds."""
    script = dict(enumerate(zip(start[:batch_size], plain[:batch_size], strict=True)))
    adversary = Observed(drafter, script=script)
    for current in (drafter, adversary):
        made = generate(target, start[:batch_size], settings(num_speculative_tokens), current)
        assert made.token_ids == plain[:batch_size]
        assert not any(made.stopped)
    if batch_size == 8:
        full = {num_speculative_tokens + 1} if adversary.chains else set()  # trees have a depth of their own
        assert {1, 2} | full <= adversary.committed_counts


@pytest.mark.parametrize("num_speculative_tokens", [1, 4, 7])
def test_1_a_stop_token_in_mid_draft_ends_the_answer(
    num_speculative_tokens: int, target: Target, drafter: Any, start: Any, plain: Any
) -> None:
    """With a draft that is right throughout, the stop token stands at every place within drafts."""
    stop = {plain[0][5], plain[2][3], plain[6][1]}
    expected = [next((a[: i + 1] for i, t in enumerate(a) if t in stop), a) for a in plain]
    assert len({len(a) for a in expected}) > 3
    right = Observed(drafter, script=dict(enumerate(zip(start, plain, strict=True))))
    for current in (drafter, right):
        made = generate(target, start, settings(num_speculative_tokens, stop=stop), current)
        assert made.token_ids == expected
        assert made.stopped == [a[-1] in stop for a in expected]


def test_1_greedy_with_a_trained_drafter(
    recipe: Recipe, target: Target, vocab: DraftVocab, trained: Trained, text: Text, start: Any, plain: Any
) -> None:
    """The trained weights in float64, on the texts they know and on others."""
    sizes = getattr(trained.drafter, "export_arguments", {})
    drafter = native.build(recipe.model | sizes, target, vocab)
    drafter.load_state_dict(trained.drafter.state_dict())
    drafter.eval()
    known = [*text.prompts, *start]
    expected = generate(target, known, settings(1)).token_ids
    for num_speculative_tokens in (1, 4, 7):
        made = generate(target, known, settings(num_speculative_tokens), drafter)
        assert made.token_ids == expected
        assert 0 < made.stats.acceptance_rate < 1


@pytest.mark.parametrize("name", POLICIES)
def test_1_greedy_with_every_draft_length_policy(
    name: str, target: Target, drafter: Any, start: Any, plain: Any
) -> None:
    """Policies that read laws refuse a drafter that has none."""
    policy = POLICIES[name]()
    decode = replace(settings(4), draft_length=policy)
    try:
        policy.check(drafter)
    except UserError:
        assert policy.reads_laws
        with pytest.raises(UserError, match=f"decode.draft_length={name}"):
            generate(target, start, decode, drafter)
        return
    assert generate(target, start[:4], decode, drafter).token_ids == plain[:4]


# 2. The sampled joint law is the target's.


def skip_probing(drafter: Any) -> None:
    if hasattr(drafter, "observe"):  # what it knows is more than the text, and little at first: its own tests prime it
        pytest.skip("this drafter asks the target")


@pytest.mark.parametrize("sampling", [SAMPLED, FILTERED], ids=["temperature", "top-k-top-p"])
def test_2_sampled_joint_law_is_the_targets(sampling: SamplingParams, small_target: Target, small_drafter: Any) -> None:
    skip_probing(small_drafter)
    assert sampled_p_value(small_target, small_drafter, sampling) > LEAST_P_VALUE


# 1 to 4 for trees, where the drafter can draft them. Every tree is compared on its way with one that a fresh state
# drafts, and its logits with those of `unroll` along each path.

TREES = {
    "static": StaticTree((-1, -1, 0, 0, 1, 2), (0, 1, 0, 1, 0, 0)),
    "dynamic": DynamicTree(depth=3, top_k=2, num_nodes=5),
}


@pytest.fixture
def tree_drafter(drafter: Any) -> Any:
    if not hasattr(drafter, "propose_tree"):
        pytest.skip("this drafter drafts chains only")
    return drafter


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_greedy_trees_are_plain_decoding(
    batch_size: int, shape: str, target: Target, tree_drafter: Any, start: Any, plain: Any
) -> None:
    """Trees of random weights, and such as have a right path up to anywhere."""
    script = dict(enumerate(zip(start[:batch_size], plain[:batch_size], strict=True)))
    decode = replace(settings(4), tree=TREES[shape])
    for observed in (Observed(tree_drafter), Observed(tree_drafter, script=script)):
        made = generate(target, start[:batch_size], decode, observed)
        assert made.token_ids == plain[:batch_size]
    if batch_size == 8:
        assert observed.committed_counts == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("shape", "children"),
    [("static", "top"), ("static", "independent"), ("static", "without_replacement"), ("dynamic", "top")],
)
def test_sampled_trees_have_the_targets_joint_law(
    shape: str, children: str, small_target: Target, small_drafter: Any
) -> None:
    if not hasattr(small_drafter, "propose_tree"):
        pytest.skip("this drafter drafts chains only")
    p_value = sampled_p_value(small_target, small_drafter, FILTERED, tree=TREES[shape], children=children)
    assert p_value > LEAST_P_VALUE


def test_sampled_trees_are_those_of_a_fresh_state(small_target: Target, small_drafter: Any) -> None:
    if not hasattr(small_drafter, "propose_tree"):
        pytest.skip("this drafter drafts chains only")
    for children in ("independent", "without_replacement"):
        decode = replace(settings(3, SAMPLED), tree=TREES["static"], children=children)
        observed = Observed(small_drafter)
        generate(small_target, prompts(LENGTHS, 5, seed=1), decode, observed)
        assert observed.proposals > 5


def test_2_block_verification_keeps_the_joint_law(small_target: Target, small_drafter: Any) -> None:
    skip_probing(small_drafter)
    assert sampled_p_value(small_target, small_drafter, SAMPLED, verification="block") > LEAST_P_VALUE


# 3. Training's `unroll` computes what `propose` does.


def skip_untrained(recipe: Recipe, drafter: Any) -> None:
    if not recipe.training or not hasattr(drafter, "unroll"):
        pytest.skip("this drafter is not trained by steps")


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_3_unroll_is_propose_at_every_length(
    sampling: SamplingParams, recipe: Recipe, target: Target, drafter: Any, start: Any, plain: Any
) -> None:
    skip_untrained(recipe, drafter)
    text = [*start[1], *plain[1]]
    propose_at_every_length(target, drafter, text, 5, sampling, [check_draft, check_unroll])


def test_3_unroll_is_propose_through_greedy_rounds(recipe: Recipe, target: Target, drafter: Any, start: Any) -> None:
    skip_untrained(recipe, drafter)
    _, seen = generate_observed(target, drafter, start, settings(4), [check_draft, check_unroll])
    assert seen.proposals > 5 and seen.committed_counts == {1, 2, 3, 4, 5}


def test_3_unroll_is_propose_through_sampled_rounds(recipe: Recipe, small_target: Target, small_drafter: Any) -> None:
    skip_untrained(recipe, small_drafter)
    start = prompts(LENGTHS, 5, seed=1)
    checks = [check_draft, check_unroll]
    _, seen = generate_observed(small_target, small_drafter, start, settings(3, SAMPLED), checks)
    assert seen.proposals > 5 and seen.committed_counts == {1, 2, 3, 4}


# 4. Cache truncation is recomputation.


def test_4_running_state_is_a_fresh_one_greedy(target: Target, drafter: Any, start: Any) -> None:
    skip_probing(drafter)
    _, seen = generate_observed(target, drafter, start, settings(4), [check_fresh])
    assert seen.proposals > 5 and seen.committed_counts == {1, 2, 3, 4, 5}


def test_4_running_state_is_a_fresh_one_sampled(small_target: Target, small_drafter: Any) -> None:
    skip_probing(small_drafter)
    start = prompts(LENGTHS, 5, seed=1)
    _, seen = generate_observed(small_target, small_drafter, start, settings(3, SAMPLED), [check_fresh])
    every_count = {1, 2, 3, 4}  # a drafter that chooses its drafts' lengths need not get to the last
    assert seen.proposals > 5
    assert seen.committed_counts == every_count if seen.always_full else seen.committed_counts >= every_count - {4}


def test_4_beams_that_share_a_past_are_drafted_for_each_by_itself(target: Target, drafter: Any, start: Any) -> None:
    """In beam search a request may go on in several ways: behind each of them a fresh state drafts the same."""
    skip_probing(drafter)
    decode, beams = DecodeSettings(12, 4, stop_token_ids=frozenset()), BeamSettings(3)
    observed = Observed(drafter, [check_fresh])
    found, plain = (beam_search(target, start[:3], decode, beams, d) for d in (observed, None))
    assert found.token_ids == plain.token_ids and observed.proposals > 3


# 5. What was saved is what is loaded.


@pytest.fixture
def folder(recipe: Recipe, target: Target, drafter: Any, tmp_path: Path) -> Path:
    described = native.Export(
        name="some", model=recipe.model, target={"name": target.name, "fingerprint": target.fingerprint, "load": {}},
        num_speculative_tokens=4, provenance={},
    )  # fmt: skip
    native.save(drafter, described, drafter.vocab, tmp_path / "export", "card")
    return tmp_path / "export"


def test_5_a_reloaded_drafter_proposes_the_same(folder: Path, target: Target, drafter: Any, start: Any) -> None:
    torch.manual_seed(99)  # nothing may come from what the new object starts with
    loaded = native.load(folder, target)
    assert loaded.vocab.size == drafter.vocab.size
    for sampling in (GREEDY, SAMPLED):
        logits, tokens = [], []
        for current in (drafter, loaded):
            with recorded_logits(current) as found:
                tokens.append(generate(target, start, DecodeSettings(8, 4, sampling), current).token_ids)
            logits.append(found)
        assert tokens[0] == tokens[1]
        assert len(logits[0]) == len(logits[1])
        assert logits[0] or not hasattr(drafter, "logits")  # then it drafts from them
        assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))


def test_5_every_tensor_is_wanted_and_every_parameter_filled(folder: Path, target: Target, drafter: Any) -> None:
    path = folder / "model.safetensors"
    saved = load_file(path)
    assert saved.keys() == drafter.state_dict().keys() | ({"d2t"} if drafter.vocab.reduced else set())
    for name, tensor in saved.items():
        others = {k: t for k, t in saved.items() if k != name}
        broken = {
            "missing": others,
            "renamed": others | {f"{name}_": tensor},
            "unknown": saved | {f"{name}_": tensor.clone()},
            "shape": others | {name: torch.cat([tensor, tensor])},
        }
        if tensor.is_floating_point():
            bad = tensor.clone()
            bad.view(-1)[-1] = float("nan")
            broken["nan"] = others | {name: bad}
        if tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1]:
            broken["transposed"] = others | {name: tensor.t().contiguous()}
        for what, tensors in broken.items():
            save_file(tensors, path)
            with pytest.raises(UserError) as error:
                native.load(folder, target)
            assert name in str(error.value), what
            if what == "unknown" or (what == "renamed" and name != "d2t"):
                assert f"{name}_" in str(error.value)


# 6. A drafter can memorise.


def test_6_a_trained_drafter_is_accepted_on_what_it_was_trained_on(trained: Trained) -> None:
    assert trained.acceptance_rate > LEAST_ACCEPTANCE, f"{trained.acceptance_rate:.3f} after {trained.steps} steps"
