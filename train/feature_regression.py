"""Training of EAGLE-style drafters: regress the target's next state, and classify through its frozen head.

B batch, S rows, M supervised rows, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from data.loader import Batch, StepBatches
from models.errors import UserError
from models.target import Target
from models.types import TargetFeatures
from train.least_squares import linear_map
from train.losses import chunked_loss, regression, soft_cross_entropy
from train.regime import Regime, check_counts


class FeatureRegression(Regime):
    """w_reg · R(f̂, f) + w_cls · soft cross-entropy, averaged over supervised positions (2401.15077, section 4.1).

    Row t of step s estimates f_{t+1+s}, from which the head makes the law of x_{t+2+s}: it is supervised where that
    token is one the target said. Steps after the first weigh `position_decay` times the one before. `noise` is the
    half width of the uniform feature noise, times 512 over a text's own length. `regression` is "mse" or "smooth_l1".
    """

    def __init__(
        self,
        drafter: nn.Module,
        target: Target,
        *,
        max_steps: int,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        warmup_fraction: float,
        regression: str,
        w_reg: float,
        w_cls: float,
        noise: float,
        num_steps: int,
        position_decay: float,
        chunk_rows: int,
        start: str,
        seed: int,
    ) -> None:
        super().__init__(
            drafter,
            target,
            max_steps=max_steps,
            seed=seed,
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
            warmup_fraction=warmup_fraction,
        )
        if start not in ("least_squares", "random"):
            raise UserError(f"drafter.training.start is {start!r}: choose least_squares or random.")
        if regression not in ("mse", "smooth_l1"):
            raise UserError(f"drafter.training.regression is {regression!r}: choose mse or smooth_l1.")
        check_counts(num_steps=num_steps, chunk_rows=chunk_rows)
        self.regression, self.w_reg, self.w_cls = regression, w_reg, w_cls
        self.noise, self.num_steps, self.position_decay = noise, num_steps, position_decay
        self.chunk_rows, self.from_least_squares = chunk_rows, start == "least_squares"

    def start(self, batches: StepBatches) -> None:
        """Before the first step: set the drafter to the best linear map of what it reads onto the next state.

        The layers then learn what is left, instead of learning to pass the state on first.
        """
        if not self.from_least_squares:
            return
        self.drafter.start_linear(linear_map(batches, self._rows, self.target.device))

    def _rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What supervised rows read, and the states that follow them: (M, 2·D) and (M, D)."""
        features, _ = self.features(batch)
        assert features.hidden is not None
        supervised = batch.loss_mask[:, 2:]
        read = torch.cat([self.target.embedding(batch.token_ids[:, 1:-1]), features.hidden[:, :-2]], dim=-1)
        dtype = self.drafter.fc.weight.dtype
        return read[supervised].to(dtype), features.hidden[:, 1:-1][supervised].to(dtype)

    def training_losses(self, batch: Batch, step: int) -> dict[str, Tensor]:
        features, _ = self.features(batch)
        return self.losses(features, batch.loss_mask, noise_seed=self.seed * 1_000_003 + step)

    def losses(self, features: TargetFeatures, loss_mask: Tensor, noise_seed: int | None = None) -> dict[str, Tensor]:
        """All parts of the loss, each a mean over supervised positions, and the top-1 agreement of the first step."""
        true = features.hidden
        assert true is not None
        distance = regression(self.regression)
        total = true.new_zeros(())
        parts: dict[str, Tensor] = {}
        noisy = self._with_noise(features, noise_seed)
        for step, estimate in enumerate(self.drafter.unroll(noisy, self.num_steps)):
            shift = step + 1  # row t estimates the state of row t + shift, and is about the token after it
            supervised = loss_mask[:, shift + 1 :]  # (B, S − shift − 1)
            rows = estimate[:, : supervised.shape[1]][supervised]  # (M, D)
            wanted = true[:, shift : shift + supervised.shape[1]][supervised]
            count = max(1, len(rows))
            reg = distance(rows, wanted) / count
            cls, agreement = self._classification(rows, wanted)
            weight = self.position_decay**step
            total = total + weight * (self.w_reg * reg + self.w_cls * cls / count)
            name = "" if step == 0 else f"_{step}"
            parts |= {f"regression{name}": reg.detach(), f"classification{name}": cls.detach() / count}
            parts[f"top1_agreement{name}"] = agreement / count
        return {"loss": total, **parts}

    def _classification(self, rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the soft cross-entropies of draft and target laws, and how often their first choices agree."""
        agreement = torch.zeros((), device=rows.device)  # in float32: bfloat16 cannot count beyond 256

        def row_loss(hidden: Tensor, which: slice) -> Tensor:
            nonlocal agreement
            draft_logits = self.drafter.logits(hidden, step=0)
            with torch.no_grad():
                target_logits = self._head(wanted[which])
                agreement += (draft_logits.argmax(-1) == target_logits.argmax(-1)).sum()
            return soft_cross_entropy(draft_logits, target_logits).sum()

        return chunked_loss(row_loss, rows, chunk_rows=self.chunk_rows), agreement

    def _with_noise(self, features: TargetFeatures, seed: int | None) -> TargetFeatures:
        assert features.hidden is not None
        if seed is None or self.noise == 0:
            return features
        hidden = features.hidden
        generator = torch.Generator(hidden.device).manual_seed(seed)
        uniform = 2 * torch.rand(hidden.shape, generator=generator, device=hidden.device) - 1
        width = self.noise * 512 / features.lengths.to(hidden.device)[:, None, None]
        return replace(features, hidden=hidden + (uniform * width).to(hidden.dtype))
