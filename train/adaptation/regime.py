"""What an adapted drafter learns at tested positions: λ_distill · KL(p‖q) + λ_task · CE (2310.07177).

The one contract is that of every trainable drafter, `unroll` and `logits` (`models.types.TrainableDrafter`): what a
family is, is not asked.

B texts, S rows, P positions, M of them at one step, K kept tokens of a law, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class LossSettings:
    """distill · KL(p‖q) + task · CE, at the `steps` tested, or at all of `num_steps` (None: as deep as drafts are)."""

    distill: float
    task: float
    steps: str
    num_steps: int | None
    position_decay: float
    chunk_rows: int

    def __post_init__(self) -> None:
        if self.distill < 0 or self.task < 0 or self.distill + self.task == 0:
            raise UserError(
                f"adaptation.loss has distill {self.distill} and task {self.task}: none below 0, and not both 0."
            )
        if self.steps not in STEPS:
            raise UserError(f"adaptation.loss.steps is {self.steps!r}: choose {' or '.join(STEPS)}.")
        for name in ("num_steps", "chunk_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"adaptation.loss.{name} is {value}: it must be at least 1.")
        if not self.position_decay > 0:
            raise UserError(f"adaptation.loss.position_decay is {self.position_decay}: it must be above 0.")


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, whose learning rate rises to `lr` over `warmup_steps`."""

    lr: float
    betas: Sequence[float]
    weight_decay: float
    warmup_steps: int

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise UserError(f"adaptation.optimizer.lr is {self.lr}: it must be above 0.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"adaptation.optimizer.betas is {list(self.betas)}: give two numbers from 0 to below 1.")
        for name in ("weight_decay", "warmup_steps"):
            if getattr(self, name) < 0:
                raise UserError(f"adaptation.optimizer.{name} is {getattr(self, name)}: it must not be below 0.")


class OnlineRegime(Regime):
    """The mean over positions, and over steps, of distill · KL(p‖q) + task · CE of the token that the target said.

    With `steps` "tested" a position is learnt at the depth at which it was tested; with "all" at every depth below
    `num_steps`, each weighing `position_decay` times the one before. The learning rate rises over `warmup_steps` and
    then stays. Raises UserError for a drafter that has nothing to learn so.
    """

    needs_laws = False

    def __init__(
        self,
        drafter: Any,
        target: Target,
        loss: LossSettings,
        optimizer: OptimizerSettings,
        *,
        depth: int,
        seed: int,
    ) -> None:
        check_adaptable(drafter)
        super().__init__(
            drafter,
            target,
            max_steps=1,
            warmup_fraction=0.0,
            lr=optimizer.lr,
            betas=(optimizer.betas[0], optimizer.betas[1]),
            weight_decay=optimizer.weight_decay,
            seed=seed,
        )
        self.distill, self.task, self.all_steps = loss.distill, loss.task, loss.steps == "all"
        deepest, wanted = max_depth(drafter), depth if loss.num_steps is None else loss.num_steps
        self.num_steps = wanted if deepest is None else min(wanted, deepest)
        self.position_decay, self.chunk_rows = loss.position_decay, loss.chunk_rows
        self.warmup_steps = max(1, optimizer.warmup_steps)

    def _lr_scale(self, step: int) -> float:
        """Linear warm-up; then the traffic goes on without an end, and so does learning."""
        return min(1.0, (step + 1) / self.warmup_steps)

    def training_losses(self, batch: Any, step: int) -> dict[str, Tensor]:
        """`loss` of a `ReplayBatch`, its parts `distill` and `task`, and how many `positions` it is a mean over.

        0 where none of its positions was tested at a step that is learnt.
        """
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
                total = total + hidden[:0].sum()  # 0, of which there is a gradient though nothing be learnt
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
    them. What of the tail it cannot propose is not known, and stays: there is no bound then.
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
        raise _not_adaptable(type(drafter))


def check_adaptable_kind(kind: type) -> None:
    """As `check_adaptable`, as far as a drafter's class tells."""
    if not hasattr(kind, "unroll"):
        raise _not_adaptable(kind)


def _not_adaptable(kind: type) -> UserError:
    return UserError(
        f"{kind.__name__} has no weights that learn what the target says: adapt an EAGLE, Medusa, multi-token or "
        "language model drafter."
    )
