"""Every policy in the decode loop: the output is the target's own, lengths are each request's, and no row is missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

import engine.loop
import models.chain_drafting
from engine.draft_length import Confidence, CostAware, DraftLength, Entropy, Fallback, Fixed, Learnt, Lengths, Window
from engine.loop import generate
from engine.settings import DecodeSettings
from engine.verify import verify_block, verify_chain
from models.checkpoint import native
from models.drafter.draft_length import DraftLengthDrafter
from models.drafter.eagle import EagleDrafter
from models.sampling import RequestRandom, SamplingParams
from models.target import Target
from models.types import TargetFeatures
from models.unread import Unread
from models.vocab import DraftVocab
from tests.helpers.drafters import (
    LEAST_P_VALUE,
    Observed,
    check_fresh,
    five_token_target,
    prompts,
    sampled_p_value,
    shaken,
    tiny_target,
)
from tests.helpers.laws import random_laws
from tests.helpers.verdicts import Drafts, emitted_by, enumerate_drafts, off_by

LENGTHS = [9, 1, 20, 31, 4, 3, 14, 6]
SAMPLED = SamplingParams(1.0)
EAGLE = {"_target_": "models.drafter.eagle.EagleDrafter"}


@dataclass(frozen=True)
class EveryThird(DraftLength):
    """Drafts in every third round of the run, and some requests not even then."""

    name: ClassVar[str] = "every_third"

    def start(self, num_requests: int, most: int, drafter: Any) -> Lengths:
        return _EveryThirdLengths()


class _EveryThirdLengths(Lengths):
    rounds = 0

    def ask(self, requests: list[int], limits: list[int]) -> list[int]:
        self.rounds += 1
        drafts = self.rounds % 3 == 1
        return [limit if drafts and (r + self.rounds) % 4 else 0 for r, limit in zip(requests, limits, strict=True)]


def policies() -> list[DraftLength]:
    """One of each, with settings that five tokens of random laws bring to every decision."""
    return [
        Fixed(),
        Window(rounds=1),
        Fallback(patience=1, rest=2),
        Confidence(token=0.5),
        Confidence(token=0.0, chain=0.25),
        Entropy(most=1.2),
        CostAware(cost=0.3, memory=0.9),
        CostAware(),
        Learnt(),
        EveryThird(),
    ]


@pytest.fixture(scope="module")
def small() -> Target:
    return five_token_target()


@pytest.fixture(scope="module")
def drafter(small: Target) -> DraftLengthDrafter:
    torch.manual_seed(0)
    drafter: DraftLengthDrafter = shaken(DraftLengthDrafter(small, DraftVocab(5), neural=EAGLE))
    drafter.length_predictor.layers[-1].weight.data *= 20  # else it says the same of all
    return drafter


@pytest.mark.parametrize("policy", policies(), ids=repr)
def test_greedy_is_plain_decoding(policy: DraftLength, small: Target, drafter: Any) -> None:
    for batch_size in (1, 3, 8):
        start = prompts(LENGTHS, 5, seed=1)[:batch_size]
        settings = DecodeSettings(1000, 5, stop_token_ids=frozenset(), draft_length=policy)
        plain = generate(small, start, settings).token_ids
        for _ in range(2):  # the second time with what the first has taught
            made = generate(small, start, settings, drafter)
            assert made.token_ids == plain
            assert (made.stats.tested <= made.stats.drafted).all()
            assert (made.stats.accepted <= made.stats.tested).all()
            assert made.stats.emitted.sum() == sum(len(answer) - 1 for answer in plain)


def test_each_policy_drafts_in_its_own_way(small: Target, drafter: Any) -> None:
    """Else the tests of this file would say nothing: drafts of several lengths, and fewer tokens than fixed ones."""
    start = prompts(LENGTHS, 5, seed=1)
    settings = DecodeSettings(1000, 5, stop_token_ids=frozenset())
    most = generate(small, start, replace(settings, draft_length=Fixed()), drafter).stats.drafts
    for policy in policies()[1:]:
        drafts = generate(small, start, replace(settings, draft_length=policy), drafter).stats.drafts
        shares = drafts.sum(0) / most.sum(0)
        assert shares[-1] < shares[0] * 0.95 or policy.name in ("fallback", "every_third", "cost_aware"), policy
        assert 0 < drafts.sum() < 0.95 * most.sum(), policy


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("policy", policies(), ids=repr)
def test_the_sampled_joint_law_is_the_targets(
    policy: DraftLength, verification: str, small: Target, drafter: Any
) -> None:
    p_value = sampled_p_value(small, drafter, SAMPLED, 3000, draft_length=policy, verification=verification)
    assert p_value > LEAST_P_VALUE


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", [p for p in policies() if p.name not in ("cost_aware", "every_third")], ids=repr)
def test_a_request_is_answered_in_a_batch_as_alone(
    policy: DraftLength, sampling: SamplingParams, small: Target, drafter: Any
) -> None:
    start = prompts(LENGTHS, 5, seed=1)
    settings = DecodeSettings(1000, 5, sampling, frozenset(), draft_length=policy)
    together = generate(small, start, settings, drafter)
    for index, prompt in enumerate(start):
        alone = generate(small, [prompt], settings, drafter, seeds=[index])
        assert alone.token_ids[0] == together.token_ids[index]
        assert (alone.stats.drafted[0] == together.stats.drafted[index]).all()


def test_streams_of_requests_that_rest_stand_still(small: Target, drafter: Any) -> None:
    """The same in a batch as alone was due to this."""
    start = prompts(LENGTHS, 5, seed=1)
    settings = DecodeSettings(1000, 5, SAMPLED, frozenset(), draft_length=Fallback(patience=1, rest=1))
    alone = [generate(small, [prompt], settings, drafter, seeds=[i]).token_ids[0] for i, prompt in enumerate(start)]
    assert generate(small, start, settings, drafter).token_ids == alone
    with mock.patch.object(RequestRandom, "resting", lambda self, rows: engine.loop.nullcontext()):
        assert generate(small, start, settings, drafter).token_ids != alone


# ---- rounds without a draft: what the drafter has not read meanwhile is not lost ----

DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle": EAGLE,
    "draft_lm": {"_target_": "models.drafter.draft_lm.DraftLM", "num_layers": 1},
    "suffix": {"_target_": "models.drafter.suffix.SuffixDrafter"},
}


def every_third(name: str, target: Target) -> Observed:
    """Greedy rounds with a draft in every third, each draft compared with a fresh state's."""
    start = prompts(LENGTHS, target.vocab_size, seed=1)
    settings = DecodeSettings(1000, 4, stop_token_ids=frozenset(), draft_length=EveryThird())
    plain = generate(target, start, settings).token_ids
    torch.manual_seed(0)
    observed = Observed(
        shaken(native.build(DRAFTERS[name], target, DraftVocab(target.vocab_size))),
        [check_fresh],
        dict(enumerate(zip(start, plain, strict=True))),
    )
    assert generate(target, start, settings, observed).token_ids == plain
    return observed


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_that_is_seldom_asked_drafts_as_a_fresh_one(name: str, target: Target) -> None:
    observed = every_third(name, target)
    assert observed.proposals > 3
    assert {3, 4, 5} <= observed.committed_counts  # a draft's 1 to 5 rows, and two plain ones


@pytest.mark.parametrize("name", DRAFTERS)
def test_lost_rows_are_noticed(name: str, target: Target) -> None:
    def last(self: Unread) -> TargetFeatures:
        parts, self._parts = self._parts, []
        return parts[-1]

    with mock.patch.object(Unread, "take", last), pytest.raises(AssertionError):
        every_third(name, target)


# ---- exactly: every draft of a small vocabulary, cut where the rule says ----


def lengths_by(policy: DraftLength, drafts: Drafts, ended: Any = models.chain_drafting._ended) -> Tensor:
    """Where the policy's rule ends each of the enumerated drafts."""
    count, most = drafts.tokens.shape
    rule: Any = policy.start(count, most, None).rule(list(range(count)), [most] * count)  # type: ignore[arg-type]
    lengths = torch.full((count,), most)
    for depth in range(most):
        draws = rule.draws(drafts.probs[:, depth])
        lengths = ended(lengths, depth, draws, rule.goes_on(drafts.drawn_with[:, depth]))
    return lengths


def chain(verifier: Callable[..., Any]) -> Any:
    return lambda p, tokens, q, parents, limits, uniforms: verifier(p, tokens, q, limits, uniforms)


def discarding(lengths: Tensor, depth: int, draws: Tensor, goes_on: Tensor) -> Tensor:
    """The mistake: the doubtful token itself is left out."""
    return torch.minimum(lengths, torch.where(draws & goes_on, lengths, depth))


RULES = [Confidence(token=0.4), Confidence(token=0.0, chain=0.2), Entropy(most=0.8)]


@pytest.fixture(scope="module")
def enumerated() -> tuple[Any, Drafts]:
    generator = torch.Generator().manual_seed(3)
    laws, drafted = random_laws(3, 4, generator), random_laws(3, 3, generator)
    return laws, enumerate_drafts(laws, drafted, [-1, 0, 1], "independent")


@pytest.mark.parametrize("verifier", [verify_chain, verify_block])
@pytest.mark.parametrize("policy", RULES, ids=repr)
def test_drafts_that_a_rule_ends_are_exact(policy: DraftLength, verifier: Any, enumerated: Any) -> None:
    laws, drafts = enumerated
    lengths = lengths_by(policy, drafts)
    assert len(set(lengths.tolist())) > 2
    options: dict[str, Any] = {"block": verifier is verify_block}
    emitted = emitted_by(laws, drafts, chain(verifier), limits=lambda *_: lengths, **options)
    assert off_by(emitted, laws) < 1e-12


@pytest.mark.parametrize("policy", RULES[:2], ids=repr)
def test_discarding_a_doubtful_token_is_off(policy: DraftLength, enumerated: Any) -> None:
    laws, drafts = enumerated
    lengths = lengths_by(policy, drafts, discarding)
    assert off_by(emitted_by(laws, drafts, chain(verify_chain), limits=lambda *_: lengths), laws) > 1e-3


@pytest.mark.parametrize("policy", [Confidence(token=0.5), Learnt()], ids=repr)
def test_discarding_a_doubtful_token_is_noticed_in_samples(
    policy: DraftLength, small: Target, drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.chain_drafting, "_ended", discarding)
    assert sampled_p_value(small, drafter, SAMPLED, draft_length=policy) < LEAST_P_VALUE


def test_a_law_policy_serves_a_drafter_with_a_reduced_vocabulary(small: Target) -> None:
    torch.manual_seed(1)
    reduced = shaken(EagleDrafter(small, DraftVocab(5, torch.tensor([0, 2, 3]))))
    assert sampled_p_value(small, reduced, SAMPLED, draft_length=Confidence(token=0.6)) > LEAST_P_VALUE
