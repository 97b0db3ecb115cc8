"""Which verification a draft gets: greedy or sampled, chain or tree, lossless or typical."""

from __future__ import annotations

from torch import Tensor

from engine.verify import Verdict, verify_block, verify_chain, verify_greedy
from engine.verify_tree import verify_tree, verify_tree_greedy, verify_typical
from models.sampling import SamplingParams, probabilities
from models.types import Draft


def verify(
    logits: Tensor, draft: Draft, limits: Tensor, sampling: SamplingParams, verification: str, uniforms: Tensor | None
) -> Verdict:
    """Check a draft of N tokens by the target's logits (B, 1 + N, V), at most `limits` (B,) of them.

    `verification` is one of `engine.settings.VERIFICATIONS`; at temperature 0 all are the same. `uniforms` (B, 1 + N)
    in [0, 1) are for sampling.
    """
    tokens, parents = draft.token_ids, draft.parents if draft.branches else None
    if uniforms is None:
        choices = logits.argmax(-1)
        if parents is None:
            return verify_greedy(choices, tokens, limits)
        return verify_tree_greedy(choices, tokens, parents, limits)
    target_probs = probabilities(logits, sampling)
    if verification == "typical":
        return verify_typical(target_probs, tokens, parents, limits, uniforms)
    if parents is not None:
        return verify_tree(target_probs, tokens, draft.probs, parents, limits, uniforms)
    chain = verify_block if verification == "block" else verify_chain
    return chain(target_probs, tokens, draft.probs, limits, uniforms)
