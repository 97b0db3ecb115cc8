"""What a loop must keep whatever the drafter proposes: the answers, their independence of the batch, and the counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.loop import Generation, generate
from engine.settings import DecodeSettings
from models.drafter.eagle import EagleDrafter
from models.errors import UserError
from models.sampling import SamplingParams
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.models import random_target
from tests.helpers.scripted import ScriptedDrafter, knows

VOCAB = 50
CONTEXT = 48
PROMPTS = [[3, 4, 5], [10, 11, 12, 13, 14, 15, 16, 17], [30], [21, 20, 20, 20, 21]]
NO_STOP = DecodeSettings(20, 4, stop_token_ids=frozenset())
SAMPLED = replace(NO_STOP, sampling=SamplingParams(1.0))
FILTERED = replace(NO_STOP, sampling=SamplingParams(0.7, top_k=20, top_p=0.9))


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(vocab_size=VOCAB, max_position_embeddings=CONTEXT, initializer_range=0.4)


@pytest.fixture(scope="module")
def plain(target: Target) -> list[list[int]]:
    """Greedy answers that fill the context."""
    answers = generate(target, PROMPTS, replace(NO_STOP, max_new_tokens=CONTEXT)).token_ids
    assert all(len(set(answer)) > 15 for answer in answers)  # a constant answer would hide faults
    return answers


def eagle(target: Target) -> EagleDrafter:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return EagleDrafter(target, DraftVocab(VOCAB)).eval()


@pytest.fixture(scope="module")
def drafters(target: Target, plain: list[list[int]]) -> dict[str, Any]:
    right = knows(PROMPTS, plain)

    def wrong(text: list[int]) -> int:
        return (right(text) + 1) % VOCAB

    def sometimes(text: list[int]) -> int:
        return wrong(text) if sum(text) % 4 == 0 else right(text)

    return {
        "none": None,
        "eagle": eagle(target),
        "perfect": ScriptedDrafter(right),
        "adversarial": ScriptedDrafter(wrong),
        "mixed": ScriptedDrafter(sometimes),
    }


SPECULATIVE = ["eagle", "perfect", "adversarial", "mixed"]


def assert_counts_agree(made: Generation, prompts: list[list[int]], num_speculative_tokens: int) -> None:
    """Every answer is the prompt pass's token and what the rounds emitted: accepted tokens and one more a round."""
    stats = made.stats
    for request, (answer, stopped) in enumerate(zip(made.token_ids, made.stopped, strict=True)):
        assert len(answer) == 1 + stats.emitted[request]
        unemitted = stats.accepted[request].sum() + stats.rounds[request] - stats.emitted[request]
        assert unemitted in ((0, 1) if stopped else (0,))  # a drafted stop token is followed by nothing
        assert stats.drafted[request].sum() <= stats.rounds[request] * num_speculative_tokens
        for counts in (stats.drafted, stats.tested, stats.accepted):
            assert (counts[request][:-1] >= counts[request][1:]).all()
        assert (stats.accepted[request] <= stats.tested[request]).all()
        assert (stats.tested[request] <= stats.drafted[request]).all()
        assert (stats.tested[request][1:] <= stats.accepted[request][:-1]).all()
    assert len(made.token_ids) == len(made.stopped) == len(prompts) == len(stats.rounds)


# ---- greedy answers ----


@pytest.mark.parametrize("name", ["none", *SPECULATIVE])
def test_greedy_answers_are_those_of_transformers(target: Target, drafters: dict[str, Any], name: str) -> None:
    settings = DecodeSettings(20, 4)  # stops at the target's own stop token
    made = generate(target, PROMPTS, settings, drafters[name])
    for prompt, answer, stopped in zip(PROMPTS, made.token_ids, made.stopped, strict=True):
        ids = torch.tensor([prompt])
        theirs = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0
        )
        assert answer == theirs[0, len(prompt) :].tolist()
        assert stopped == (answer[-1] in target.stop_token_ids)
    assert_counts_agree(made, PROMPTS, 4)


@pytest.mark.parametrize("name", SPECULATIVE)
@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 5])
def test_greedy_answers_do_not_depend_on_the_draft_length(
    target: Target, drafters: dict[str, Any], plain: list[list[int]], name: str, num_speculative_tokens: int
) -> None:
    settings = replace(NO_STOP, num_speculative_tokens=num_speculative_tokens)
    made = generate(target, PROMPTS, settings, drafters[name])
    assert made.token_ids == [answer[:20] for answer in plain]
    assert_counts_agree(made, PROMPTS, num_speculative_tokens)


@pytest.mark.parametrize("name", ["none", *SPECULATIVE])
def test_a_context_that_ends_exactly_at_the_maximum(
    target: Target, drafters: dict[str, Any], plain: list[list[int]], name: str
) -> None:
    made = generate(target, PROMPTS, replace(NO_STOP, max_new_tokens=1000), drafters[name])
    assert made.token_ids == plain
    assert [len(p) + len(a) for p, a in zip(PROMPTS, plain, strict=True)] == [CONTEXT] * len(PROMPTS)
    assert made.stopped == [False] * len(PROMPTS)
    ids = torch.tensor([PROMPTS[0]])
    theirs = target.model.generate(ids, do_sample=False, max_length=CONTEXT, eos_token_id=VOCAB, pad_token_id=0)
    assert theirs[0].tolist() == PROMPTS[0] + plain[0]


def test_a_prompt_that_leaves_room_for_one_token(target: Target) -> None:
    prompts = [list(range(CONTEXT - 1)), PROMPTS[0], list(range(1, CONTEXT - 1))]
    made = generate(target, prompts, NO_STOP, eagle(target))
    assert [len(answer) for answer in made.token_ids] == [1, 20, 2]
    assert made.token_ids == [generate(target, [prompt], NO_STOP).token_ids[0] for prompt in prompts]
    assert made.stats.rounds[[0, 2]].tolist() == [0, 1]


@pytest.mark.parametrize("name", ["none", *SPECULATIVE])
def test_one_new_token_needs_no_round(
    target: Target, drafters: dict[str, Any], plain: list[list[int]], name: str
) -> None:
    made = generate(target, PROMPTS, replace(NO_STOP, max_new_tokens=1), drafters[name])
    assert made.token_ids == [answer[:1] for answer in plain]
    assert made.stats.rounds.sum() == made.stats.drafted.sum() == 0


# ---- drafters at both ends ----


@pytest.mark.parametrize("num_speculative_tokens", [1, 3, 4])
@pytest.mark.parametrize("rest", [0, 1, 2])
def test_a_perfect_drafter_is_accepted_whole(
    target: Target, drafters: dict[str, Any], num_speculative_tokens: int, rest: int
) -> None:
    full = 18 // (num_speculative_tokens + 1)
    rest = min(rest, num_speculative_tokens)  # tokens of a last, shorter round
    max_new_tokens = 1 + full * (num_speculative_tokens + 1) + rest
    settings = replace(NO_STOP, max_new_tokens=max_new_tokens, num_speculative_tokens=num_speculative_tokens)
    stats = generate(target, PROMPTS, settings, drafters["perfect"]).stats
    assert stats.rounds.tolist() == [full + (rest > 0)] * len(PROMPTS)
    assert stats.acceptance_rate == stats.expected_acceptance_rate == stats.draft_utilization == 1
    last_round = [max(rest - 1, 0) > i for i in range(num_speculative_tokens)]
    assert stats.drafted.tolist() == [[full + more for more in last_round]] * len(PROMPTS)
    if rest == 0:
        assert stats.block_efficiency == num_speculative_tokens + 1


def test_an_adversarial_drafter_costs_rounds_and_nothing_else(target: Target, drafters: dict[str, Any]) -> None:
    stats = generate(target, PROMPTS, NO_STOP, drafters["adversarial"]).stats
    assert stats.rounds.tolist() == [19] * len(PROMPTS)
    assert stats.block_efficiency == 1
    assert stats.acceptance_rate == stats.expected_acceptance_rate == 0
    assert stats.drafted[0].tolist() == [18, 17, 16, 15]  # the last rounds leave room for fewer


# ---- a batch is its requests ----


@pytest.mark.parametrize("settings", [NO_STOP, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("name", ["none", "eagle", "mixed"])
def test_a_ragged_batch_gives_each_request_what_it_gets_alone(
    target: Target, drafters: dict[str, Any], plain: list[list[int]], name: str, settings: DecodeSettings
) -> None:
    seeds = [5, 900, 17, 33]
    settings = replace(settings, stop_token_ids=frozenset({plain[1][4], plain[2][7], 48}))
    together = generate(target, PROMPTS, settings, drafters[name], seeds=seeds)
    assert_counts_agree(together, PROMPTS, 4 if name != "none" else 0)
    assert len({len(answer) for answer in together.token_ids}) > 1  # requests leave at different times
    for i, (prompt, seed) in enumerate(zip(PROMPTS, seeds, strict=True)):
        alone = generate(target, [prompt], settings, drafters[name], seeds=[seed])
        assert alone.token_ids[0] == together.token_ids[i]
        for counter in ("rounds", "emitted", "drafted", "tested", "accepted", "expected"):
            counts = getattr(together.stats, counter)[i]
            assert getattr(alone.stats, counter)[0] == pytest.approx(counts, abs=1e-9), counter
    order = [2, 0, 3, 1]
    shuffled = generate(target, [PROMPTS[i] for i in order], settings, drafters[name], seeds=[seeds[i] for i in order])
    assert shuffled.token_ids == [together.token_ids[i] for i in order]


def test_without_seeds_requests_count_on_from_the_settings_seed(target: Target, drafters: dict[str, Any]) -> None:
    for name in ("none", "eagle"):
        made = generate(target, PROMPTS, replace(SAMPLED, seed=70), drafters[name])
        named = generate(target, PROMPTS, SAMPLED, drafters[name], seeds=[70, 71, 72, 73])
        assert made.token_ids == named.token_ids
        assert made.token_ids != generate(target, PROMPTS, replace(SAMPLED, seed=71), drafters[name]).token_ids
    same = generate(target, [PROMPTS[0]] * 3, SAMPLED, drafters["eagle"])
    assert len({tuple(answer) for answer in same.token_ids}) == 3


# ---- stop tokens ----


@pytest.mark.parametrize("name", ["none", "perfect", "mixed"])
def test_an_answer_ends_at_its_first_stop_token_also_in_mid_draft(
    target: Target, drafters: dict[str, Any], plain: list[list[int]], name: str
) -> None:
    for position in range(12):
        stop = plain[0][position]
        made = generate(target, PROMPTS, replace(NO_STOP, stop_token_ids=frozenset({stop})), drafters[name])
        for found, answer in zip(made.token_ids, plain, strict=True):
            end = answer[:20].index(stop) + 1 if stop in answer[:20] else 20
            assert found == answer[:end]
        assert made.stopped == [stop in answer[:20] for answer in plain]
        assert_counts_agree(made, PROMPTS, 4 if name != "none" else 0)


@pytest.mark.parametrize("name", ["none", *SPECULATIVE])
def test_the_first_of_several_stop_tokens_ends_an_answer(
    target: Target, drafters: dict[str, Any], plain: list[list[int]], name: str
) -> None:
    stop = frozenset({plain[0][0], plain[1][9], plain[2][2], plain[3][6]})
    made = generate(target, PROMPTS, replace(NO_STOP, stop_token_ids=stop), drafters[name])
    for found, stopped, answer in zip(made.token_ids, made.stopped, plain, strict=True):
        end = next(i for i, token in enumerate(answer) if token in stop) + 1
        assert (found, stopped) == (answer[:end], True)
    assert made.token_ids[0] == plain[0][:1] and made.stats.rounds[0] == 0


def test_a_stop_token_as_the_very_last_allowed_token_counts_as_a_stop(target: Target, plain: list[list[int]]) -> None:
    position = next(i for i in range(3, 20) if plain[0][i] not in plain[0][:i])
    settings = DecodeSettings(position + 1, stop_token_ids=frozenset({plain[0][position]}))
    made = generate(target, PROMPTS[:1], settings)
    assert (len(made.token_ids[0]), made.stopped) == (position + 1, [True])


# ---- what the loop tells others ----


@pytest.mark.parametrize("settings", [NO_STOP, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["none", "eagle", "perfect", "mixed"])
def test_the_callback_gets_each_answer_in_order(
    target: Target, drafters: dict[str, Any], plain: list[list[int]], name: str, settings: DecodeSettings
) -> None:
    settings = replace(settings, stop_token_ids=frozenset({plain[1][5], 48}))
    heard: list[list[int]] = [[] for _ in PROMPTS]
    drafted = [0] * len(PROMPTS)
    calls = [0] * len(PROMPTS)

    def listen(request: int, tokens: list[int], from_draft: int) -> None:
        assert len(tokens) - 1 <= from_draft <= len(tokens) and tokens
        heard[request] += tokens
        drafted[request] += from_draft
        calls[request] += 1

    made = generate(target, PROMPTS, settings, drafters[name], on_tokens=listen)
    assert heard == made.token_ids
    assert calls == [rounds + 1 for rounds in made.stats.rounds]
    for request in range(len(PROMPTS)):
        if not made.stopped[request]:
            assert drafted[request] == made.stats.accepted[request].sum()


@pytest.mark.parametrize("settings", [NO_STOP, SAMPLED], ids=["greedy", "sampled"])
def test_committed_rows_are_the_text_and_the_targets_own_states(
    target: Target, drafters: dict[str, Any], plain: list[list[int]], settings: DecodeSettings
) -> None:
    layers = (1, 3, 0)
    seen: dict[tuple[int, ...], int] = {}

    def observe(text: list[int], hidden: Tensor) -> None:
        states = target(torch.tensor([text[:-1]]), capture_layers=layers).hidden
        torch.testing.assert_close(hidden, states[0], atol=1e-9, rtol=0)
        seen[tuple(text)] = len(text)

    drafter = ScriptedDrafter(drafters["mixed"].choose, capture_layers=layers, observe=observe)
    made = generate(target, PROMPTS, settings, drafter)
    for prompt, answer in zip(PROMPTS, made.token_ids, strict=True):
        texts = [text for text in seen if text[: len(prompt)] == tuple(prompt)]
        assert (*prompt, answer[0]) in texts
        assert all(text == tuple(prompt + answer)[: len(text)] for text in texts)
    assert made.stats.accepted.sum() > 0


def test_times_add_up(target: Target, drafters: dict[str, Any]) -> None:
    seconds = generate(target, PROMPTS, NO_STOP, drafters["eagle"]).seconds
    assert min(seconds.prefill, seconds.draft, seconds.verify) > 0
    assert seconds.prefill + seconds.draft + seconds.verify <= seconds.total


# ---- refusals ----


def test_prompts_that_cannot_be_answered_are_refused_by_number(target: Target) -> None:
    with pytest.raises(UserError, match="Prompt 1 is empty"):
        generate(target, [[1], []], NO_STOP)
    with pytest.raises(UserError, match=f"Prompt 2 has {CONTEXT} tokens, but the context of 'llama' holds {CONTEXT}"):
        generate(target, [[1], [2], [3] * CONTEXT], NO_STOP)


@pytest.mark.parametrize("seeds", [[5], [1, 2, 3, 4, 5], []])
def test_a_request_needs_a_seed_of_its_own(target: Target, seeds: list[int]) -> None:
    with pytest.raises(ValueError, match=f"{len(seeds)} seeds for 4 prompts"):
        generate(target, PROMPTS, SAMPLED, seeds=seeds)


def test_no_prompts_no_answers(target: Target) -> None:
    made = generate(target, [], NO_STOP, eagle(target))
    assert (made.token_ids, made.stopped, made.stats.rounds.tolist()) == ([], [], [])


def test_bad_settings_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="max_new_tokens is 0"):
        DecodeSettings(max_new_tokens=0)
    with pytest.raises(UserError, match="num_speculative_tokens is 0"):
        DecodeSettings(num_speculative_tokens=0)
