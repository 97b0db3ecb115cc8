"""What several nodes learnt, merged: the weighted average of their low-rank deltas, without any node's data.

A delta is, for each adapted layer, A (r, in) and B (out, r), scaled, so that the layer's weight becomes W + B·A. The
average of several is kept exactly, as one delta of the sum of their ranks:

    Σ_i w_i B_i A_i = [w_1 B_1, w_2 B_2, ..] · [A_1; A_2; ..]

whereas averaging the A and the B by themselves gives the products of strangers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from models.checkpoint.native import read_tensors
from models.errors import UserError
from models.files import atomic_folder

Factors = dict[str, tuple[Tensor, Tensor]]  # a layer's name → A (r, in), B (out, r)


@dataclass(frozen=True, slots=True)
class Delta:
    """What adapters add to the drafter whose weights have the hash `base`, learnt from so many `requests`."""

    base: str
    requests: float
    factors: Factors


def delta_of(model: nn.Module, base: str, requests: int) -> Delta:
    """The delta of a model with adapters (`models.lora`)."""
    from peft.tuners.lora import LoraLayer

    factors: Factors = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            for adapter in layer.active_adapters:
                a, b = _weight(layer.lora_A[adapter]), _weight(layer.lora_B[adapter])
                factors[name] = (a.clone(), b * layer.scaling[adapter])
    return Delta(base, float(requests), factors)


def _weight(factor: nn.Module) -> Tensor:
    weight = factor.weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def merge(deltas: Sequence[Delta], weights: Sequence[float] | None = None) -> Delta:
    """Σ w_i δ_i with weights that are divided by their sum; None: by the requests that each has learnt from.

    Raises UserError for deltas of different drafters, and for weights that are none.
    """
    if not deltas:
        raise UserError("There is nothing to merge: name at least one delta.")
    if len({delta.base for delta in deltas}) > 1:
        raise UserError("The deltas were learnt from different drafters: their sum means nothing.")
    given: Any = [delta.requests for delta in deltas] if weights is None else weights
    numbers = isinstance(given, list | tuple) and all(isinstance(w, int | float) for w in given)
    if not numbers or len(given) != len(deltas) or any(weight < 0 for weight in given) or not sum(given) > 0:
        raise UserError(f"weights is {given}: give a number of at least 0 for each of {len(deltas)} deltas, not all 0.")
    shares = [weight / sum(given) for weight in given]
    names = sorted({name for delta in deltas for name in delta.factors})
    factors: Factors = {}
    for name in names:
        parts = [
            (*delta.factors[name], share) for delta, share in zip(deltas, shares, strict=True) if name in delta.factors
        ]
        factors[name] = (torch.cat([a for a, _, _ in parts]), torch.cat([share * b for _, b, share in parts], dim=1))
    return Delta(deltas[0].base, sum(delta.requests for delta in deltas), factors)


@torch.no_grad()
def apply(delta: Delta, model: nn.Module) -> None:
    """Add a delta to the layers of a model, for good. Raises UserError for layers that it lacks or of another shape."""
    layers = dict(model.named_modules())
    for name, (a, b) in delta.factors.items():
        layer = layers.get(name)
        if not isinstance(layer, nn.Linear | Conv1D):
            raise UserError(f"The delta is for a layer {name!r}, which {type(model).__name__} does not have.")
        change = b @ a
        change = change.t() if isinstance(layer, Conv1D) else change
        if layer.weight.shape != change.shape:
            raise UserError(f"The delta of {name!r} is {tuple(change.shape)}, the weight {tuple(layer.weight.shape)}.")
        layer.weight += change.to(layer.weight)


def save(delta: Delta, folder: Path) -> None:
    """Write a delta, whole or not at all: delta.safetensors and delta.json."""
    tensors = {f"{name}.{part}": t for name, pair in delta.factors.items() for part, t in zip("AB", pair, strict=True)}
    told = {"base": delta.base, "requests": delta.requests}
    with atomic_folder(folder) as temporary:
        save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, temporary / "delta.safetensors")
        (temporary / "delta.json").write_text(json.dumps(told, indent=1) + "\n")


def load(folder: Path) -> Delta:
    """Read a delta. Raises UserError where the folder holds none, or a damaged one."""
    tensors = read_tensors(folder / "delta.safetensors")
    try:
        told: dict[str, Any] = json.loads((folder / "delta.json").read_text())
        names = {name.rpartition(".")[0] for name in tensors}
        factors = {name: (tensors[f"{name}.A"], tensors[f"{name}.B"]) for name in names}
        return Delta(told["base"], float(told["requests"]), factors)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{str(folder)!r} holds no delta that can be read: {type(error).__name__}: {error}.") from error
