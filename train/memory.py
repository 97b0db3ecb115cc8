"""How much memory a training takes at its peak, by a model of it, before it starts.

    peak = weights of target and drafter + gradients + AdamW's two moments + a batch's states
         + max(the target's pass, kept activations + one layer's computed again + rows and head gradients + logits)

Activations are what operations keep for their gradients. How much that is no formula says for all drafters, but how it
grows does: w + a·B·S + b·S² + c·B·S², of which w is copies of weights in autocast's dtype, and b and c are masks and
attention weights. The four are found from what is kept of four tiny batches. Where layers are computed twice
(`models.recompute`), the layers' share of the difference is alive once, while it is computed again.

B texts, S rows, D hidden size, L captured layers, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from data.loader import StepBatches
from models.recompute import Recomputing
from models.target import Target
from models.types import TargetFeatures
from train.processes import count
from train.regime import Regime

_PROBE_ROWS = 16
_LAWS_AT_ONCE = 8  # tensors (chunk, Vd) that are alive while a chunk's loss and gradient are taken


@dataclass(frozen=True)
class Peak:
    """Bytes of each part; `target_pass` and what the drafter's step holds are never alive together."""

    weights: int
    gradients: int
    moments: int
    states: int
    target_pass: int
    activations: int
    recomputed: int
    rows: int
    logits: int

    @property
    def total(self) -> int:
        """The most that is alive at a time."""
        step = self.activations + self.recomputed + self.rows + self.logits
        return self.weights + self.gradients + self.moments + self.states + max(self.target_pass, step)

    def __str__(self) -> str:
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        told = ", ".join(f"{name.replace('_', ' ')} {_told(size)}" for name, size in parts.items() if size)
        return f"memory: about {_told(self.total)} at its peak ({told})"


def peak(regime: Regime, batch_size: int, num_rows: int, *, online: bool, dtype: torch.dtype | None = None) -> Peak:
    """Of a training on batches of `batch_size` texts of `num_rows` tokens, in autocast to `dtype` where there is one.

    `online` says that the target's states are computed for every batch.
    """
    drafter, target = regime.drafter, regime.target
    trained = [p for p in regime.parameters() if p.requires_grad]
    tokens = batch_size * num_rows
    activations, recomputed = _activations(regime, batch_size, num_rows, dtype)
    steps = regime.num_steps
    head = sum(_bytes(drafter.logit_parameters(step)) for step in range(steps))
    vocab_bytes = torch.promote_types(trained[0].dtype, torch.float32).itemsize * drafter.vocab.size
    return Peak(
        weights=_bytes([*target.original.model.parameters(), *regime.target.model.parameters(), *drafter.parameters()]),
        gradients=_bytes(trained),
        moments=2 * _bytes(trained),
        states=tokens * _state_bytes(regime, online),
        target_pass=_target_pass(target, tokens) if online else 0,
        activations=activations,
        recomputed=recomputed,
        rows=2 * steps * tokens * target.hidden_size * trained[0].dtype.itemsize + head,
        logits=_LAWS_AT_ONCE * min(tokens, regime.chunk_rows) * vocab_bytes,
    )


def peak_of_run(regime: Regime, batches: StepBatches, options: dict[str, Any]) -> Peak:
    """Of a step of a run on its longest texts, in one of its processes; what they divide is counted as whole."""
    fit, precision = options["fit"], str(options["trainer"]["precision"])
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    online = fit["hidden_states"] == "online" or not regime.backbone.frozen
    rows = fit["batch_size"] // count()
    return peak(regime, rows, int(max(batches.row_lengths)), online=online, dtype=dtype)


def _state_bytes(regime: Regime, online: bool) -> int:
    """Of a token: its captured states, or what a cache holds of laws in place of the last."""
    size, dtype, laws = regime.target.hidden_size, regime.target.dtype, regime.law_tokens
    if online or laws is None:
        return len(regime.capture_layers) * size * dtype.itemsize
    width = len(regime.drafter.capture_layers) * size + 2 * laws
    return width * torch.promote_types(dtype, torch.float32).itemsize


def _target_pass(target: Target, tokens: int) -> int:
    """What a layer of the target holds beside the captured states: six rows of D and three of the inner size."""
    inner = getattr(target.config, "intermediate_size", None) or 4 * target.hidden_size
    return tokens * (6 * target.hidden_size + 3 * inner) * target.dtype.itemsize


def _activations(regime: Regime, batch_size: int, num_rows: int, dtype: torch.dtype | None) -> tuple[int, int]:
    """What the drafter keeps of a batch, and what one layer computes again."""
    parts = [part for part in regime.drafter.modules() if isinstance(part, Recomputing) and part.recompute]
    kept = _grown(regime, batch_size, num_rows, dtype)
    if not parts:
        return kept, 0
    before = sum(part.passes for part in parts)
    _kept(regime, 1, 1, dtype)
    passes = sum(part.passes for part in parts) - before
    for part in parts:
        part.recompute = False
    try:
        whole = _grown(regime, batch_size, num_rows, dtype)
    finally:
        for part in parts:
            part.recompute = True
    return kept, max(0, whole - kept) // max(1, passes)


def _grown(regime: Regime, batch_size: int, num_rows: int, dtype: torch.dtype | None) -> int:
    """Bytes that the drafter keeps, as they grow from four tiny batches: w + a·B·S + b·S² + c·B·S²."""
    sizes = [(b, s) for b in (1, 2) for s in (_PROBE_ROWS, 2 * _PROBE_ROWS)]
    terms = torch.tensor([[1, b * s, s * s, b * s * s] for b, s in sizes], dtype=torch.float64)
    kept = torch.tensor([float(_kept(regime, b, s, dtype)) for b, s in sizes], dtype=torch.float64)
    found = torch.linalg.solve(terms, kept).clamp(min=0)
    wanted = [1, batch_size * num_rows, num_rows**2, batch_size * num_rows**2]
    return round(float(found @ torch.tensor(wanted, dtype=torch.float64)))


def _kept(regime: Regime, batch_size: int, num_rows: int, dtype: torch.dtype | None) -> int:
    """Bytes that the drafter keeps for the gradients of a batch of zeros, parameters left out."""
    targets = (regime.target, regime.target.original)
    frozen = [p for target in targets for p in target.model.parameters()]
    with saved_storages([*regime.drafter.parameters(), *frozen]) as kept, _in(regime, dtype):
        steps = regime.computed(_zeros(regime, batch_size, num_rows))
    del steps
    return sum(kept.values())


def _zeros(regime: Regime, batch_size: int, num_rows: int) -> TargetFeatures:
    target, layers = regime.target, len(regime.drafter.capture_layers)
    ids = torch.zeros(batch_size, num_rows, dtype=torch.int64, device=target.device)
    hidden = None
    if layers:
        shape = (batch_size, num_rows, layers * target.hidden_size)
        hidden = torch.zeros(shape, dtype=target.dtype, device=target.device)
    return TargetFeatures(ids, ids, hidden, torch.full((batch_size,), num_rows))


@contextmanager
def _in(regime: Regime, dtype: torch.dtype | None) -> Iterator[None]:
    """As in training, with the random numbers left as they are."""
    device = regime.target.device
    random = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with random, torch.enable_grad(), torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        yield


@contextmanager
def saved_storages(ignored: Iterable[Tensor] = ()) -> Iterator[dict[int, int]]:
    """Collect the bytes of all storages that operations within keep for their gradients, without those of `ignored`."""
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is used twice
    known = {tensor.untyped_storage().data_ptr() for tensor in ignored}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield kept


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of tensors, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.numel() * t.element_size() for t in tensors}
    return sum(storages.values())


def _told(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
