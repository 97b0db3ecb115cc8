"""Training that is counting: a drafter without weights reads the answers once."""

from __future__ import annotations

from typing import Any

from data.loader import StepBatches
from data.progress import Progress
from models.errors import UserError
from models.target import Target


class Counting:
    """Gives a drafter's `count(texts)` the token ids of all answers, each behind its prompt.

    Takes no steps, so `max_steps` and `seed` do not matter. Raises UserError for a drafter that has no `count`.
    """

    def __init__(self, drafter: Any, target: Target, *, max_steps: int, seed: int) -> None:
        if not hasattr(drafter, "count"):
            raise UserError(
                f"drafter.training is {type(self).__module__}.{type(self).__name__}, but {type(drafter).__name__} "
                "does not learn by counting: leave drafter.training as its file has it."
            )
        self._drafter = drafter

    def learn(self, batches: StepBatches) -> None:
        """Count every answer once."""
        texts = batches.token_ids
        with Progress("answers counted", len(texts)) as progress:

            def counted() -> Any:
                for text in texts:
                    yield text
                    progress.advance(1)

            self._drafter.count(counted())
