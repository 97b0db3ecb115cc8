"""Hierarchical multi-token prediction: first a class of tokens, then the token in it: q(x) = q(c) · q(x | c).

The states are those of sequential multi-token prediction. A trained linear layer tells the class; inside a class, the
target's own head decides. So the frozen head need not be right about how much mass a far token's kind gets. Classes
are clusters of the unembedding's rows, and stored with the weights.

M rows, C classes, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from models.drafter.mtp import SequentialMTP
from models.errors import UserError
from models.layers import LayerSizes
from models.target import Target
from models.vocab import DraftVocab

_ITERATIONS, _ROWS_AT_ONCE = 10, 16384


class HierarchicalMTP(SequentialMTP):
    """Sequential multi-token prediction with `num_classes` classes; None: the square root of the vocabulary.

    Further arguments are those of `SequentialMTP`.
    """

    token_class: Tensor  # (Vd,)

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        num_classes: int | None = None,
        num_blocks: int = 1,
        num_layers: int = 1,
        capture_layers: list[int] | None = None,
        **sizes: Unpack[LayerSizes],
    ) -> None:
        super().__init__(
            target, vocab, num_blocks=num_blocks, num_layers=num_layers, capture_layers=capture_layers, **sizes
        )
        count = round(vocab.size**0.5) if num_classes is None else num_classes
        if not 1 <= count <= vocab.size:
            raise UserError(
                f"drafter.model.num_classes is {count}: it must be between 1 and the {vocab.size} tokens of the draft "
                "vocabulary."
            )
        rows = self.head.weight.detach().to(torch.promote_types(self.head.weight.dtype, torch.float32))
        token_class = cluster(rows, count)
        self.register_buffer("token_class", token_class)
        sizes_of = torch.bincount(token_class, minlength=count)
        self.class_head = nn.Linear(target.hidden_size, count, device=rows.device, dtype=rows.dtype)
        with torch.no_grad():  # near to the mass that the target's head gives the classes
            means = torch.zeros(count, rows.shape[1], dtype=rows.dtype, device=rows.device)
            means = means.index_add_(0, token_class, rows) / sizes_of[:, None]
            self.class_head.weight.copy_(self.head.scale * means)
            self.class_head.bias.copy_(sizes_of.log())
        self.settle(target)

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """log q (..., Vd) of estimated states (..., D): a law as it is, which sums to 1."""
        inside = super().logits(hidden).to(torch.promote_types(self.head.weight.dtype, torch.float32))
        classes = self.class_head(hidden.to(self.class_head.weight.dtype)).log_softmax(-1).to(inside.dtype)
        index = self.token_class.expand(inside.shape)
        shape = classes.shape
        most = inside.new_full(shape, float("-inf")).scatter_reduce(-1, index, inside.detach(), "amax")
        mass = inside.new_zeros(shape).scatter_add(-1, index, (inside - most.gather(-1, index)).exp())
        return inside + (classes - most - mass.log()).gather(-1, index)

    def logit_parameters(self, step: int = 0) -> list[nn.Parameter]:
        """Those that tell the class, and the target's head."""
        return [*self.class_head.parameters(), *super().logit_parameters(step)]


@torch.no_grad()
def cluster(rows: Tensor, count: int) -> Tensor:
    """The class (M,) of each row (M, D) among `count`, none of them empty: k-means by direction, always the same."""
    rows = nn.functional.normalize(rows, dim=-1)
    centres = rows[_spread(rows, count)]
    for _ in range(_ITERATIONS):
        found = [(part @ centres.t()).max(-1) for part in rows.split(_ROWS_AT_ONCE)]
        nearest, closeness = (torch.cat(side) for side in ([f.indices for f in found], [f.values for f in found]))
        sizes = torch.bincount(nearest, minlength=count)
        far = iter(closeness.argsort())  # a class without rows takes the row that is furthest from its own centre
        for empty in (sizes == 0).nonzero()[:, 0].tolist():
            row = next(r for r in far if sizes[nearest[r]] > 1)
            sizes[nearest[row]] -= 1
            sizes[empty] += 1
            nearest[row] = empty
        centres = nn.functional.normalize(torch.zeros_like(centres).index_add_(0, nearest, rows), dim=-1)
    return nearest


def _spread(rows: Tensor, count: int) -> list[int]:
    """Rows to begin with, each drawn in proportion to its squared distance from those before (k-means++)."""
    generator = torch.Generator().manual_seed(0)
    chosen = [int(torch.randint(len(rows), (1,), generator=generator))]
    distance = torch.full((len(rows),), float("inf"), device=rows.device, dtype=rows.dtype)
    for _ in range(count - 1):
        distance = torch.minimum(distance, (2 - 2 * rows @ rows[chosen[-1]]).clamp(min=0))
        distance[chosen[-1]] = 0
        weights = distance if distance.any() else torch.ones_like(distance)
        chosen.append(int(torch.multinomial(weights.float().cpu(), 1, generator=generator)))
    return chosen
