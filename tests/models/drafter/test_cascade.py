"""Cascades of real drafters: what each stage is told, what comes out, and what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.drafter.cascade import CascadeDrafter
from models.drafter.prompt_lookup import PromptLookupDrafter
from models.errors import UserError
from models.sampling import RequestRandom, SamplingParams, probabilities
from models.target import Target
from models.types import Draft, TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import (
    EXACT,
    LEAST_P_VALUE,
    Proposal,
    check_fresh,
    five_token_target,
    generate_observed,
    prompts,
    sampled_p_value,
    shaken,
)
from tests.helpers.scripted import ScriptedDrafter, ScriptedState, knows

CASCADE = "models.drafter.cascade.CascadeDrafter"
EAGLE = {"_target_": "models.drafter.eagle.EagleDrafter"}
LM = {"_target_": "models.drafter.draft_lm.DraftLM", "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2,
      "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
LOOKUP = {"_target_": "models.drafter.prompt_lookup.PromptLookupDrafter"}
SUFFIX = {"_target_": "models.drafter.suffix.SuffixDrafter", "length_factor": 1.0}
HYBRID = {"_target_": "models.drafter.hybrid.HybridDrafter", "neural": LM}
LOOKUP_CACHE = {"_target_": "models.drafter.lookup_cache.LookupCacheDrafter", "ngrams": [3, 2, 1]}
INNER = {"_target_": CASCADE, "first": LOOKUP, "second": LM, "num_checked": 1}
TRUSTS = [{}, {"num_checked": 0}, {"num_checked": 1}, {"trusted_match": 2}, {"trusted_match": 2, "num_own": 1}]
LENGTHS = [9, 1, 20, 31, 4, 3]
GREEDY, SAMPLED, FILTERED = SamplingParams(), SamplingParams(1.0), SamplingParams(0.7, top_k=3, top_p=0.9)
PAIRS = {
    "look-up, eagle": (LOOKUP, EAGLE),
    "suffix, draft_lm": (SUFFIX, LM),
    "draft_lm, eagle": (LM, EAGLE),
    "eagle, draft_lm": (EAGLE, LM),
    "hybrid, eagle": (HYBRID, EAGLE),
    "cascade, eagle": (INNER, EAGLE),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return five_token_target()


def build(target: Target, pair: tuple[Any, Any], *, vocab: Tensor | None = None, **options: Any) -> CascadeDrafter:
    torch.manual_seed(0)
    model = {"_target_": CASCADE, "first": pair[0], "second": pair[1]} | options
    drafter: CascadeDrafter = shaken(native.build(model, target, DraftVocab(5, vocab)), amount=0.3)
    return drafter


def check_second_law(drafter: Any, proposal: Proposal) -> None:
    """Where all is checked, the laws are those of the second drafter's `unroll` behind the draft so far."""
    draft, history, second = proposal.draft, proposal.history, drafter.second
    assert (draft.parents == torch.arange(draft.token_ids.shape[1]) - 1).all()
    features, last = history.features(draft.token_ids)
    if features.hidden is not None:
        features = drafter._read_by(1, features)
    rows = torch.arange(len(last))
    for step, hidden in enumerate(second.unroll(features, draft.token_ids.shape[1])):
        logits = second.logits(hidden[rows, last])
        for row in range(len(last)):
            if draft.lengths is not None and step >= draft.lengths[row]:
                continue
            if proposal.sampling.greedy:
                assert draft.token_ids[row, step] == second.vocab.to_target(logits[row].argmax())
            else:
                law = second.vocab.widen(probabilities(logits[row], proposal.sampling))
                torch.testing.assert_close(draft.probs[row, step], law, **EXACT)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("pair", ["look-up, eagle", "suffix, draft_lm", "draft_lm, eagle", "eagle, draft_lm"])
@pytest.mark.parametrize("vocab", [None, torch.tensor([0, 2, 3])], ids=["full", "reduced"])
def test_a_checked_draft_has_the_second_drafters_laws(
    vocab: Tensor | None, pair: str, sampling: SamplingParams, target: Target
) -> None:
    """Through rounds that accept a part of it; states stay what a fresh one would hold; up to the context's end."""
    drafter = build(target, PAIRS[pair], vocab=vocab)
    settings = DecodeSettings(1000, 3, sampling, frozenset())
    start = prompts(LENGTHS, 5, seed=1)
    made, seen = generate_observed(target, drafter, start, settings, [check_second_law, check_fresh])
    assert seen.proposals > 5 and seen.committed_counts >= {1, 2}
    if sampling.greedy:
        assert made.token_ids == generate(target, start, settings).token_ids


@pytest.mark.parametrize("sampling", [SAMPLED, FILTERED], ids=["sampled", "filtered"])
@pytest.mark.parametrize("trust", TRUSTS, ids=str)
@pytest.mark.parametrize("pair", ["look-up, eagle", "draft_lm, eagle"])
def test_the_targets_law_comes_out(pair: str, trust: dict[str, int], sampling: SamplingParams, target: Target) -> None:
    drafter = build(target, PAIRS[pair], **trust)
    assert sampled_p_value(target, drafter, sampling) > LEAST_P_VALUE


@pytest.mark.parametrize("trust", TRUSTS[2:], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_trusting_is_lossless_in_a_batch_as_alone(pair: str, trust: dict[str, int], target: Target) -> None:
    """Greedy output is plain decoding's; a request's drafts are the same in any batch, whenever rows are read."""
    drafter = build(target, PAIRS[pair], **trust)
    start = prompts(LENGTHS, 5, seed=2)
    for sampling in (GREEDY, SAMPLED):
        settings = DecodeSettings(1000, 4, sampling, frozenset())
        together, seen = generate_observed(target, drafter, start, settings, [check_fresh])
        assert seen.proposals > 5
        if sampling.greedy:
            assert together.token_ids == generate(target, start, settings).token_ids
            continue
        for index, prompt in enumerate(start):
            alone = generate(target, [prompt], settings, drafter, seeds=[index])
            assert alone.token_ids[0] == together.token_ids[index]
            assert (alone.stats.drafted[0] == together.stats.drafted[index]).all()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("first", [LOOKUP, SUFFIX, LOOKUP_CACHE], ids=["look-up", "suffix", "look-up cache"])
def test_long_matches_are_trusted_and_short_ones_checked(
    first: dict[str, Any], sampling: SamplingParams, target: Target
) -> None:
    """Row by row the draft is that of a cascade which trusts everything, or one which checks everything."""
    texts = [[1, 2, 3, 4, 1, 2, 3], [0, 1, 2, 4, 3, 1, 2], [4, 3, 1, 0, 2, 0, 3], [0, 0, 1, 1, 2, 2, 3]]
    matched = [3, 2, 1, 0]  # tokens of the longest ending that came before
    ids = torch.tensor(texts)
    cases = {"mixed": {"trusted_match": 2}, "all": {"num_checked": 0}, "none": {}}
    made = {}
    for name, options in cases.items():
        drafter = build(target, (first, EAGLE), **options)
        hidden = target(ids, capture_layers=drafter.capture_layers).hidden
        made[name] = drafter.propose(
            drafter.new_state(4, 16),
            TargetFeatures(ids[:, :-1], ids[:, 1:], None if hidden is None else hidden[:, :-1], torch.full((4,), 6)),
            num_speculative_tokens=3,
            sampling=sampling,
            random=RequestRandom([1, 2, 3, 4], 3),
        )
    for row, length in enumerate(matched):
        expected = made["all" if length >= 2 else "none"]
        assert torch.equal(made["mixed"].token_ids[row], expected.token_ids[row])
        if not sampling.greedy:
            assert torch.equal(made["mixed"].probs[row], expected.probs[row])
    assert not torch.equal(made["all"].token_ids[:3], made["none"].token_ids[:3])


def put_first(drafter: Any, first: Any) -> None:
    del drafter.first  # a module; what comes is none
    drafter.first = first


class Silent(ScriptedDrafter):
    """Has nothing to say."""

    def propose(self, state: ScriptedState, committed: Any, **options: Any) -> Draft:
        nothing = super().propose(state, committed, **(options | {"num_speculative_tokens": 0})).token_ids.long()
        return Draft(nothing, nothing, None, torch.zeros(len(nothing), dtype=torch.int64))


@pytest.mark.parametrize("second", [EAGLE, LM], ids=["eagle", "draft_lm"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_behind_a_silent_drafter_the_second_drafts_its_own_chain(
    sampling: SamplingParams, second: dict[str, Any], target: Target
) -> None:
    """Token for token, with the same random numbers."""
    drafter = build(target, (LOOKUP, second), num_checked=1)
    put_first(drafter, Silent(lambda text: 0))
    ids = torch.tensor(prompts([8, 8, 8], 5))
    with torch.no_grad():
        hidden = target(ids, capture_layers=drafter.capture_layers).hidden
        committed = TargetFeatures(
            ids[:, :-1], ids[:, 1:], None if hidden is None else hidden[:, :-1], torch.tensor([7, 3, 5])
        )
        made = [
            d.propose(
                d.new_state(3, 16), committed, num_speculative_tokens=4, sampling=sampling,
                random=RequestRandom([1, 2, 3], 4),
            )
            for d in (drafter, drafter.second)
        ]  # fmt: skip
    assert torch.equal(made[0].token_ids, made[1].token_ids)
    if not sampling.greedy:
        torch.testing.assert_close(made[0].probs, made[1].probs, atol=0, rtol=0)


def test_a_sure_first_drafter_is_handed_on_whole(target: Target) -> None:
    """Trusted tokens are tested by the target alone; where it knows the answer, all are accepted."""
    start = prompts([6, 3], 5, seed=3)
    settings = DecodeSettings(13, 4, stop_token_ids=frozenset())
    plain = generate(target, start, settings).token_ids
    drafter = build(target, (LOOKUP, EAGLE), num_checked=0)
    put_first(drafter, ScriptedDrafter(knows(start, plain)))
    made = generate(target, start, settings, drafter)
    assert made.token_ids == plain
    assert made.stats.acceptance_rate == 1 and made.stats.rounds.tolist() == [3, 3]


def test_each_stage_reads_its_own_layers(target: Target) -> None:
    """The union is captured once, and each stage gets its layers in its own order."""

    class ReadsThreeAndOne(CascadeDrafter):
        """As if the first drafter's layers were these."""

        def __init__(self, target: Target, vocab: DraftVocab) -> None:
            with mock.patch.object(PromptLookupDrafter, "capture_layers", (3, 1), create=True):
                super().__init__(target, vocab, first=LOOKUP, second=EAGLE)

    with mock.patch.object(PromptLookupDrafter, "__setattr__", skip_capture_layers):
        drafter = ReadsThreeAndOne(target, DraftVocab(5))
    assert drafter.capture_layers == (1, 3, 4)
    ids = torch.tensor(prompts([6, 6], 5))
    with torch.no_grad():
        hidden, *captured = [target(ids, capture_layers=layers).hidden for layers in ((1, 3, 4), (3, 1), (4,))]
    features = TargetFeatures(ids, ids, hidden, torch.tensor([6, 6]))
    for stage, expected in enumerate(captured):
        assert torch.equal(drafter._read_by(stage, features).hidden, expected)
    plain = build(target, (LOOKUP, EAGLE))
    assert plain.capture_layers == (target.num_layers,) and plain._read_by(0, features).hidden is None


def skip_capture_layers(module: torch.nn.Module, name: str, value: Any) -> None:
    if name != "capture_layers":
        torch.nn.Module.__setattr__(module, name, value)


def described(target: Target, model: dict[str, Any]) -> native.Export:
    return native.Export("some", model, {"name": "t", "fingerprint": target.fingerprint, "load": {}}, 4, {})


@pytest.mark.parametrize("num_checked", [None, 1])
@pytest.mark.parametrize("vocabs", [(None, [0, 2, 3]), ([1, 2], [0, 2, 3]), ([1, 2], None)], ids=str)
def test_exports_are_put_together_and_exported_whole(
    vocabs: tuple[Any, Any], num_checked: int | None, target: Target, tmp_path: Path
) -> None:
    """Each stage keeps its own vocabulary; the folders of the stages are needed no more."""
    for name, model, ids in (("first", LM, vocabs[0]), ("second", EAGLE, vocabs[1])):
        vocab = DraftVocab(5, None if ids is None else torch.tensor(ids))
        stage = shaken(native.build(model, target, vocab), amount=0.3)
        native.save(stage, described(target, model), stage.vocab, tmp_path / name, "card")
    model = {"_target_": CASCADE, "first_export": str(tmp_path / "first"), "second_export": str(tmp_path / "second"),
             "num_checked": num_checked}  # fmt: skip
    drafter = native.build(model, target, DraftVocab(5))
    assert drafter.pretrained
    native.save(drafter, described(target, model), drafter.vocab, tmp_path / "whole", "card")
    for file in [*(tmp_path / "first").iterdir(), *(tmp_path / "second").iterdir()]:
        file.unlink()
    torch.manual_seed(9)
    loaded = native.load(tmp_path / "whole", target)
    ids = [[0, 1, 2, 3, 4] if ids is None else ids for ids in vocabs]
    proposes = ids[1] if num_checked is None else sorted({*ids[0], *ids[1]})
    for one in (drafter, loaded):
        assert one.vocab.to_target(torch.arange(one.vocab.size)).tolist() == proposes
        assert [stage.vocab.size for stage in (one.first, one.second)] == [len(ids[0]), len(ids[1])]
    start = prompts([5, 2, 3], 5)
    for sampling in (GREEDY, SAMPLED):
        settings = DecodeSettings(20, 4, sampling, frozenset())
        made = [generate(target, start, settings, d) for d in (drafter, loaded)]
        assert made[0].token_ids == made[1].token_ids
        assert made[0].stats.expected.tolist() == made[1].stats.expected.tolist()


def test_what_a_first_stage_counted_is_exported(target: Target, tmp_path: Path) -> None:
    model = {"_target_": CASCADE, "first": SUFFIX, "second": EAGLE}
    drafter = shaken(native.build(model, target, DraftVocab(5)))
    drafter.first.count(prompts([20, 20], 5))
    native.save(drafter, described(target, model), drafter.vocab, tmp_path / "export", "card")
    loaded = native.load(tmp_path / "export", target)
    assert loaded.first.export_arguments == drafter.first.export_arguments
    assert loaded.first.export_arguments["num_states"] > 10
    assert not drafter.pretrained  # its EAGLE has random weights


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"first": LOOKUP, "second": EAGLE, "num_checked": -1}, "num_checked is -1: it must be 0 or more"),
        ({"first": LOOKUP, "second": EAGLE, "trusted_match": 0}, "trusted_match is 0: it must be 1 or more"),
        ({"first": LOOKUP, "second": EAGLE, "num_own": 0}, "num_own is 0: it must be 1 or more"),
        ({"second": EAGLE}, "The cascade has no first drafter: give drafter.model.first_export"),
        ({"first": LOOKUP}, "The cascade has no second drafter"),
        ({"first": EAGLE, "second": LOOKUP}, "PromptLookupDrafter cannot check another"),
        ({"first": {"_target_": "models.drafter.lookahead.LookaheadDrafter"}, "second": EAGLE}, "cannot be checked"),
        ({"first": EAGLE | {"layers": 2}, "second": EAGLE}, "takes no argument 'layers'"),
        ({"first": LOOKUP, "second_export": "nowhere"}, "'nowhere' is not an export"),
    ],
)
def test_senseless_options_are_refused(arguments: dict[str, Any], sentence: str, target: Target) -> None:
    with pytest.raises(UserError, match=sentence):
        native.build({"_target_": CASCADE} | arguments, target, DraftVocab(5))
