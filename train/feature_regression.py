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
from train.divergences import Divergence, agreement
from train.least_squares import check_start, moments, ridge
from train.losses import chunked_loss, law_loss, regression, top_k_cross_entropy
from train.processes import drawn_for_all, share
from train.regime import Regime, check_counts, check_depth

_SOFT = Divergence({"soft_cross_entropy": 1.0})


class FeatureRegression(Regime):
    """w_reg · R(f̂, f) + w_cls · soft cross-entropy, averaged over supervised positions (2401.15077, section 4.1).

    Row t of step s estimates f_{t+1+s}, from which the head makes the law of x_{t+2+s}: it is supervised where that
    token is one the target said. Steps after the first weigh `position_decay` times the one before. `noise` is the
    half width of the uniform feature noise, times 512 over a text's own length. `regression` is "mse" or "smooth_l1".
    A drafter's `usage` of the supervised rows, where it tells any, is logged beside them.
    HASS (2408.15766) adds w_top_k · −Σ p log q over the target's `top_k` likeliest tokens.
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
        w_top_k: float,
        top_k: int,
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
        if regression not in ("mse", "smooth_l1"):
            raise UserError(f"drafter.training.regression is {regression!r}: choose mse or smooth_l1.")
        check_counts(num_steps=num_steps, chunk_rows=chunk_rows, top_k=top_k)
        check_depth(drafter, num_steps)
        self.regression, self.w_reg, self.w_cls = regression, w_reg, w_cls
        self.w_top_k, self.top_k = w_top_k, top_k
        self.noise, self.num_steps, self.position_decay = noise, num_steps, position_decay
        self.chunk_rows, self.from_least_squares = chunk_rows, check_start(start)

    def start(self, batches: StepBatches) -> None:
        """Before the first step: set the drafter to the best linear map of what it reads onto the next state.

        The layers then learn what is left, instead of learning to pass the state on first. The states after the next
        one, where the drafter estimates several at once, start as the best linear maps of its first estimate.
        """
        if not self.from_least_squares:
            return
        found, size = moments(batches, self.target.device, self._read_and_wanted), self.target.hidden_size
        first, *later = found.both.split(size, dim=1)
        weight = ridge(found.read, first)  # (2k·D, D)
        made = weight.t() @ found.read @ weight  # the first estimates' own moments
        self.drafter.start_linear(weight.t(), [ridge(made, weight.t() @ part).t() for part in later])

    def _read_and_wanted(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What the drafter reads (M, 2k·D) and the m next states (M, m·D), all of which precede supervised tokens."""
        features, _ = self.features(batch)
        assert features.hidden is not None
        drafter, ahead = self.drafter, self.drafter.num_future
        rows = max(0, batch.token_ids.shape[1] - 1 - ahead)  # those whose m next states and tokens are all known
        supervised = torch.stack([batch.loss_mask[:, j + 2 : j + 2 + rows] for j in range(ahead)]).all(0)
        states = torch.cat([features.hidden[:, j + 1 : j + 1 + rows] for j in range(ahead)], dim=-1)
        windows = drafter.window(features.next_token_ids, drafter.before(features)[0])[:, :rows]
        dtype = drafter.fc.weight.dtype
        return windows[supervised].to(dtype), states[supervised].to(dtype)

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
            count = share(len(rows))
            reg = distance(rows, wanted) / count
            loss, counted = self._classification(rows, wanted)
            total = total + self.position_decay**step * (self.w_reg * reg + loss / count)
            found = {"regression": reg.detach(), **{key: value / count for key, value in counted.items()}}
            parts |= {key if step == 0 else f"{key}_{step}": value for key, value in found.items()}
            if step == 0 and hasattr(self.drafter, "usage"):
                which = nn.functional.pad(supervised, (0, true.shape[1] - supervised.shape[1]))
                parts |= {key: value / count for key, value in self.drafter.usage(noisy, which).items()}
        return {"loss": total, **parts}

    def _classification(self, rows: Tensor, wanted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The rows' weighted losses on draft and target laws, summed; and sums of each, and of equal first choices."""
        dtype = torch.promote_types(rows.dtype, torch.float32)  # bfloat16 cannot count beyond 256
        names = ("classification", "top1_agreement", *(["top_k"] if self.w_top_k else []))
        counted = {name: torch.zeros((), dtype=dtype, device=rows.device) for name in names}
        weights = {"classification": self.w_cls, "top_k": self.w_top_k}
        nobody = torch.full((len(rows),), -1, device=rows.device)  # what the target said is not looked at

        def row_loss(hidden: Tensor, which: slice) -> Tensor:
            with torch.no_grad():
                target_logits = self._head(wanted[which])

            def compare(draft_logits: Tensor, part: slice) -> Tensor:
                true = target_logits[part]
                found, q, p = _SOFT.compared(draft_logits, true, nobody[part])
                losses = {"classification": found.sum()}
                if self.w_top_k:
                    losses["top_k"] = top_k_cross_entropy(draft_logits, true, self.top_k).sum()
                with torch.no_grad():
                    counted["top1_agreement"] += agreement(q, p).sum()
                    for name, loss in losses.items():
                        counted[name] += loss
                return torch.stack([weights[name] * loss for name, loss in losses.items()]).sum()

            return law_loss(compare, self.drafter.logits(hidden, step=0))

        return chunked_loss(row_loss, rows, chunk_rows=self.chunk_rows), counted

    def _with_noise(self, features: TargetFeatures, seed: int | None) -> TargetFeatures:
        assert features.hidden is not None
        if seed is None or self.noise == 0:
            return features
        hidden = features.hidden
        generator = torch.Generator(hidden.device).manual_seed(seed)
        uniform = 2 * drawn_for_all(hidden.shape, generator, hidden.device) - 1
        width = self.noise * 512 / features.text_lengths.to(hidden.device)[..., None]
        return replace(features, hidden=hidden + (uniform * width).to(hidden.dtype))
