"""The joint law of sampled tokens through the whole engine, against the target's own, enumerated; what breaks it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import engine.choose
import engine.loop
from engine.loop import Generation, generate
from engine.settings import DecodeSettings
from engine.verify import Verdict, acceptance_probabilities, verify_chain
from models.drafter.eagle import EagleDrafter
from models.sampling import RequestRandom, SamplingParams, draw, probabilities
from models.target import Target
from models.tree import chain_parents
from models.types import Draft, TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.laws import chi_square_p_value, joint_law, law_by_loop
from tests.helpers.models import random_target
from tests.helpers.scripted import ScriptedDrafter, ScriptedState

VOCAB = 6
PROMPTS = [[1, 2, 3, 4, 5], [0, 3]]
REPEATS = 2000
LENGTH = 4  # tokens whose joint law is enumerated
PLAIN = SamplingParams(1.0)
FILTERED = SamplingParams(0.7, top_k=4, top_p=0.9)
SETTINGS = DecodeSettings(6, 3, stop_token_ids=frozenset(), sampling=PLAIN)


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
    )


@pytest.fixture(scope="module")
def drafters(target: Target) -> dict[str, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        eagle = EagleDrafter(target, DraftVocab(VOCAB)).eval()
        reduced = EagleDrafter(target, DraftVocab(VOCAB, torch.tensor([0, 2, 3, 5]))).eval()
    return {
        "none": None,
        "eagle": eagle,
        "eagle, reduced vocabulary": reduced,
        "deterministic": ScriptedDrafter(lambda text: (3, 2)[(len(text) + text[-1]) % 2]),
    }


@pytest.fixture(scope="module")
def laws(target: Target) -> dict[tuple[int, SamplingParams], Tensor]:
    """The target's joint law of LENGTH tokens behind each prompt: whole forward passes, no cache, a loop's warp."""
    found = {}
    for index, sampling in itertools.product(range(len(PROMPTS)), (PLAIN, FILTERED)):
        conditional = []
        for n in range(LENGTH):
            prefixes = torch.tensor(list(itertools.product(range(VOCAB), repeat=n)), dtype=torch.int64)
            ids = torch.cat([torch.tensor([PROMPTS[index]]).expand(VOCAB**n, -1), prefixes.view(VOCAB**n, n)], dim=1)
            logits = target.model(ids).logits[:, -1].tolist()
            rows = [law_by_loop(row, sampling.temperature, sampling.top_k, sampling.top_p) for row in logits]
            conditional.append(torch.tensor(rows, dtype=torch.float64).view((VOCAB,) * (n + 1)))
        found[index, sampling] = joint_law(conditional)
    return found


def sample(target: Target, drafter: Any, sampling: SamplingParams) -> Generation:
    """Each prompt REPEATS times, in one ragged batch."""
    return generate(target, PROMPTS * REPEATS, replace(SETTINGS, sampling=sampling), drafter)


def smallest_p_value(
    made: Generation, laws: dict[tuple[int, SamplingParams], Tensor], sampling: SamplingParams
) -> float:
    """Of chi-square tests of tokens 1 to 3, 2 to 4, and 1 and 2, behind each prompt."""
    values = []
    for index in range(len(PROMPTS)):
        tokens = np.array(made.token_ids[index :: len(PROMPTS)])[:, :LENGTH]
        assert tokens.shape == (REPEATS, LENGTH)
        counts = np.zeros((VOCAB,) * LENGTH)
        np.add.at(counts, tuple(tokens.T), 1)
        law = laws[index, sampling].numpy()
        values += [chi_square_p_value(counts.sum(axes), law.sum(axes)) for axes in ((3,), (0,), (2, 3))]
    return min(values)


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["temperature 1", "filtered"])
@pytest.mark.parametrize("name", ["none", "eagle", "eagle, reduced vocabulary", "deterministic"])
def test_sampled_tokens_have_the_targets_joint_law(
    target: Target,
    drafters: dict[str, Any],
    laws: dict[tuple[int, SamplingParams], Tensor],
    name: str,
    sampling: SamplingParams,
) -> None:
    made = sample(target, drafters[name], sampling)
    assert smallest_p_value(made, laws, sampling) > 1e-3
    stats = made.stats
    if name != "none":
        assert 0.1 < stats.acceptance_rate < 0.9  # both acceptance and correction were at work
        # Given its chance a token is accepted or not: the sum of the differences has a variance of at most 1/4 each.
        assert abs(stats.accepted.sum() - stats.expected.sum()) < 4 * (stats.tested.sum() / 4) ** 0.5


# ---- what the statistic must see ----

VerifyChain = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor], Verdict]


def told(change: Callable[[Tensor], Tensor]) -> VerifyChain:
    """Verify against changed draft laws."""

    def verify(p: Tensor, tokens: Tensor, q: Tensor | None, limits: Tensor, uniforms: Tensor) -> Verdict:
        if q is None:  # nothing was drafted
            return verify_chain(p, tokens, q, limits, uniforms)
        changed = change(q)
        return verify_chain(p, tokens, changed / changed.sum(-1, keepdim=True), limits, uniforms)

    return verify


def correction_from_the_target(
    p: Tensor, tokens: Tensor, q: Tensor | None, limits: Tensor, uniforms: Tensor
) -> Verdict:
    verdict = verify_chain(p, tokens, q, limits, uniforms)
    return replace(verdict, extra_token=draw(p[torch.arange(len(p)), verdict.accepted], uniforms[:, 0]))


def bonus_for_a_correction(p: Tensor, tokens: Tensor, q: Tensor | None, limits: Tensor, uniforms: Tensor) -> Verdict:
    verdict = verify_chain(p, tokens, q, limits, uniforms)
    bonus = draw(p[torch.arange(len(p)), limits], uniforms[:, 0])
    return replace(verdict, extra_token=bonus)


def accepted_at_the_next_position(
    p: Tensor, tokens: Tensor, q: Tensor | None, limits: Tensor, uniforms: Tensor
) -> Verdict:
    accept = uniforms[:, 1:] < acceptance_probabilities(p.roll(-1, dims=1), tokens, q)
    # Numbers that make the real function accept just those.
    return verify_chain(p, tokens, q, limits, torch.cat([uniforms[:, :1], (~accept).double()], dim=1))


def doubtful_tokens_discarded(p: Tensor, tokens: Tensor, q: Tensor | None, limits: Tensor, uniforms: Tensor) -> Verdict:
    if q is None:  # nothing was drafted
        return verify_chain(p, tokens, q, limits, uniforms)
    doubtful = q.gather(2, tokens[..., None]).squeeze(2) < 0.3
    doubtful = torch.cat([doubtful, torch.ones_like(doubtful[:, :1])], dim=1)
    return verify_chain(p, tokens, q, torch.minimum(limits, doubtful.int().argmax(1)), uniforms)


MISTAKES = {
    "q at another temperature": told(lambda q: q**2),
    "q is 1 / V": told(torch.ones_like),
    "q of other weights than those that drafted": told(lambda q: q + 0.5 * q.roll(1, dims=-1)),
    "correction from p": correction_from_the_target,
    "bonus for a correction": bonus_for_a_correction,
    "accepted one position too late": accepted_at_the_next_position,
    "a doubtful token discarded": doubtful_tokens_discarded,
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_the_statistic_rejects_every_known_mistake(
    target: Target,
    drafters: dict[str, Any],
    laws: dict[tuple[int, SamplingParams], Tensor],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine.choose, "verify_chain", MISTAKES[name])
    assert smallest_p_value(sample(target, drafters["eagle"], PLAIN), laws, PLAIN) < 1e-6


def test_the_statistic_rejects_checking_with_the_numbers_that_drafted(
    target: Target,
    drafters: dict[str, Any],
    laws: dict[tuple[int, SamplingParams], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def one_stream(seeds: list[int], block: int, purpose: int, device: torch.device) -> RequestRandom:
        return RequestRandom(seeds, block, 0, device)

    monkeypatch.setattr(engine.loop, "RequestRandom", one_stream)
    assert smallest_p_value(sample(target, drafters["eagle"], PLAIN), laws, PLAIN) < 1e-6


# ---- the p that drafts are checked against ----


class SelfDrafter(ScriptedDrafter):
    """Draws drafts from the target's own law, computed from the whole text every time."""

    def __init__(self, target: Target) -> None:
        super().__init__(lambda text: 0)
        self.target = target

    def propose(
        self,
        state: ScriptedState,
        committed: TargetFeatures,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams,
        random: RequestRandom,
    ) -> Draft:
        super().propose(state, committed, num_speculative_tokens=0, sampling=sampling, random=random)
        uniforms = random.uniform(num_speculative_tokens)
        drafts, laws = [], []
        for row, text in enumerate(state.texts):
            drafted: list[int] = []
            for depth in range(num_speculative_tokens):
                logits = self.target.model(torch.tensor([text + drafted])).logits[0, -1]
                laws.append(probabilities(logits, sampling))
                drafted.append(int(draw(laws[-1], uniforms[row, depth])))
            drafts.append(drafted)
        token_ids = torch.tensor(drafts)
        return Draft(token_ids, chain_parents(*token_ids.shape), torch.stack(laws).view(*token_ids.shape, -1))


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["temperature 1", "filtered"])
def test_drafts_from_the_targets_own_law_are_always_accepted(target: Target, sampling: SamplingParams) -> None:
    prompts = [[1, 2, 3, 4, 5], [0, 3], [4], [5, 5, 5]]
    settings = replace(SETTINGS, max_new_tokens=17, sampling=sampling)
    stats = generate(target, prompts, settings, SelfDrafter(target)).stats
    assert stats.acceptance_rate == 1
    assert stats.expected_acceptance_rate == pytest.approx(1, abs=1e-9)
    assert stats.rounds.tolist() == [4] * len(prompts)
    assert stats.block_efficiency == 4
