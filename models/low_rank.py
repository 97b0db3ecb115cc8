"""Linear layers as products of two narrow ones, W = U·V: each layer has a V of its own, and U with the others.

One U serves all matrices of a kind (the queries' of every layer, say). Kinds go by the names within a layer.

F outputs, K inputs, r rank, which is F at most.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from models.errors import UserError


class LowRankLinear(nn.Module):
    """x ↦ U·(V·x) + b. U is part of another module, so it is neither saved nor moved with this one."""

    def __init__(self, shared: nn.Linear, own: nn.Linear, bias: nn.Parameter | None) -> None:
        super().__init__()
        self._shared = (shared,)
        self.own, self.bias = own, bias

    @property
    def weight(self) -> Tensor:
        """W (F, K), computed."""
        return self._shared[0].weight @ self.own.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._shared[0](self.own(x))
        return out if self.bias is None else out + self.bias


@torch.no_grad()
def factor(
    layers: nn.ModuleList, rank: int, *, fitted: bool, source: nn.ModuleList | None = None, where: str
) -> nn.ModuleDict:
    """Put a `LowRankLinear` in the place of every linear layer in `layers`; returns the U (F, r) of each kind.

    The columns of U are the first left singular vectors of all matrices of a kind side by side, in `source` or, for
    None, in `layers` themselves. Then V = Uᵀ·W is the best for that U, and without `source` both are the best of their
    rank. With `fitted` false the weights mean nothing yet: V is random, as large as they are, and so is U where there
    is no `source`. Raises UserError, which calls the settings `where`, for layers that cannot share.
    """
    kinds = _kinds(layers)
    if not kinds:
        raise UserError(f"{where}: the draft model has no linear layers in a form that can be factored.")
    basis = kinds if source is None else _kinds(source)
    shared = nn.ModuleDict()
    for name, group in kinds.items():
        size = _rows(group, name, where)
        if source is not None and (theirs := _rows(basis.get(name, []), name, where)) != size:
            raise UserError(
                f"{where}.share=target: {name} has {size} rows in the draft model, and {theirs or 'none'} in the "
                "target: use share=layers."
            )
        columns = min(rank, size)
        first = group[0].weight
        if source is None and not fitted:
            left = nn.init.orthogonal_(torch.empty(size, columns, dtype=torch.float64))
        else:
            left = principal((linear.weight.t() for linear in basis[name]), columns).t()
        shared[_key(name)] = outer = _linear(left.to(first))
        for layer in layers:
            if isinstance(linear := _part(layer, name), nn.Linear):
                wide = linear.weight.double()
                own = left.to(wide).t() @ wide if fitted else wide[:columns] * (size / columns) ** 0.5
                layer.set_submodule(name, LowRankLinear(outer, _linear(own.to(first)), linear.bias))
    return shared


@torch.no_grad()
def multiply_out(layers: nn.ModuleList) -> None:
    """Put ordinary linear layers, W = U·V, in the place of factored ones."""
    for layer in layers:
        for name, part in list(layer.named_modules()):
            if isinstance(part, LowRankLinear):
                layer.set_submodule(name, _linear(part.weight, part.bias))


def principal(matrices: Iterable[Tensor], count: int) -> Tensor:
    """The `count` directions (count, D) that hold most of matrices (·, D): those of the largest singular values."""
    gram = sum(wide.t() @ wide for wide in (matrix.detach().double() for matrix in matrices))
    assert isinstance(gram, Tensor)
    return torch.linalg.eigh(gram).eigenvectors[:, -count:].t()


def _kinds(layers: nn.ModuleList) -> dict[str, list[nn.Linear]]:
    """The linear layers of each kind, by its name within a layer."""
    found: dict[str, list[nn.Linear]] = {}
    for layer in layers:
        for name, part in layer.named_modules():
            if isinstance(part, nn.Linear):
                found.setdefault(name, []).append(part)
    return found


def _rows(group: list[nn.Linear], name: str, where: str) -> int:
    """F, which is the same for a whole kind; 0 where there is none of it."""
    sizes = {len(linear.weight) for linear in group}
    if len(sizes) > 1:
        raise UserError(f"{where}: {name} has {' or '.join(map(str, sorted(sizes)))} rows: layers cannot share it.")
    return sizes.pop() if sizes else 0


def _part(layer: nn.Module, name: str) -> nn.Module | None:
    return dict(layer.named_modules()).get(name)


def _key(name: str) -> str:
    return name.replace(".", "_")  # names within a ModuleDict have no dots


def _linear(weight: Tensor, bias: nn.Parameter | None = None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight, linear.bias = nn.Parameter(weight.contiguous()), bias  # type: ignore[assignment]
    return linear
