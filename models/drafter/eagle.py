"""EAGLE-1: a regressor of the target's next hidden state (2401.15077).

Row t reads the state f_t and the embedding of the token x_{t+1} that followed it, and estimates f_{t+1}; the target's
own frozen head turns that estimate into a law of x_{t+2}. Drafting feeds the estimate back in place of the state.
Embedding and head are the target's. The fusing projection has no bias, the first layer no input norm, and nothing is
normalised at the end: so the same weights load in vLLM, SGLang and SafeAILab's code. `fc_bias`, `rope_parameters` and
`rms_norm_eps` are for checkpoints that were trained elsewhere, with other ones than the target's.

With `feature_window` k, a row reads the last k pairs of a token's embedding and the state before it; with `num_future`
m, a pass estimates the next m states at once, the second to the last as linear maps of the first.

B batch, S rows, D hidden size, P = (2k − 1)·D what a row reads beside its token, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from models.layers import DecoderStack, LayerShape, layer_config
from models.state_feedback import FeedbackDrafter
from models.target import Target
from models.vocab import DraftVocab


class EagleDrafter(FeedbackDrafter):
    """`num_layers` decoder layers over fc([emb(x_{t+1}); f_t]).

    Sizes left at None are the target's. `vocab` limits what can be proposed: the head then computes only those rows,
    which is most of a small drafter's cost.
    """

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        num_layers: int = 1,
        feature_window: int = 1,
        num_future: int = 1,
        fc_bias: bool = False,
        **sizes: Unpack[LayerShape],
    ) -> None:
        super().__init__(target, vocab, feature_window, num_future)
        self.config = layer_config(target, num_layers, **sizes)
        self.capture_layers = (target.num_layers,)
        size = target.hidden_size
        self.fc = nn.Linear(2 * feature_window * size, size, bias=fc_bias)
        self.stack = DecoderStack(self.config, first_input_norm=False)
        self.own_steps = num_future
        self.further = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(num_future - 1))
        self.head = target.head.rows(vocab.token_ids)  # the target's own
        self._settle(target)

    def start_linear(self, weight: Tensor, further: list[Tensor]) -> None:
        """Begin as the linear map `weight` (D, 2k·D) of what is read, with layers that add nothing yet.

        `further` are the maps (D, D) from its result to the estimates of the m − 1 later states.
        """
        with torch.no_grad():
            self.fc.weight.copy_(weight)
            if self.fc.bias is not None:
                self.fc.bias.zero_()
            for linear, start in zip(self.further, further, strict=True):
                linear.weight.copy_(start)  # type: ignore[operator]
            for layer in self.stack.layers:
                layer.self_attn.o_proj.weight.zero_()  # type: ignore[union-attr, operator]
                layer.mlp.down_proj.weight.zero_()  # type: ignore[union-attr, operator]

    def fuse(self, token_ids: Tensor, past: Tensor) -> Tensor:
        """Combine tokens (B, S) with what is before them (B, S, P): (B, S, D)."""
        return self.fc(self.window(token_ids, past).to(self.fc.weight.dtype))

    def outlook(self, hidden: Tensor) -> Tensor:
        """The stack's output (B, S, D), which is the first estimate, and the others made of it: (B, S, m, D)."""
        return torch.stack([hidden, *(linear(hidden) for linear in self.further)], dim=2)

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Draft logits (..., Vd) of estimated states (..., D), by the target's head."""
        return self.head(hidden.to(self.head.weight.dtype))

    def logit_parameters(self, step: int = 0) -> list[nn.Parameter]:
        """None: the head is the target's, and frozen."""
        return []
