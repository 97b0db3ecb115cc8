"""What a draft length policy is, and the plainest one.

A policy that looks at past rounds says how many tokens each request drafts in the next one. A policy that looks at the
draft as it grows is a stop rule, which the drafter's chain asks. Neither may know a token that it leaves out: see
`models.types.Draft`. Policies are for chains; each request of a batch has a length of its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from models.chain_drafting import StopRule
from models.errors import UserError
from models.types import Drafter


@dataclass(frozen=True, slots=True)
class Round:
    """What came of a round, by running request."""

    requests: list[int]
    drafted: list[int]  # tokens that could be accepted
    accepted: list[int]
    drawn: int  # tokens that the longest chain was drawn to: so many steps the drafter took
    seconds: float  # of drafting and checking


class Lengths:
    """A policy at work in one run of the decode loop; this one drafts what there is room for.

    The loop calls `ask`, then `rule` where some request drafts, and `after` when the round is over.
    """

    def ask(self, requests: list[int], limits: list[int]) -> list[int]:
        """How many tokens each running request may draft in this round, at most `limits`; 0 is a plain step."""
        return limits

    def rule(self, requests: list[int], limits: list[int]) -> StopRule | None:
        """What ends the chains of this round as they grow, at `limits` at the latest; None: nothing does."""
        return None

    def after(self, made: Round) -> None:
        """Learn what came of a round."""


@dataclass(frozen=True)
class DraftLength:
    """A policy as it was configured; subclasses hold their settings."""

    name: ClassVar[str]
    reads_laws: ClassVar[bool] = False

    def check(self, drafter: Any) -> None:
        """Raise UserError where the drafter has not what the policy looks at."""
        if self.reads_laws and not hasattr(drafter, "expander"):
            raise UserError(
                f"decode.draft_length={self.name} reads the laws that tokens are drawn from, but "
                f"{type(drafter).__name__} draws no chain from laws: choose fixed, window or fallback."
            )

    def start(self, num_requests: int, most: int, drafter: Drafter) -> Lengths:
        """Begin a run of the loop over `num_requests` requests that draft at most `most` tokens."""
        return Lengths()

    def describe(self) -> dict[str, Any]:
        """Its name and its settings, as plain values."""
        return {"policy": self.name, **asdict(self)}

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Fixed(DraftLength):
    """num_speculative_tokens, always."""

    name: ClassVar[str] = "fixed"


def check_number(name: str, value: Any, least: float, most: float = float("inf"), *, whole: bool = False) -> None:
    """Raise UserError where decode.draft_length.`name` is no number from `least` to `most`."""
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        bounds = f"of at least {least:g}" if most == float("inf") else f"from {least:g} to {most:g}"
        raise UserError(
            f"decode.draft_length.{name} is {value!r}: it must be a {'whole ' if whole else ''}number {bounds}."
        )
