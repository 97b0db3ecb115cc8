"""Logits to laws: the only home of temperature, top-k and top-p, and of drawing a token from a law.

B batch, V vocabulary. Leading dimensions are free.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.errors import UserError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a law is made from logits: temperature 0 is greedy; top_k 0 and top_p 1 switch those filters off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:  # nor a nan
            raise UserError(f"temperature is {self.temperature}: it must be 0 (greedy) or more.")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}: it must be 0 (off) or more.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: it must lie in (0, 1].")

    @property
    def greedy(self) -> bool:
        """True where the law is a point mass on the largest logit."""
        return self.temperature == 0


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Turn logits (..., V) into the law that tokens are drawn from, (..., V), in float32 or wider.

    Temperature first, then top-k, then top-p over what is left, then renormalisation: the order of transformers and
    vLLM. Of tokens tied at the k-th place all are kept, of tokens tied where top-p ends those of lower ids.
    Greedy gives a one-hot law on the first largest logit.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if params.greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        smallest_kept = logits.topk(params.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    law = logits.softmax(-1)
    if params.top_p < 1:
        ordered, order = law.sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.cumsum(-1) - ordered
        dropped = torch.zeros_like(law, dtype=torch.bool).scatter_(-1, order, mass_before >= params.top_p)
        law = law.masked_fill(dropped, 0.0)
        law = law / law.sum(-1, keepdim=True)
    return law


def draw(law: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token per law by inverting its cumulative sum: law (..., V), uniform (...) in [0, 1) → (...) int64.

    The law need not sum to one. A token of probability zero is never drawn.
    """
    cumulative = law.double().cumsum(-1)
    threshold = uniform.double().unsqueeze(-1) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp_(max=law.shape[-1] - 1)


class RequestRandom:
    """A stream of uniform numbers per request, so that a request's tokens do not depend on its neighbours.

    Every call takes `block` numbers from each stream however many are asked for: how far a stream has come then
    depends on the number of calls alone. Rows follow `seeds`; streams of another `purpose` are independent.
    """

    def __init__(self, seeds: list[int], block: int, purpose: int = 0, device: torch.device | str = "cpu") -> None:
        self._streams = [torch.Generator().manual_seed(2 * seed + purpose) for seed in seeds]
        self._block = block
        self._device = device

    def uniform(self, columns: int) -> Tensor:
        """Numbers in [0, 1): (B, columns) float64. Raises ValueError for more columns than the block holds."""
        if columns > self._block:
            raise ValueError(f"{columns} numbers asked for, but a block holds {self._block}")
        rows = [torch.rand(self._block, generator=stream, dtype=torch.float64) for stream in self._streams]
        return torch.stack(rows)[:, :columns].to(self._device)

    def select(self, rows: list[int]) -> None:
        """Keep the streams of `rows`, in that order."""
        self._streams = [self._streams[row] for row in rows]
