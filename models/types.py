"""The contracts between target, drafter and engine.

B batch, S rows, N draft nodes, L captured layers, D hidden size, V target and Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from models import packing
from models.sampling import RequestRandom, SamplingParams
from models.tree import DynamicTree, StaticTree
from models.vocab import DraftVocab


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    """What a drafter knows of a stretch of text; the same alignment in training and in decoding.

    Row t holds the token x_t, the token x_{t+1} that followed it, and the target's hidden states at x_t. Rows from
    `lengths` on are padding.
    """

    token_ids: Tensor  # (B, S)
    next_token_ids: Tensor  # (B, S)
    hidden: Tensor | None  # (B, S, L·D), the captured layers side by side
    lengths: Tensor  # (B,) valid rows, on the host
    segments: Tensor | None = None  # (B, S) in training: which of a row's texts (`models.packing`); None: there is one

    def select(self, rows: list[int]) -> TargetFeatures:
        """Those of the requests `rows`, in that order; there are no packed ones."""
        hidden = None if self.hidden is None else self.hidden[rows]
        return TargetFeatures(self.token_ids[rows], self.next_token_ids[rows], hidden, self.lengths[rows])

    @property
    def positions(self) -> Tensor:
        """The place of each row within its text: (1 or B, S)."""
        if self.segments is not None:
            return packing.positions(self.segments)
        return torch.arange(self.token_ids.shape[1], device=self.token_ids.device)[None]

    @property
    def text_lengths(self) -> Tensor:
        """How long the text of each row is: (B, 1 or S)."""
        if self.segments is not None:
            return packing.text_lengths(self.segments, self.lengths)
        return self.lengths[:, None]


@dataclass(frozen=True, slots=True)
class Probes:
    """Rows that the target reads in the same pass as a draft. None is ever accepted.

    Parents are probes or the last committed token: neither do probes see the draft, nor the draft them. What the target
    would choose behind the last `num_asked` of them comes back to the drafter (`observe`).
    """

    token_ids: Tensor  # (B, M) in the target's vocabulary
    parents: Tensor  # (B, M) an earlier probe; −1 is the last committed token
    num_asked: int


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens. `probs` is the law each token was really drawn from; None where each is a point mass.

    `branches` says on the host whether `parents` are those of a tree: a chain needs no mask of its own.

    A drafter of chains that has less than N tokens to say for a request, or nothing, gives `lengths`: the first
    lengths[b] are meant, and the rest is padding that is neither checked nor counted. Such a length must be fixed
    before the tokens that it cuts are drawn, by the committed text (look-up: how much followed the match) or by the
    draft's tokens before the cut (a low confidence in the last that is kept). Given those the draft is then one of a
    fixed length, for which verification is exact whatever the length; a length that looked at the value of a token
    which it cuts would let only some values be tested, and change the output's law.

    In a tree of less than was asked for, or none, `lengths` counts the levels that are meant, and padding hangs deeper.
    `probes` are what the drafter wants to know beside. `matched` says of a draft that was looked up by how many of the
    text's last tokens it was found.
    """

    token_ids: Tensor  # (B, N) in the target's vocabulary
    parents: Tensor  # (B, N) −1 is the last committed token; a chain is arange(N) − 1
    probs: Tensor | None  # (B, N, V)
    lengths: Tensor | None = None  # (B,) of 0 .. N, on the host; None: all N
    branches: bool = False
    probes: Probes | None = None
    matched: Tensor | None = None  # (B,) on the host


class DraftState(Protocol):
    """What a drafter remembers of the requests it serves."""

    def select(self, rows: list[int]) -> None:
        """Keep the requests `rows`, in that order, when others have finished.

        In beam search a row may come several times: the request then goes on in several ways, each by itself.
        """


class Drafter(Protocol):
    """A model, or anything else, that proposes tokens for a target.

    `capture_layers` names the target states it reads: j is the state entering layer j, and the number of layers (or
    −1) is the state that the target's head reads.
    """

    capture_layers: tuple[int, ...]
    vocab: DraftVocab

    def new_state(self, batch_size: int, max_len: int) -> DraftState:
        """Memory for requests of at most `max_len` rows, those of a draft included."""

    def propose(
        self,
        state: DraftState,
        committed: TargetFeatures,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams,
        random: RequestRandom,
    ) -> Draft:
        """Take in the rows confirmed since the last call, and draft what follows them.

        The drafter first drops from `state` whatever it had drafted itself. `random` holds a stream per request in
        place of one generator, so that a request's draft is the same in any batch.
        """


class ProbingDrafter(Drafter, Protocol):
    """A drafter whose drafts have probes, or are not the chains that are asked for.

    What it drafts may depend on the answers to its probes. So its state is not a function of the text alone, unlike
    that of every other drafter.
    """

    num_rows: int  # the most rows of a draft and its probes together

    def observe(self, state: DraftState, choices: Tensor) -> None:
        """Take in the target's choices (B, num_asked) behind the last draft's probes, before the rows are confirmed."""


def probes(drafter: object) -> bool:
    """Whether it is a `ProbingDrafter`."""
    return getattr(drafter, "num_rows", 0) > 0


def max_depth(drafter: object) -> int | None:
    """How many tokens deep a drafter's drafts can be: its `max_depth`, where it has a head for each; None: any number.

    Longer chains end there; a deeper tree is refused.
    """
    found: int | None = getattr(drafter, "max_depth", None)
    return found


def own_steps(drafter: object) -> int:
    """How many steps of `unroll` have parameters of their own (its `own_steps`): all of a head each, else the first.

    What is trained for fewer leaves some as they began, and they draft all the same.
    """
    found: int = getattr(drafter, "own_steps", max_depth(drafter) or 1)
    return found


def packs(drafter: object) -> bool:
    """Whether `unroll` goes by the segments of its features, so that several texts may share a row (its `packs`)."""
    return bool(getattr(drafter, "packs", False))


def feeds_back(drafter: object) -> bool:
    """Whether each step of `unroll` reads the output of the one before, so that training on more steps teaches it to
    (its `feeds_back`).
    """
    return bool(getattr(drafter, "feeds_back", False))


class TrainableDrafter(Drafter, Protocol):
    """A drafter with something to learn. The engine needs none of this, and a drafter without weights has none."""

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        """For training: yield the hidden states (B, S, D) of step 0, 1, ..; row t of step s is about x_{t+2+s}."""

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Draft logits (..., Vd) of hidden states (..., D) of a step; apart from `unroll`, so that losses can chunk it.

        Only a drafter with several heads minds which step it is.
        """

    def logit_parameters(self, step: int = 0) -> list[nn.Parameter]:
        """The parameters that `logits` trains at a step; none for a head that is the target's."""


class TreeDrafter(Drafter, Protocol):
    """A drafter that can say what follows several tokens at once."""

    def propose_tree(
        self,
        state: DraftState,
        committed: TargetFeatures,
        *,
        shape: StaticTree | DynamicTree,
        children: str,
        sampling: SamplingParams,
        random: RequestRandom,
    ) -> Draft:
        """As `propose`, a tree of the given shape; `children` is how those of a static tree are chosen."""
