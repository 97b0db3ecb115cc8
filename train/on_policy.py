"""Texts that the drafter itself continues, for the target to judge (2306.13649).

B batch, S rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from data.loader import Batch
from models.sampling import RequestRandom, SamplingParams
from models.types import TargetFeatures

_TOKENS_AT_ONCE = 16  # a draft holds the laws of all its tokens


@torch.no_grad()
def continue_answers(
    drafter: Any,
    batch: Batch,
    *,
    temperature: float,
    seed: int,
    stop_token_ids: frozenset[int],
    part: tuple[int, int] = (0, 1),
) -> Batch:
    """The batch's texts up to the first token that the target said, then the drafter's own, of the same length.

    A text ends earlier at a stop token, or where the drafter's context is full. The loss mask is on what the drafter
    said. `seed` decides what is drawn; there are no hidden states. For drafters that read tokens alone. `part` says
    which rows of a larger batch these are, as `StepBatches.part` has it.
    """
    device, sampling = batch.token_ids.device, SamplingParams(temperature)
    lengths, ids, masks = (t.tolist() for t in (batch.lengths, batch.token_ids, batch.loss_mask))
    known = [max(2, m.index(True) + 1) if any(m) else n for m, n in zip(masks, lengths, strict=True)]
    texts = [row[:n] for row, n in zip(ids, known, strict=True)]
    running = [row for row in range(len(texts)) if known[row] < lengths[row]]
    first, parts = part
    seeds = [seed * len(texts) * parts + first + row * parts for row in running]
    random = RequestRandom(seeds, _TOKENS_AT_ONCE, device=device)
    state = drafter.new_state(len(running), batch.token_ids.shape[1] + 2 * _TOKENS_AT_ONCE)
    new = [texts[row] for row in running]  # what the drafter has not read yet, and the token before that
    while running:
        draft = drafter.propose(
            state,
            _pairs(new, device),
            num_speculative_tokens=_TOKENS_AT_ONCE,
            sampling=sampling,
            random=random,
        )
        room = [_TOKENS_AT_ONCE] * len(running) if draft.lengths is None else draft.lengths.tolist()
        unfinished = []
        for place, (row, tokens) in enumerate(zip(running, draft.token_ids.tolist(), strict=True)):
            wanted = tokens[: min(room[place], lengths[row] - len(texts[row]))]
            end = next((i + 1 for i, token in enumerate(wanted) if token in stop_token_ids), None)
            new[place] = [texts[row][-1], *wanted[:end]]
            texts[row] += wanted[:end]
            if end is None and len(wanted) == _TOKENS_AT_ONCE and len(texts[row]) < lengths[row]:
                unfinished.append(place)
        running, new = ([part[place] for place in unfinished] for part in (running, new))
        if running:
            state.select(unfinished)
            random.select(unfinished)
    return _padded(texts, known, device)


def _pairs(texts: list[list[int]], device: torch.device) -> TargetFeatures:
    """Rows of a token and the one behind it, of texts of any lengths."""
    batch = _padded(texts, [0] * len(texts), torch.device("cpu"))
    ids = batch.token_ids.to(device)
    return TargetFeatures(ids[:, :-1], ids[:, 1:], None, batch.lengths - 1)


def _padded(texts: list[list[int]], known: list[int], device: torch.device) -> Batch:
    lengths = torch.tensor([len(text) for text in texts])
    token_ids = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int64)
    loss_mask = torch.zeros(token_ids.shape, dtype=torch.bool)
    for row, (text, first) in enumerate(zip(texts, known, strict=True)):
        token_ids[row, : len(text)] = torch.tensor(text)
        loss_mask[row, first : len(text)] = True
    return Batch(token_ids.to(device), loss_mask.to(device), lengths.to(device), None)


def mixed(ours: Batch, theirs: Batch, chosen: Tensor) -> Batch:
    """The rows `chosen` (B,) of `theirs` and the others of `ours`, padded to one length; both with states or none."""
    width = max(ours.token_ids.shape[1], theirs.token_ids.shape[1])

    def choose(a: Tensor, b: Tensor) -> Tensor:
        a, b = (_widened(t, width) for t in (a, b))
        return torch.where(chosen.view(-1, *[1] * (a.dim() - 1)), b, a)

    hidden = None
    if ours.hidden is not None and theirs.hidden is not None:
        hidden = choose(ours.hidden, theirs.hidden)
    return Batch(
        choose(ours.token_ids, theirs.token_ids),
        choose(ours.loss_mask, theirs.loss_mask),
        torch.where(chosen.to(ours.lengths.device), theirs.lengths.to(ours.lengths.device), ours.lengths),
        hidden,
    )


def _widened(rows: Tensor, width: int) -> Tensor:
    if rows.shape[1] == width:
        return rows
    wide = rows.new_zeros(rows.shape[0], width, *rows.shape[2:])
    wide[:, : rows.shape[1]] = rows
    return wide
