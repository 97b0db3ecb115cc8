"""A light drafter of small experts, of which a learnt gate chooses by what the text is about.

What a text is about is a mean of its rows that forgets, e_t = Σ_{s ≤ t} m^{t−s}·x_s / Σ_{s ≤ t} m^{t−s}, of which both
sums are remembered. The gate is softmax(G·e_t); `route` soft adds all experts' results by it, top1 (2101.03961) runs
the rows through their likeliest expert alone, times its gate, so that the gate still learns; it has no loss that
balances the experts. It switches where the text's domain does.

B batch, S rows, D hidden size, X experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from models.errors import UserError
from models.layers import RMSNorm, layer_config
from models.light import LightDrafter, LightLayer, SparseMLP
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab

ROUTES = ("soft", "top1")


class ExpertsLayer(LightLayer):
    """x + Σ_i gate_i · expert_i(norm(x))."""

    def __init__(self, config: LlamaConfig, num_experts: int, memory: float, route: str, active: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.state_shape, self.memory, self.route = (size + 1,), memory, route
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.gate = nn.Linear(size, num_experts, bias=False)
        self.experts = nn.ModuleList(SparseMLP(config, active) for _ in range(num_experts))

    def scan(self, x: Tensor, state: Tensor, each: bool = True) -> tuple[Tensor, Tensor]:
        rows = self.norm(x)
        sums = self.sums(rows, state)
        gates = self.gates(sums)  # (B, S, X)
        if self.route == "top1":
            gates = gates * self.shares(gates)
        added = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            if self.route == "soft":
                added = added + gates[..., index : index + 1] * expert(rows)
            else:
                chosen = gates[..., index] > 0
                added = added.index_put((chosen,), gates[..., index][chosen][:, None] * expert(rows[chosen]))
        return x + added, sums if each else sums[:, -1:]

    def gates(self, sums: Tensor) -> Tensor:
        """How much each expert counts (..., X), from both sums (..., D + 1)."""
        about: Tensor = self.gate(sums[..., :-1] / sums[..., -1:])
        return about.softmax(-1)

    def shares(self, gates: Tensor) -> Tensor:
        """What of each row every expert has (..., X): its gate, or with `route` top1 the whole row or nothing."""
        return gates if self.route == "soft" else (gates == gates.amax(-1, keepdim=True)).to(gates.dtype)

    def sums(self, rows: Tensor, state: Tensor) -> Tensor:
        """Both sums (B, S, D + 1) behind each of the rows (B, S, D), from those before them (B, D + 1)."""
        order = torch.arange(rows.shape[1], device=rows.device)
        apart = order[:, None] - order
        shares = torch.where(apart >= 0, self.memory ** apart.clamp(min=0).to(rows.dtype), 0.0)
        kept = self.memory ** (1 + order).to(rows.dtype)
        return shares @ nn.functional.pad(rows, (0, 1), value=1.0) + kept[:, None] * state[:, None]

    def outputs(self) -> list[nn.Linear]:
        experts: list[Any] = list(self.experts)
        return [expert.down_proj for expert in experts]


class ExpertsDrafter(LightDrafter):
    """`num_layers` layers of `num_experts` MLPs, each `intermediate_size` wide; `active` is `SparseMLP`'s.

    At None an expert has a quarter of the target's width. `memory` is m. Raises UserError for senseless values.
    """

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        num_layers: int = 1,
        num_experts: int = 4,
        memory: float = 0.95,
        route: str = "soft",
        intermediate_size: int | None = None,
        active: int = 0,
    ) -> None:
        if num_experts < 1:
            raise UserError(f"drafter.model.num_experts is {num_experts}: it must be at least 1.")
        if not 0 <= memory < 1:
            raise UserError(f"drafter.model.memory is {memory}: it must be at least 0 and below 1.")
        if route not in ROUTES:
            raise UserError(f"drafter.model.route is {route!r}: choose {' or '.join(ROUTES)}.")
        config = layer_config(target, num_layers, intermediate_size=intermediate_size)
        if intermediate_size is None:
            config.intermediate_size = max(1, config.intermediate_size // 4)
        layers = [ExpertsLayer(config, num_experts, memory, route, active) for _ in range(num_layers)]
        super().__init__(target, vocab, layers)

    @torch.no_grad()
    def usage(self, features: TargetFeatures, counted: Tensor) -> dict[str, Tensor]:
        """How many of the `counted` rows (B, S) each expert has, as `share_of_expert_0`, ..

        Those of layers behind the first are `share_of_expert_0_of_layer_1`, .., and so on.
        """
        assert features.hidden is not None
        read, found = self.window(features.next_token_ids, features.hidden), {}
        x = self.fc(read.to(self.fc.weight.dtype))
        for number, (layer, state) in enumerate(zip(self._layers, self._nothing(len(x)), strict=True)):
            gates = layer.gates(layer.sums(layer.norm(x), state))  # (B, S, X)
            place = f"_of_layer_{number}" if number else ""
            for index, taken in enumerate(layer.shares(gates)[counted].sum(0)):
                found[f"share_of_expert_{index}{place}"] = taken
            if number + 1 < len(self._layers):
                x, _ = layer.scan(x, state, each=False)
        return found
