"""The unembedding of a target: hidden state to logits, whole or for some tokens only."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig


class Head:
    """logits = softcap(scale · (W·h + b)), W (V, D); the softcap is c·tanh(x / c) and off where c is None.

    The state that it reads already went through the target's final norm. A head is frozen, and no module itself: a
    drafter that holds one neither trains, saves nor moves it.
    """

    def __init__(self, linear: nn.Linear, scale: float = 1.0, softcap: float | None = None) -> None:
        self.linear = linear.requires_grad_(False)
        self.scale = scale
        self.softcap = softcap

    @classmethod
    def of(cls, output_embeddings: nn.Linear, config: PreTrainedConfig) -> Head:
        """Read what follows the unembedding in this architecture from its config."""
        scale = getattr(config, "logit_scale", None) or 1.0  # Cohere multiplies
        scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite divides
        return cls(output_embeddings, scale, getattr(config, "final_logit_softcapping", None))

    @property
    def weight(self) -> Tensor:
        """W (V, D)."""
        return self.linear.weight

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(hidden)
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
        chosen = nn.Linear(self.weight.shape[1], len(index), bias=self.linear.bias is not None, device="meta")
        chosen.weight = nn.Parameter(self.weight[index], requires_grad=False)
        if self.linear.bias is not None:
            chosen.bias = nn.Parameter(self.linear.bias[index], requires_grad=False)
        return Head(chosen, self.scale, self.softcap)


def linears_of(module: object) -> list[nn.Linear]:
    """The linear layers of a module and of the heads that its parts hold, alone or in tuples; else none."""
    found: list[nn.Linear] = []
    for part in module.modules() if isinstance(module, nn.Module) else []:
        found += [part] if isinstance(part, nn.Linear) else []
        for value in vars(part).values():
            held = value if isinstance(value, tuple) else (value,)
            found += [head.linear for head in held if isinstance(head, Head)]
    return found
