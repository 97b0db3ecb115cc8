"""A neural drafter together with a predictor of how far its drafts are worth going.

The drafts are the neural drafter's. The engine ends them where `length_predictor` tells it to, unless it is asked for
another policy (`decode.draft_length`); what is trained here is the predictor alone (`train.draft_length`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from models.checkpoint import native
from models.drafter import accelerate_drafter
from models.errors import UserError
from models.length_predictor import LengthPredictor
from models.sampling import RequestRandom, SamplingParams
from models.target import Target
from models.tree_drafting import Expander
from models.types import Draft, DraftState, TargetFeatures, max_depth
from models.vocab import DraftVocab


class DraftLengthDrafter(nn.Module):
    """The drafter in the folder `export`, or the one that `neural` describes, and a predictor for its drafts.

    Raises UserError without both, and for a drafter that draws no chains from laws.
    """

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        neural: dict[str, Any] | None = None,
        export: str | None = None,
    ) -> None:
        super().__init__()
        if export is None and neural is None:
            raise UserError("There is no neural drafter: give drafter.model.export or drafter.model.neural.")
        self.neural, self._model = native.load_or_build(export, neural or {}, target, vocab)
        if not hasattr(self.neural, "expander"):
            raise UserError(
                f"{type(self.neural).__name__} draws no chains from laws, which the predictor of lengths reads."
            )
        self.pretrained = export is not None or getattr(self.neural, "pretrained", False)
        self.capture_layers: tuple[int, ...] = self.neural.capture_layers
        self.max_depth = max_depth(self.neural)
        self.vocab: DraftVocab = self.neural.vocab
        self.length_predictor = LengthPredictor().to(target.device)

    @property
    def export_arguments(self) -> dict[str, Any]:
        """The neural drafter in place of its folder."""
        return {"export": None, "neural": self._model | getattr(self.neural, "export_arguments", {})}

    def accelerate(self) -> None:
        """Prepare for inference, for good, as the neural drafter does."""
        accelerate_drafter(self.neural)

    def new_state(self, batch_size: int, max_len: int) -> DraftState:
        """The neural drafter's."""
        state: DraftState = self.neural.new_state(batch_size, max_len)
        return state

    def propose(
        self,
        state: DraftState,
        committed: TargetFeatures,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams,
        random: RequestRandom,
    ) -> Draft:
        """The neural drafter's chain of N tokens, whatever the predictor thinks of it."""
        draft: Draft = self.neural.propose(
            state, committed, num_speculative_tokens=num_speculative_tokens, sampling=sampling, random=random
        )
        return draft

    def expander(self, state: DraftState, committed: TargetFeatures) -> Expander:
        """The neural drafter's."""
        expander: Expander = self.neural.expander(state, committed)
        return expander
