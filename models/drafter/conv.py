"""A light drafter whose rows are mixed by depthwise-separable causal convolutions (1610.02357).

y_t = W · SiLU(Σ_i c_i ⊙ x_{t−i}), i = 0 .. kernel_size − 1, with a vector c_i for each place and one matrix W. What is
remembered are the last kernel_size − 1 rows.

B batch, S rows, D hidden size, k kernel size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from models.errors import UserError
from models.layers import layer_config
from models.light import LightDrafter, MixingLayer
from models.target import Target
from models.vocab import DraftVocab


class ConvLayer(MixingLayer):
    """The convolution, and an MLP behind it. At first a row is mixed with nothing."""

    def __init__(self, config: LlamaConfig, kernel_size: int, active: int) -> None:
        super().__init__(config, active)
        size = config.hidden_size
        self.state_shape = (kernel_size - 1, size)
        self.depthwise = nn.Parameter(torch.zeros(kernel_size, size))  # the row's own factors come last
        with torch.no_grad():
            self.depthwise[-1] = 1
        self.pointwise = nn.Linear(size, size, bias=False)

    def mix(self, x: Tensor, state: Tensor, each: bool) -> tuple[Tensor, Tensor]:
        rows, count = torch.cat([state, x], dim=1), x.shape[1]  # (B, k − 1 + S, D)
        places = [factors * rows[:, place : place + count] for place, factors in enumerate(self.depthwise)]
        mixed = self.pointwise(nn.functional.silu(torch.stack(places).sum(0)))
        behind = torch.arange(1 if each else count, 1 + count, device=x.device)
        return mixed, rows[:, behind[:, None] + torch.arange(len(places) - 1, device=x.device)]

    def outputs(self) -> list[nn.Linear]:
        return [self.pointwise, self.mlp.down_proj]


class ConvDrafter(LightDrafter):
    """`num_layers` layers over the last `kernel_size` rows each; `active` is `SparseMLP`'s.

    `intermediate_size` at None is the target's. Raises UserError for sizes below 1.
    """

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        num_layers: int = 2,
        kernel_size: int = 4,
        intermediate_size: int | None = None,
        active: int = 0,
    ) -> None:
        if kernel_size < 1:
            raise UserError(f"drafter.model.kernel_size is {kernel_size}: it must be at least 1.")
        config = layer_config(target, num_layers, intermediate_size=intermediate_size)
        super().__init__(target, vocab, [ConvLayer(config, kernel_size, active) for _ in range(num_layers)])
