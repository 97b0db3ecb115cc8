"""A hybrid: λ · p_ngram + (1 − λ) · p_neural, a chain drawn from the mixture itself.

p_ngram are the shares of what followed the text's longest ending that was ever continued: in the request's own text, or
in the texts that were counted in training, where the match is longer there. Where nothing is known, or nothing that the
draft vocabulary holds, the neural law stands alone. p_neural is the law of a drafter that can say what follows a chain
token by token (`expander`); it reads the drawn token, whichever part that came from. Temperature and filters are
applied to the mixture of the two unfiltered laws, so greedy drafting takes the mixture's largest token, and the law
reported is that which was drawn from. The draft vocabulary is the neural drafter's.

B batch, N drafted tokens, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from models.checkpoint import native
from models.drafter import accelerate_drafter
from models.errors import UserError
from models.law_drafting import DraftsChains
from models.sampling import UNFILTERED, probabilities
from models.suffix_automaton import ROOT, CountedSuffixes, FrozenSuffixes, Place, SuffixAutomaton, Suffixes
from models.target import Target
from models.text_drafting import select_texts, take_in
from models.tree_drafting import Expander
from models.types import DraftState, TargetFeatures, max_depth
from models.vocab import DraftVocab


class NgramText:
    """One request's text with a draft behind it, and where both stand in the automata."""

    def __init__(self, max_match: int, counted: FrozenSuffixes | None) -> None:
        self.started = False
        self._own, self._counted, self._place = SuffixAutomaton(max_match), counted, ROOT
        self._drafted: list[tuple[Suffixes, Place]] = []

    def append(self, token_ids: list[int]) -> None:
        """Drop the draft, and take in the text's next tokens."""
        self.started = True
        for token in token_ids:
            self._own.append(token)
            if self._counted is not None:
                self._place = self._counted.advance(self._place, token)
        self._drafted = [(self._own, self._own.place())]
        if self._counted is not None:
            self._drafted.append((self._counted, self._place))

    def draft(self, token: int) -> None:
        """Go on behind a drafted token, which counts nowhere."""
        self._drafted = [(suffixes, suffixes.advance(place, token)) for suffixes, place in self._drafted]

    def following(self) -> dict[int, int]:
        """What followed the longest match, and how often; empty where not even the last token is known."""
        places = [(suffixes, suffixes.continued(place)) for suffixes, place in self._drafted]
        suffixes, place = max(places, key=lambda found: found[1].matched)  # the first of several: the own text
        return suffixes.following(place.state) if place.matched else {}


class HybridState:
    """The neural drafter's state, and the texts of the running requests."""

    def __init__(self, neural: DraftState, texts: list[NgramText]) -> None:
        self.neural, self.texts = neural, texts

    def select(self, rows: list[int]) -> None:
        """Keep the requests `rows`, in that order."""
        self.neural.select(rows)
        self.texts = select_texts(self.texts, rows)


class HybridDrafter(DraftsChains, nn.Module):
    """Mixes n-gram counts with weight `ngram_weight` into a neural drafter.

    That is the one in the folder `export`, or without one the drafter that `neural` describes (`_target_` and
    arguments). Endings of up to `max_match` tokens are told apart. `num_states` and `num_edges` are written by an
    export. Raises UserError for a weight outside [0, 1], and for a drafter that cannot draft token by token.
    """

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        neural: dict[str, Any] | None = None,
        export: str | None = None,
        ngram_weight: float = 0.5,
        max_match: int = 8,
        num_states: int = 0,
        num_edges: int = 0,
    ) -> None:
        super().__init__()
        if not 0 <= ngram_weight <= 1:
            raise UserError(f"drafter.model.ngram_weight is {ngram_weight}: it must lie in [0, 1].")
        if export is None and neural is None:
            raise UserError("The hybrid has no neural drafter: give drafter.model.export or drafter.model.neural.")
        SuffixAutomaton(max_match)  # refuses what cannot be
        self.neural, self._model = native.load_or_build(export, neural or {}, target, vocab)
        if not hasattr(self.neural, "expander"):
            raise UserError(f"{type(self.neural).__name__} cannot be mixed: it does not draft from laws.")
        self.pretrained = export is not None or getattr(self.neural, "pretrained", False)
        self.capture_layers: tuple[int, ...] = self.neural.capture_layers
        self.max_depth = max_depth(self.neural)
        self.vocab: DraftVocab = self.neural.vocab
        self.counted = CountedSuffixes(max_match, num_states, num_edges)
        self._max_match, self._ngram_weight = max_match, ngram_weight
        known = range(self.vocab.size) if self.vocab.token_ids is None else self.vocab.token_ids.tolist()
        self._draft_ids = {token: draft_id for draft_id, token in enumerate(known)}

    @property
    def export_arguments(self) -> dict[str, Any]:
        """The neural drafter in place of its folder, and the sizes of what was counted."""
        neural = self._model | getattr(self.neural, "export_arguments", {})
        return {"export": None, "neural": neural, **self.counted.sizes}

    def accelerate(self) -> None:
        """Prepare for inference, for good, as the neural drafter does."""
        accelerate_drafter(self.neural)

    def count(self, texts: Iterable[list[int]]) -> None:
        """Learn n-grams from token ids, in place of all that were counted before."""
        self.counted.count(texts)

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Draft logits (..., Vd) of the mixture (..., Vd), which is what this drafter has for a hidden state."""
        return hidden.log()

    def new_state(self, batch_size: int, max_len: int) -> HybridState:
        """Memory for requests of at most `max_len` rows, those of a draft included."""
        counted = self.counted.suffixes()
        texts = [NgramText(self._max_match, counted) for _ in range(batch_size)]
        return HybridState(self.neural.new_state(batch_size, max_len), texts)

    def expander(self, state: HybridState, committed: TargetFeatures) -> Expander:
        """Take in the confirmed rows; the mixture behind them is then told along one chain, token by token."""
        take_in(state.texts, committed)
        return _HybridExpander(self, self.neural.expander(state.neural, committed), state.texts)

    def _mixture(self, logits: Tensor, texts: list[NgramText]) -> Tensor:
        """λ · p_ngram + (1 − λ) · p_neural (B, Vd), of the neural drafter's logits (B, Vd)."""
        neural = probabilities(logits, UNFILTERED)
        counts = torch.zeros(neural.shape, dtype=neural.dtype)
        for row, text in enumerate(texts):
            found = {self._draft_ids[t]: count for t, count in text.following().items() if t in self._draft_ids}
            counts[row, list(found)] = torch.tensor(list(found.values()), dtype=neural.dtype)
        total = counts.sum(-1, keepdim=True)
        weight = self._ngram_weight * (total > 0).to(neural)
        ngram = (counts / total.clamp(min=1)).to(neural.device)
        return weight * ngram + (1 - weight) * neural


class _HybridExpander:
    """The mixture along a chain; the texts of the requests go on with it."""

    def __init__(self, drafter: HybridDrafter, neural: Expander, texts: list[NgramText]) -> None:
        self.room = neural.room
        self._drafter, self._neural, self._texts = drafter, neural, texts

    def root(self) -> Tensor:
        return self._mixed(self._neural.root())

    def below(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        for text, token in zip(self._texts, token_ids[:, 0].tolist(), strict=True):
            text.draft(token)
        return self._mixed(self._neural.below(token_ids, parents))

    def _mixed(self, neural: Tensor) -> Tensor:
        return self._drafter.logits(self._drafter._mixture(neural[:, 0], self._texts))[:, None]
