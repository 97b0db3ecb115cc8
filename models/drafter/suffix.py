"""Suffix automata as drafters: the likeliest continuation of the longest known ending (2411.04975).

Every request has an automaton of its own text, which grows as tokens come; all share one of the texts that were counted
in training, if any. Each of them says what most frequently followed the text's longest ending that it knows, token by
token. The draft of which more is expected to be right is proposed; where both expect the same, that of the longer
match, and then the request's own. A draft is as long as its match times `length_factor`, at least 1 token: a long match
is a sign that more will be copied. That length follows from the committed text alone.

The draft is a point mass, so it is accepted with p(x).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from models.errors import UserError
from models.suffix_automaton import ROOT, CountedSuffixes, FrozenSuffixes, Place, SuffixAutomaton, Suffixes
from models.target import Target
from models.text_drafting import DraftsFromText, TextState
from models.vocab import DraftVocab


class SuffixRequest:
    """One request's text, and where it stands among the texts that were counted."""

    def __init__(self, max_match: int, length_factor: float, counted: FrozenSuffixes | None) -> None:
        self.started, self.matched = False, 0
        self._own, self._length_factor = SuffixAutomaton(max_match), length_factor
        self._counted, self._place = counted, ROOT

    def append(self, token_ids: list[int]) -> None:
        """Take in the next tokens."""
        self.started = True
        for token in token_ids:
            self._own.append(token)
            if self._counted is not None:
                self._place = self._counted.advance(self._place, token)

    def continuation(self, num_tokens: int) -> list[int]:
        """Up to `num_tokens` tokens that are likely to follow; none where not even the last token is known."""
        sources: list[tuple[Suffixes, Place]] = [(self._own, self._own.place())]
        if self._counted is not None:
            sources.append((self._counted, self._counted.continued(self._place)))
        drafts = []
        for suffixes, place in sources:
            length = min(num_tokens, max(1, int(self._length_factor * place.matched)))
            token_ids, expected = suffixes.draft(place, length)
            drafts.append(((expected, place.matched), token_ids))
        (_, self.matched), token_ids = max(drafts, key=lambda draft: draft[0])  # the first of several
        return token_ids


class SuffixDrafter(DraftsFromText, nn.Module):
    """Copies from the request's own text and from counted ones; a module without parameters.

    Endings of up to `max_match` tokens are told apart. The draft vocabulary is left alone: whatever stands in a text
    can be proposed. `num_states` and `num_edges` are written by an export. Raises UserError for a match or a factor
    that is too small.
    """

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        max_match: int = 24,
        length_factor: float = 2.0,
        num_states: int = 0,
        num_edges: int = 0,
    ) -> None:
        super().__init__()
        if not length_factor > 0:
            raise UserError(f"drafter.model.length_factor is {length_factor}: it must be above 0.")
        SuffixAutomaton(max_match)  # refuses what cannot be
        self.capture_layers: tuple[int, ...] = ()
        self.vocab = DraftVocab(target.vocab_size)
        self.counted = CountedSuffixes(max_match, num_states, num_edges)
        self._max_match, self._length_factor = max_match, length_factor

    @property
    def export_arguments(self) -> dict[str, int]:
        """The sizes of what was counted, for which a loaded drafter makes room."""
        return self.counted.sizes

    def count(self, texts: Iterable[list[int]]) -> None:
        """Learn from token ids, in place of all that was counted before."""
        self.counted.count(texts)

    def new_state(self, batch_size: int, max_len: int) -> TextState:
        """Empty texts."""
        counted = self.counted.suffixes()
        return TextState([SuffixRequest(self._max_match, self._length_factor, counted) for _ in range(batch_size)])
