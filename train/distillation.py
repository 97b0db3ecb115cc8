"""Distillation of a target into a small language model: its laws, its layers' states, and the drafter's own texts.

B batch, S rows, M supervised rows, D hidden size of the target and D' of the draft model, K layers of the draft model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from data.loader import Batch, StepBatches
from models.attention_maps import check_maps, common_groups, grouped, states_and_maps
from models.errors import UserError
from models.lora import add_adapters, merge_adapters, merged
from models.pruning import Kept, best_units
from models.target import Target
from train.law_matching import LawMatching
from train.losses import chunked_loss
from train.on_policy import continue_answers, mixed
from train.processes import count, drawn_for_all, gathered, rank, share
from train.regime import check_counts
from train.sensitivity import IMPORTANCES, measured_loss_of_acceptance, report, sensitivity, summary

_READ_BY = {
    "layer_map": "it is for drafter.training.w_layers and w_attention, which are both 0",
    "normalize_layers": "it is for drafter.training.w_layers, which is 0",
    "measure_units": "it is for a drafter that begins as a pruned target (drafter.model.start=pruned)",
}


class Distillation(LawMatching):
    """The losses of `LawMatching`, and `w_layers` times that of the layers; some texts are the drafter's own.

    Layers (1908.09355): Σ_j ‖f_j − g_j(h_j)‖², the mean over supervised positions, where h_j is the state behind layer
    j of the draft model, f_j that behind the target's layer `layer_map[j − 1]` (null: j·n/K, the last onto the last),
    and g_j a learnt map where they differ in width. The square is a mean over D, or with `normalize_layers` the sum
    over vectors of length 1. The last states are those behind the final norms.

    On policy (2306.13649): every `refresh_every` steps the drafter continues the prompts of that step's batch, drawing
    at `on_policy_temperature`; up to the next time a row of a batch is one of these with the chance `on_policy_ratio`.
    They are a part of checkpoints. No gradient flows through the drawing, and cross_entropy is a mean over the other
    rows, since the target did not say these.

    Attention: `w_attention` times Σ_j KL(A_j ‖ a_j) in the same rows, where a_j is the attention of layer j of the
    draft model and A_j that of the target's layer that it is mapped to (2004.02984 has pairs of heads). Here they are
    means over as many groups of heads as both models can be divided into, those of their key-value heads where they
    have equally many. The target's are in no cache: with this loss it always reads the texts once more, with eager
    attention, which holds (B, H, S, S) for every layer.

    With `lora` the draft model's weights stay, and adapters beside them are trained (`models.lora`). They are a part of
    the weights whenever the drafter is measured, and in the end.

    A drafter that begins as a pruned target is cut before the first step by `importance` (`train.sensitivity`) over
    `calibration_batches` batches; its layers too with `choose_layers` importance, or at even distances. The run's
    `sensitivity.csv` tells of every unit, with `measure_units` also what acceptance falls by without it.
    """

    def __init__(
        self,
        drafter: Any,
        target: Target,
        *,
        w_layers: float,
        layer_map: list[int] | None,
        normalize_layers: bool,
        on_policy_ratio: float,
        on_policy_temperature: float,
        refresh_every: int,
        importance: str,
        choose_layers: str,
        calibration_batches: int,
        measure_units: bool,
        w_attention: float,
        lora: Mapping[str, Any] | None,
        **laws: Any,
    ) -> None:
        super().__init__(drafter, target, **laws)
        check_counts(refresh_every=refresh_every, calibration_batches=calibration_batches)
        if importance not in IMPORTANCES:
            raise UserError(f"drafter.training.importance is {importance!r}: choose {' or '.join(IMPORTANCES)}.")
        if choose_layers not in ("even", "importance"):
            raise UserError(f"drafter.training.choose_layers is {choose_layers!r}: choose even or importance.")
        if not 0 <= on_policy_ratio <= 1:
            raise UserError(f"drafter.training.on_policy_ratio is {on_policy_ratio}: it must be from 0 to 1.")
        if on_policy_ratio and drafter.capture_layers:
            raise UserError(
                "drafter.training.on_policy_ratio is for drafters that read tokens alone; "
                f"{type(drafter).__name__} reads the target's states too: set it to 0."
            )
        unread = {
            "layer_map": layer_map is not None and not (w_layers or w_attention),
            "normalize_layers": normalize_layers and not w_layers,
            "measure_units": measure_units and getattr(drafter, "units", None) is None,
        }
        for name, is_unread in unread.items():
            if is_unread:
                raise UserError(f"drafter.training.{name} would not be read: {_READ_BY[name]}.")
        self.on_policy_ratio, self.on_policy_temperature = on_policy_ratio, on_policy_temperature
        self.refresh_every, self.importance, self.choose_layers = refresh_every, importance, choose_layers
        self.calibration_batches, self.measure_units = calibration_batches, measure_units
        self._own_texts: Batch | None = None
        self.w_layers, self.normalize_layers = w_layers, normalize_layers
        self.w_attention, self.lora = w_attention, lora
        self._layer_map: tuple[int, ...] = ()
        self.projections = nn.ModuleList()
        if w_layers or w_attention:
            self._layer_map = _mapped(drafter, target, layer_map, "w_layers" if w_layers else "w_attention")
        if w_attention:
            for model in (target, drafter.lm):
                check_maps(model, "drafter.training.w_attention")
            self._groups = common_groups(target, drafter.lm)
        if w_layers:
            read, last = self.capture_layers[: self._num_read], self.capture_layers[-1]
            self.capture_layers = tuple(dict.fromkeys((*read, *self._layer_map, last)))
            self.projections = _projections(drafter.lm, target, len(self._layer_map))
        if lora is not None:
            self._adapt(lora)

    def _adapt(self, lora: Mapping[str, Any]) -> None:
        """Freeze the drafter, and put adapters into it."""
        if not hasattr(self.drafter, "lm") or not self.drafter.pretrained:
            raise UserError(
                "drafter.training.lora adapts a language model that has weights already: begin with some of the "
                "target's (drafter.model.start) or with a folder (drafter.model.name_or_path, or init_from for one of "
                "ours), or set it to null."
            )
        self.drafter.requires_grad_(False)
        add_adapters(self.drafter.model, lora, "drafter.training.lora")

    def _reads_last_state(self) -> str | None:
        if self.w_layers:
            return "drafter.training.w_layers compares that itself"
        if self.on_policy_ratio:
            return "drafter.training.on_policy_ratio is for texts that are in no cache"
        return super()._reads_last_state()

    def on_train_start(self) -> None:
        """Let adapters drop out from the first step on, in a resumed run too."""
        super().on_train_start()
        self.drafter.train()

    @contextmanager
    def measurable(self) -> Iterator[None]:
        """As for every regime; adapters are a part of the weights."""
        with super().measurable(), merged(self.drafter.model) if self.lora is not None else nullcontext():
            yield

    def kept_state(self) -> dict[str, Tensor]:
        """As for every regime; adapters are a part of the weights."""
        with merged(self.drafter.model) if self.lora is not None else nullcontext():
            return super().kept_state()

    def load_kept_state(self, tensors: dict[str, Tensor]) -> None:
        """As for every regime; the adapters are gone for good."""
        if self.lora is not None:
            merge_adapters(self.drafter.model)
        super().load_kept_state(tensors)

    def start(self, batches: StepBatches) -> dict[str, str] | None:
        """Cut a drafter that begins as a pruned target."""
        units: Kept | None = getattr(self.drafter, "units", None)
        if units is None:
            return None
        chosen = [batches[step] for step in range(self.calibration_batches)]
        scores = sensitivity(self.target, chosen, chunk_rows=self.chunk_rows)
        counts = {"layers": len(units.layers), "groups": units.groups.shape[1], "channels": units.channels.shape[1]}
        layers = units.layers if self.choose_layers == "even" else None
        kept = best_units(scores[self.importance], counts, layers)
        if self.lora is not None:
            merge_adapters(self.drafter.model)
        self.drafter.cut(kept)
        if self.lora is not None:
            self._adapt(self.lora)
        if self.measure_units:
            scores["acceptance_lost"] = measured_loss_of_acceptance(self.target, chosen[0])
        print(summary(scores, kept))
        return {"sensitivity.csv": report(scores, kept)}

    def training_losses(self, batch: Batch, step: int) -> dict[str, Tensor]:
        """The losses of the laws, and those of the layers, `layers` and `attention`, where they have a weight."""
        torch.manual_seed((self.seed * 1_000_003 + step) * count() + rank())  # the same drops out in a resumed run
        batch, labels = self._with_own_texts(self.with_states(batch), step)
        features, last = self.features(batch)
        assert last is not None
        if not self._layer_map:
            return self.law_losses(batch, last, self.drafter.unroll(features, self.num_steps), labels)
        if self.w_attention:
            states, maps = self.drafter.states_and_maps(features)
        else:
            states, maps = self.drafter.states(features, tuple(range(1, len(self._layer_map)))), []
        found = self.law_losses(batch, last, self.drafter.steps(states[-1], self.num_steps), labels)
        if self.w_layers:
            layers = self.layer_loss(batch, states)
            found |= {"loss": found["loss"] + self.w_layers * layers, "layers": layers.detach()}
        if self.w_attention:
            attention = self.attention_loss(batch, maps)
            found |= {"loss": found["loss"] + self.w_attention * attention, "attention": attention.detach()}
        return found

    def layer_loss(self, batch: Batch, states: list[Tensor]) -> Tensor:
        """Of the draft model's states (B, S, D') behind its layers, at x_{t+1} in row t, against those of a batch."""
        assert batch.hidden is not None
        by_layer = dict(zip(self.capture_layers, batch.hidden.chunk(len(self.capture_layers), dim=-1), strict=True))
        supervised = batch.loss_mask[:, 2:]  # where the state that is compared tells a token that is learnt
        rows = torch.cat([state[:, : supervised.shape[1]][supervised] for state in states], dim=-1)  # (M, K·D')
        true = [by_layer[layer][:, 1:-1][supervised] for layer in self._layer_map]  # K of (M, D)

        def row_loss(hidden: Tensor, which: slice) -> Tensor:
            parts = hidden.chunk(len(true), dim=-1)
            pairs = zip(parts, self.projections, true, strict=True)
            return torch.stack([self._distance(project(part), wanted[which]) for part, project, wanted in pairs]).sum()

        parameters = list(self.projections.parameters())
        return chunked_loss(row_loss, rows, parameters, chunk_rows=self.chunk_rows) / share(len(rows))

    def attention_loss(self, batch: Batch, maps: list[Tensor]) -> Tensor:
        """Of the draft model's attention (B, H, S + 1, S + 1) in each of its layers, against that of the target."""
        with torch.no_grad(), torch.autocast(batch.token_ids.device.type, enabled=False):
            theirs = states_and_maps(self.target, batch.token_ids)[1]
        supervised, width = batch.loss_mask[:, 2:], batch.token_ids.shape[1]  # the rows of `layer_loss`
        total = maps[0].new_zeros((), dtype=torch.promote_types(maps[0].dtype, torch.float32))
        for ours, layer in zip(maps, self._layer_map, strict=True):
            p, q = (
                grouped(whole[:, :, 1 : width - 1, :width], self._groups).transpose(1, 2)[supervised].to(total.dtype)
                for whole in (theirs[layer - 1], ours)
            )  # (M, G, S)
            smallest = torch.finfo(total.dtype).tiny  # where both are 0, nothing is added
            distance = (p * (p.clamp(min=smallest).log() - q.clamp(min=smallest).log())).sum(-1)
            total = total + distance.mean(-1).sum()
        return total / share(int(supervised.sum()))

    def _distance(self, ours: Tensor, theirs: Tensor) -> Tensor:
        dtype = torch.promote_types(ours.dtype, torch.float32)
        ours, theirs = ours.to(dtype), theirs.to(dtype)
        if self.normalize_layers:
            ours, theirs = (nn.functional.normalize(t, dim=-1) for t in (ours, theirs))
            return (ours - theirs).square().sum()
        return (ours - theirs).square().mean(-1).sum()

    def _with_own_texts(self, batch: Batch, step: int) -> tuple[Batch, Tensor]:
        """The batch with some rows of the drafter's own, and the labels (B, S), which these have none of."""
        if not self.on_policy_ratio:
            return batch, self.drafter.vocab.to_draft(batch.token_ids)
        if step % (self.refresh_every * self._batches_per_step) == 0:
            self._own_texts = self._continued(batch, step)
        assert self._own_texts is not None
        if self._own_texts.hidden is None:  # made just now, or read from a checkpoint
            device = batch.token_ids.device
            ids, mask, lengths = (t.to(device) for t in self._own_texts[:3])
            self._own_texts = self.with_states(Batch(ids, mask, lengths, None))
        stream = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        drawn = drawn_for_all((len(batch.token_ids),), stream)
        chosen = (drawn < self.on_policy_ratio).to(batch.token_ids.device)
        both = mixed(batch, self._own_texts, chosen)
        labels = self.drafter.vocab.to_draft(both.token_ids)
        return both, torch.where(chosen[:, None], -1, labels)

    def _continued(self, batch: Batch, step: int) -> Batch:
        self.drafter.eval()
        made = continue_answers(
            self.drafter,
            batch,
            temperature=self.on_policy_temperature,
            seed=self.seed * 1_000_003 + step,
            part=(rank(), count()),
            stop_token_ids=self.target.stop_token_ids,
        )
        self.drafter.train()
        return made

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._own_texts is not None:
            checkpoint["own_texts"] = _of_all([t.cpu() for t in self._own_texts[:3]])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "own_texts" in checkpoint:
            ids, mask, lengths = (t[rank() :: count()] for t in checkpoint["own_texts"])
            self._own_texts = Batch(ids, mask, lengths, None)


def _of_all(texts: list[Tensor]) -> list[Tensor]:
    """The ids, masks (B, S) and lengths (B,) of all processes' rows, in the order of the whole batch."""
    parts = gathered(texts)
    width = max(int(lengths.max()) for *_, lengths in parts)
    same = [[nn.functional.pad(t, (0, width - t.shape[1])) for t in part[:2]] + part[2:] for part in parts]
    return [torch.stack(column, dim=1).flatten(0, 1) for column in zip(*same, strict=True)]


def _mapped(drafter: Any, target: Target, layer_map: list[int] | None, weight: str) -> tuple[int, ...]:
    """Which of the target's layers each of the draft model's is compared with, counted from 1."""
    if not hasattr(drafter, "states"):
        raise UserError(
            f"drafter.training.{weight} is for language models: {type(drafter).__name__} has no layers to compare."
        )
    number, theirs = drafter.lm.num_layers, target.num_layers
    if layer_map is None:
        return tuple(max(1, round((j + 1) * theirs / number)) for j in range(number))
    if len(layer_map) != number or not all(1 <= layer <= theirs for layer in layer_map):
        raise UserError(
            f"drafter.training.layer_map is {list(layer_map)}: give a layer from 1 to {theirs} of the target for each "
            f"of the draft model's {number}."
        )
    return tuple(layer_map)


def _projections(lm: Target, target: Target, count: int) -> nn.ModuleList:
    """The maps g_j, which are the identity where the widths agree."""
    if lm.hidden_size == target.hidden_size:
        return nn.ModuleList(nn.Identity() for _ in range(count))
    size, dtype = (lm.hidden_size, target.hidden_size), next(lm.layers.parameters()).dtype
    return nn.ModuleList(nn.Linear(*size, bias=False, device=lm.device, dtype=dtype) for _ in range(count))
