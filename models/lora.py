"""LoRA adapters (2106.09685) by peft: put beside a model's linear layers, and made one with them again.

A linear layer x ↦ W·x + b becomes x ↦ W·x + (alpha / rank)·B·A·x + b, where A and B alone are trained. B begins at 0,
so that nothing changes at first.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from models.errors import UserError

_KEYS = ("rank", "alpha", "dropout", "target_modules")


def add_adapters(model: nn.Module, settings: Mapping[str, Any], where: str) -> None:
    """Put adapters into `model`, and freeze all else of it.

    `settings` are `rank`, and where they are not its defaults `alpha` (rank), `dropout` (0) before A, and
    `target_modules`, the last parts of the names of the layers that get an adapter (null: all linear ones). Raises
    UserError, which calls the settings `where`, for values that make no sense and for names that the model lacks.
    """
    rank, alpha, dropout = check_lora(settings, where)
    chosen = _chosen(model, settings.get("target_modules"), where)
    from peft import LoraConfig  # slow to import, and rarely needed

    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=dropout,
        target_modules=list(chosen),
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in chosen.values()),
    )
    inject(config, model)
    model.train(model.training)  # the adapters too


def inject(config: Any, model: nn.Module) -> None:
    """Put adapters beside the model's layers, in float32 at least: small steps of training would be rounded away."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def merge_adapters(model: nn.Module) -> dict[str, nn.Module]:
    """Put layers of W + (alpha / rank)·B·A in the place of those with adapters; returns these by their names."""
    from peft.tuners.lora import LoraLayer

    adapted: dict[str, Any] = {name: part for name, part in model.named_modules() if isinstance(part, LoraLayer)}
    for name, layer in adapted.items():
        plain = copy.deepcopy(layer.get_base_layer())
        with torch.no_grad():
            for adapter in layer.active_adapters:
                plain.weight += layer.get_delta_weight(adapter)
        model.set_submodule(name, plain)
    vars(model).pop("peft_config", None)
    return adapted


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """Within, the model is an ordinary one; behind it, the very same adapters and weights are there as before."""
    config = vars(model).get("peft_config")
    adapted = merge_adapters(model)
    try:
        yield
    finally:
        for name, layer in adapted.items():
            model.set_submodule(name, layer)
        if config is not None:
            vars(model)["peft_config"] = config


def check_lora(settings: Mapping[str, Any], where: str) -> tuple[int, float, float]:
    """Rank, alpha and dropout of the settings of `add_adapters`. Raises UserError for values that make no sense."""
    if not isinstance(settings, Mapping):
        raise UserError(f"{where} is {settings!r}: give names and values, as {{rank: 8}}.")
    for key in settings:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{where} has {key!r}: choose from {', '.join(_KEYS)}.{meant}")
    rank = settings.get("rank")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise UserError(f"{where}.rank is {rank!r}: it must be a whole number of at least 1.")
    given, dropout = settings.get("alpha"), settings.get("dropout", 0.0)
    alpha = rank if given is None else given
    if not alpha > 0:
        raise UserError(f"{where}.alpha is {alpha}: it must be above 0.")
    if not 0 <= dropout < 1:
        raise UserError(f"{where}.dropout is {dropout}: it must be 0 or more, and below 1.")
    return rank, float(alpha), float(dropout)


def _chosen(model: nn.Module, names: Any, where: str) -> dict[str, nn.Module]:
    """The linear layers of those names, or all."""
    linears: dict[str, nn.Module] = {
        name: part for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)
    }
    if not linears:
        raise UserError(f"{where}: the model has no linear layers that an adapter fits.")
    if names is None:
        return linears
    if isinstance(names, str):
        raise UserError(f"{where}.target_modules is {names!r}: give a list of names, or null for all linear layers.")
    for name in names:
        if not any(_ends(whole, name) for whole in linears):
            known = sorted({whole.rpartition(".")[2] for whole in linears})
            raise UserError(f"{where}.target_modules has {name!r}: choose from {', '.join(known)}.")
    found = {whole: part for whole, part in linears.items() if any(_ends(whole, name) for name in names)}
    if not found:
        raise UserError(f"{where}.target_modules is empty: name a layer, or use null for all linear ones.")
    return found


def _ends(whole: str, name: str) -> bool:
    return f".{whole}".endswith(f".{name}")
