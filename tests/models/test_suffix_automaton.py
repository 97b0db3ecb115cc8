"""Suffix automata against a search through all texts, and what a token costs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from models.errors import UserError
from models.suffix_automaton import ROOT, CountedSuffixes, FrozenSuffixes, Place, SuffixAutomaton, Suffixes
from tests.helpers.suffixes import Texts, longest_continued, searched


def same(suffixes: Suffixes, place: Place, texts: Texts, context: list[int], longest: int) -> bool:
    """Whether match, counts and draft at `place` are what a search for `context` in `texts` finds."""
    size, found = longest_continued(texts, context, longest)
    place = suffixes.continued(place)
    drafted, expected = suffixes.draft(place, 5)
    wanted, wanted_expected = searched(texts, context, longest, 5)
    return (
        place.matched == size
        and (size == 0 or suffixes.following(place.state) == found)
        and drafted == wanted
        and abs(expected - wanted_expected) < 1e-12
    )


def some_text(rng: random.Random, alphabet: int, length: int) -> list[int]:
    """Tokens, some of them copied from further back, as texts do."""
    text: list[int] = []
    while len(text) < length:
        if len(text) > 4 and rng.random() < 0.5:
            start = rng.randrange(len(text))
            text += text[start : start + rng.randint(1, 8)]
        else:
            text.append(rng.randrange(alphabet))
    return text[:length]


def growing_agrees(automaton_class: type[SuffixAutomaton], longest: int) -> bool:
    """Whether an automaton of one text knows, after every token, what a search knows."""
    rng = random.Random(0)
    for alphabet in (1, 2, 3, 20):
        automaton, text = automaton_class(longest), []
        for token in some_text(rng, alphabet, 60):
            text.append(token)
            automaton.append(token)
            if not same(automaton, automaton.place(), [text], text, longest):
                return False
    return True


def frozen_agrees(automaton_class: type[SuffixAutomaton], longest: int, frozen_class: type[FrozenSuffixes]) -> bool:
    """Whether one of several texts, frozen, knows of another text, after every token, what a search knows."""
    rng = random.Random(1)
    for alphabet in (1, 2, 3, 20):
        texts = [some_text(rng, alphabet, rng.randint(1, 25)) for _ in range(6)]
        texts.append([*texts[0], *texts[1]])  # begins as an earlier text
        automaton = automaton_class(longest)
        for text in texts:
            automaton.begin()
            for token in text:
                automaton.append(token)
        frozen = frozen_class(longest, {name: tensor.numpy() for name, tensor in automaton.frozen().items()})
        place, context = ROOT, []
        for token in [*texts[2], alphabet, *some_text(rng, alphabet, 40), *texts[3], *texts[0]]:
            context.append(token)
            place = frozen.advance(place, token)
            if not same(frozen, place, texts, context, longest):
                return False
    return True


@pytest.mark.parametrize("longest", [1, 2, 3, 5, 100])
def test_a_growing_automaton_is_a_search(longest: int) -> None:
    assert growing_agrees(SuffixAutomaton, longest)


@pytest.mark.parametrize("longest", [1, 2, 3, 5, 100])
def test_a_frozen_automaton_of_several_texts_is_a_search(longest: int) -> None:
    assert frozen_agrees(SuffixAutomaton, longest, FrozenSuffixes)


class ForgetsWhenSplitting(SuffixAutomaton):
    """A split-off state starts to count from 0."""

    def _add(self, length: int, link: int, edges: dict[int, int], count: int) -> int:
        return super()._add(length, link, edges, 0)


class SharesEdges(SuffixAutomaton):
    """Both halves of a split state keep one dictionary."""

    def _exactly(self, state: int, token: int, target: int) -> int:
        half = super()._exactly(state, token, target)
        self._edges[half] = self._edges[target]
        return half


class NeverSplits(SuffixAutomaton):
    def _exactly(self, state: int, token: int, target: int) -> int:
        return target


class CountsTheWholeOnly(SuffixAutomaton):
    """An occurrence of a string is none of its endings'."""

    def append(self, token: int) -> None:
        super().append(token)
        state = self._links[self._ending.state]
        while state > 0:
            self._counts[state] -= 1
            state = self._links[state]


class CountsTooShort(SuffixAutomaton):
    """Counts strings of max_match tokens at most, so that what follows such a string is not counted."""

    def append(self, token: int) -> None:
        self.max_match -= 1
        super().append(token)
        self.max_match += 1

    def following(self, state: int) -> dict[int, int]:
        return {token: max(1, count) for token, count in super().following(state).items()}


class RunsOn(SuffixAutomaton):
    """Texts are taken for one."""

    def begin(self) -> None:
        if not hasattr(self, "_whole"):
            super().begin()


class ForgetsTheOtherBeginning(SuffixAutomaton):
    """A text that begins as an earlier one is taken to be in the state of the longer string."""

    def _extend(self, token: int) -> None:
        known = self._edges[self._whole].get(token)
        if known is None:
            super()._extend(token)
        else:
            self._whole = known


class LastOfSeveral(SuffixAutomaton):
    """Of the tokens that followed equally often, the highest id."""

    def likeliest(self, state: int) -> tuple[int, float]:
        found = self.following(state)
        token = max(found, key=lambda token: (found[token], token))
        return token, found[token] / sum(found.values())


class SharesOfAllOccurrences(SuffixAutomaton):
    """The text's end counts as a continuation."""

    def likeliest(self, state: int) -> tuple[int, float]:
        token, _ = super().likeliest(state)
        return token, self.following(state)[token] / max(1, self._counts[state])


class KeepsAllOfTheMatch(SuffixAutomaton):
    """The match may be longer than max_match."""

    def cut(self, state: int, matched: int, limit: int) -> Place:
        return Place(state, matched)


@pytest.mark.parametrize(
    "mutant",
    [
        ForgetsWhenSplitting, SharesEdges, NeverSplits, CountsTheWholeOnly, CountsTooShort, LastOfSeveral,
        SharesOfAllOccurrences, KeepsAllOfTheMatch,
    ],
)  # fmt: skip
def test_the_search_notices_mistakes_in_growing(mutant: type[SuffixAutomaton]) -> None:
    assert not growing_agrees(mutant, 3)


@pytest.mark.parametrize(
    "mutant",
    [
        ForgetsWhenSplitting, SharesEdges, NeverSplits, CountsTheWholeOnly, RunsOn, ForgetsTheOtherBeginning,
    ],
)  # fmt: skip
def test_the_search_notices_mistakes_in_several_texts(mutant: type[SuffixAutomaton]) -> None:
    assert not frozen_agrees(mutant, 3, FrozenSuffixes)


class ShortensByOne(FrozenSuffixes):
    """Where a token never followed, the match loses its first token only in number."""

    def advance(self, place: Place, token: int) -> Place:
        found = super().advance(place, token)
        return found if found.matched == 0 else Place(found.state, min(place.matched + 1, self.max_match))


class LastEdge(FrozenSuffixes):
    def likeliest(self, state: int) -> tuple[int, float]:
        found = self.following(state)
        token = max(found, key=lambda token: (found[token], token))
        return token, found[token] / sum(found.values())


class NeverBacksOff(FrozenSuffixes):
    """What is known but was never continued counts as the match."""

    def continued(self, place: Place) -> Place:
        return ROOT if place.state and self.ends(place.state) else place


@pytest.mark.parametrize("mutant", [ShortensByOne, LastEdge, NeverBacksOff])
def test_the_search_notices_mistakes_in_looking_up(mutant: type[FrozenSuffixes]) -> None:
    assert not frozen_agrees(SuffixAutomaton, 3, mutant)


class CountedList(list[int]):
    """Counts how often an item is read."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        CountedList.read += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", ["one token", "period", "random", "copies"])
def test_a_token_costs_the_same_however_long_the_text_is(kind: str) -> None:
    rng, automaton, costs = random.Random(0), SuffixAutomaton(6), []
    automaton._links, automaton._lengths = CountedList([-1]), CountedList([0])
    for size in (200, 4000):
        text = {
            "one token": [0] * size,
            "period": [0, 1, 1, 2, 0] * (size // 5),
            "random": [rng.randrange(3) for _ in range(size)],
            "copies": some_text(rng, 10, size),
        }[kind]
        CountedList.read = 0
        for token in text:
            automaton.append(token)
            automaton.place()
        costs.append(CountedList.read / size)
    assert max(costs) < 50 and costs[1] < 1.5 * costs[0]
    assert len(automaton._lengths) <= 2 * 4200


def test_counted_texts_are_held_as_tensors() -> None:
    """Ordinals by hand: of "aab" and "ab", a is followed by a once and by b twice."""
    counted = CountedSuffixes(4)
    assert counted.suffixes() is None and not counted.state_dict()
    assert counted.sizes == {"num_states": 0, "num_edges": 0}
    counted.count([[7, 7, 9], [7, 9]])
    suffixes = counted.suffixes()
    assert suffixes is not None
    place = suffixes.advance(ROOT, 7)
    assert suffixes.following(place.state) == {7: 1, 9: 2} and suffixes.following(0) == {7: 3, 9: 2}
    assert suffixes.draft(place, 3) == ([9], 2 / 3)
    assert {tensor.dtype for tensor in counted.state_dict().values()} == {torch.int32}
    loaded = CountedSuffixes(4, **counted.sizes)
    loaded.load_state_dict(counted.state_dict())
    again = loaded.suffixes()
    assert again is not None and again.draft(place, 3) == ([9], 2 / 3)
    counted.count([[1, 2]])  # in place of the others
    suffixes = counted.suffixes()
    assert suffixes is not None and suffixes.following(0) == {1: 1, 2: 1}


def test_edges_are_in_order() -> None:
    automaton = SuffixAutomaton(2)
    for token in [5, 3, 9, 1, 5, 1]:
        automaton.append(token)
    arrays = {name: tensor.numpy() for name, tensor in automaton.frozen().items()}
    for start, end in zip(arrays["first_edge"][:-1], arrays["first_edge"][1:], strict=True):
        assert (np.diff(arrays["edge_tokens"][start:end]) > 0).all()
    assert arrays["first_edge"][-1] == len(arrays["edge_tokens"]) == len(arrays["edge_states"])


def test_what_makes_no_automaton_is_refused() -> None:
    with pytest.raises(UserError, match="max_match is 0"):
        SuffixAutomaton(0)
    with pytest.raises(UserError, match="There is nothing to count"):
        CountedSuffixes(3).count([[], []])
    for sizes in ((1, 0), (0, 3), (5, 3), (-2, 1)):
        with pytest.raises(UserError, match=f"num_states {sizes[0]} and num_edges {sizes[1]}"):
            CountedSuffixes(3, *sizes)
