"""Medusa: a head for each of the next tokens but one, all on the state that the target's head reads (2401.10774).

The target's own head tells x_{t+1} from the state h_t, and when drafting begins that token is known. Head k = 1 .. K
tells x_{t+1+k} from the same state: it is step k − 1 of `unroll`. A head is `num_layers` residual blocks
h + SiLU(W h + b), each with weights of its own, and an unembedding. W and b begin at zero and the unembedding as a copy
of the target's, so every head begins as the target's own. No head knows what the others have drafted: what is said at
one depth of a tree is the same behind all its nodes.

Tensors have vLLM's names, `blocks.{i}.layers.{j}.weight` and `.bias` and `lm_heads.{i}.weight`.

B batch, S rows, R committed rows, N drafted tokens, Q nodes of a tree's level, K heads, D hidden size, V target and Vd
draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from models.errors import UserError
from models.law_drafting import DraftsTrees
from models.target import Target
from models.tree_drafting import Expander
from models.types import TargetFeatures
from models.vocab import DraftVocab

UNEMBEDDINGS = ("full", "shared")


class MedusaState:
    """Nothing: all that a draft needs is the state of the last committed row, which every call brings along."""

    def select(self, rows: list[int]) -> None:
        """Keep the requests `rows`, in that order."""


class MedusaBlock(nn.Module):
    """h ↦ h + SiLU(W h + b), `num_layers` times, each with weights of its own; at first it changes nothing."""

    def __init__(self, size: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(num_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + nn.functional.silu(layer(hidden))
        return hidden


class MedusaDrafter(DraftsTrees, nn.Module):
    """K = `num_heads` heads of `num_layers` blocks, which draft up to K tokens deep; longer chains end there.

    `unembedding` is "full", a copy of the target's for each head, which is trained, or "shared", the target's own for
    all of them, which is not. Both have the rows of `vocab` only. Raises UserError for any other, and for counts below
    1.
    """

    packs = True

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        num_heads: int = 5,
        num_layers: int = 1,
        unembedding: str = "full",
    ) -> None:
        super().__init__()
        for name, count in {"num_heads": num_heads, "num_layers": num_layers}.items():
            if count < 1:
                raise UserError(f"drafter.model.{name} is {count}: it must be at least 1.")
        if unembedding not in UNEMBEDDINGS:
            raise UserError(f"drafter.model.unembedding is {unembedding!r}: choose {' or '.join(UNEMBEDDINGS)}.")
        self.capture_layers = (target.num_layers,)
        self.vocab, self.max_depth = vocab, num_heads
        self.blocks = nn.ModuleList(MedusaBlock(target.hidden_size, num_layers) for _ in range(num_heads))
        if unembedding == "full":
            token_ids = torch.arange(vocab.vocab_size) if vocab.token_ids is None else vocab.token_ids
            self._heads = tuple(target.head.rows(token_ids) for _ in range(num_heads))
            self.lm_heads = nn.ModuleList(head.linear for head in self._heads)
            self.requires_grad_(True)
        else:
            self._heads = (target.head.rows(vocab.token_ids),) * num_heads  # no module: neither trained nor saved
        # Float32 at least, whatever the target's dtype: small steps of training would be rounded away.
        self.to(device=target.device, dtype=torch.promote_types(target.dtype, torch.float32))

    def head_states(self, hidden: Tensor, step: int) -> Tensor:
        """What head `step` + 1 makes of states (..., D): (..., D), for `logits` of that step."""
        states: Tensor = self.blocks[step](hidden.to(next(self.blocks.parameters()).dtype))
        return states

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Draft logits (..., Vd) of what head `step` + 1 made of a state (..., D), by its unembedding."""
        head = self._heads[step]
        return head(hidden.to(head.weight.dtype))

    def logit_parameters(self, step: int = 0) -> list[nn.Parameter]:
        """The unembedding of head `step` + 1 where it is its own; else none."""
        return [p for p in self._heads[step].linear.parameters() if p.requires_grad]

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        """Yield what heads 1, 2, .. make of all states: (B, S, D) of step 0, 1, ..; row t of step s is about x_{t+2+s}.

        Raises UserError for more steps than there are heads.
        """
        assert features.hidden is not None
        if num_steps > self.max_depth:
            raise UserError(f"{num_steps} steps are asked of {self.max_depth} Medusa heads.")
        for step in range(num_steps):
            yield self.head_states(features.hidden, step)

    def new_state(self, batch_size: int, max_len: int) -> MedusaState:
        """Memory for requests of at most `max_len` rows: there is nothing to remember."""
        return MedusaState()

    def expander(self, state: MedusaState, committed: TargetFeatures) -> Expander:
        """What follows the confirmed rows (B, R), told node by node."""
        assert committed.hidden is not None
        last = (committed.lengths.to(committed.hidden.device) - 1).clamp(min=0)
        return _MedusaExpander(self, committed.hidden[torch.arange(len(last), device=last.device), last][:, None])


class _MedusaExpander:
    """One head after the other on the state (B, 1, D) of the last committed row."""

    def __init__(self, drafter: MedusaDrafter, hidden: Tensor) -> None:
        self.room = torch.full((len(hidden),), drafter.max_depth)
        self._drafter, self._hidden, self._depth = drafter, hidden, 0

    def root(self) -> Tensor:
        return self._next()

    def below(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        return self._next().expand(-1, token_ids.shape[1], -1)

    def _next(self) -> Tensor:
        drafter, depth = self._drafter, self._depth
        self._depth += 1
        return drafter.logits(drafter.head_states(self._hidden, depth), depth)
