"""What the decode loop shows of its rounds to whoever learns from them.

B batch (requests still running), N drafted tokens, P depth of a draft tree, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.verify import Verdict
from models.types import Draft


@dataclass(frozen=True, slots=True)
class Checked:
    """A round after its verdict. `logits` are the target's own, before any penalty, bias or temperature."""

    requests: list[int]  # (B,) the caller's numbers
    draft: Draft
    limits: list[int]  # (B,) drafted tokens that could be accepted
    logits: Tensor  # (B, 1 + N, V) behind the pending token and the draft's
    verdict: Verdict

    def tested(self, row: int) -> Iterator[tuple[int, int, int, bool]]:
        """Of each tested depth of one request: node of `logits` that tells the law, the draft's node, depth, accepted.

        A depth is tested where the draft has a token behind what was accepted: what lies behind the first rejected
        token never was, and where all were accepted none was rejected. The node of a rejected tree level is its first.
        """
        accepted, limit = int(self.verdict.accepted[row]), self.limits[row]
        path = self.verdict.path
        nodes = list(range(accepted)) if path is None else path[row, :accepted].tolist()
        for depth, node in enumerate(nodes):
            yield (nodes[depth - 1] + 1 if depth else 0), node, depth, True
        if accepted < limit:
            last = nodes[-1] if nodes else -1
            below = [i for i, parent in enumerate(self.draft.parents[row].tolist()) if parent == last]
            if below:
                yield last + 1, below[0], accepted, False


class Observer(Protocol):
    """Is told of every round; it must not change what it is shown."""

    def before_round(self) -> None:
        """No draft is under way: the only moment at which the weights of the drafter may be exchanged."""

    def checked(self, made: Checked) -> None:
        """A draft was verified, and is not yet committed."""
