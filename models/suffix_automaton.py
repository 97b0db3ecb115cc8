"""Suffix automata with counts: what followed the longest known ending of a text, and how often.

A state stands for the strings that end at the same places of the text (or texts), so a text of n tokens has at most 2n
states, and one more token costs O(1), amortised (Blumer et al. 1985, "The smallest automaton recognizing the subwords
of a text"). A state's link leads to the longest of its strings' endings that also ends elsewhere.

Counts are kept for strings of up to `max_match` + 1 tokens: the law behind a text is that behind its longest ending,
of at most `max_match` tokens, that was ever continued. Its probabilities are count(ending + token) over the sum of
these. Counting costs one step for every state that the last `max_match` + 1 tokens' endings fall into.

S states, E edges.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from models.errors import UserError


class Place(NamedTuple):
    """Where a text stands: the state of an ending that is known, and how many tokens long that ending is."""

    state: int
    matched: int


ROOT = Place(0, 0)  # the empty ending, which is always known


class Suffixes(ABC):
    """What both kinds of automata can be asked. Raises UserError for a `max_match` below 1."""

    def __init__(self, max_match: int) -> None:
        if max_match < 1:
            raise UserError(f"drafter.model.max_match is {max_match}: it must be at least 1.")
        self.max_match = max_match

    @abstractmethod
    def length(self, state: int) -> int:
        """The length of the state's longest string."""

    @abstractmethod
    def link(self, state: int) -> int:
        """The state of the longest ending that is not in this state; −1 for the root."""

    @abstractmethod
    def target(self, state: int, token: int) -> int:
        """The state behind a token; −1 where it never followed."""

    @abstractmethod
    def following(self, state: int) -> dict[int, int]:
        """The tokens that followed, and how often each did."""

    @abstractmethod
    def likeliest(self, state: int) -> tuple[int, float]:
        """The token that followed most often, the lowest id on a tie, and its share of all that followed."""

    @abstractmethod
    def ends(self, state: int) -> bool:
        """True where nothing ever followed."""

    def advance(self, place: Place, token: int) -> Place:
        """The longest known ending, of at most `max_match` tokens, once `token` has come."""
        state, matched = place
        while (found := self.target(state, token)) < 0:
            if state == 0:
                return ROOT
            state = self.link(state)
            matched = self.length(state)
        return self.cut(found, matched + 1, self.max_match)

    def cut(self, state: int, matched: int, limit: int) -> Place:
        """The last `limit` tokens at most of the string of `matched` tokens in `state`."""
        if matched <= limit:
            return Place(state, matched)
        while self.length(self.link(state)) >= limit:
            state = self.link(state)
        return Place(state, limit)

    def continued(self, place: Place) -> Place:
        """The longest ending that something followed; the root where nothing did."""
        state, matched = place
        while state != 0 and self.ends(state):
            state = self.link(state)
            matched = self.length(state)
        return Place(state, matched)

    def draft(self, place: Place, num_tokens: int) -> tuple[list[int], float]:
        """Up to `num_tokens` tokens, each the most frequent one (the lowest id on a tie) behind what stands before it.

        Also how many of them are expected to be right: Σ over tokens of the product of the probabilities up to it
        (2411.04975). The draft ends where only the empty ending is known.
        """
        tokens: list[int] = []
        path, expected = 1.0, 0.0
        for _ in range(num_tokens):
            place = self.continued(place)
            if place.matched == 0:
                break
            token, probability = self.likeliest(place.state)
            path *= probability
            expected += path
            tokens.append(token)
            place = self.cut(self.target(place.state, token), place.matched + 1, self.max_match)
        return tokens, expected


class SuffixAutomaton(Suffixes):
    """An automaton that grows, token by token and text by text."""

    def __init__(self, max_match: int) -> None:
        super().__init__(max_match)
        self._lengths, self._links, self._counts = [0], [-1], [0]
        self._edges: list[dict[int, int]] = [{}]
        self.begin()

    def begin(self) -> None:
        """Start another text."""
        self._whole = 0  # state of the whole text
        self._ending = ROOT  # its last max_match + 1 tokens

    def append(self, token: int) -> None:
        """Take in the text's next token."""
        self._extend(token)
        state, matched = self._ending
        self._ending = self.cut(self._edges[state][token], matched + 1, self.max_match + 1)
        state = self._ending.state
        while state != 0:
            self._counts[state] += 1
            state = self._links[state]

    def place(self) -> Place:
        """The longest ending of the text, of at most `max_match` tokens, that was continued before."""
        return self.continued(self.cut(*self._ending, self.max_match))

    def length(self, state: int) -> int:
        return self._lengths[state]

    def link(self, state: int) -> int:
        return self._links[state]

    def target(self, state: int, token: int) -> int:
        return self._edges[state].get(token, -1)

    def following(self, state: int) -> dict[int, int]:
        return {token: self._counts[target] for token, target in self._edges[state].items()}

    def likeliest(self, state: int) -> tuple[int, float]:
        found = self.following(state)
        token = min(found, key=lambda token: (-found[token], token))
        return token, found[token] / sum(found.values())

    def ends(self, state: int) -> bool:
        return not self._edges[state]

    def frozen(self) -> dict[str, Tensor]:
        """The automaton as int32 tensors: (S,) each, `first_edge` (S + 1,), edges (E,) by state and then by token."""
        sizes = [len(edges) for edges in self._edges]
        first_edge = np.concatenate([[0], np.cumsum(sizes)])
        edges = np.fromiter(
            (pair for edges in self._edges for pair in sorted(edges.items())), dtype=np.dtype((np.int32, 2))
        ).reshape(-1, 2)
        arrays = {
            "lengths": self._lengths,
            "links": self._links,
            "counts": self._counts,
            "first_edge": first_edge,
            "edge_tokens": edges[:, 0],
            "edge_states": edges[:, 1],
        }
        return {name: torch.from_numpy(np.array(values, dtype=np.int32)) for name, values in arrays.items()}

    def _extend(self, token: int) -> None:
        """Make the state of the whole text and `token`, with edges from all endings that `token` never followed."""
        state, known = self._whole, self._edges[self._whole].get(token)
        if known is not None:  # an earlier text began in the same way
            self._whole = self._exactly(state, token, known)
            return
        new = self._add(self._lengths[state] + 1, 0, {}, 0)
        while state >= 0 and token not in self._edges[state]:
            self._edges[state][token] = new
            state = self._links[state]
        if state >= 0:
            self._links[new] = self._exactly(state, token, self._edges[state][token])
        self._whole = new

    def _exactly(self, state: int, token: int, target: int) -> int:
        """The state whose longest string is that of `state` and `token`: split off `target` where that has longer ones.

        Up to now both halves ended at the same places, so both keep the count and what followed.
        """
        length = self._lengths[state] + 1
        if self._lengths[target] == length:
            return target
        half = self._add(length, self._links[target], dict(self._edges[target]), self._counts[target])
        while state >= 0 and self._edges[state].get(token) == target:
            self._edges[state][token] = half
            state = self._links[state]
        self._links[target] = half
        return half

    def _add(self, length: int, link: int, edges: dict[int, int], count: int) -> int:
        self._lengths.append(length)
        self._links.append(link)
        self._edges.append(edges)
        self._counts.append(count)
        return len(self._lengths) - 1


class FrozenSuffixes(Suffixes):
    """An automaton as arrays, which can be asked but does not grow."""

    def __init__(self, max_match: int, arrays: dict[str, np.ndarray]) -> None:
        super().__init__(max_match)
        self._lengths, self._links, self._counts = arrays["lengths"], arrays["links"], arrays["counts"]
        self._first, self._tokens, self._states = arrays["first_edge"], arrays["edge_tokens"], arrays["edge_states"]

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenSuffixes:
        return self  # it never changes, and may be large

    def length(self, state: int) -> int:
        return int(self._lengths[state])

    def link(self, state: int) -> int:
        return int(self._links[state])

    def target(self, state: int, token: int) -> int:
        start, end = self._first[state], self._first[state + 1]
        edge = bisect_left(self._tokens, token, int(start), int(end))
        return int(self._states[edge]) if edge < end and self._tokens[edge] == token else -1

    def following(self, state: int) -> dict[int, int]:
        edges = slice(self._first[state], self._first[state + 1])
        counts = self._counts[self._states[edges]]
        return dict(zip(self._tokens[edges].tolist(), counts.tolist(), strict=True))

    def likeliest(self, state: int) -> tuple[int, float]:
        edges = slice(self._first[state], self._first[state + 1])
        counts = self._counts[self._states[edges]]
        best = int(counts.argmax())  # the first of several, which has the lowest id
        return int(self._tokens[edges][best]), float(counts[best] / counts.sum(dtype=np.int64))

    def ends(self, state: int) -> bool:
        return bool(self._first[state] == self._first[state + 1])


class CountedSuffixes(nn.Module):
    """The automaton of a corpus, as buffers that are saved with a drafter; none until something is counted.

    `num_states` and `num_edges` are the sizes of one that is about to be loaded. Raises UserError for sizes that
    belong to no automaton.
    """

    def __init__(self, max_match: int, num_states: int = 0, num_edges: int = 0) -> None:
        super().__init__()
        if (num_states, num_edges) != (0, 0) and not 1 < num_states <= num_edges + 1:
            raise UserError(
                f"drafter.model has num_states {num_states} and num_edges {num_edges}: only an export has these, and "
                "no automaton has such sizes."
            )
        self.max_match = max_match
        sizes = dict.fromkeys(("lengths", "links", "counts"), num_states)
        sizes |= {"first_edge": num_states + 1, "edge_tokens": num_edges, "edge_states": num_edges}
        if num_states > 0:
            self._hold({name: torch.zeros(size, dtype=torch.int32) for name, size in sizes.items()})

    @property
    def sizes(self) -> dict[str, int]:
        """The constructor's arguments that make room for this automaton."""
        found = dict(self.named_buffers())
        return {
            "num_states": len(found["lengths"]) if found else 0,
            "num_edges": len(found["edge_tokens"]) if found else 0,
        }

    def count(self, texts: Iterable[list[int]]) -> None:
        """Replace the automaton by that of `texts`, which do not run into each other. Raises UserError for no token."""
        automaton = SuffixAutomaton(self.max_match)
        for text in texts:
            automaton.begin()
            for token in text:
                automaton.append(token)
        if automaton.ends(0):
            raise UserError("There is nothing to count: no text has a token.")
        self._hold(automaton.frozen())

    def suffixes(self) -> FrozenSuffixes | None:
        """The automaton as it stands now; None without one."""
        arrays = {name: tensor.cpu().numpy() for name, tensor in self.named_buffers()}
        return FrozenSuffixes(self.max_match, arrays) if arrays else None

    def _hold(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
