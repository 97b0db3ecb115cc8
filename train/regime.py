"""What every training of a drafter shares: the target beside it, the optimizer, and what a batch tells.

B batch, S rows, D hidden size.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import lightning
import torch
from torch import Tensor, nn

from data.features import CacheSettings, FeatureCache
from data.loader import Batch, StepBatches
from data.shards import spread
from engine.stats import DecodingStats
from models.errors import UserError
from models.target import Target
from models.types import TargetFeatures, max_depth, own_steps
from train.backbone import backbone_of
from train.losses import chunked_loss
from train.processes import count, means, share

_TARGET = "target_parameters."


class Regime(lightning.LightningModule):
    """AdamW with linear warm-up and a half cosine down to zero; a subclass says in `training_losses` what is lessened.

    `capture_layers` are the target's states that a batch must hold: those that the drafter reads, and behind them those
    that the target's head reads, as far as the regime asks for the target's laws (`needs_laws`).

    With `backbone`, the target is trained too, at times (`train.backbone`): `target` must then be one that it adapted.
    Gradients reach it through the states that the drafter reads, never through what the drafter is to say.
    """

    needs_laws = True
    chunk_rows = 512
    num_steps = 1

    def __init__(
        self,
        drafter: Any,
        target: Target,
        *,
        max_steps: int,
        seed: int,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        warmup_fraction: float,
        backbone: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.backbone = backbone_of({"backbone": backbone})
        if self.backbone.frozen == bool(target.trained):
            raise ValueError(f"the target is not what drafter.training.backbone.by={self.backbone.by} made")
        if not self.backbone.frozen and not drafter.capture_layers:
            raise UserError(
                f"{type(drafter).__name__} reads no states of the target: there is nothing to train it for."
            )
        self.base = None if self.backbone.frozen else self.backbone.divergence()
        self.target_parameters = nn.ParameterList(target.trained)
        self._batches_per_step, self._step = 1, 0
        self.law_tokens: int | None = None
        # In a tuple, so that it is neither trained nor saved with the drafter, nor moved by Lightning, which puts the
        # module on the CPU when training ends.
        self._target = (target,)
        self.max_steps, self.lr, self.weight_decay, self.seed = max_steps, lr, weight_decay, seed
        self.betas = (betas[0], betas[1])
        self.warmup_steps = max(1, round(warmup_fraction * max_steps))
        self._head = target.head.rows(drafter.vocab.token_ids)
        read, last = tuple(map(target.layer_index, drafter.capture_layers)), target.num_layers
        self.capture_layers = read if last in read or not self.needs_laws else (*read, last)
        self._num_read = len(read)

    @property
    def target(self) -> Target:
        """The target that the drafter is for: frozen, or the adapted one."""
        return self._target[0]

    @property
    def first_supervised(self) -> int:
        """The place in a text of the first token that a row of the same text is ever about, at all steps.

        A token before it may be supervised in a text that begins its row alone: in others, rows of the text before
        would be about it.
        """
        return self.num_steps + 1

    @property
    def trains_target(self) -> bool:
        """Whether the target is trained at present."""
        return any(parameter.requires_grad for parameter in self.target_parameters)

    def cache_states(
        self, batches: StepBatches, root: Path, batches_per_step: int = 1, settings: CacheSettings | None = None
    ) -> None:
        """Let batches hold states of the target that are kept on disk under `root`, as long as it is not trained."""
        steps = self.backbone.first_joint_step(self.max_steps)
        batches.cache, batches.cached_steps = None, len(batches)
        if self.capture_layers and steps:
            layers = self.capture_layers if self.law_tokens is None else self.capture_layers[: self._num_read]
            batches.cache = FeatureCache.build(self.target.original, batches.token_ids, layers, root, settings)
        if not self.backbone.frozen:
            batches.cached_steps = steps * batches_per_step

    def keep_laws(self, top_k: int) -> None:
        """Let the cache hold laws of `top_k` tokens in place of the last state.

        Raises UserError where that state is read by itself, and where the laws would take as much room.
        """
        why = self._reads_last_state()
        if why is None and 8 * top_k >= self.target.hidden_size * min(4, self.target.dtype.itemsize):
            why = f"they take 8 bytes a token, {8 * top_k} in all, and the state no more"
        if why is not None:
            raise UserError(f"fit.cache.top_k is {top_k}, which keeps laws in place of the target's last state: {why}.")
        self.law_tokens = top_k

    def _reads_last_state(self) -> str | None:
        """Why laws cannot stand for the target's last state; None where they can."""
        if self.target.num_layers in self.capture_layers[: self._num_read]:
            return f"{type(self.drafter).__name__} reads that itself"
        return None if self.backbone.frozen else "the target is trained too"

    @contextmanager
    def whole_states(self, batches: StepBatches) -> Iterator[None]:
        """Within, batches hold no laws in place of states."""
        cache = batches.cache
        if self.law_tokens is not None:
            batches.cache = None
        try:
            yield
        finally:
            batches.cache = cache

    def start(self, batches: StepBatches) -> dict[str, str] | None:
        """Prepare the drafter before the first step of all; a resumed run does not come here.

        Returns files for the run's folder that tell what was found, by their names.
        """
        return None

    def measured(self, stats: DecodingStats) -> None:
        """Take note of what the engine measured with the drafter on validation prompts."""

    @contextmanager
    def measurable(self) -> Iterator[None]:
        """Within, the drafter is as the engine measures it: in evaluation mode, and what its export would be."""
        self.drafter.eval()
        try:
            yield
        finally:
            self.drafter.train()

    def kept_state(self) -> dict[str, Tensor]:
        """What is kept of the best step: the drafter's weights, and what of the target is trained with it."""
        return self.drafter.state_dict() | self.target_parameters.state_dict(prefix=_TARGET)

    def load_kept_state(self, tensors: dict[str, Tensor]) -> None:
        """Go back to what `kept_state` gave, and move to the target's device: Lightning leaves all on the CPU."""
        names = self.target_parameters.state_dict(prefix=_TARGET).keys()
        self.target_parameters.load_state_dict({name.removeprefix(_TARGET): tensors[name] for name in names})
        self.drafter.load_state_dict({name: tensor for name, tensor in tensors.items() if name not in names})
        self.to(self.target.original.device)

    def on_train_start(self) -> None:
        """Learn what the numbers of batches mean; a resumed run comes here too."""
        self._batches_per_step = self.trainer.accumulate_grad_batches
        if count() > 1:  # Lightning's handler tells the others in the midst of what they say to each other
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def configure_model(self) -> None:
        """Let a strategy see all that will be trained, at times at least, and divide it among processes."""
        self.target_parameters.requires_grad_(True)
        divide = getattr(self.trainer.strategy, "divide", None)
        if divide is not None:
            divide(self, self.target)

    def configure_optimizers(self) -> Any:
        adapted = list(self.target_parameters)
        ids = set(map(id, adapted))
        slower = self.slower_parameters()
        ids |= {id(p) for parameters, _ in slower for p in parameters}
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.parameters() if p.requires_grad and id(p) not in ids]}
        ]
        groups += [{"params": parameters, "lr": self.lr * multiple} for parameters, multiple in slower]
        if adapted:
            groups[0]["name"] = "drafter"
            groups.append({"params": adapted, "name": "target", "lr": self.lr / self.backbone.drafter_lr_multiple})
        optimizer = torch.optim.AdamW(
            groups, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay, fused=self._fused()
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_scale)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _fused(self) -> bool | None:
        """Whether the optimizer's step is one pass over memory, as on the CPU it is not by itself.

        Not for parameters that are spread over processes; nor in mixed precision, where Lightning would not clip.
        """
        trainer = self._trainer
        if trainer is not None and ("mixed" in str(trainer.precision) or hasattr(trainer.strategy, "divide")):
            return None
        return True if all(type(p.data) is Tensor and p.is_cpu for p in self.parameters()) else None

    def slower_parameters(self) -> list[tuple[list[nn.Parameter], float]]:
        """Parameters whose learning rate is smaller, and by what; a resumed run goes on with what it had."""
        return []

    def _lr_scale(self, step: int) -> float:
        """Linear warm-up, then a half cosine down to zero at `max_steps`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.max_steps - self.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))

    def with_states(self, batch: Batch) -> Batch:
        """The batch with the target's states, which are computed here where they are not cached.

        While the target is trained they are the adapted one's, with gradients.
        """
        known = batch.hidden is not None and (batch.hidden.requires_grad or not self.trains_target)
        if known or not self.capture_layers:
            return batch
        target: Any = self.target if self.trains_target else self.target.original
        learning = target.learning(self.seed * 1_000_003 + self._step) if self.trains_target else torch.no_grad()
        with learning, torch.autocast(batch.token_ids.device.type, enabled=False):
            return batch._replace(hidden=target.states(batch.token_ids, self.capture_layers, batch.segments))

    def features(self, batch: Batch) -> tuple[TargetFeatures, Tensor | None]:
        """What the drafter reads of a batch, and the states (B, S, D) that the target's head reads, if asked for.

        In place of those states there may be laws (B, S, 2·K), of which `target_logits` makes the same.

        Both are cached states, or of the target's forward pass. The latter are to say what is right, and have no
        gradients. The token after the last row is unknown, and 0 here; no supervised estimate reads it.
        """
        hidden = self.with_states(batch).hidden
        following = nn.functional.pad(batch.token_ids[:, 1:], (0, 1))
        width = self._num_read * self.target.hidden_size
        if self.law_tokens is not None and hidden is not None and hidden.shape[-1] == width + 2 * self.law_tokens:
            states = hidden[..., :width].to(self.target.dtype) if width else None
            features = TargetFeatures(batch.token_ids, following, states, batch.lengths, batch.segments)
            return features, hidden[..., width:]
        last = self._last(hidden).detach() if self.needs_laws else None
        if hidden is not None and self._num_read < len(self.capture_layers):
            read = hidden.chunk(len(self.capture_layers), dim=-1)[: self._num_read]
            hidden = torch.cat(read, dim=-1) if read else None
        return TargetFeatures(batch.token_ids, following, hidden, batch.lengths, batch.segments), last

    def target_logits(self, rows: Tensor) -> Tensor:
        """The target's logits (..., Vd) over the draft vocabulary, of its last states (..., D) or laws (..., 2·K)."""
        if self._are_laws(rows):
            return spread(rows, self.target.vocab_size, self.drafter.vocab.token_ids)
        return self._head(rows)

    def whole_logits(self, rows: Tensor) -> Tensor:
        """As `target_logits`, over all of the target's tokens (..., V)."""
        return spread(rows, self.target.vocab_size) if self._are_laws(rows) else self.target.head(rows)

    def first_choices(self, rows: Tensor) -> Tensor:
        """The target's likeliest tokens (M,), of the same."""
        if self._are_laws(rows):
            return rows[:, rows.shape[-1] // 2].long()
        return torch.cat([self.target.head(chunk).argmax(-1) for chunk in rows.split(self.chunk_rows)])

    def _are_laws(self, rows: Tensor) -> bool:
        return self.law_tokens is not None and rows.shape[-1] == 2 * self.law_tokens

    def _last(self, hidden: Tensor | None) -> Tensor:
        """The states that the head reads (B, S, D), of the captured ones (B, S, L·D)."""
        assert hidden is not None
        return hidden.chunk(len(self.capture_layers), dim=-1)[self.capture_layers.index(self.target.num_layers)]

    def computed(self, features: TargetFeatures) -> list[Tensor]:
        """What the drafter computes of a batch before its losses; `train.memory` counts what is kept of that."""
        return list(self.drafter.unroll(features, self.num_steps))

    def base_loss(self, batch: Batch) -> Tensor:
        """How far the trained target is from the original one, or from what is said, by `backbone.base`.

        A mean over supervised tokens, over the whole vocabulary, of a batch that has states.
        """
        assert self.base is not None
        supervised, head, original = batch.loss_mask[:, 1:], self.target.head, self.target.original
        labels = batch.token_ids[:, 1:][supervised]
        with torch.autocast(labels.device.type, enabled=False):
            rows = self._last(batch.hidden)[:, :-1][supervised]  # (M, D)
            true = rows.detach()
            if self.base.reads_target:
                with torch.no_grad():
                    true = original(batch.token_ids, segments=batch.segments).last[:, :-1][supervised]

            def row_loss(hidden: Tensor, which: slice) -> Tensor:
                assert self.base is not None
                with torch.no_grad():
                    law = original.head(true[which])
                return self.base(head(hidden), law, labels[which]).sum()

            total = chunked_loss(row_loss, rows, head.linear.parameters(), chunk_rows=self.chunk_rows)
        return total / share(len(rows))

    def training_losses(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """`loss`, which is lessened, and all that is to be logged beside it; `step` is the batch's number.

        Of the drafter alone: `joint_losses` has the trained target's.
        """
        raise NotImplementedError

    def joint_losses(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """`training_losses`; while the target is trained too, with its own loss, `base`, in `loss`."""
        self._step, weight = step, self.backbone.weight(step // self._batches_per_step, self.max_steps)
        self.target_parameters.requires_grad_(weight is not None)
        if weight is None:
            return self.training_losses(batch, step)
        batch = self.with_states(batch)
        base = self.base_loss(batch)
        found = self.joined(batch, step, base, weight)
        return {**found, "base": base.detach(), "drafter_weight": torch.tensor(weight)}

    def joined(self, batch: Batch, step: int, base: Tensor, weight: float) -> dict[str, Tensor]:
        """`training_losses` with `base` + `weight` · the drafter's loss as `loss`."""
        found = self.training_losses(batch, step)
        return {**found, "loss": base + weight * found["loss"], "drafter_loss": found["loss"].detach()}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        losses = self.joint_losses(batch, batch_idx)
        loss = losses["loss"]
        told = over_all(losses)
        self.log_dict({f"train/{k}": v for k, v in told.items()}, prog_bar=False)
        self.log("loss", told["loss"], prog_bar=True, logger=False)
        return loss


def over_all(losses: dict[str, Tensor]) -> dict[str, Tensor]:
    """The means over processes: with `share`, a sum over all rows by a count of all rows."""
    if count() == 1:
        return losses
    device, dtype = losses["loss"].device, torch.promote_types(losses["loss"].dtype, torch.float32)
    found = means([value.detach().to(device, dtype) for value in losses.values()])
    return dict(zip(losses, cast(list[Tensor], found), strict=True))


def check_depth(drafter: Any, num_steps: int) -> None:
    """Raise UserError for more steps than a drafter looks ahead, and for fewer than have parameters of their own."""
    deepest, own = max_depth(drafter), own_steps(drafter)
    if deepest is not None and num_steps > deepest:
        raise UserError(
            f"drafter.training.num_steps is {num_steps}, but the drafter looks {deepest} tokens ahead only."
        )
    if num_steps < own:
        raise UserError(
            f"drafter.training.num_steps is {num_steps}, but {own} tokens ahead have weights of their own, and those "
            f"of the last {own - num_steps} would draft as they began: set it to {own} or more, or build fewer of them."
        )


def check_counts(**counts: int) -> None:
    """Raise UserError for a setting of `drafter.training` that is no number of at least 1."""
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"drafter.training.{name} is {value}: it must be at least 1.")
