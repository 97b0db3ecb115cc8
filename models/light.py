"""What light drafters share: EAGLE-1's way of drafting, over layers that remember a state of fixed size.

Row t reads the state f_t and the embedding of x_{t+1}, and estimates f_{t+1}, of which the target's own head makes the
law of x_{t+2} (2401.15077). A layer needs no keys of earlier rows: it goes over rows in order, from the state that it
had before them, and tells the state behind each. So a draft costs the same whatever the text's length.

B batch, S rows, R committed rows, Q nodes, D hidden size, F intermediate size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from models.errors import UserError
from models.law_drafting import DraftsTrees
from models.layers import MLP, RMSNorm, moved_up
from models.recompute import Recomputing
from models.target import Target
from models.tree_drafting import Expander
from models.types import TargetFeatures
from models.vocab import DraftVocab

_PART = 64  # committed rows that are gone over at once: what is remembered behind each of them is large


class SparseMLP(MLP):
    """SwiGLU of which only the `active` largest inner numbers by their size are kept; 0 keeps all."""

    def __init__(self, config: LlamaConfig, active: int = 0) -> None:
        super().__init__(config)
        if not 0 <= active <= config.intermediate_size:
            raise UserError(
                f"drafter.model.active is {active}: it must be from 0 (all) to intermediate_size, "
                f"{config.intermediate_size}."
            )
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        if self.active:
            least = inner.abs().topk(self.active, dim=-1).values[..., -1:]
            inner = inner.masked_fill(inner.abs() < least, 0.0)
        return self.down_proj(inner)


class LightLayer(nn.Module):
    """Goes over rows in order. `state_shape` is that of what it remembers, zeros before the first row."""

    state_shape: tuple[int, ...]

    def scan(self, x: Tensor, state: Tensor, each: bool = True) -> tuple[Tensor, Tensor]:
        """Rows (B, S, D) behind `state` (B, ...) → rows (B, S, D), and the state behind each (B, S, ...).

        Without `each`, only that behind the last row: (B, 1, ...).
        """
        raise NotImplementedError

    def outputs(self) -> list[nn.Linear]:
        """The projections whose results are added to the rows."""
        raise NotImplementedError


class MixingLayer(LightLayer):
    """x + mix(norm(x)), then + mlp(norm(·)); a subclass says in `mix` how rows are mixed."""

    def __init__(self, config: LlamaConfig, active: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SparseMLP(config, active)

    def mix(self, x: Tensor, state: Tensor, each: bool) -> tuple[Tensor, Tensor]:
        """As `scan`, of what is added to the rows."""
        raise NotImplementedError

    def scan(self, x: Tensor, state: Tensor, each: bool = True) -> tuple[Tensor, Tensor]:
        mixed, states = self.mix(self.input_norm(x), state, each)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), states


class LightState:
    """What every layer remembers behind the committed rows: each (B, ...)."""

    def __init__(self, layers: list[Tensor]) -> None:
        self.layers = layers

    def select(self, rows: list[int]) -> None:
        """Keep the requests `rows`, in that order."""
        self.layers = [state[rows] for state in self.layers]


class LightDrafter(DraftsTrees, Recomputing):
    """`layers` over fc([emb(x_{t+1}); f_t]); embedding and head are the target's, and frozen."""

    num_future = 1
    feeds_back = True

    def __init__(self, target: Target, vocab: DraftVocab, layers: Sequence[LightLayer]) -> None:
        super().__init__()
        self.capture_layers = (target.num_layers,)
        self.vocab, self.size = vocab, target.hidden_size
        self.fc = nn.Linear(2 * self.size, self.size, bias=False)
        self.layers = nn.ModuleList(layers)
        self.head = target.head.rows(vocab.token_ids)
        self._embedding = (target.embedding,)  # in a tuple, so that it is neither trained nor saved with the drafter
        # Float32 at least, whatever the target's dtype: small steps of training would be rounded away.
        self.to(device=target.device, dtype=torch.promote_types(target.dtype, torch.float32))

    @torch.no_grad()
    def start_linear(self, weight: Tensor, further: list[Tensor]) -> None:
        """Begin as the linear map `weight` (D, 2·D) of what is read, with layers that add nothing yet."""
        self.fc.weight.copy_(weight)
        for layer in self._layers:
            for linear in layer.outputs():
                linear.weight.zero_()

    @property
    def _layers(self) -> list[Any]:
        return list(self.layers)

    def window(self, token_ids: Tensor, past: Tensor) -> Tensor:
        """What fc reads of tokens (B, S) and the states before them (B, S, D): (B, S, 2·D)."""
        return torch.cat([self._embedding[0](token_ids), past], dim=-1)

    def before(self, features: TargetFeatures) -> tuple[Tensor, None]:
        """The state before each row's token: (B, S, D)."""
        assert features.hidden is not None
        return features.hidden, None

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Draft logits (..., Vd) of estimated states (..., D), by the target's head."""
        return self.head(hidden.to(self.head.weight.dtype))

    def logit_parameters(self, step: int = 0) -> list[nn.Parameter]:
        """None: the head is the target's, and frozen."""
        return []

    def scan(
        self, token_ids: Tensor, past: Tensor, states: list[Tensor], each: bool = True
    ) -> tuple[Tensor, list[Tensor]]:
        """Estimates (B, S, D) of rows in order, and what every layer remembers behind each: (B, S, ...).

        Without `each`, only behind the last row: (B, 1, ...).
        """
        x, found = self.fc(self.window(token_ids, past).to(self.fc.weight.dtype)), []
        for layer, state in zip(self._layers, states, strict=True):
            x, after = self.recomputed(layer.scan, x, state, each)
            found.append(after)
        return x, found

    def step(self, token_ids: Tensor, past: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """As `scan`, of rows (B, Q) none of which follows another: each goes on from its own states (B, Q, ...)."""
        shape = token_ids.shape
        x, found = self.scan(
            token_ids.reshape(-1, 1), past.reshape(-1, 1, self.size), [s.flatten(0, 1) for s in states]
        )
        return x.view(*shape, -1), [state[:, 0].unflatten(0, shape) for state in found]

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        """Yield the estimates (B, S, D) of step 0, 1, ..: row t of step s is about x_{t+2+s}.

        Step s reads the estimate of step s − 1 in place of the state, and the token one further on. The last s rows of
        step s have no such token, and repeat the last one.
        """
        assert features.hidden is not None
        token_ids = features.next_token_ids
        hidden, states = self.scan(token_ids, features.hidden, self._nothing(len(token_ids)), each=num_steps > 1)
        yield hidden
        for _ in range(1, num_steps):
            token_ids = moved_up(token_ids)
            hidden, states = self.step(token_ids, hidden, states)
            yield hidden

    def _nothing(self, batch_size: int) -> list[Tensor]:
        weight = self.fc.weight.detach()
        return [weight.new_zeros(batch_size, *layer.state_shape) for layer in self._layers]

    def new_state(self, batch_size: int, max_len: int) -> LightState:
        """What is remembered of nothing; its size does not depend on `max_len`."""
        return LightState(self._nothing(batch_size))

    def expander(self, state: LightState, committed: TargetFeatures) -> Expander:
        """Take in the confirmed rows (B, R); what follows them is then told node by node."""
        assert committed.hidden is not None
        last = (committed.lengths.to(committed.hidden.device) - 1).clamp(min=0)
        behind, carried = None, state.layers
        for start in range(0, committed.hidden.shape[1], _PART):
            rows = slice(start, start + _PART)
            found = self.scan(committed.next_token_ids[:, rows], committed.hidden[:, rows], carried)
            carried = [after[:, -1] for after in found[1]]
            behind = _at(last - start, [found[0], *found[1]], behind)
        assert behind is not None
        hidden, *state.layers = behind
        return _LightExpander(self, hidden[:, None], [after[:, None] for after in state.layers])


def _at(index: Tensor, found: list[Tensor], before: list[Tensor] | None) -> list[Tensor]:
    """Each of `found` (B, C, ...) at its request's index (B,); what was found before where that is not among the C."""
    row, within = torch.arange(len(index), device=index.device), index.clamp(0, found[0].shape[1] - 1)
    here = [part[row, within] for part in found]
    if before is None:
        return here
    new = index >= 0
    return [torch.where(new.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(here, before, strict=True)]


class _LightExpander:
    """Estimates behind the nodes of a tree, each told behind its parent's."""

    room = None

    def __init__(self, drafter: LightDrafter, hidden: Tensor, states: list[Tensor]) -> None:
        self._drafter, self._hidden, self._states = drafter, hidden, states  # (B, Q, D), each (B, Q, ...)

    def root(self) -> Tensor:
        return self._drafter.logits(self._hidden)

    def below(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        row = torch.arange(len(parents), device=parents.device)[:, None]
        past, states = self._hidden[row, parents], [state[row, parents] for state in self._states]
        self._hidden, self._states = self._drafter.step(token_ids, past, states)
        return self._drafter.logits(self._hidden)
