"""What drafters that read nothing but text share: the tokens that have come, and drafts of their own length."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from models import tree
from models.sampling import RequestRandom, SamplingParams
from models.types import Draft, TargetFeatures


class Text(Protocol):
    """One request's text, as far as it is confirmed, and what may follow it."""

    started: bool  # whether any token has come
    matched: int  # tokens of the ending by which the last continuation was found

    def append(self, token_ids: list[int]) -> None:
        """Take in the next tokens."""

    def continuation(self, num_tokens: int) -> list[int]:
        """Up to `num_tokens` tokens that are likely to follow; none where none is known."""


class TextState:
    """The texts of the running requests."""

    def __init__(self, texts: Sequence[Any]) -> None:
        self.texts = list(texts)

    def select(self, rows: list[int]) -> None:
        """Keep the requests `rows`, in that order."""
        self.texts = select_texts(self.texts, rows)


class DraftsFromText:
    """`propose` by what a request's text tells to follow: a point mass at each token, accepted with p(x)."""

    def propose(
        self,
        state: TextState,
        committed: TargetFeatures,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams,
        random: RequestRandom,
    ) -> Draft:
        """Take in the confirmed rows, then draft up to N tokens; `lengths` says how many, and 0 pads the rest."""
        take_in(state.texts, committed)
        drafts = [text.continuation(num_speculative_tokens) for text in state.texts]
        draft = point_masses(drafts, num_speculative_tokens, committed.token_ids.device)
        return replace(draft, matched=torch.tensor([text.matched for text in state.texts]))


Item = TypeVar("Item")


def select_texts(texts: list[Item], rows: list[int]) -> list[Item]:
    """The texts `rows`, in that order. One that is chosen again is copied, so that each goes on by itself."""
    return [copy.deepcopy(texts[row]) if row in rows[:place] else texts[row] for place, row in enumerate(rows)]


def take_in(texts: Sequence[Any], committed: TargetFeatures) -> None:
    """Let each text grow by its rows' next tokens; by its first row's own one too where it has not started."""
    token_ids, following = committed.token_ids.tolist(), committed.next_token_ids.tolist()
    for row, (text, length) in enumerate(zip(texts, committed.lengths.tolist(), strict=True)):
        text.append(([] if text.started else token_ids[row][:1]) + following[row][:length])


def point_masses(drafts: list[list[int]], num_tokens: int, device: torch.device) -> Draft:
    """Chains of up to `num_tokens` tokens without laws; `lengths` says how many are meant, and 0 pads the rest."""
    padded = torch.tensor([draft + [0] * (num_tokens - len(draft)) for draft in drafts], device=device)
    parents = tree.chain_parents(len(drafts), num_tokens, device)
    return Draft(padded, parents, None, torch.tensor([len(draft) for draft in drafts]))
