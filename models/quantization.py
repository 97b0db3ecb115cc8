"""Weights as int8: symmetric, with a scale for every row of a matrix.

F rows (outputs), K columns (inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.errors import UserError

_SUFFIX = ".scale"


def quantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every floating-point matrix `name` (F, K) as int8 beside `name.scale` (F,); other tensors stay as they are.

    w ≈ scale · int8 with scale = max |w| / 127 over a row, so that no weight is off by more than half a scale.
    """
    result = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not tensor.is_floating_point():
            result[name] = tensor
            continue
        largest = tensor.abs().amax(1).float()
        scale = torch.where(largest > 0, largest / 127, 1.0)
        result[name] = (tensor / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        result[name + _SUFFIX] = scale
    return result


def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float32 weights that `quantized` tensors stand for. Raises UserError for a missing or misshapen scale."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int8:
            continue
        scale = result.pop(name + _SUFFIX, None)
        if scale is None or scale.shape != tensor.shape[:1]:
            raise UserError(f"{name + _SUFFIX} is missing, or does not hold a number for each row of {name}.")
        result[name] = tensor.float() * scale[:, None]
    return result
