"""A drafter's own, smaller vocabulary and its map to the target's.

`d2t` holds offsets, as EAGLE-3 checkpoints do: target token = draft token + d2t[draft token].
V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.errors import UserError


class DraftVocab:
    """The target tokens that a drafter can propose; all of them unless `token_ids` is given.

    `token_ids` (Vd,) are target ids in ascending order. Raises UserError where they are not, or lie outside V.
    """

    def __init__(self, vocab_size: int, token_ids: Tensor | None = None) -> None:
        self.vocab_size = vocab_size
        self.token_ids = token_ids
        if token_ids is not None:
            ascending = bool((token_ids[1:] > token_ids[:-1]).all())
            if len(token_ids) == 0 or not ascending or token_ids[0] < 0 or token_ids[-1] >= vocab_size:
                raise UserError(
                    f"The draft vocabulary must hold distinct target ids below {vocab_size} in ascending order."
                )

    @classmethod
    def most_frequent(cls, counts: Tensor, size: int | None) -> DraftVocab:
        """Choose the `size` most frequent tokens by `counts` (V,), the lower id on a tie; all when size is None."""
        if size is None or size >= len(counts):
            return cls(len(counts))
        if size < 1:
            raise UserError(f"draft_vocab_size is {size}: it must be at least 1, or null for the whole vocabulary.")
        order = counts.argsort(descending=True, stable=True)
        return cls(len(counts), order[:size].sort().values)

    @classmethod
    def from_offsets(cls, vocab_size: int, d2t: Tensor) -> DraftVocab:
        """Rebuild the vocabulary from stored offsets (Vd,)."""
        return cls(vocab_size, torch.arange(len(d2t)) + d2t)

    @property
    def size(self) -> int:
        """Vd."""
        return self.vocab_size if self.token_ids is None else len(self.token_ids)

    @property
    def reduced(self) -> bool:
        """True where some target tokens cannot be proposed."""
        return self.token_ids is not None

    def offsets(self) -> Tensor:
        """d2t: (Vd,) int64."""
        if self.token_ids is None:
            return torch.zeros(self.vocab_size, dtype=torch.int64)
        return self.token_ids - torch.arange(len(self.token_ids))

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids to target ids, any shape."""
        return draft_ids if self.token_ids is None else self.token_ids.to(draft_ids.device)[draft_ids]

    def to_draft(self, token_ids: Tensor) -> Tensor:
        """Target ids to draft ids, any shape; −1 for those that cannot be proposed."""
        if self.token_ids is None:
            return token_ids
        draft_ids = torch.full((self.vocab_size,), -1, dtype=torch.int64, device=token_ids.device)
        known = self.token_ids.to(token_ids.device)
        draft_ids[known] = torch.arange(len(known), device=token_ids.device)
        return draft_ids[token_ids]

    def widen(self, law: Tensor) -> Tensor:
        """Spread a law over the draft vocabulary (..., Vd) to the target's (..., V), zero elsewhere."""
        if self.token_ids is None:
            return law
        wide = law.new_zeros(*law.shape[:-1], self.vocab_size)
        return wide.index_copy_(-1, self.token_ids.to(law.device), law)
