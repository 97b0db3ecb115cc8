"""Why two engines disagree about the same drafter, and whether two samples of accepted counts have one law.

P prompts or samples, K drafted positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.rounds import Compared, Counts

_MATERIAL = 0.02  # a difference of conditional acceptance that a few near-ties of the drafter do not make
_RARE = 0.1  # of all rounds that part: fewer are near-ties
_SHUFFLES = 20_000
SILENT = "it drafted nothing: the drafter is not in use there"


def conditional(accepted: Sequence[int], drafts: int) -> list[float]:
    """Accepted at each position over accepted at the one before it; nan where nothing came so far."""
    reached = [drafts, *accepted]
    return [a / r if r else float("nan") for r, a in zip(reached, accepted, strict=False)]


def diagnose(compared: Compared) -> str | None:
    """The likely cause of a difference, by the first position where theirs accepts less (or more); None for none.

    Drafts are made behind other texts as soon as one differs, so that all positions' counts move a little. So only
    rounds that begin behind the same text are looked at, where both engines tell of their rounds. The first position
    at which those part tells the cause; a few may part earlier, at near-ties of the drafter.
    """
    if compared.equal:
        return None
    if compared.parted:
        first = compared.parted[0]
        return (
            f"answers part (prompt {first.prompt}, token {first.position}, logits {first.gap:.2g} apart): the target "
            "itself differs there: its weights, dtype, RoPE or stop tokens"
        )
    if not compared.unequal:
        return (
            "every prompt's answers part at a near-tie, so that nothing could be compared: take other prompts (another "
            "seed, a larger num_prompts, or prompts=FILE)"
        )
    ours, theirs = compared.totals()
    if theirs["drafts"] == 0:
        return SILENT
    place, change = _by_rounds(compared) or _by_totals(ours, theirs)
    if place is None:
        prompts = ", ".join(map(str, compared.unequal[:5]))
        return (
            f"no position's acceptance differs by more than {_MATERIAL:.0%}: near-ties of the drafter, or another rule "
            f"of counting (prompts {prompts}). To tell them apart, take more and longer answers (num_prompts, "
            "max_new_tokens): near-ties stay as rare, and a fault of the files shows at its position"
        )
    if place == 0:
        cause = "layer, norm, RoPE, mask, captured layers or vocabulary map"
    else:
        cause = "what is fed back from token to token (state or position), or that position's own head"
    return f"position {place} accepts {'less' if change < 0 else 'more'} ({change:+.1%}): {cause}"


def _by_totals(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[int | None, float]:
    """The first position at which the share of accepted drafts moves, and by how much."""
    before, after = (conditional(side["accepted_per_position"], side["drafts"]) for side in (ours, theirs))
    moved = [
        (place, a - b)
        for place, (a, b) in enumerate(zip(after, before, strict=True))
        if not abs(a - b) <= _MATERIAL  # nan counts: nothing got so far
    ]
    return moved[0] if moved else (None, 0.0)


def _by_rounds(compared: Compared) -> tuple[int | None, float] | None:
    """The first position at which rounds behind the same text part, and how the share of accepted drafts moves there.

    None where the rounds are not told, no position where hardly any part.
    """
    pairs = [pair for place in compared.unequal for pair in _shared(compared.ours[place], compared.theirs[place])]
    parted = Counter(min(pair) for pair in pairs if pair[0] != pair[1])
    if not parted:
        return None
    often = max(_MATERIAL * len(pairs), _RARE * parted.total())
    place = min((place for place, number in parted.items() if number >= often), default=None)
    if place is None:
        return None, 0.0
    reached = [pair for pair in pairs if min(pair) >= place]
    more = sum((b > place) - (a > place) for a, b in reached)
    return place, more / len(reached)


def _shared(ours: Counts, theirs: Counts) -> list[tuple[int, int]]:
    """Accepted tokens of both in each round that begins at the same token of one answer; none if rounds are missing."""
    starts: list[dict[int, int]] = []
    for side in (ours, theirs):
        begin, found = 1, dict[int, int]()
        for accepted in side.rounds:
            found[begin] = accepted
            begin += accepted + 1
        if begin < len(side.token_ids):
            return []
        starts.append(found)
    return [(accepted, starts[1][begin]) for begin, accepted in starts[0].items() if begin in starts[1]]


def two_samples(ours: Sequence[Counts], theirs: Sequence[Counts], seed: int = 0) -> tuple[float, float]:
    """χ² of the two pooled histograms of accepted counts, and the p-value of such a χ² under one law.

    Entries i of both are answers to the same prompt. Rounds of one answer are not independent, so the p-value is not
    that of the χ² distribution but of a permutation test: under one law each pair may be swapped, and the p-value is
    the share of random swaps with a χ² at least as large. Raises ValueError for sequences of different lengths.
    """
    a, b = (np.array([c.histogram for c in side], dtype=np.float64) for side in (ours, theirs))
    if a.shape != b.shape:
        raise ValueError(f"{len(ours)} and {len(theirs)} answers are no pairs")
    both, difference = (a + b).sum(0), a - b  # (K + 1,), (P, K + 1)
    found = float(_chi_square(difference.sum(0)[None], both, a.sum() + b.sum())[0])
    rng = np.random.default_rng(seed)
    signs = rng.choice(np.array([-1.0, 1.0]), size=(_SHUFFLES, len(a)))
    swapped = _chi_square(signs @ difference, both, a.sum() + b.sum())
    return found, float((1 + (swapped >= found - 1e-9).sum()) / (1 + _SHUFFLES))


def _chi_square(difference: NDArray[np.float64], both: NDArray[np.float64], whole: float) -> NDArray[np.float64]:
    """Homogeneity of two histograms whose sum is `both` and whose difference is `difference` (·, K + 1)."""
    share = (both + difference) / 2  # (·, K + 1) the first histogram
    size = share.sum(-1, keepdims=True)
    expected = both * size / whole
    other = both - share
    expected_other = both - expected
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = (share - expected) ** 2 / expected + (other - expected_other) ** 2 / expected_other
    return np.nansum(terms, axis=-1)
