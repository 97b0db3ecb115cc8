"""What every drafter that tells its laws node by node does with them: chains, and trees where it tells several at once.

B batch, R committed rows, N drafted tokens.
"""

from __future__ import annotations

from typing import Any

from models.chain_drafting import draft_chain
from models.errors import UserError
from models.sampling import RequestRandom, SamplingParams
from models.tree import DynamicTree, StaticTree
from models.tree_drafting import Expander, grow
from models.types import Draft, TargetFeatures, max_depth
from models.vocab import DraftVocab


class DraftsChains:
    """`propose` by what a subclass's `expander` tells."""

    vocab: DraftVocab

    def expander(self, state: Any, committed: TargetFeatures) -> Expander:
        """Take in the confirmed rows (B, R); what follows them is then told node by node."""
        raise NotImplementedError

    def propose(
        self,
        state: Any,
        committed: TargetFeatures,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams,
        random: RequestRandom,
    ) -> Draft:
        """Take in the confirmed rows (B, R), then draft a chain of N tokens, or of as many as it has room for."""
        expander = self.expander(state, committed)
        return draft_chain(expander, self.vocab, num_speculative_tokens, sampling=sampling, random=random)


class DraftsTrees(DraftsChains):
    """`propose_tree` as well: its `expander` can tell what follows several nodes at once."""

    def propose_tree(
        self,
        state: Any,
        committed: TargetFeatures,
        *,
        shape: StaticTree | DynamicTree,
        children: str,
        sampling: SamplingParams,
        random: RequestRandom,
    ) -> Draft:
        """Take in the confirmed rows (B, R), then draft a tree. Raises UserError for one deeper than it can tell."""
        check_depth(self, shape)
        expander = self.expander(state, committed)
        return grow(expander, shape, self.vocab, children=children, sampling=sampling, random=random)


def check_depth(drafter: object, shape: StaticTree | DynamicTree) -> None:
    """Raise UserError for a draft tree with more levels than the drafter can tell."""
    deepest = max_depth(drafter)
    if deepest is not None and shape.depth > deepest:
        raise UserError(
            f"The draft tree is {shape.depth} tokens deep, but {type(drafter).__name__} looks {deepest} tokens ahead: "
            "use a shallower tree."
        )
