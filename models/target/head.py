"""The unembedding of a target: hidden state to logits, whole or for some tokens only."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig


class Head(nn.Module):
    """logits = softcap(scale · (W·h + b)), W (V, D); the softcap is c·tanh(x / c) and off where c is None.

    The state that it reads already went through the target's final norm.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: float = 1.0, softcap: float | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.weight: Tensor
        self.bias: Tensor | None
        self.scale = scale
        self.softcap = softcap

    @classmethod
    def of(cls, output_embeddings: nn.Linear, config: PreTrainedConfig) -> Head:
        """Read what follows the unembedding in this architecture from its config."""
        scale = getattr(config, "logit_scale", None) or 1.0  # Cohere multiplies
        scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite divides
        bias = None if output_embeddings.bias is None else output_embeddings.bias.detach()
        weight = output_embeddings.weight.detach()
        return cls(weight, bias, scale, getattr(config, "final_logit_softcapping", None))

    def forward(self, hidden: Tensor) -> Tensor:
        logits = nn.functional.linear(hidden, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def rows(self, token_ids: Tensor | None) -> Head:
        """The head over the tokens `token_ids` (Vd,) only, as a copy; the head itself for None."""
        if token_ids is None:
            return self
        index = token_ids.to(self.weight.device)
        return Head(self.weight[index], None if self.bias is None else self.bias[index], self.scale, self.softcap)
