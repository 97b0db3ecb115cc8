"""Records as a batch that a drafter can learn from.

Row t of step s of `unroll` tells a law of x_{t+2+s}. A position at index i of the text that was tested d tokens deep in
its draft was told by step d in row i − 2 − d: nothing else of `unroll` is what the engine saw.

B records, S rows, P positions, K kept tokens of a law.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from data.loader import Batch
from train.adaptation.records import Record


class ReplayBatch(NamedTuple):
    """Texts as every training has them, and the positions in them that are learnt; laws as records have them."""

    texts: Batch
    rows: Tensor  # (P,) which text
    places: Tensor  # (P,) index of the position in it
    depths: Tensor  # (P,) drafted tokens before it
    labels: Tensor  # (P,) what the target said there
    law_ids: Tensor  # (P, K)
    law_probs: Tensor  # (P, K)


def replay_batch(records: Sequence[Record], positions: Sequence[Tensor], device: torch.device) -> ReplayBatch:
    """The chosen `positions` (of 0 .. P − 1) of each record; texts end at the last of them, padded on the right."""
    lengths = torch.tensor([int(r.place[p].max()) + 1 for r, p in zip(records, positions, strict=True)])
    token_ids = torch.zeros(len(records), int(lengths.max()), dtype=torch.int64)
    loss_mask = torch.zeros(token_ids.shape, dtype=torch.bool)
    for row, (record, chosen, length) in enumerate(zip(records, positions, lengths.tolist(), strict=True)):
        token_ids[row, :length] = record.token_ids[:length]
        loss_mask[row, record.place[chosen]] = True
    rows = torch.cat([torch.full((len(chosen),), row) for row, chosen in enumerate(positions)])
    parts = [
        torch.cat([getattr(record, name)[chosen] for record, chosen in zip(records, positions, strict=True)])
        for name in ("place", "depth", "labels", "law_ids", "law_probs")
    ]
    texts = Batch(token_ids.to(device), loss_mask.to(device), lengths, None)
    place, depth, labels, law_ids, law_probs = (part.to(device) for part in parts)
    return ReplayBatch(texts, rows.to(device), place, depth, labels, law_ids, law_probs)
