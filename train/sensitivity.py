"""How much a target's answers depend on each of its layers, key-value groups and MLP channels.

Two figures for a unit with weights W and gradient g of the mean cross-entropy of the answers, each averaged over
batches: the ratio ‖g‖_F / ‖W‖_F, which the literature prints, though it grows as weights are scaled down that the next
product scales up; and Taylor's |Σ g·w|, what the loss would change by to first order if the unit were zero
(1611.06440).

B batch, S rows, D hidden size, M supervised rows; n, H, F as in `models.pruning`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from data.loader import Batch
from data.progress import Progress
from models.pruning import UNITS, Kept, empty_scores, squared_norms, unit_counts, unit_sums
from models.target import Target
from models.target.head import linears_of
from train.losses import chunked_loss

IMPORTANCES = ("gradient_ratio", "taylor")


def sensitivity(target: Target, batches: Iterable[Batch], *, chunk_rows: int = 512) -> dict[str, dict[str, Tensor]]:
    """For each of `IMPORTANCES` the scores of all units, over what the target said in `batches`.

    A parameter's gradient is alive only until its sums are taken, so that memory holds one at a time.
    """
    counts, norms = unit_counts(target), squared_norms(target)
    found = {name: empty_scores(counts, target.device) for name in IMPORTANCES}
    number = 0
    with _layers_with_gradients(target) as layers:
        for batch in batches:
            squares, products = (empty_scores(counts, target.device) for _ in range(2))
            with _summed(layers, counts, squares, products):
                _answers_loss(target, batch, chunk_rows).backward()
            for kind in UNITS:
                found["gradient_ratio"][kind] += squares[kind].sqrt() / norms[kind].sqrt().clamp(min=1e-30)
                found["taylor"][kind] += products[kind].abs()
            number += 1
    return {name: {kind: total / number for kind, total in scores.items()} for name, scores in found.items()}


@torch.no_grad()
def measured_loss_of_acceptance(target: Target, batch: Batch) -> dict[str, Tensor]:
    """By how much α = Σ min(p, q) falls below 1 when q is the target without a unit: layers (n,) and groups (n, H).

    A mean over what the target said in `batch`. It takes a forward pass for every unit, and so is for a report.
    """
    counts = unit_counts(target)
    found = {kind: scores for kind, scores in empty_scores(counts, target.device).items() if kind != "channels"}
    with _layers_with_gradients(target) as layers, Progress("units left out", counts["layers"]) as progress:
        whole = _laws(target, batch)
        for index, layer in enumerate(layers):
            out, down = layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight
            with _zeroed(out), _zeroed(down):
                found["layers"][index] = 1 - torch.minimum(whole, _laws(target, batch)).sum(-1).mean()
            for group, columns in enumerate(out.chunk(counts["groups"], dim=1)):
                with _zeroed(columns):
                    found["groups"][index, group] = 1 - torch.minimum(whole, _laws(target, batch)).sum(-1).mean()
            progress.advance(1)
    return found


def report(scores: dict[str, dict[str, Tensor]], kept: Kept) -> str:
    """A CSV table with a row for every unit: its kind, layer, index, figures, and whether it is kept."""
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerow(["unit", "layer", "index", *scores, "kept"])
    place = {layer: i for i, layer in enumerate(kept.layers)}
    for kind in UNITS:
        having = [name for name in scores if kind in scores[name]]
        shape = scores[having[0]][kind].shape
        chosen = {"groups": kept.groups, "channels": kept.channels}
        for layer in range(shape[0]):
            inside = set(chosen[kind][place[layer]].tolist()) if kind in chosen and layer in place else set()
            for index in range(shape[1] if len(shape) > 1 else 1):
                at = (layer, index) if len(shape) > 1 else layer
                figures = [f"{scores[name][kind][at]:.6g}" if name in having else "" for name in scores]
                is_kept = index in inside if kind in chosen else layer in place
                writer.writerow([kind[:-1], layer, index if kind in chosen else "", *figures, int(is_kept)])
    return table.getvalue()


def summary(scores: dict[str, dict[str, Tensor]], kept: Kept) -> str:
    """A line for every layer, for people: its own figures, and the range of those of its groups and channels."""
    lines = [f"{'layer':>5} {'kept':>4}  " + "  ".join(f"{name} of layer, groups, channels" for name in scores)]
    for layer in range(len(next(iter(scores.values()))["layers"])):
        cells = []
        for found in scores.values():
            ranges = [f"{found['layers'][layer]:.3g}"]
            ranges += [_range(found[kind][layer]) for kind in ("groups", "channels") if kind in found]
            cells.append(", ".join(ranges))
        lines.append(f"{layer:>5} {'yes' if layer in kept.layers else 'no':>4}  " + "  ".join(cells))
    return "\n".join(lines)


def _range(values: Tensor) -> str:
    return f"{values.min():.2g}–{values.max():.2g}"


def _supervised(target: Target, batch: Batch) -> tuple[Tensor, Tensor]:
    """States (M, D) by the model's own forward pass, and the tokens (M,) that were said behind them."""
    ids, mask = (t.to(target.device) for t in (batch.token_ids, batch.loss_mask))
    hidden = target.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[:, :-1][mask[:, 1:]], ids[:, 1:][mask[:, 1:]]


def _answers_loss(target: Target, batch: Batch, chunk_rows: int) -> Tensor:
    hidden, said = _supervised(target, batch)

    def row_loss(rows: Tensor, which: slice) -> Tensor:
        return nn.functional.cross_entropy(_wide(target.head(rows)), said[which], reduction="sum")

    return chunked_loss(row_loss, hidden, chunk_rows=chunk_rows) / max(1, len(hidden))


def _laws(target: Target, batch: Batch) -> Tensor:
    return _wide(target.head(_supervised(target, batch)[0])).softmax(-1)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@contextmanager
def _layers_with_gradients(target: Target) -> Iterator[list[Any]]:
    """The target's layers, whose weights are in the graph meanwhile, on torch's own products."""
    layers: Any = target.model.get_decoder().layers
    routed = [(linear, vars(linear).pop("forward")) for linear in linears_of(layers) if "forward" in vars(linear)]
    layers.requires_grad_(True)
    try:
        yield list(layers)
    finally:
        layers.requires_grad_(False)
        for linear, forward in routed:
            linear.forward = forward  # type: ignore[method-assign]


@contextmanager
def _summed(
    layers: list[Any], counts: dict[str, int], squares: dict[str, Tensor], products: dict[str, Tensor]
) -> Iterator[None]:
    """Add Σ g² and Σ g·w of every unit as each parameter's gradient is complete, and drop the gradient."""

    def watch(name: str, index: int) -> Any:
        def take(parameter: Tensor) -> None:
            grad = parameter.grad
            assert grad is not None
            for totals, values in ((squares, grad.square()), (products, grad * parameter.detach())):
                for kind, sums in unit_sums(name, values, counts).items():
                    totals[kind][index] += sums
            parameter.grad = None

        return take

    hooks = [
        parameter.register_post_accumulate_grad_hook(watch(name, index))
        for index, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _zeroed(weight: Tensor) -> Iterator[None]:
    kept = weight.detach().clone()
    weight.detach().zero_()
    try:
        yield
    finally:
        weight.detach().copy_(kept)
