"""Is a drafter ready? Its first law beside the target's on the target's own text, before any decoding.

All at temperature 1 over supervised positions, with the draft's law and the target's both over the draft vocabulary.
S tokens of a text, V target and Vd draft vocabulary.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eval.drafted_rows import Rows, Text
from models.target import Target

_FREQUENT = 100  # tokens


@dataclass(frozen=True, slots=True)
class Readiness:
    """Means over the tokens of the target's answers."""

    top1_agreement: float  # the first choices are one, where the target's is among the hundred most frequent tokens
    top10_coverage: float  # the target's first choice is among the draft's ten likeliest
    entropy_ratio: float  # entropy of the draft's law over that of the target's
    kl: float  # KL(target ‖ draft), nats
    positions: int
    ceiling: float  # the target's mass inside the draft vocabulary: no α can be above it
    ceiling_block_efficiency: float  # τ with q = p there, of chains of num_speculative_tokens
    num_speculative_tokens: int


@torch.inference_mode()
def readiness(
    target: Target, drafter: Any, texts: list[tuple[list[int], int]], num_speculative_tokens: int
) -> Readiness | None:
    """Compare first laws on `texts`, each token ids and the length of the prompt in front of the answer.

    None for a drafter that says no laws in training (look-up), or texts too short to have a position.
    """
    if not hasattr(drafter, "unroll"):
        return None
    made = Rows(target, drafter, [Text(*text) for text in texts], num_steps=1)
    said = Counter(token for ids, start in texts for token in ids[start:])
    frequent = drafter.vocab.to_draft(torch.tensor([token for token, _ in said.most_common(_FREQUENT)]))
    proposable = drafter.vocab.to_target(torch.arange(drafter.vocab.size, device=target.device))
    rows: list[Tensor] = []
    masses: list[Tensor] = []
    for text in made.texts:
        p_logits, q_logits = made.laws(text)
        log_p, log_q = p_logits[:, proposable].log_softmax(-1), q_logits.log_softmax(-1)
        masses.append(p_logits.double().softmax(-1)[:, proposable].sum(-1))
        rows.append(_compared(log_p, log_q, frequent.to(log_p.device)))
    total = torch.cat(rows).double()
    if not len(total):
        return None
    agree, counted, covered, p_entropy, q_entropy, kl = total.sum(0).tolist()
    return Readiness(
        agree / counted if counted else float("nan"),
        covered / len(total),
        q_entropy / p_entropy,
        kl / len(total),
        len(total),
        float(torch.cat(masses).mean()),
        ceiling_block_efficiency(masses, num_speculative_tokens),
        num_speculative_tokens,
    )


def ceiling_block_efficiency(masses: list[Tensor], num_speculative_tokens: int) -> float:
    """τ where q is p, renormalised over a draft vocabulary that holds `masses` (R,) of p at the tokens of each text.

    Such a token is accepted with the mass m: τ = 1 + Σ_i E[m_t ··· m_{t+i−1}], the mean over all i tokens in a row. No
    more are counted than a text has.
    """
    found = 1.0
    for length in range(1, num_speculative_tokens + 1):
        runs = torch.cat([m.unfold(0, length, 1).prod(-1) for m in masses if len(m) >= length] or [torch.zeros(0)])
        if len(runs):
            found += float(runs.mean())
    return found


def _compared(log_p: Tensor, log_q: Tensor, frequent: Tensor) -> Tensor:
    """Columns per position: agreement on a frequent token, whether it is one, coverage, two entropies, KL."""
    choice = log_p.argmax(-1)
    is_frequent = torch.isin(choice, frequent)
    agree = is_frequent & (choice == log_q.argmax(-1))
    covered = (log_q.topk(min(10, log_q.shape[-1])).indices == choice[:, None]).any(-1)
    p, q = log_p.exp(), log_q.exp()
    columns = [agree, is_frequent, covered, -(p * log_p).sum(-1), -(q * log_q).sum(-1), (p * (log_p - log_q)).sum(-1)]
    return torch.stack([column.float() for column in columns], dim=1)
