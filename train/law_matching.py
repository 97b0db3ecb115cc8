"""Training of drafters by the laws alone: bring what the drafter says of a token near what the target says of it.

B batch, S rows, M supervised rows, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from data.loader import Batch
from models.target import Target
from train.divergences import Divergence, agreement
from train.losses import chunked_loss, law_loss
from train.processes import share
from train.regime import Regime, check_counts, check_depth


class LawMatching(Regime):
    """Σ_s position_decay^s · D(p, q_s) over the steps of `unroll`, each a mean over supervised positions.

    Row t of step s tells a law of x_{t+2+s}. It is compared with the target's over the draft vocabulary, renormalised,
    where that token is one the target said. `losses` names the divergences and their weights (`train.divergences`). The
    mean of cross_entropy is over those tokens that have a label (`law_losses`).
    With `skip_unproposable`, positions where the target's first choice is outside the draft vocabulary are no longer
    among the supervised ones, as EAGLE-3 has it (2503.01840).
    """

    def __init__(
        self,
        drafter: Any,
        target: Target,
        *,
        losses: dict[str, float],
        temperature: float,
        lk_eta: float,
        num_steps: int,
        position_decay: float,
        chunk_rows: int,
        skip_unproposable: bool = False,
        **optimization: Any,
    ) -> None:
        super().__init__(drafter, target, **optimization)
        check_counts(num_steps=num_steps, chunk_rows=chunk_rows)
        check_depth(drafter, num_steps)
        self.divergence = Divergence(losses, temperature, lk_eta)
        self.num_steps, self.position_decay, self.chunk_rows = num_steps, position_decay, chunk_rows
        self.skip_unproposable = skip_unproposable and drafter.vocab.reduced

    def training_losses(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """The loss, and for every step s its part, the chance of acceptance and how often the first choices agree."""
        features, states = self.features(batch)
        assert states is not None
        labels = self.drafter.vocab.to_draft(batch.token_ids)
        return self.law_losses(batch, states, self.drafter.unroll(features, self.num_steps), labels)

    def law_losses(self, batch: Batch, states: Tensor, steps: Iterable[Tensor], labels: Tensor) -> dict[str, Tensor]:
        """As `training_losses`, of the target's states (B, S, D), the drafter's of every step, and draft ids (B, S).

        `labels` are what the target said, −1 where the drafter cannot propose it or the target did not say it.
        """
        total = states.new_zeros((), dtype=torch.promote_types(states.dtype, torch.float32))
        batch = batch._replace(loss_mask=self._proposable(states, batch.loss_mask))
        parts: dict[str, Tensor] = {}
        for ahead, hidden in enumerate(steps):
            loss, told = self.step_loss(batch, states, hidden, ahead, labels)
            total = total + self.position_decay**ahead * loss
            parts |= told
        return {"loss": total, **parts}

    def step_loss(
        self, batch: Batch, states: Tensor, hidden: Tensor, ahead: int, labels: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean divergence at the step whose states are `hidden` (B, S, D), and what is to be logged of it.

        `states` (B, S, D) are those that the target's head reads; `labels` (B, S) are as `law_losses` has them, and
        without them all tokens are the target's.
        """
        if labels is None:
            labels = self.drafter.vocab.to_draft(batch.token_ids)
        supervised = batch.loss_mask[:, ahead + 2 :]  # (B, S − ahead − 2)
        rows = hidden[:, : supervised.shape[1]][supervised]  # (M, D)
        true = states[:, ahead + 1 : ahead + 1 + supervised.shape[1]][supervised]
        said = labels[:, ahead + 2 :][supervised]
        count, weight = share(len(rows)), 1.0
        if self.divergence.reads_labels:
            weight = count / share(int((said >= 0).sum()))
        loss, counted = self._matched(rows, true, said, ahead, weight)
        name = "" if ahead == 0 else f"_{ahead}"
        parts = {f"divergence{name}": loss.detach() / count}
        parts[f"acceptance{name}"], parts[f"top1_agreement{name}"] = counted / count
        return loss / count, parts

    @torch.no_grad()
    def _proposable(self, states: Tensor, loss_mask: Tensor) -> Tensor:
        """The loss mask (B, S), without the tokens before which the target's first choice cannot be proposed."""
        if not self.skip_unproposable:
            return loss_mask
        supervised = loss_mask.clone()
        supervised[:, 0] = False  # no state is before it
        before = states[:, :-1][supervised[:, 1:]]  # (M, D)
        known = self.drafter.vocab.to_draft(self.first_choices(before)) >= 0
        return supervised.masked_scatter(supervised.clone(), known)

    def _matched(
        self, rows: Tensor, true: Tensor, labels: Tensor, ahead: int, label_weight: float
    ) -> tuple[Tensor, Tensor]:
        """Sum of the rows' divergences, and sums (2,) of their chance of acceptance and agreement of first choices."""
        counted = torch.zeros(2, device=rows.device)  # in float32: bfloat16 cannot count beyond 256

        def row_loss(hidden: Tensor, which: slice) -> Tensor:
            with torch.no_grad():
                target_logits = self.target_logits(true[which])
            said = labels[which]

            def compare(draft_logits: Tensor, part: slice) -> Tensor:
                found, q, p = self.divergence.compared(draft_logits, target_logits[part], said[part], label_weight)
                with torch.no_grad():
                    counted[0] += torch.minimum(q, p).sum()
                    counted[1] += agreement(q, p).sum()
                return found.sum()

            return law_loss(compare, self.drafter.logits(hidden, ahead))

        parameters = self.drafter.logit_parameters(ahead)
        return chunked_loss(row_loss, rows, parameters, chunk_rows=self.chunk_rows), counted
