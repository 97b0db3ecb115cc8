"""What drafters that read nothing but text share: the tokens that have come, and drafts of their own length."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch

from models import tree
from models.types import Draft, TargetFeatures

Text = TypeVar("Text")


def select_texts(texts: list[Text], rows: list[int]) -> list[Text]:
    """The texts `rows`, in that order. One that is chosen again is copied, so that each goes on by itself."""
    return [copy.deepcopy(texts[row]) if row in rows[:place] else texts[row] for place, row in enumerate(rows)]


def new_tokens(committed: TargetFeatures, started: list[bool]) -> list[list[int]]:
    """The tokens that each request's text has grown by; its first row's own one only where it has not `started`."""
    token_ids, following = committed.token_ids.tolist(), committed.next_token_ids.tolist()
    return [
        ([] if begun else token_ids[row][:1]) + following[row][:length]
        for row, (begun, length) in enumerate(zip(started, committed.lengths.tolist(), strict=True))
    ]


def point_masses(drafts: list[list[int]], num_tokens: int, device: torch.device) -> Draft:
    """Chains of up to `num_tokens` tokens without laws; `lengths` says how many are meant, and 0 pads the rest."""
    padded = torch.tensor([draft + [0] * (num_tokens - len(draft)) for draft in drafts], device=device)
    parents = tree.chain_parents(len(drafts), num_tokens, device)
    return Draft(padded, parents, None, torch.tensor([len(draft) for draft in drafts]))
