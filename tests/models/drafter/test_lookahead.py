"""Lookahead decoding against Jacobi iterations written out: mask, window, n-grams, and what comes out.

W window, N n-gram length, G candidates.
"""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from engine.beam import beam_search
from engine.beam_step import BeamSettings
from engine.loop import generate
from engine.settings import DecodeSettings
from models import tree
from models.checkpoint import native
from models.drafter import lookahead
from models.drafter.lookahead import LookaheadDrafter, Pool, padded, trie, window_parents
from models.errors import UserError
from models.sampling import SamplingParams
from models.target import Target
from models.text_drafting import TextState
from models.types import Draft, TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import LEAST_P_VALUE, five_token_target, prompts, sampled_p_value

MODEL = {"_target_": "models.drafter.lookahead.LookaheadDrafter"}
SIZES = [(5, 4, 5), (3, 2, 1), (1, 3, 2), (2, 5, 3)]  # W, N, G
GREEDY, SAMPLED = SamplingParams(), SamplingParams(1.0)


@pytest.fixture(scope="module")
def target() -> Target:
    return five_token_target()


class Recorded(LookaheadDrafter):
    """Keeps, for each request, the rows that it was told of, and its window and n-grams at every proposal."""

    def new_state(self, batch_size: int, max_len: int) -> TextState:
        state = super().new_state(batch_size, max_len)
        self.rounds: list[list[Any]] = [[] for _ in range(batch_size)]
        self.number = {id(request): i for i, request in enumerate(state.texts)}
        return state

    def propose(self, state: TextState, committed: TargetFeatures, **options: Any) -> Draft:
        draft = super().propose(state, committed, **options)
        for row, request in enumerate(state.texts):
            count = int(committed.lengths[row])
            ids = [committed.token_ids[row, :count].tolist(), committed.next_token_ids[row, :count].tolist()]
            pool = {first: request.pool.behind(first) for first in range(5)}
            hidden = None if committed.hidden is None else committed.hidden[row, :count].clone()
            window = [list(level) for level in request.levels]
            drafted = paths(draft.token_ids[row].tolist(), draft.parents[row].tolist(), int(draft.lengths[row]))
            self.rounds[self.number[id(request)]].append((*ids, hidden, window, pool, drafted))
        return draft


def paths(token_ids: list[int], parents: list[int], depth: int) -> list[tuple[int, ...]]:
    """The paths of `depth` nodes of a tree, in the order of their last ones."""
    found = []
    for node in range(len(parents)):
        path, at = [], node
        while at >= 0:
            path.insert(0, token_ids[at])
            at = parents[at]
        if len(path) == depth:
            found.append(tuple(path))
    return found if depth else []


def build(target: Target, sizes: tuple[int, int, int], drafter_class: Any = LookaheadDrafter) -> Any:
    window, ngram, candidates = sizes
    return drafter_class(target, DraftVocab(5), window=window, ngram=ngram, candidates=candidates)


def visible(level: int, column: int, window: int) -> set[int]:
    """The guesses that one guess sees, itself included: the oldest up to its column, and younger ones of its column."""
    oldest = set(range(column + 1))
    return oldest | {younger * window + column for younger in range(1, level + 1)}


@pytest.mark.parametrize(("window", "ngram"), [(5, 4), (15, 5), (1, 2), (3, 2), (1, 5)])
def test_the_windows_mask_is_that_of_a_loop(window: int, ngram: int) -> None:
    parents = torch.tensor([window_parents(window, ngram)])
    mask, depth = tree.ancestors(parents)[0], tree.depths(parents)[0]
    assert len(mask) == window * (ngram - 1)
    for level, column in itertools.product(range(ngram - 1), range(window)):
        row = level * window + column
        assert set(mask[row].nonzero().flatten().tolist()) == visible(level, column, window)
        assert depth[row] == level + column  # it is so many positions behind the first


def test_draft_and_window_do_not_see_each_other(target: Target) -> None:
    """The mask of whole passes: the pending token, the draft, and the window."""
    drafter, checked = build(target, (4, 3, 5)), 0

    def step(token_ids: Tensor, *args: Any, parents: Tensor | None = None, **kwargs: Any) -> Any:
        nonlocal checked
        if parents is not None:
            num_nodes = token_ids.shape[1] - 4 * 2
            for sees in tree.ancestors(parents):
                assert sees[:, 0].all()
                assert not sees[num_nodes:, 1:num_nodes].any() and not sees[:num_nodes, num_nodes:].any()
                for level, column in itertools.product(range(2), range(4)):
                    row = sees[num_nodes + level * 4 + column, num_nodes:]
                    assert set(row.nonzero().flatten().tolist()) == visible(level, column, 4)
                checked += num_nodes > 2
        return Target.step(target, token_ids, *args, parents=parents, **kwargs)

    with mock.patch.object(target, "step", step):
        generate(target, prompts([5, 2, 9], 5), DecodeSettings(16, 4, stop_token_ids=frozenset()), drafter)
    assert checked > 10


@torch.no_grad()
def choice(target: Target, text: list[int]) -> int:
    return int(target.head(target(torch.tensor([text])).last[0, -1]).argmax())


def check_request(target: Target, rounds: list[Any], sizes: tuple[int, int, int]) -> int:
    """Jacobi iterations on whole texts, guesses kept by their absolute positions; returns how much was drafted."""
    window, ngram, candidates = sizes
    text: list[int] = []
    guesses: list[dict[int, int]] = [{} for _ in range(ngram - 1)]
    pool: dict[int, list[tuple[int, ...]]] = {first: [] for first in range(5)}
    filler, drafted = iter(()), 0
    for token_ids, following, _, levels, known, found in rounds:
        if not text:
            text, filler = token_ids[:1], itertools.cycle(token_ids)
        else:
            here = len(text) - 1
            chosen = {}
            for column in range(window):
                oldest = [guesses[0][here + 1 + j] for j in range(column + 1)]
                younger = [guesses[level][here + 1 + column + level] for level in range(1, ngram - 1)]
                gram = [oldest[-1], *younger, choice(target, text + oldest + younger)]
                chosen[here + ngram + column] = gram[-1]
                tails = pool[gram[0]]
                if tuple(gram[1:]) in tails:
                    tails.remove(tuple(gram[1:]))
                tails.insert(0, tuple(gram[1:]))
                del tails[candidates:]
            guesses = [*guesses[1:], chosen]
        text = text + following
        here = len(text) - 1
        for level in range(ngram - 1):
            for position in range(here + 1 + level, here + 1 + level + window):
                if position not in guesses[level]:
                    guesses[level][position] = next(filler)
        expected = [[guesses[a][here + 1 + a + j] for j in range(window)] for a in range(ngram - 1)]
        assert levels == expected
        assert known == pool
        cut = [tail[: max(len(f) for f in found)] if found else () for tail in pool[text[-1]]]
        assert set(found) == set(cut) - {()} and bool(found) == bool(pool[text[-1]])
        drafted += len(found)
    return drafted


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_window_and_ngrams_are_those_of_jacobi_iterations(
    sizes: tuple[int, int, int], sampling: SamplingParams, target: Target
) -> None:
    """In a ragged batch whose requests accept different numbers of tokens; no guess is beyond the context's end."""
    drafter = build(target, sizes, Recorded)
    start = prompts([6, 1, 8, 4], 5, seed=1)
    settings = DecodeSettings(16, 4, sampling, frozenset())
    made = generate(target, start, settings, drafter)
    for prompt, answer, rounds in zip(start, made.token_ids, drafter.rounds, strict=True):
        told = [token for _, following, *_ in rounds for token in following]
        assert (prompt + answer)[1 : len(told) + 1] == told
        assert check_request(target, rounds, sizes) > 0
    counts = {len(following) for rounds in drafter.rounds for _, following, *_ in rounds[1:]}
    assert {1, 2} <= counts
    if sampling.greedy:
        assert made.token_ids == generate(target, start, settings).token_ids
        assert made.stats.accepted.sum() > 10 and made.stats.block_efficiency > 1.2


class ForgetsTheMove(lookahead.LookaheadRequest):
    """The window stays where it is, however many tokens were committed."""

    def append(self, token_ids: list[int]) -> None:
        super().append(token_ids[-1:] if self.started else token_ids)


class KeepsTheOldest(lookahead.LookaheadRequest):
    """The n-gram is that of the column before."""

    def observe(self, choices: list[int]) -> None:
        super().observe(choices[-1:] + choices[:-1])


@pytest.mark.parametrize("mutant", [ForgetsTheMove, KeepsTheOldest])
def test_the_iterations_notice_mistakes(mutant: Any, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "LookaheadRequest", mutant)
    drafter = build(target, (5, 4, 5), Recorded)
    generate(target, prompts([9, 4], 5, seed=1), DecodeSettings(18, 4, stop_token_ids=frozenset()), drafter)
    with pytest.raises(AssertionError):
        for rounds in drafter.rounds:
            check_request(target, rounds, (5, 4, 5))


def test_states_of_the_window_are_not_committed(target: Target) -> None:
    """A probing drafter that reads states gets those of the text alone."""
    drafter = build(target, (3, 3, 2), Recorded)
    drafter.capture_layers = (1, target.num_layers)
    start = prompts([5, 2], 5)
    made = generate(target, start, DecodeSettings(15, 4, stop_token_ids=frozenset()), drafter)
    for prompt, answer, rounds in zip(start, made.token_ids, drafter.rounds, strict=True):
        states = torch.cat([hidden for _, _, hidden, *_ in rounds])
        with torch.no_grad():
            expected = target(torch.tensor([prompt + answer]), capture_layers=drafter.capture_layers).hidden[0]
        torch.testing.assert_close(states, expected[: len(states)], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("sizes", [(15, 5, 15), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("num_speculative_tokens", [1, 6])
def test_greedy_output_is_plain_decodings(
    num_speculative_tokens: int, sizes: tuple[int, int, int], target: Target
) -> None:
    """Of the published sizes and the smallest; shorter n-grams than asked for, and longer ones."""
    start = prompts([9, 1, 20, 31, 4], 5, seed=1)
    settings = DecodeSettings(1000, num_speculative_tokens, stop_token_ids=frozenset())
    made = generate(target, start, settings, build(target, sizes))
    assert made.token_ids == generate(target, start, settings).token_ids
    depth = min(num_speculative_tokens, sizes[1] - 1)
    assert made.stats.accepted[:, :depth].sum(0).min() > 0 and made.stats.drafts[:, depth:].sum() == 0


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_request_is_answered_in_a_batch_as_alone(sampling: SamplingParams, target: Target) -> None:
    drafter = build(target, (4, 3, 3))
    start = prompts([9, 1, 14, 4], 5, seed=2)
    settings = DecodeSettings(17, 4, sampling, frozenset())
    together = generate(target, start, settings, drafter)
    for index, prompt in enumerate(start):
        alone = generate(target, [prompt], settings, drafter, seeds=[index])
        assert alone.token_ids[0] == together.token_ids[index]
        for name in ("drafted", "tested", "accepted"):
            assert getattr(alone.stats, name)[0].tolist() == getattr(together.stats, name)[index].tolist()


class Primed(LookaheadDrafter):
    """Begins with some n-grams, so that drafts come from the first round on; behind some tokens there are none."""

    def new_state(self, batch_size: int, max_len: int) -> TextState:
        state = super().new_state(batch_size, max_len)
        for request in state.texts:
            for first, tail in ((0, (1, 2, 0)), (0, (1, 3, 3)), (0, (4, 0, 1)), (1, (2, 2, 4)), (1, (0, 3, 1)),
                                (3, (2, 1, 0)), (4, (0, 0, 2)), (4, (3, 1, 1))):  # fmt: skip
                request.pool.add(first, tail)
        return state


@pytest.mark.parametrize("sampling", [SAMPLED, SamplingParams(0.8, top_k=4, top_p=0.85)], ids=["plain", "filtered"])
def test_the_targets_law_comes_out(sampling: SamplingParams, target: Target) -> None:
    drafter = build(target, (2, 4, 3), Primed)
    assert sampled_p_value(target, drafter, sampling) > LEAST_P_VALUE


def test_what_needs_chains_or_takes_no_answers_is_refused(target: Target) -> None:
    drafter = build(target, (2, 4, 3))
    with pytest.raises(UserError, match="Block verification is for chains, but LookaheadDrafter drafts trees"):
        generate(target, [[0]], DecodeSettings(4, verification="block"), drafter)
    with pytest.raises(UserError, match="LookaheadDrafter probes the target, which beam search has no room for"):
        beam_search(target, [[0]], DecodeSettings(4), BeamSettings(2), drafter)


def test_the_pool_forgets_the_ngram_that_was_found_longest_ago() -> None:
    pool = Pool(2)
    for tail in ((1, 1), (2, 2), (1, 1), (3, 3)):
        pool.add(0, tail)
    pool.add(1, (4, 4))
    assert [pool.behind(first) for first in range(3)] == [[(3, 3), (1, 1)], [(4, 4)], []]


def test_ngrams_become_a_tree_that_holds_each_path_once() -> None:
    tails = [(1, 2, 3), (1, 2, 4), (2, 2, 3), (1, 2, 3), (1, 5, 1)]
    token_ids, parents = trie(tails)
    assert paths(token_ids, parents, 3) == [(1, 2, 3), (1, 2, 4), (2, 2, 3), (1, 5, 1)]
    assert len(token_ids) == 9 and [t for t, p in zip(token_ids, parents, strict=True) if p < 0] == [1, 2]
    wide = padded((token_ids, parents), 11)
    assert paths(*wide, 3) == paths(token_ids, parents, 3) and len(wide[0]) == 11
    assert padded(trie([]), 2) == ([0, 0], [-1, -1])


def test_it_proposes_any_token_and_has_no_weights(target: Target) -> None:
    drafter = native.build(MODEL, target, DraftVocab(5, torch.tensor([0, 3])))
    assert not list(drafter.parameters()) and not drafter.state_dict() and not drafter.vocab.reduced


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"window": 0}, "window is 0: it must be at least 1"),
        ({"ngram": 1}, "ngram is 1: it must be at least 2"),
        ({"candidates": 0}, "candidates is 0: it must be at least 1"),
    ],
)
def test_senseless_options_are_refused(arguments: dict[str, Any], sentence: str, target: Target) -> None:
    with pytest.raises(UserError, match=sentence):
        native.build(MODEL | arguments, target, DraftVocab(5))
