"""Training of block-parallel drafters: blocks behind random tokens of the text, each weighed position by position.

B batch, S rows, A anchors of a text, M blocks, N tokens that a block drafts, D hidden size, r rank, Vd draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from data.loader import Batch
from models.errors import UserError
from models.target import Target
from train.divergences import agreement
from train.law_matching import LawMatching
from train.losses import chunked_loss, law_loss
from train.processes import drawn_for_all, share
from train.regime import check_counts

KINDS = ("exponential", "dpace", "uniform")


@dataclass(frozen=True)
class PositionWeights:
    """How much the j-th token of a block counts, j = 1 .. N. Raises UserError for senseless settings.

    exponential  e^(−(j − 1) / `length`) (DFlash, 2602.06036)
    dpace        Σ_{i ≥ j} Π_{k ≤ i} [(1 − floor)·q_k + floor], q_k the drafter's chance of the text's k-th token: how
                 many tokens of the block hang on the j-th (D-PACE, 2605.18810); no gradient flows through it
    uniform      1
    """

    by: str = "exponential"
    length: float = 7.0
    floor: float = 0.5

    def __post_init__(self) -> None:
        if self.by not in KINDS:
            raise UserError(f"drafter.training.weights.by is {self.by!r}: choose {', '.join(KINDS)}.")
        if not self.length > 0:
            raise UserError(f"drafter.training.weights.length is {self.length}: it must be above 0.")
        if not 0 <= self.floor <= 1:
            raise UserError(f"drafter.training.weights.floor is {self.floor}: it must be from 0 to 1.")

    def __call__(self, chances: Tensor, valid: Tensor) -> Tensor:
        """Of the drafter's `chances` (M, N) of what was said, where `valid` (M, N) from the first on: (M, N)."""
        known = valid.to(chances.dtype)
        if self.by == "exponential":
            position = torch.arange(chances.shape[1], device=chances.device, dtype=chances.dtype)
            return known * torch.exp(-position / self.length)
        if self.by == "uniform":
            return known
        reached = (((1 - self.floor) * chances.detach() + self.floor) * known).cumprod(1)
        return known * reached.flip(1).cumsum(1).flip(1)


class BlockParallel(LawMatching):
    """The mean over blocks of Σ_j w_j · D(p_j, q_j), and `w_confidence` times Σ_j w_j · BCE(c_j, α_j).

    Behind each of `num_anchors` tokens of a text (null: all) that the target said, chosen anew in every batch, stands a
    block. It counts up to the first token that the target did not say. `losses` name the divergences D
    (`train.divergences`). The confidences c are taught α = Σ min(p, q) with p of the whole vocabulary, the chance that
    a token is accepted if those before it are; no gradient flows through α.
    """

    def __init__(
        self,
        drafter: Any,
        target: Target,
        *,
        num_anchors: int | None,
        weights: Mapping[str, Any],
        w_confidence: float,
        **others: Any,
    ) -> None:
        if not hasattr(drafter, "told_behind"):
            raise UserError(f"{type(drafter).__name__} is not trained by drafter.training._target_={__name__}.")
        super().__init__(drafter, target, num_steps=drafter.max_depth, position_decay=1.0, **others)
        if num_anchors is not None:
            check_counts(num_anchors=num_anchors)
        try:
            self.weights = PositionWeights(**weights)
        except TypeError as error:
            raise UserError(f"drafter.training.weights: {str(error).split('__init__() ')[-1]}.") from error
        self.num_anchors, self.w_confidence = num_anchors, w_confidence

    def training_losses(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """The loss, and of every position its divergence, chance of acceptance and agreement of first choices."""
        features, states = self.features(batch)
        assert states is not None
        loss_mask = self._proposable(states, batch.loss_mask)
        rows, chosen = self.anchors(loss_mask, step)
        told = self.drafter.told_behind(features, rows)[chosen]  # (M, N, D + r)
        text, row = chosen.nonzero()[:, 0], rows[chosen]
        last = batch.token_ids.shape[1] - 1
        ahead = row[:, None] + 2 + torch.arange(self.num_steps, device=row.device)  # (M, N) the tokens drafted
        within, text = ahead.clamp(max=last), text[:, None]
        valid = (loss_mask[text, within] & (ahead <= last)).cumprod(1).bool()
        labels = self.drafter.vocab.to_draft(batch.token_ids)[text, within]
        return self.block_losses(told, states[text, within - 1], labels, valid)

    def _share(self, true: Tensor, target_logits: Tensor) -> Tensor:
        """What of the target's whole law is of the draft vocabulary (C, N, 1), where confidences are to tell of that.

        Of the target's states (C, N, D), and the logits (C, N, Vd) of that vocabulary.
        """
        dtype = torch.promote_types(target_logits.dtype, torch.float32)
        if self.drafter.confidence_head is None or not self.drafter.vocab.reduced:
            return target_logits.new_ones((*target_logits.shape[:-1], 1), dtype=dtype)
        norms = [x.to(dtype).logsumexp(-1, keepdim=True) for x in (target_logits, self.whole_logits(true))]
        return (norms[0] - norms[1]).exp()

    def anchors(self, loss_mask: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Rows (B, A) of a batch that blocks follow, and which of these (B, A) bool are meant: a text may have fewer.

        They are those rows t where x_{t+2} is in `loss_mask` (B, S), or as many of them as `num_anchors` says.
        """
        behind = nn.functional.pad(loss_mask[:, 2:], (0, min(2, loss_mask.shape[1])))
        stream = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        order = drawn_for_all(behind.shape, stream).to(behind.device).masked_fill(~behind, -1.0)
        most = int(behind.sum(1).max())
        count = max(1, most if self.num_anchors is None else min(self.num_anchors, most))
        found = order.topk(count, dim=1)
        return found.indices, found.values >= 0

    def block_losses(self, told: Tensor, true: Tensor, labels: Tensor, valid: Tensor) -> dict[str, Tensor]:
        """As `training_losses`, of what M blocks tell (M, N, D + r), the target's states before those tokens (M, N, D),
        draft ids (M, N), −1 where there is none, and which tokens (M, N) count.
        """
        drafter, head = self.drafter, self.drafter.confidence_head
        counted = torch.zeros(4, self.num_steps, device=told.device)  # float32: bfloat16 cannot count beyond 256

        def row_loss(told: Tensor, which: slice) -> Tensor:
            with torch.no_grad():
                target_logits = self.target_logits(true[which])
                known, said, taught, share = valid[which], labels[which], [], self._share(true[which], target_logits)

            def compare(draft_logits: Tensor, part: slice) -> Tensor:
                laws = (draft_logits.flatten(0, 1), target_logits[part].flatten(0, 1), said[part].flatten())
                found, q, p = (t.unflatten(0, known[part].shape) for t in self.divergence.compared(*laws))
                with torch.no_grad():
                    alpha = torch.minimum(q, share[part] * p).sum(-1)
                    chances = q.gather(-1, said[part].clamp(min=0)[..., None])[..., 0] * (said[part] >= 0)
                    weights = self.weights(chances, known[part])
                    taught.append((weights, alpha))
                    for index, told_of in enumerate((found, alpha, agreement(q, p))):
                        counted[index] += (told_of * known[part]).sum(0)
                return (weights * found).sum()

            loss = law_loss(compare, drafter.logits(told))
            if head is not None:
                weights, alpha = (torch.cat(parts) for parts in zip(*taught, strict=True))
                entropy = nn.functional.binary_cross_entropy_with_logits
                errors = entropy(head(told).to(alpha.dtype), alpha.clamp(0, 1), reduction="none")
                counted[3] += (errors.detach() * known).sum(0)
                loss = loss + self.w_confidence * (weights * errors).sum()
            return loss

        parameters = [*drafter.logit_parameters(), *([] if head is None else head.parameters())]
        total = chunked_loss(row_loss, told, parameters, chunk_rows=max(1, self.chunk_rows // self.num_steps))
        names = ("divergence", "acceptance", "top1_agreement", *([] if head is None else ["confidence_loss"]))
        means = counted / share(valid.sum(0))
        parts = {
            name if ahead == 0 else f"{name}_{ahead}": means[index, ahead]
            for index, name in enumerate(names)
            for ahead in range(self.num_steps)
        }
        return {"loss": total / share(len(told)), **parts}
