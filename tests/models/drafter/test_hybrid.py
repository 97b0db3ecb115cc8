"""The hybrid's law against a mixture that is written out, from a search and from the neural drafter's `unroll`.

R drafts, N drafted tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.drafter.hybrid import HybridDrafter, NgramText
from models.errors import UserError
from models.sampling import SamplingParams, probabilities
from models.target import Target
from models.types import Draft, TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import (
    EXACT,
    LEAST_P_VALUE,
    Proposal,
    check_draft,
    check_fresh,
    five_token_target,
    generate_observed,
    prompts,
    sampled_p_value,
    shaken,
)
from tests.helpers.laws import Laws, behind, law_by_loop, random_laws
from tests.helpers.suffixes import longest_continued
from tests.helpers.verdicts import Drafts, bisect, emitted_by, off_by
from tests.models.test_chain_checking import Given, block, token

EAGLE = {"_target_": "models.drafter.eagle.EagleDrafter"}
LM = {"_target_": "models.drafter.draft_lm.DraftLM", "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2,
      "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
LENGTHS = [9, 1, 20, 31, 4, 3]
COUNTED = prompts([15, 15], 5, seed=7)
GREEDY, SAMPLED, FILTERED = SamplingParams(), SamplingParams(1.0), SamplingParams(0.7, top_k=3, top_p=0.9)


@pytest.fixture(scope="module")
def target() -> Target:
    return five_token_target()


def build(
    target: Target,
    neural: dict[str, Any],
    *,
    counted: bool = True,
    vocab: Tensor | None = None,
    drafter_class: type[HybridDrafter] = HybridDrafter,
    **options: Any,
) -> HybridDrafter:
    torch.manual_seed(0)
    drafter = shaken(drafter_class(target, DraftVocab(5, vocab), neural=neural, max_match=3, **options), amount=0.3)
    if counted:
        drafter.count(COUNTED)
    return drafter


def mixed_by_hand(neural: list[float], text: list[int], drafted: list[int], drafter: Any, weight: float) -> list[float]:
    """The mixture over the draft vocabulary at temperature 1."""
    context = text + drafted
    counted = COUNTED if drafter.counted.sizes["num_states"] else []
    own, other = (longest_continued(texts, context, 3) for texts in ([text], counted))
    _, found = other if other[0] > own[0] else own
    known = range(5) if drafter.vocab.token_ids is None else drafter.vocab.token_ids.tolist()
    kept = [found.get(token, 0) for token in known]
    law = law_by_loop(neural)
    if not sum(kept):
        return law
    return [weight * n / sum(kept) + (1 - weight) * p for n, p in zip(kept, law, strict=True)]


def check_mixture(drafter: Any, proposal: Proposal) -> None:
    """Every token is drawn from the mixture of what `unroll` and a search say behind the text and the draft so far."""
    draft, history = proposal.draft, proposal.history
    features, last = history.features(draft.token_ids)
    rows = torch.arange(len(last))
    for step, hidden in enumerate(drafter.neural.unroll(features, draft.token_ids.shape[1])):
        logits = drafter.neural.logits(hidden[rows, last]).tolist()
        for row in range(len(last)):
            if draft.lengths is not None and step >= draft.lengths[row]:
                continue
            text = [*history.token_ids[row], history.pending[row]]
            drafted = draft.token_ids[row, :step].tolist()
            law = torch.tensor(
                mixed_by_hand(logits[row], text, drafted, drafter, drafter._ngram_weight), dtype=torch.float64
            )
            if proposal.sampling.greedy:
                chosen = drafter.vocab.widen(law)[draft.token_ids[row, step]]
                assert float(chosen) == pytest.approx(float(law.max()), abs=1e-9)
            else:
                wide = drafter.vocab.widen(probabilities(law.log(), proposal.sampling))
                torch.testing.assert_close(draft.probs[row, step], wide, **EXACT)


def check_observed(target: Target, drafter: Any, sampling: SamplingParams) -> None:
    settings = DecodeSettings(1000, 3, sampling, frozenset())
    start = prompts(LENGTHS, 5, seed=1)
    checks = [check_draft, check_mixture, check_fresh]
    made, seen = generate_observed(target, drafter, start, settings, checks)
    assert seen.proposals > 5 and seen.committed_counts >= {1, 2, 3}
    if sampling.greedy:
        assert made.token_ids == generate(target, start, settings).token_ids


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("neural", [EAGLE, LM], ids=["eagle", "draft_lm"])
@pytest.mark.parametrize("options", [{}, {"counted": False}, {"vocab": torch.tensor([0, 2, 3])}, {"ngram_weight": 1.0}])
def test_the_law_is_the_mixture_behind_every_token(
    options: dict[str, Any], neural: dict[str, Any], sampling: SamplingParams, target: Target
) -> None:
    check_observed(target, build(target, neural, **options), sampling)


class ReportsTheNeuralLaw(HybridDrafter):
    """Draws from the mixture, and says it drew from the neural drafter."""

    def _mixture(self, logits: Tensor, texts: list[NgramText]) -> Tensor:
        self.said.append(self.vocab.widen(probabilities(logits, SAMPLED)))
        return super()._mixture(logits, texts)

    def propose(self, *args: Any, **options: Any) -> Draft:
        self.said: list[Tensor] = []
        draft = super().propose(*args, **options)
        return replace(draft, probs=None if draft.probs is None else torch.stack(self.said, dim=1))


class NoticesNoDraft(HybridDrafter):
    """The n-grams stay where the committed text ends."""

    def new_state(self, batch_size: int, max_len: int) -> Any:
        state = super().new_state(batch_size, max_len)
        for text in state.texts:
            text.draft = lambda token: None  # type: ignore[method-assign]
        return state


class AlwaysTheOwnText(HybridDrafter):
    def new_state(self, batch_size: int, max_len: int) -> Any:
        state = super().new_state(batch_size, max_len)
        for text in state.texts:
            text._counted = None
        return state


class SwapsTheWeights(HybridDrafter):
    def _mixture(self, logits: Tensor, texts: list[NgramText]) -> Tensor:
        self._ngram_weight = 1 - self._ngram_weight
        mixed = super()._mixture(logits, texts)
        self._ngram_weight = 1 - self._ngram_weight
        return mixed


class MixesFilteredLaws(HybridDrafter):
    """The neural law at its temperature, and the mixture at that temperature again."""

    def _mixture(self, logits: Tensor, texts: list[NgramText]) -> Tensor:
        return super()._mixture(logits / 0.7, texts)


@pytest.mark.parametrize(
    "mutant",
    [ReportsTheNeuralLaw, NoticesNoDraft, AlwaysTheOwnText, SwapsTheWeights, MixesFilteredLaws],
)
def test_the_written_out_mixture_notices_mistakes(mutant: type[HybridDrafter], target: Target) -> None:
    with pytest.raises(AssertionError):
        check_observed(target, build(target, EAGLE, ngram_weight=0.7, drafter_class=mutant), SAMPLED)


# ---- exact enumeration through the verifier ----

TEXT = [0, 1, 2, 0, 1, 3, 0, 1, 4, 2, 0, 1]  # the ending was continued by 2, 3 and 4
DRAWN, RIGHT, SEEN = 2, 1e-12, 1e-3  # tokens; a law that is right, and one that is not


def enumerated(drafter: HybridDrafter, target: Laws, sampling: SamplingParams) -> Drafts:
    """Every draft of N tokens that the drafter makes behind `TEXT`, by bisecting the number that each is drawn with."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(1, len(TEXT) - 1, 16 * len(drafter.capture_layers), generator=generator, dtype=torch.float64)
    ids = torch.tensor([TEXT])
    rows = TargetFeatures(ids[:, :-1], ids[:, 1:], hidden, torch.tensor([len(TEXT) - 1]))

    def propose(draws: Tensor) -> Draft:
        random: Any = Given(draws)
        state, committed = drafter.new_state(len(draws), 40), rows.select([0] * len(draws))
        return drafter.propose(state, committed, num_speculative_tokens=DRAWN, sampling=sampling, random=random)

    draws, weight = torch.full((1, DRAWN), 0.5, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for at in range(DRAWN):
        below = torch.arange(1, 5).repeat(len(draws))

        def lower(u: Tensor, at: int = at, draws: Tensor = draws, below: Tensor = below) -> Tensor:
            tried = draws.repeat_interleave(4, dim=0)
            tried[:, at] = u
            return propose(tried).token_ids[:, at] < below

        edges = bisect(lower, torch.zeros(len(below), dtype=torch.float64)).view(-1, 4)
        edges = torch.nn.functional.pad(torch.nn.functional.pad(edges, (1, 0)), (0, 1), value=1.0)  # (R, V + 1)
        mass = edges.diff(dim=1)
        row, column = (mass > 0).nonzero(as_tuple=True)
        weight, draws = weight[row] * mass[row, column], draws[row]
        draws[:, at] = (edges[row, column] + edges[row, column + 1]) / 2
    draft = propose(draws)
    assert draft.probs is not None and draft.lengths is None
    return Drafts(weight, draft.token_ids, draft.probs, behind(target, draft.token_ids), list(range(-1, DRAWN - 1)))


@pytest.mark.parametrize(
    ("options", "sampling"),
    [({"ngram_weight": 0.8, "vocab": torch.tensor([0, 2, 3])}, SAMPLED), ({}, SamplingParams(1.3, top_k=3))],
    ids=["reduced", "filtered"],
)
def test_what_is_made_of_mixed_drafts_has_exactly_the_targets_law(
    options: dict[str, Any], sampling: SamplingParams, target: Target
) -> None:
    """The drafter itself is enumerated, the verifier with it, and the target's laws are any."""
    laws = random_laws(5, DRAWN + 1, torch.Generator().manual_seed(2))
    drafts = enumerated(build(target, EAGLE, **options), laws, sampling)
    assert len(drafts.weight) >= 9 and float(drafts.weight.sum()) == pytest.approx(1)
    torch.testing.assert_close(drafts.drawn_with.prod(1), drafts.weight, **EXACT)
    assert off_by(emitted_by(laws, drafts, token), laws) < RIGHT
    assert off_by(emitted_by(laws, drafts, block, block=True), laws) < RIGHT


def test_enumeration_sees_another_law_than_the_mixture(target: Target) -> None:
    """Scored with the neural law, what was drawn from the mixture changes what comes out."""
    laws = random_laws(5, DRAWN + 1, torch.Generator().manual_seed(2))
    drafts = enumerated(build(target, EAGLE, drafter_class=ReportsTheNeuralLaw), laws, SAMPLED)
    assert off_by(emitted_by(laws, drafts, token), laws) > SEEN


@pytest.mark.parametrize("sampling", [SAMPLED, FILTERED])
@pytest.mark.parametrize("neural", [EAGLE, LM], ids=["eagle", "draft_lm"])
def test_counted_hybrids_keep_the_law(neural: dict[str, Any], sampling: SamplingParams, target: Target) -> None:
    assert sampled_p_value(target, build(target, neural), sampling) > LEAST_P_VALUE


def test_a_hybrid_that_reports_the_neural_law_changes_what_comes_out(target: Target) -> None:
    drafter = build(target, EAGLE, ngram_weight=0.7, drafter_class=ReportsTheNeuralLaw)
    assert sampled_p_value(target, drafter, SAMPLED) < LEAST_P_VALUE


def test_a_weight_of_nothing_is_the_neural_drafter(target: Target) -> None:
    settings = DecodeSettings(25, 4, SAMPLED, frozenset())
    drafter = build(target, EAGLE, ngram_weight=0.0)
    start = prompts([5, 2, 3], 5)
    ours, theirs = (generate(target, start, settings, d) for d in (drafter, drafter.neural))
    assert ours.token_ids == theirs.token_ids
    assert ours.stats.accepted.tolist() == theirs.stats.accepted.tolist()


def described(target: Target, model: dict[str, Any]) -> native.Export:
    return native.Export("some", model, {"name": "t", "fingerprint": target.fingerprint, "load": {}}, 4, {})


@pytest.mark.parametrize("vocab", [None, torch.tensor([0, 2, 3])], ids=["full", "reduced"])
@pytest.mark.parametrize("neural", [EAGLE, LM], ids=["eagle", "draft_lm"])
def test_an_export_is_mixed_and_exported_whole(
    neural: dict[str, Any], vocab: Tensor | None, target: Target, tmp_path: Path
) -> None:
    """The hybrid of an export needs that folder no more once it is exported itself."""
    inner = build(target, neural, vocab=vocab).neural
    native.save(inner, described(target, neural), inner.vocab, tmp_path / "inner", "card")
    model = {"_target_": "models.drafter.hybrid.HybridDrafter", "export": str(tmp_path / "inner"), "neural": EAGLE}
    drafter = native.build(model, target, DraftVocab(5))
    assert drafter.pretrained and drafter.vocab.size == inner.vocab.size
    drafter.count(COUNTED)
    native.save(drafter, described(target, model), drafter.vocab, tmp_path / "outer", "card")
    for file in (tmp_path / "inner").iterdir():
        file.unlink()
    torch.manual_seed(9)
    loaded = native.load(tmp_path / "outer", target)
    assert loaded.capture_layers == inner.capture_layers and loaded.export_arguments == drafter.export_arguments
    start = prompts([5, 2, 3], 5)
    for sampling in (GREEDY, SAMPLED):
        settings = DecodeSettings(20, 4, sampling, frozenset())
        made = [generate(target, start, settings, d) for d in (drafter, loaded)]
        assert made[0].token_ids == made[1].token_ids
        assert made[0].stats.accepted.tolist() == made[1].stats.accepted.tolist()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"neural": EAGLE, "ngram_weight": 1.5}, r"ngram_weight is 1.5: it must lie in \[0, 1\]"),
        ({}, "The hybrid has no neural drafter"),
        ({"neural": EAGLE, "max_match": 0}, "max_match is 0"),
        ({"neural": {"_target_": "models.drafter.suffix.SuffixDrafter"}}, "SuffixDrafter cannot be mixed"),
        ({"neural": EAGLE | {"layers": 2}}, "takes no argument 'layers'"),
        ({"export": "nowhere"}, "'nowhere' is not an export"),
    ],
)
def test_senseless_options_are_refused(arguments: dict[str, Any], sentence: str, target: Target) -> None:
    with pytest.raises(UserError, match=sentence):
        native.build({"_target_": "models.drafter.hybrid.HybridDrafter"} | arguments, target, DraftVocab(5))
