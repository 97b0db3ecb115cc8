"""How a chain of drafted tokens is drawn: the same for every drafter that can say what follows token by token.

B batch, N drafted tokens, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from models import tree
from models.sampling import UNFILTERED, RequestRandom, SamplingParams, draw, probabilities
from models.tree_drafting import Expander
from models.types import Draft, Drafter, DraftState, TargetFeatures
from models.vocab import DraftVocab


class LawDrafter(Drafter, Protocol):
    """A drafter whose chains are drawn from laws: its `propose` is `draft_chain` with what its `expander` tells."""

    def expander(self, state: DraftState, committed: TargetFeatures) -> Expander:
        """Take in the rows confirmed since the last call; what follows them is then told token by token."""


class StopRule(Protocol):
    """Ends chains while they grow; asked once for each token of the longest, `draws` first.

    Neither method sees a token that it could discard: `draws` is asked before one is drawn, and `goes_on` is about the
    next one. So whether a token is tested does not depend on its own value, which keeps the output's law (see `Draft`).
    The law is that which tokens are drawn from; where greedy, the softmax of the logits. Requests whose chain has ended
    are asked about as well, and the answers ignored.
    """

    limits: list[int]  # the most tokens of each request

    def draws(self, law: Tensor) -> Tensor:
        """Which requests (B,) bool draw a token from their law (B, Vd); the chain of the others ends before it."""

    def goes_on(self, chance: Tensor) -> Tensor:
        """Which requests (B,) bool go on behind the token just drawn, which had this chance (B,); it is kept."""


@runtime_checkable
class EstimateRule(StopRule, Protocol):
    """A rule that looks at the drafter's own estimates: its expander has `confidence`, the chances (B, Q) of these."""

    def estimate(self, chance: Tensor) -> None:
        """Be told, before `draws` is asked, how likely (B,) the token that would be drawn next is to be accepted.

        The drafter says so of a token that it has not drawn, from what is before it.
        """


def draft_chain(
    expander: Expander,
    vocab: DraftVocab,
    num_tokens: int,
    *,
    sampling: SamplingParams,
    random: RequestRandom,
    stop: StopRule | None = None,
) -> Draft:
    """Draw N tokens one behind the other, each from the law that the drafter tells behind those before it.

    A request that the expander has no room for gets a shorter chain, or none; what no request has room for is padding
    that costs nothing. With a rule when to `stop`, N is only the most: as many tokens are drawn as the longest chain
    has, and the host waits for the device at each of them.
    """
    lengths = _limits(expander.room, None if stop is None else torch.tensor(stop.limits), num_tokens)
    uniforms = None if sampling.greedy else random.uniform(num_tokens)
    if lengths is not None and not lengths.any():
        nothing = torch.zeros(len(lengths), 0, dtype=torch.int64, device=random.device)
        return Draft(nothing, nothing, None, lengths)
    logits = expander.root()
    only = torch.zeros(len(logits), 1, dtype=torch.int64, device=logits.device)
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    longest = num_tokens if lengths is None else int(lengths.max())
    for depth in range(longest):
        if depth > 0:  # each token's parent is the only one of the call before
            logits = expander.below(tokens[-1][:, None], only)
        law = logits[:, 0]
        if uniforms is not None or stop is not None:
            law = probabilities(law, UNFILTERED if sampling.greedy else sampling)
        if isinstance(stop, EstimateRule):
            confident: Any = expander
            stop.estimate(confident.confidence()[:, 0])
        draws = None if stop is None else stop.draws(law)
        token = logits[:, 0].argmax(-1) if uniforms is None else draw(law, uniforms[:, depth])
        tokens.append(vocab.to_target(token))
        if uniforms is not None:
            laws.append(vocab.widen(law))
        if stop is not None and draws is not None:
            lengths = _ended(lengths, depth, draws, stop.goes_on(law.gather(1, token[:, None])[:, 0]))
            if not (lengths > depth + 1).any():
                break
    drafted, probs = torch.stack(tokens, dim=1), torch.stack(laws, dim=1) if laws else None
    if stop is None and longest < num_tokens:
        drafted = nn.functional.pad(drafted, (0, num_tokens - longest))
        probs = None if probs is None else nn.functional.pad(probs, (0, 0, 0, num_tokens - longest))
    parents = tree.chain_parents(len(drafted), drafted.shape[1], drafted.device)
    return Draft(drafted, parents, probs, lengths)


def _limits(room: Tensor | None, limits: Tensor | None, num_tokens: int) -> Tensor | None:
    """How many tokens each request may draft: (B,), on the host; None where that is N for all and no rule ends any."""
    if limits is not None:
        return limits.clamp(max=num_tokens) if room is None else torch.minimum(room, limits).clamp(0, num_tokens)
    if room is None or bool((room >= num_tokens).all()):
        return None
    return room.clamp(0, num_tokens)


def _ended(lengths: Tensor | None, depth: int, draws: Tensor, goes_on: Tensor) -> Tensor:
    """Cut chains before the token at `depth` where none was to be drawn, behind it where it was the last. Waits."""
    assert lengths is not None
    goes_on, draws = torch.stack([goes_on, draws]).cpu()
    most = torch.where(goes_on, lengths, depth + 1)
    return torch.minimum(lengths, torch.where(draws, most, depth))
