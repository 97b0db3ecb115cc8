"""EAGLE-1: a regressor of the target's next hidden state (2401.15077).

Row t reads the state f_t and the embedding of the token x_{t+1} that followed it, and estimates f_{t+1}; the target's
own frozen head turns that estimate into a law of x_{t+2}. Drafting feeds the estimate back in place of the state.
Embedding and head are the target's. The fusing projection has no bias, the first layer no input norm, and nothing is
normalised at the end: so the same weights load in vLLM, SGLang and SafeAILab's code.

B batch, S rows, R committed rows, N drafted tokens, D hidden size, V target and Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from models import tree
from models.cache import KVCache
from models.chain_drafting import draft_chain
from models.layers import DecoderStack, UnrolledMemory, layer_config, unrolled_mask
from models.sampling import RequestRandom, SamplingParams
from models.target import Target
from models.tree import DynamicTree, StaticTree
from models.tree_drafting import Expander, TreeRows, grow
from models.types import Draft, TargetFeatures
from models.vocab import DraftVocab


class EagleState:
    """Keys of the committed rows; what was drafted behind them is dropped when the next rows come."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.committed = cache.lengths  # (B,) rows that are confirmed

    def select(self, rows: list[int]) -> None:
        """Keep the requests `rows`, in that order."""
        self.cache.select(rows)
        self.committed = self.committed[rows]


class EagleDrafter(nn.Module):
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
        intermediate_size: int | None = None,
        num_attention_heads: int | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.config = layer_config(
            target,
            num_layers,
            intermediate_size=intermediate_size,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
        )
        self.capture_layers = (target.num_layers,)
        self.vocab = vocab
        size = target.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.stack = DecoderStack(self.config, first_input_norm=False)
        self.head = target.head.rows(vocab.token_ids)  # the target's own
        self._embedding = (target.embedding,)  # in a tuple, so that it is neither trained nor saved with the drafter
        # Float32 at least, whatever the target's dtype: small steps of training would be rounded away.
        self.to(device=target.device, dtype=torch.promote_types(target.dtype, torch.float32))

    def start_linear(self, weight: Tensor) -> None:
        """Begin as the linear map `weight` (D, 2·D) of [emb; f], with layers that add nothing yet."""
        with torch.no_grad():
            self.fc.weight.copy_(weight)
            for layer in self.stack.layers:
                layer.self_attn.o_proj.weight.zero_()  # type: ignore[union-attr, operator]
                layer.mlp.down_proj.weight.zero_()  # type: ignore[union-attr, operator]

    def fuse(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Combine tokens (B, S) with the states before them (B, S, D): (B, S, D)."""
        fused = torch.cat([self._embedding[0](token_ids), hidden], dim=-1)
        return self.fc(fused.to(self.fc.weight.dtype))

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Draft logits (..., Vd) of estimated states (..., D), by the target's head."""
        return self.head(hidden.to(self.head.weight.dtype))

    def logit_parameters(self, step: int = 0) -> list[nn.Parameter]:
        """None: the head is the target's, and frozen."""
        return []

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        """Yield the estimates (B, S, D) of step 0, 1, ..: row t of step s estimates f_{t+1+s}.

        Step s reads the estimate of step s − 1 in place of the state, and the token one further on. The last s rows
        of step s have no such token, and repeat the last one.
        """
        assert features.hidden is not None
        memory = UnrolledMemory()
        hidden, token_ids = features.hidden, features.next_token_ids
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
        for step in range(num_steps):
            mask = unrolled_mask(token_ids.shape[1], step, token_ids.device)
            hidden = self.stack(self.fuse(token_ids, hidden), positions + step, memory, mask)
            yield hidden
            token_ids = torch.cat([token_ids[:, 1:], token_ids[:, -1:]], dim=1)

    def new_state(self, batch_size: int, max_len: int) -> EagleState:
        """Memory for requests of at most `max_len` rows, those of a draft included."""
        return EagleState(KVCache(len(self.stack.layers), batch_size, max_len, self.fc.weight.device))

    def propose(
        self,
        state: EagleState,
        committed: TargetFeatures,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams,
        random: RequestRandom,
    ) -> Draft:
        """Take in the confirmed rows (B, R), then draft a chain of N tokens, one pass of the layers for each."""
        expander = self.expander(state, committed)
        return draft_chain(expander, self.vocab, num_speculative_tokens, sampling=sampling, random=random)

    def propose_tree(
        self,
        state: EagleState,
        committed: TargetFeatures,
        *,
        shape: StaticTree | DynamicTree,
        children: str,
        sampling: SamplingParams,
        random: RequestRandom,
    ) -> Draft:
        """Take in the confirmed rows (B, R), then draft a tree, one pass of the layers for each of its levels."""
        expander = self.expander(state, committed)
        return grow(expander, shape, self.vocab, children=children, sampling=sampling, random=random)

    def expander(self, state: EagleState, committed: TargetFeatures) -> Expander:
        """Take in the confirmed rows (B, R); what follows them is then told node by node."""
        return _EagleExpander(self, state.cache, self._ingest(state, committed))

    def _ingest(self, state: EagleState, committed: TargetFeatures) -> Tensor:
        """Read the confirmed rows: the estimate (B, 1, D) of the state that follows the last one."""
        assert committed.hidden is not None
        cache = state.cache
        cache.truncate(state.committed)
        num_rows = committed.token_ids.shape[1]
        cache.begin(num_rows)
        lengths = cache.lengths.to(committed.hidden.device)
        positions = lengths[:, None] + torch.arange(num_rows, device=lengths.device)
        alone = num_rows == 1 and cache.uniform
        mask = None if alone else tree.attention_mask(lengths, num_rows, longest=cache.width - num_rows)
        hidden = self.stack(self.fuse(committed.next_token_ids, committed.hidden), positions, cache, mask)
        cache.commit(committed.lengths)
        state.committed = cache.lengths
        last = (committed.lengths.to(hidden.device) - 1).clamp(min=0)
        return hidden[torch.arange(len(last), device=hidden.device), last][:, None]


class _EagleExpander:
    """Estimates behind the nodes of a tree, each read behind its parent's."""

    room = None

    def __init__(self, drafter: EagleDrafter, cache: KVCache, estimate: Tensor) -> None:
        self._drafter, self._cache, self._estimates = drafter, cache, estimate  # (B, rows of the level above, D)
        self._rows = TreeRows(cache)

    def root(self) -> Tensor:
        return self._drafter.logits(self._estimates)

    def below(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        positions, mask = self._rows.begin(parents)
        above = self._estimates.gather(1, parents[..., None].expand(-1, -1, self._estimates.shape[-1]))
        self._estimates = self._drafter.stack(self._drafter.fuse(token_ids, above), positions, self._cache, mask)
        self._rows.end(token_ids.shape[1])
        return self._drafter.logits(self._estimates)
