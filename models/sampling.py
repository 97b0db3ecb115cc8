"""Logits to laws: the only home of temperature, top-k and top-p, and of drawing a token from a law.

B batch, V vocabulary. Leading dimensions are free.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.errors import UserError

_LIKELIEST = 512  # tokens that are sorted before the whole vocabulary is


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
        law = _nucleus(law, params.top_p)
        law = law / law.sum(-1, keepdim=True)
    return law


def _nucleus(law: Tensor, top_p: float) -> Tensor:
    """Zero all but the most probable tokens (..., V): those before which less than `top_p` of the mass comes.

    A CPU takes longer to sort a large vocabulary than to compute its logits. There the likeliest tokens are found
    first, and a whole law is sorted only where they do not hold the mass.
    """
    if law.device.type == "cpu" and law.shape[-1] > _LIKELIEST:
        laws = law.flatten(0, -2)
        kept, enough = _nucleus_of_likeliest(laws, top_p)
        if not enough.all():
            kept[~enough] = _nucleus_by_sorting(laws[~enough], top_p)
        return kept.view_as(law)
    return _nucleus_by_sorting(law, top_p)


def _nucleus_by_sorting(law: Tensor, top_p: float) -> Tensor:
    ordered, order = law.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(law).scatter_(-1, order, ordered.masked_fill(mass_before >= top_p, 0.0))


def _nucleus_of_likeliest(law: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The nucleus (R, V) as far as the likeliest tokens hold it, and which rows (R,) they suffice for."""
    likeliest, token_ids = law.topk(_LIKELIEST, dim=-1, sorted=False)
    token_ids, by_id = token_ids.sort(dim=-1)
    ordered, by_mass = likeliest.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    mass = ordered.cumsum(-1)
    # Any of the tokens tied with the last may be missing, so the mass must be reached before them.
    reached = torch.where(ordered > ordered[..., -1:], mass, 0.0).amax(-1)
    kept = ordered.masked_fill(mass - ordered >= top_p, 0.0)
    return torch.zeros_like(law).scatter_(-1, token_ids.gather(-1, by_mass), kept), reached >= top_p


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
