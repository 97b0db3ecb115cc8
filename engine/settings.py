"""What to generate, and how drafts are made and verified."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.draft_length import DraftLength, Fixed
from models.errors import UserError
from models.sampling import SamplingParams
from models.tree import DynamicTree, StaticTree
from models.tree_drafting import check_children

VERIFICATIONS = ("token", "block", "typical")


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """Settings of a run of the decode loop.

    `stop_token_ids` None means the target's own; `stop_strings` end an answer with the token that completes one.
    `seed` starts each request's stream. With a `tree` that is what is drafted, in place of a chain of
    `num_speculative_tokens`; `children` is how a static tree's are chosen where sampling (`choose_children`).
    `draft_length` says how many tokens of a chain are drafted, that many at most; None leaves it to the drafter, which
    may have a predictor of its own, and else drafts them all. `verification` is "token" or, for chains, "block", both
    lossless; "typical" acceptance is not.
    """

    max_new_tokens: int = 128
    num_speculative_tokens: int = 4
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] | None = None
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    tree: StaticTree | DynamicTree | None = None
    children: str = "top"
    verification: str = "token"
    draft_length: DraftLength | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}: it must be at least 1.")
        if self.num_speculative_tokens < 1:
            raise UserError(f"num_speculative_tokens is {self.num_speculative_tokens}: it must be at least 1.")
        check_children(self.children)
        if self.verification not in VERIFICATIONS:
            raise UserError(f"decode.verification is {self.verification!r}: choose {', '.join(VERIFICATIONS)}.")
        if self.verification == "block" and self.tree is not None:
            raise UserError("Block verification is for chains: leave decode.tree out, or use verification=token.")

        if self.tree is not None and not isinstance(self.draft_length, Fixed | None):
            raise UserError(f"decode.draft_length={self.draft_length} is for chains: leave it or decode.tree out.")

    @property
    def num_nodes(self) -> int:
        """How many tokens are drafted in a round."""
        return self.num_speculative_tokens if self.tree is None else self.tree.num_nodes

    @property
    def depth(self) -> int:
        """How many of them can be accepted."""
        return self.num_speculative_tokens if self.tree is None else self.tree.depth

    @property
    def draft_rows(self) -> int:
        """How many rows a drafter may need for a draft, beside those of the tokens that come of it."""
        if isinstance(self.tree, DynamicTree):  # it reads nodes that are not kept
            return max(self.tree.num_nodes, self.tree.top_k * (self.tree.depth - 1))
        return self.num_nodes

    @property
    def lossless(self) -> bool:
        """True where the output has the target's own law."""
        return self.verification != "typical" or self.sampling.greedy
