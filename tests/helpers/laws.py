"""Laws written out in full: slow oracles for sampling, and the exact law of what a verifier emits.

A law with memory is a list `laws` in which laws[n] has shape (V,) * n + (V,): laws[n][x_1, .., x_n] is the law of the
token behind the prefix x_1 .. x_n. B drafts, N drafted tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor

from engine.verify import acceptance_probabilities, extra_law

Laws = list[Tensor]
Accept = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Extra = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor], Tensor]


def adjusted_by_loop(
    logits: Sequence[float], penalty: float = 1.0, bias: Sequence[tuple[int, float]] = (), seen: Collection[int] = ()
) -> list[float]:
    """One row of logits: first the bias is added, then tokens seen are penalised."""
    biases = dict(bias)
    adjusted = [x + biases.get(i, 0.0) for i, x in enumerate(logits)]
    return [(x * penalty if x < 0 else x / penalty) if i in seen else x for i, x in enumerate(adjusted)]


def law_by_loop(
    logits: Sequence[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """The law of one row of logits: temperature, then top-k (ties kept), top-p (ties by lower id), and min-p."""
    size = len(logits)
    if temperature == 0:
        best = max(range(size), key=lambda i: (logits[i], -i))
        return [float(i == best) for i in range(size)]
    scaled = [x / temperature for x in logits]
    if top_k > 0:
        last_kept = sorted(scaled, reverse=True)[min(top_k, size) - 1]
        scaled = [x if x >= last_kept else -math.inf for x in scaled]
    largest = max(scaled)
    weights = [math.exp(x - largest) for x in scaled]
    law = [w / sum(weights) for w in weights]
    before, kept = 0.0, set()
    for i in sorted(range(size), key=lambda i: (-law[i], i)):
        if before < top_p or top_p == 1:
            kept.add(i)
        before += law[i]
    kept = {i for i in kept if law[i] >= min_p * max(law)}
    left = sum(law[i] for i in kept)
    return [law[i] / left if i in kept else 0.0 for i in range(size)]


def invert_by_loop(law: Sequence[float], uniform: float) -> int:
    """The first token whose cumulative sum exceeds `uniform` of the whole."""
    cumulative, sums = 0.0, []
    for mass in law:
        cumulative += mass
        sums.append(cumulative)
    return next(token for token, reached in enumerate(sums) if reached > uniform * cumulative)


def random_laws(vocab: int, length: int, generator: torch.Generator, *, zeros: float = 0.0, sharp: float = 1.5) -> Laws:
    """Laws for prefixes of 0 .. length − 1 tokens; a share `zeros` of the tokens is impossible (never all)."""
    laws = []
    for n in range(length):
        shape = (vocab,) * (n + 1)
        logits = sharp * torch.randn(shape, generator=generator, dtype=torch.float64)
        dropped = torch.rand(shape, generator=generator) < zeros
        dropped.scatter_(-1, logits.argmax(-1, keepdim=True), False)
        laws.append(logits.masked_fill(dropped, -math.inf).softmax(-1))
    return laws


def one_hot_laws(vocab: int, length: int, generator: torch.Generator) -> Laws:
    """Point masses on a random token behind every prefix."""
    tokens = [torch.randint(vocab, (vocab,) * n, generator=generator) for n in range(length)]
    return [torch.nn.functional.one_hot(t, vocab).double() for t in tokens]


def warped(laws: Laws, exponent: float) -> Laws:
    """The same laws at temperature 1 / exponent."""
    powers = [law**exponent for law in laws]
    return [p / p.sum(-1, keepdim=True) for p in powers]


def joint_law(laws: Laws) -> Tensor:
    """The law of the first len(laws) tokens together: (V,) * len(laws)."""
    joint = torch.ones((), dtype=laws[0].dtype)
    for law in laws:
        joint = joint[..., None] * law
    return joint


def behind(laws: Laws, tokens: Tensor) -> Tensor:
    """The laws met along given token sequences (B, N): (B, len(laws), V)."""
    rows = [laws[n].expand(len(tokens), -1) if n == 0 else laws[n][tuple(tokens[:, :n].T)] for n in range(len(laws))]
    return torch.stack(rows, dim=1)


def emitted_law(
    target: Laws,
    draft: Laws,
    *,
    reported: Laws | None = None,
    deterministic: bool = False,
    limits: Callable[[Tensor, Tensor], Tensor] | None = None,
    accept: Accept = acceptance_probabilities,
    extra: Extra = extra_law,
) -> Tensor:
    """The exact joint law of N + 1 tokens that come out when drafts from `draft` are checked against `target`.

    Every draft is enumerated with its probability. Where fewer than N + 1 tokens are emitted, the target continues.
    `reported` is what the verifier is told of the draft's laws (the truth unless given, nothing for `deterministic`);
    `limits` cuts drafts (B, N), given the probabilities (B, N) that their tokens were drawn with.
    """
    vocab, num_tokens = len(target[0]), len(draft)
    drafts = torch.tensor(list(itertools.product(range(vocab), repeat=num_tokens)))
    weight = joint_law(draft).flatten()
    drafts, reached = drafts[weight > 0], weight[weight > 0]
    p = behind(target, drafts)
    q = None if deterministic else behind(reported or draft, drafts)
    drawn_with = behind(draft, drafts).gather(2, drafts[..., None]).squeeze(2)
    full = torch.full((len(drafts),), num_tokens)
    cut = full if limits is None else limits(drafts, drawn_with)
    chances = accept(p, drafts, q)
    flow = torch.zeros(())
    for n in range(num_tokens + 1):
        chance = torch.where(cut == n, 0.0, chances[:, n]) if n < num_tokens else torch.zeros_like(reached)
        law = extra(p, drafts, q, torch.full_like(full, n), cut)
        ends = (reached * (1 - chance))[:, None] * law / law.sum(1, keepdim=True)
        ended = torch.zeros((vocab,) * (n + 1), dtype=ends.dtype)
        if n == 0:
            flow = ended + ends.sum(0)
        else:
            flow = flow[..., None] * target[n] + ended.index_put(tuple(drafts[:, :n].T), ends, accumulate=True)
        reached = reached * chance
    return flow


def chi_square_p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """How likely counts at least this odd are, were they drawn from `law`; 0.0 where the impossible was seen.

    Cells with an expected count below 5 are merged, rarest first.
    """
    counts, law = counts.flatten(), law.flatten()
    if counts[law <= 0].any():
        return 0.0
    expected = law * counts.sum()
    observed_cells, expected_cells = [0.0], [0.0]
    for cell in np.argsort(expected, kind="stable"):
        if expected_cells[-1] >= 5:
            observed_cells.append(0.0)
            expected_cells.append(0.0)
        observed_cells[-1] += counts[cell]
        expected_cells[-1] += expected[cell]
    observed, wanted = np.array(observed_cells), np.array(expected_cells)
    assert (wanted >= 5).all() and len(wanted) > 1
    return float(chi2.sf(((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1))
