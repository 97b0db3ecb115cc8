"""Which domain a request is of, by the tokens of its prompt: multinomial naive Bayes, learnt from a few of each.

V vocabulary, C domains.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from models.errors import UserError


class DomainDetector:
    """argmax_c log P(c) + Σ_x log P(x | c), with counts smoothed by `smoothing` tokens spread over all V."""

    def __init__(self, vocab_size: int, examples: Iterable[tuple[list[int], str]], smoothing: float = 200.0) -> None:
        counts: dict[str, Tensor] = {}
        requests: dict[str, int] = {}
        everything = torch.zeros(vocab_size, dtype=torch.float64)
        for token_ids, domain in examples:
            found = torch.bincount(torch.tensor(token_ids), minlength=vocab_size).double()
            counts[domain] = counts.get(domain, torch.zeros_like(found)) + found
            requests[domain] = requests.get(domain, 0) + 1
            everything += found
        if not counts:
            raise UserError("There are no requests to tell domains by.")
        # Smoothed by what is common to all: a token that was never seen in a domain is not evidence by itself.
        common = (everything + 1) / (everything.sum() + vocab_size)
        self.domains = sorted(counts)
        laws = [(counts[d] + smoothing * common) / (counts[d].sum() + smoothing) for d in self.domains]
        self._log_laws = torch.stack(laws).log()  # (C, V)
        total = sum(requests.values())
        self._log_priors = torch.tensor([requests[d] / total for d in self.domains], dtype=torch.float64).log()

    def scores(self, token_ids: list[int]) -> Tensor:
        """log P(c, prompt) of each domain: (C,)."""
        return self._log_priors + self._log_laws[:, token_ids].sum(-1)

    def detect(self, token_ids: list[int]) -> str:
        """The likeliest domain of a prompt."""
        return self.domains[int(self.scores(token_ids).argmax())]
