"""Training of EAGLE-style drafters: regress the target's next state, and classify through its frozen head.

B batch, S rows, M supervised rows, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from data.loader import Batch, StepBatches
from models.errors import UserError
from models.target import Target
from models.types import Drafter, TargetFeatures
from train.losses import chunked_loss, regression, soft_cross_entropy

_ROWS_PER_UNKNOWN = 64


class FeatureRegression(lightning.LightningModule):
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
        super().__init__()
        if start not in ("least_squares", "random"):
            raise UserError(f"drafter.training.start is {start!r}: choose least_squares or random.")
        if regression not in ("mse", "smooth_l1"):
            raise UserError(f"drafter.training.regression is {regression!r}: choose mse or smooth_l1.")
        for name, value in (("num_steps", num_steps), ("chunk_rows", chunk_rows)):
            if value < 1:
                raise UserError(f"drafter.training.{name} is {value}: it must be at least 1.")
        self.drafter: Any = drafter
        # In a tuple, so that it is neither trained nor saved with the drafter, nor moved by Lightning, which puts the
        # module on the CPU when training ends.
        self._target = (target,)
        self.max_steps, self.lr, self.weight_decay = max_steps, lr, weight_decay
        self.betas = (betas[0], betas[1])
        self.warmup_steps = max(1, round(warmup_fraction * max_steps))
        self.regression, self.w_reg, self.w_cls = regression, w_reg, w_cls
        self.noise, self.num_steps, self.position_decay = noise, num_steps, position_decay
        self.chunk_rows, self.from_least_squares, self.seed = chunk_rows, start == "least_squares", seed
        self._target_head = target.head.rows(drafter.vocab.token_ids)  # type: ignore[union-attr, arg-type]

    @torch.no_grad()
    def start(self, batches: StepBatches) -> None:
        """Before the first step: set the drafter to the best linear map of what it reads onto the next state.

        By ridge regression over supervised positions of the first batches, some `_ROWS_PER_UNKNOWN` for each weight of
        a row. The layers then learn what is left, instead of learning to pass the state on first.
        """
        if not self.from_least_squares:
            return
        target, width = self._target[0], 2 * self._target[0].hidden_size
        inputs = torch.zeros(width, width, dtype=torch.float64, device=target.device)
        outputs = torch.zeros(width, target.hidden_size, dtype=torch.float64, device=target.device)
        count = step = 0
        while count < _ROWS_PER_UNKNOWN * width and step * batches.batch_size < len(batches.token_ids):
            made = batches[step]
            hidden = None if made.hidden is None else made.hidden.to(target.device)
            batch = Batch(made.token_ids.to(target.device), made.loss_mask.to(target.device), made.lengths, hidden)
            features = training_features(target, self.drafter, batch)
            assert features.hidden is not None
            supervised = batch.loss_mask[:, 2:]
            read = torch.cat([target.embedding(batch.token_ids[:, 1:-1]), features.hidden[:, :-2]], dim=-1)[supervised]
            wanted = features.hidden[:, 1:-1][supervised]
            read, wanted = read.to(self.drafter.fc.weight.dtype), wanted.to(self.drafter.fc.weight.dtype)
            inputs += (read.t() @ read).double()
            outputs += (read.t() @ wanted).double()
            count, step = count + len(read), step + 1
        ridge = 1e-3 * inputs.diagonal().mean() * torch.eye(width, dtype=torch.float64, device=target.device)
        self.drafter.start_linear(torch.linalg.solve(inputs + ridge, outputs).t())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            self.drafter.parameters(), lr=self.lr, betas=self.betas, weight_decay=self.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_scale)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _lr_scale(self, step: int) -> float:
        """Linear warm-up, then a half cosine down to zero at `max_steps`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.max_steps - self.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        features = training_features(self._target[0], self.drafter, batch)
        losses = self.losses(features, batch.loss_mask, noise_seed=self.seed * 1_000_003 + batch_idx)
        self.log_dict({f"train/{k}": v for k, v in losses.items()}, prog_bar=False)
        self.log("loss", losses["loss"], prog_bar=True, logger=False)
        return losses["loss"]

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
            draft_logits = self.drafter.logits(hidden)
            with torch.no_grad():
                target_logits = self._target_head(wanted[which])
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


def training_features(target: Target, drafter: Drafter, batch: Batch) -> TargetFeatures:
    """What the drafter reads of a batch: cached states, or the target's forward pass.

    The token after the last row is unknown, and 0 here; no supervised estimate reads it.
    """
    hidden = batch.hidden
    if hidden is None and drafter.capture_layers:
        with torch.no_grad(), torch.autocast(batch.token_ids.device.type, enabled=False):
            hidden = target(batch.token_ids, capture_layers=drafter.capture_layers).hidden
    following = nn.functional.pad(batch.token_ids[:, 1:], (0, 1))
    return TargetFeatures(batch.token_ids, following, hidden, batch.lengths)
