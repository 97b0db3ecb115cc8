"""Logits to laws: the only home of penalty, bias, temperature, top-k, top-p, min-p, and of drawing from a law.

The order is that of transformers' `generate`: bias, repetition penalty (both in `adjust`), then temperature, top-k,
top-p, min-p (in `probabilities`).

B batch, M nodes (the pending token and the draft behind it), V vocabulary. Leading dimensions are free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from models.errors import UserError

_LIKELIEST = 512  # tokens that are sorted before the whole vocabulary is
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a law is made from logits: temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch those filters off.

    `logit_bias` holds (token id, what is added to its logit); −inf forbids the token. `repetition_penalty` above 1
    makes tokens of the prompt and the answer less likely, 1 is off. Both change the greedy choice too (see `adjust`).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.temperature >= 0:  # nor a nan
            raise UserError(f"temperature is {self.temperature}: it must be 0 (greedy) or more.")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}: it must be 0 (off) or more.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: it must lie in (0, 1].")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p is {self.min_p}: it must lie in [0, 1].")
        if not 0 < self.repetition_penalty <= _LARGEST:
            raise UserError(f"repetition_penalty is {self.repetition_penalty}: it must be above 0 and finite.")
        biased: set[int] = set()
        for token, bias in self.logit_bias:
            if not isinstance(token, int) or token < 0:
                raise UserError(f"logit_bias names the token {token!r}: it must be a token id, 0 or more.")
            if token in biased:
                raise UserError(f"logit_bias names the token {token} more than once: give each token one bias.")
            biased.add(token)
            if not bias <= _LARGEST:  # nor a nan
                raise UserError(f"logit_bias adds {bias} to token {token}: it must be finite, or -inf to forbid it.")

    @property
    def greedy(self) -> bool:
        """True where the law is a point mass on the largest logit."""
        return self.temperature == 0

    @property
    def adjusts(self) -> bool:
        """True where `adjust` changes logits."""
        return self.repetition_penalty != 1 or bool(self.logit_bias)

    @property
    def needs_seen(self) -> bool:
        """True where `adjust` must be told which tokens the context holds."""
        return self.repetition_penalty != 1


UNFILTERED = SamplingParams(1.0)  # laws as the logits have them


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise UserError where `logit_bias` names a token outside the vocabulary, or leaves none that may be chosen."""
    for token, _ in params.logit_bias:
        if token >= vocab_size:
            raise UserError(f"logit_bias names the token {token}, but the vocabulary ends at {vocab_size - 1}.")
    if sum(bias == float("-inf") for _, bias in params.logit_bias) == vocab_size:
        raise UserError(f"logit_bias forbids all {vocab_size} tokens of the vocabulary: leave at least one.")


def adjust(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """Apply bias, then repetition penalty, to raw logits (..., V), before temperature and before a greedy choice.

    The bias is added. Then logits l of the tokens that `seen` (..., V) bool marks (those of the prompt and the answer
    so far, however often) become l / penalty, or l · penalty where l < 0 (1909.05858, section 4.1, but for the sign).
    Returns float32 or wider; the very same tensor where both are off. Raises ValueError for a penalty without `seen`.

    Only the target's logits need this. A drafter may draft from laws that were not adjusted: what it drew from is
    what it reports, so the output law stays exact, and only acceptance is lost.
    """
    if not params.adjusts:
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if params.logit_bias:
        token_ids, biases = zip(*params.logit_bias, strict=True)
        bias = logits.new_zeros(logits.shape[-1])
        bias[list(token_ids)] = logits.new_tensor(biases)
        logits = logits + bias
    if params.needs_seen:
        if seen is None:
            raise ValueError("a repetition penalty needs to know the tokens seen")
        penalty = params.repetition_penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    return logits


def seen_tokens(prompts: list[list[int]], vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Which tokens each prompt holds: (B, V) bool. Ids beyond the head's vocabulary cannot be chosen, and are left out.

    Inputs of an embedding that is larger than the head do hold such ids.
    """
    seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        seen[row, [token for token in set(prompt) if token < vocab_size]] = True
    return seen.to(device)


def seen_at_nodes(seen: Tensor, node_tokens: Tensor, related: Tensor) -> Tensor:
    """Which tokens the context holds at each node: (B, M, V) bool.

    `seen` (B, V) are the tokens before the first node, node_tokens (B, M) the nodes' own; related (B, M, M) is True
    at [b, i, j] where node j lies on the path to node i, i itself included (`tree.ancestors`). At the last node of the
    accepted path the result is what the next round starts from.
    """
    # Nodes off the path write the node's own token once more, so that every write is a True and their order is free.
    on_path = torch.where(related, node_tokens[:, None, :], node_tokens[:, :, None])
    return seen[:, None, :].repeat(1, node_tokens.shape[1], 1).scatter_(2, on_path, True)


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Turn logits (..., V) into the law that tokens are drawn from, (..., V), in float32 or wider.

    Temperature first, then top-k, then top-p over what is left, then min-p, which keeps tokens at least min_p times
    as probable as the likeliest, then renormalisation: the order of transformers. Of tokens tied at the k-th place all
    are kept, of tokens tied where top-p ends those of lower ids. Greedy gives a one-hot law on the first largest logit.
    Penalty and bias come before, from `adjust`.
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
    if params.min_p > 0:
        law = law.masked_fill(law < params.min_p * law.amax(-1, keepdim=True), 0.0)
    if params.top_p < 1 or params.min_p > 0:
        law = law / law.sum(-1, keepdim=True)
    return law


def _nucleus(law: Tensor, top_p: float) -> Tensor:
    """Zero all but the most probable tokens (..., V): those before which less than `top_p` of the mass comes.

    A CPU takes longer to sort a large vocabulary than to compute its logits. There the likeliest tokens are found
    first, and a whole law is sorted only where they do not hold the mass.
    """
    if law.device.type == "cpu" and law.shape[-1] > _LIKELIEST:
        laws = law.reshape(-1, law.shape[-1])
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
        self.device = device

    def uniform(self, columns: int) -> Tensor:
        """Numbers in [0, 1): (B, columns) float64. Raises ValueError for more columns than the block holds."""
        if columns > self._block:
            raise ValueError(f"{columns} numbers asked for, but a block holds {self._block}")
        rows = [torch.rand(self._block, generator=stream, dtype=torch.float64) for stream in self._streams]
        return torch.stack(rows)[:, :columns].to(self.device)

    @contextmanager
    def resting(self, rows: list[int]) -> Iterator[None]:
        """Leave the streams of `rows` where they are, whatever numbers are taken meanwhile."""
        states = [self._streams[row].get_state() for row in rows]
        yield
        for row, state in zip(rows, states, strict=True):
            self._streams[row].set_state(state)

    def select(self, rows: list[int]) -> None:
        """Keep the streams of `rows`, in that order."""
        self._streams = [self._streams[row] for row in rows]
