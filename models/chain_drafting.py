"""How a chain of drafted tokens is drawn: the same for every drafter that can say what follows token by token.

B batch, N drafted tokens, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models import tree
from models.sampling import RequestRandom, SamplingParams, draw, probabilities
from models.tree_drafting import Expander
from models.types import Draft
from models.vocab import DraftVocab


def draft_chain(
    expander: Expander, vocab: DraftVocab, num_tokens: int, *, sampling: SamplingParams, random: RequestRandom
) -> Draft:
    """Draw N tokens one behind the other, each from the law that the drafter tells behind those before it.

    A request that the expander has no room for gets a shorter chain, or none.
    """
    lengths = None if expander.room is None else expander.room.clamp(0, num_tokens)
    if lengths is not None and bool((lengths == num_tokens).all()):
        lengths = None
    uniforms = None if sampling.greedy else random.uniform(num_tokens)
    if lengths is not None and not lengths.any():
        nothing = torch.zeros(len(lengths), num_tokens, dtype=torch.int64, device=random.device)
        return Draft(nothing, tree.chain_parents(len(lengths), num_tokens, nothing.device), None, lengths)
    logits = expander.root()
    parents = tree.chain_parents(len(logits), num_tokens, logits.device)
    tokens: list[Tensor] = []
    laws: list[Tensor] = []
    only = torch.zeros_like(parents[:, :1])  # each token's parent is the only one of the call before
    for depth in range(num_tokens):
        if depth > 0:
            logits = expander.below(tokens[-1][:, None], only)
        if uniforms is None:
            tokens.append(vocab.to_target(logits[:, 0].argmax(-1)))
        else:
            law = probabilities(logits[:, 0], sampling)
            tokens.append(vocab.to_target(draw(law, uniforms[:, depth])))
            laws.append(vocab.widen(law))
    return Draft(torch.stack(tokens, dim=1), parents, torch.stack(laws, dim=1) if laws else None, lengths)
