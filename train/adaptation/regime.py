"""What an adapted drafter learns at tested positions: λ_distill · KL(p‖q) + λ_task · CE (2310.07177).

The one contract is that of every trainable drafter, `unroll` and `logits` (`models.types.TrainableDrafter`): what a
family is, is not asked.

B texts, S rows, P positions, M of them at one step, K kept tokens of a law, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.errors import UserError
from models.target import Target
from models.types import max_depth
from train.adaptation.batches import ReplayBatch
from train.losses import chunked_loss
from train.regime import Regime

STEPS = ("tested", "all")


class OnlineRegime(Regime):
    """The mean over positions, and over steps, of distill · KL(p‖q) + task · CE of the token that the target said.

    With `steps` "tested" a position is learnt at the depth at which it was tested; with "all" at every depth below
    `num_steps`, each weighing `position_decay` times the one before. The learning rate rises over `warmup_steps` and
    then stays. Raises UserError for a drafter that has nothing to learn so, and for senseless settings.
    """

    needs_laws = False

    def __init__(
        self,
        drafter: Any,
        target: Target,
        *,
        distill: float,
        task: float,
        steps: str,
        num_steps: int,
        position_decay: float,
        chunk_rows: int,
        warmup_steps: int,
        lr: float,
        **optimization: Any,
    ) -> None:
        check_adaptable(drafter)
        if distill < 0 or task < 0 or distill + task == 0:
            raise UserError(f"adaptation.loss has distill {distill} and task {task}: none below 0, and not both 0.")
        if steps not in STEPS:
            raise UserError(f"adaptation.loss.steps is {steps!r}: choose {' or '.join(STEPS)}.")
        for name, value in (("num_steps", num_steps), ("chunk_rows", chunk_rows)):
            if value < 1:
                raise UserError(f"adaptation.loss.{name} is {value}: it must be at least 1.")
        if not lr > 0:
            raise UserError(f"adaptation.optimizer.lr is {lr}: it must be above 0.")
        super().__init__(drafter, target, max_steps=1, warmup_fraction=0.0, lr=lr, **optimization)
        self.distill, self.task, self.all_steps = distill, task, steps == "all"
        deepest = max_depth(drafter)
        self.num_steps = num_steps if deepest is None else min(num_steps, deepest)
        self.position_decay, self.chunk_rows, self.warmup_steps = position_decay, chunk_rows, max(1, warmup_steps)

    def _lr_scale(self, step: int) -> float:
        """Linear warm-up; then the traffic goes on without an end, and so does learning."""
        return min(1.0, (step + 1) / self.warmup_steps)

    def training_losses(self, batch: Any, step: int) -> dict[str, Tensor]:
        """`loss` of a `ReplayBatch`, its parts `distill` and `task`, and how many `positions` it is a mean over."""
        replay: ReplayBatch = batch
        features, _ = self.features(replay.texts)
        num_steps = self.num_steps
        if not self.all_steps:
            num_steps = min(num_steps, 1 + int(replay.depths.max()))
        total = torch.zeros((), device=replay.places.device)
        weight, count, parts = 0.0, 0, torch.zeros(2, device=replay.places.device)
        for ahead, hidden in enumerate(self.drafter.unroll(features, num_steps)):
            row = replay.places - 2 - ahead
            chosen = row >= 0 if self.all_steps else (replay.depths == ahead) & (row >= 0)
            if not bool(chosen.any()):
                continue
            scale = self.position_decay**ahead
            loss, told = self._depth_loss(hidden[replay.rows[chosen], row[chosen]], replay, chosen, ahead)
            total = total + scale * loss
            weight, count, parts = weight + scale * int(chosen.sum()), count + int(chosen.sum()), parts + told
        found = {"distill": parts[0] / max(1, count), "task": parts[1] / max(1, count)}
        return {"loss": total / max(weight, 1e-9), **found, "positions": torch.tensor(float(count))}

    def _depth_loss(self, rows: Tensor, replay: ReplayBatch, chosen: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
        """Sum of the losses of states (M, D) at a step, and sums (2,) of their parts."""
        vocab = self.drafter.vocab
        ids, labels = vocab.to_draft(replay.law_ids[chosen]), vocab.to_draft(replay.labels[chosen])
        probs = replay.law_probs[chosen]
        whole = replay.law_ids.shape[1] >= vocab.vocab_size
        counted = torch.zeros(2, device=rows.device)

        def row_loss(hidden: Tensor, which: slice) -> Tensor:
            logits = self.drafter.logits(hidden, ahead)
            log_q = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
            distill = tail_divergence(log_q, ids[which], probs[which], whole=whole).sum()
            said = labels[which]
            task = torch.where(said >= 0, -log_q.gather(-1, said.clamp(min=0)[:, None])[:, 0], 0.0).sum()
            counted.add_(torch.stack([distill, task]).detach())
            return self.distill * distill + self.task * task

        parameters = self.drafter.logit_parameters(ahead)
        return chunked_loss(row_loss, rows, parameters, chunk_rows=self.chunk_rows), counted


def tail_divergence(log_q: Tensor, law_ids: Tensor, law_probs: Tensor, *, whole: bool = False) -> Tensor:
    """KL(p‖q) where p is known at K tokens and else as a mass: log_q (M, Vd), laws (M, K) → (M,).

    The tokens beside the K count as one outcome, which gives a lower bound of the divergence of the laws, and that
    itself where K are all (`whole`). Ids of −1 are of tokens that the drafter cannot propose: p is renormalised without
    them.
    """
    known = law_ids >= 0
    places = law_ids.clamp(min=0)
    p = torch.where(known, law_probs.to(log_q.dtype), 0.0)
    others = known.sum(-1) < log_q.shape[-1]
    tail = torch.where(others, (1 - law_probs.to(log_q.dtype).sum(-1)).clamp(min=0), 0.0)
    tail = torch.zeros_like(tail) if whole else tail
    total = (p.sum(-1) + tail).clamp(min=torch.finfo(log_q.dtype).tiny)
    p, tail = p / total[:, None], tail / total
    top = torch.zeros_like(log_q, dtype=torch.bool).scatter_add_(-1, places, known)
    log_tail = log_q.masked_fill(top, torch.finfo(log_q.dtype).min / 2).logsumexp(-1)
    entropy = torch.special.xlogy(p, p).sum(-1) + torch.special.xlogy(tail, tail)
    inside = torch.where(known, log_q.gather(-1, places), 0.0)
    return entropy - (p * inside).sum(-1) - torch.where(tail > 0, tail * log_tail, 0.0)


def check_adaptable(drafter: Any) -> None:
    """Raise UserError for a drafter without weights that say something of the next tokens."""
    if not hasattr(drafter, "unroll") or not any(p.requires_grad for p in drafter.parameters()):
        raise UserError(
            f"{type(drafter).__name__} has no weights that learn what the target says: adapt an EAGLE, Medusa, "
            "multi-token or language model drafter."
        )
