"""A small language model made to be trained: from nothing, from a checkpoint, or out of the target itself.

Its weights can begin as the target's first or evenly strided layers, or as a pruned target (`models.pruning`). It can
have the target's embedding and head for its own: frozen, in no file, and where its states are narrower than the
target's through two learnt maps, W = U·V with the target's matrix as the shared U and V (D', D) of its own.

With `low_rank` the matrices of its layers are factored: W = U·V, with a U for all layers (`models.low_rank`).

V vocabulary, D hidden size of the target and D' of the draft model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from models.drafter.draft_lm import NEW_LAYERS, LMDrafter, LMSizes, lm_dtype, new_lm, open_lm
from models.errors import UserError
from models.linear import accelerate
from models.low_rank import LowRankLinear, factor, multiply_out, principal
from models.pruning import (
    UNITS,
    Kept,
    best_units,
    check_shape,
    copy_embeddings,
    copy_kept,
    cut_config,
    even_layers,
    squared_norms,
    unit_counts,
    whole_layers,
)
from models.target import Target
from models.target.head import Head, linears_of
from models.vocab import DraftVocab

STARTS = ("random", "first_layers", "strided_layers", "pruned")
EMBEDDINGS = ("own", "copied", "shared")
SHARES = ("layers", "target")
_LOW_RANK = "drafter.model.low_rank"


class DistilledLM(LMDrafter):
    """A draft model whose weights begin as `start` says: random, first_layers, strided_layers or pruned.

    With random it is the model in the folder `name_or_path`, or a new one of the given `config` or sizes, as `DraftLM`
    has it. With first_layers and strided_layers it holds `num_layers` of the target's layers, its norm, embedding and
    head. With pruned it holds the shares `keep` of the target's layers, of their groups and of their channels; until
    `cut` is told which, layers at even distances and what has the largest weights. `embeddings` are own; copied (they
    begin as the target's, and are tied where those are); or shared (they are the target's, and frozen).

    `low_rank` {rank, share, train_shared} factors its layers: U begins as the best fit of the draft model's own layers
    (share layers) or of the target's (share target), as far as these weights are not random, and is trained or not.

    Raises UserError for settings that contradict each other, and for a target whose layers cannot be cut.
    """

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        name_or_path: str | None = None,
        config: dict[str, Any] | None = None,
        dtype: str | None = None,
        start: str = "random",
        keep: Mapping[str, float] | None = None,
        embeddings: str = "own",
        low_rank: Mapping[str, Any] | None = None,
        **sizes: Unpack[LMSizes],
    ) -> None:
        if embeddings not in EMBEDDINGS:
            raise UserError(f"drafter.model.embeddings is {embeddings!r}: choose {', '.join(EMBEDDINGS)}.")
        if name_or_path is not None and embeddings != "own":
            raise UserError("drafter.model.name_or_path has an embedding of its own: drop drafter.model.embeddings.")
        if keep is not None and start != "pruned":
            raise UserError(f"drafter.model.keep says what start=pruned leaves, but start is {start}: drop one.")
        begun = None
        if start == "random":
            lm = open_lm(target, name_or_path=name_or_path, config=config, dtype=dtype, **sizes)
        else:
            begun = _beginning(target, start, {**sizes, "name_or_path": name_or_path, "config": config}, keep)
            lm = new_lm(cut_config(target, begun), target, lm_dtype(dtype, target))
            copy_kept(target, lm, begun)
        if embeddings == "copied" or (begun is not None and embeddings == "own"):
            lm = _with_copied_embeddings(target, lm)
        head = _share(target, lm) if embeddings == "shared" else None
        self._source, self._low_rank = (target,), None if low_rank is None else _checked_low_rank(low_rank)
        pretrained = name_or_path is not None or begun is not None
        factors = self._factored(lm, pretrained)
        super().__init__(lm, vocab, pretrained=pretrained, head=head)
        self.factors = factors
        self.widen = None if head is None else head.widen
        self.units = begun if start == "pruned" else None
        self._shared = embeddings == "shared"

    def cut(self, kept: Kept) -> None:
        """Of a pruned start: begin with these units instead, as many of each kind as there are."""
        assert self.units is not None and self.units.channels.shape == kept.channels.shape
        multiply_out(self.lm.layers)
        copy_kept(self._source[0], self.lm, kept)
        self.units, self.factors = kept, self._factored(self.lm, True)

    def _factored(self, lm: Target, fitted: bool) -> nn.ModuleDict | None:
        """Factor the layers of `lm` where `low_rank` says so; returns the U of each kind."""
        if self._low_rank is None:
            return None
        source = self._source[0].layers if self._low_rank["share"] == "target" else None
        factors = factor(lm.layers, self._low_rank["rank"], fitted=fitted, source=source, where=_LOW_RANK)
        return factors.requires_grad_(self._low_rank["train_shared"])

    def dense_tensors(self) -> dict[str, Tensor]:
        """The tensors of `state_dict` as they would be without `low_rank`: W = U·V in place of U and V."""
        parts = {f"model.{name}": p for name, p in self.model.named_modules() if isinstance(p, LowRankLinear)}
        factored = {f"{name}.own.weight" for name in parts}
        tensors = {name: tensor for name, tensor in self.state_dict().items() if name not in factored}
        dense = {name: tensor for name, tensor in tensors.items() if not name.startswith("factors.")}
        return dense | {f"{name}.weight": part.weight.detach() for name, part in parts.items()}

    def accelerate(self) -> None:
        """Prepare for inference, for good; see `Target.accelerate`."""
        super().accelerate()
        accelerate(linears_of(self.factors))

    @property
    def export_arguments(self) -> dict[str, Any]:
        """As `LMDrafter` has them, without what the weights began with."""
        embeddings = "shared" if self._shared else "own"
        low_rank = None if self._low_rank is None else {**self._low_rank, "share": "layers"}
        begun = {"start": "random", "keep": None, "embeddings": embeddings, "low_rank": low_rank}
        return {**super().export_arguments, **begun}

    def logit_parameters(self, step: int = 0) -> list[nn.Parameter]:
        """The head's own, and those of the map in front of a shared one."""
        return [*super().logit_parameters(step), *([] if self.widen is None else self.widen.parameters())]


class SharedEmbedding(nn.Module):
    """The target's embedding, which is no part of this module, and a learnt map to narrower states."""

    def __init__(self, target: Target, narrow: nn.Linear | None, dtype: torch.dtype) -> None:
        super().__init__()
        self._embedding: tuple[Any] = (target.embedding,)
        self.narrow, self._dtype = narrow, dtype

    @property
    def weight(self) -> Tensor:
        """U (V, D)."""
        weight: Tensor = self._embedding[0].weight
        return weight

    def forward(self, token_ids: Tensor) -> Tensor:
        wide: Tensor = self._embedding[0](token_ids).to(self._dtype)
        return wide if self.narrow is None else self.narrow(wide)


class SharedHead(Head):
    """The target's head, read through a learnt map from narrower states."""

    def __init__(self, head: Head, widen: nn.Linear | None) -> None:
        super().__init__(head.linear, head.scale, head.softcap)
        self.widen = widen

    def __call__(self, hidden: Tensor) -> Tensor:
        wide = hidden if self.widen is None else self.widen(hidden)
        return super().__call__(wide.to(self.weight.dtype))

    def rows(self, token_ids: Tensor | None) -> SharedHead:
        return SharedHead(super().rows(token_ids), self.widen)


class _HeadModule(nn.Module):
    """A head in the place where transformers looks for one."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self._head = (head,)

    def forward(self, hidden: Tensor) -> Tensor:
        return self._head[0](hidden)


def _checked_low_rank(given: Mapping[str, Any]) -> dict[str, Any]:
    if set(given) != {"rank", "share", "train_shared"}:
        raise UserError(f"{_LOW_RANK} has {', '.join(given) or 'nothing'}: give rank, share and train_shared.")
    if not isinstance(given["rank"], int) or given["rank"] < 1:
        raise UserError(f"{_LOW_RANK}.rank is {given['rank']!r}: it must be a whole number of at least 1.")
    if given["share"] not in SHARES:
        raise UserError(f"{_LOW_RANK}.share is {given['share']!r}: choose {' or '.join(SHARES)}.")
    if not isinstance(given["train_shared"], bool):
        raise UserError(f"{_LOW_RANK}.train_shared is {given['train_shared']!r}: it must be true or false.")
    return dict(given)


def _beginning(target: Target, start: str, others: dict[str, Any], keep: Mapping[str, float] | None) -> Kept:
    """What of the target the draft model begins with."""
    if start not in STARTS:
        raise UserError(f"drafter.model.start is {start!r}: choose {', '.join(STARTS)}.")
    allowed = ("num_layers",) if start != "pruned" else ()
    wrong = [name for name, value in others.items() if value is not None and name not in allowed]
    if wrong:
        raise UserError(
            f"drafter.model.{wrong[0]} is given beside start={start}: the target's layers have sizes of their own."
        )
    check_shape(target)
    if start == "pruned":
        counts = _counts(target, keep or {})
        layers = even_layers(target.num_layers, counts["layers"])
        return best_units(squared_norms(target), counts, layers)
    num_layers = NEW_LAYERS if others.get("num_layers") is None else others["num_layers"]
    if not 0 < num_layers <= target.num_layers:
        raise UserError(f"drafter.model.num_layers is {num_layers}: the target has {target.num_layers}.")
    first = tuple(range(num_layers))
    return whole_layers(target, first if start == "first_layers" else even_layers(target.num_layers, num_layers))


def _counts(target: Target, keep: Mapping[str, float]) -> dict[str, int]:
    """How many units of each kind a pruned target keeps: shares, rounded, and one at least."""
    for kind, share in keep.items():
        if kind not in UNITS:
            raise UserError(f"drafter.model.keep has {kind!r}: choose from {', '.join(UNITS)}.")
        if not 0 < share <= 1:
            raise UserError(f"drafter.model.keep.{kind} is {share}: it must be above 0, and 1 at most.")
    kinds = set(getattr(target.config, "layer_types", None) or [])
    if keep.get("layers", 1) < 1 and len(kinds) > 1:
        raise UserError(
            f"drafter.model.keep.layers is {keep['layers']}, but target {target.name!r} has layers of several kinds "
            f"({', '.join(sorted(kinds))}), which cannot take each other's places: keep them all."
        )
    return {kind: max(1, round(keep.get(kind, 1) * count)) for kind, count in unit_counts(target).items()}


def _with_copied_embeddings(target: Target, lm: Target) -> Target:
    """`lm` with the target's embedding and head, tied where the target's are."""
    if lm.hidden_size != target.hidden_size or lm.vocab_size != target.vocab_size:
        raise UserError(
            f"drafter.model.embeddings=copied: the target's are {target.vocab_size} × {target.hidden_size}, and those "
            f"of the draft model {lm.vocab_size} × {lm.hidden_size}: use shared, or leave drafter.model.hidden_size."
        )
    if target.head.weight is target.embedding.weight and lm.head.weight is not lm.embedding.weight:
        lm.model.config.tie_word_embeddings = True
        embedding: Any = lm.embedding
        lm.head.linear.weight = embedding.weight
    copy_embeddings(target, lm)
    return lm


def _share(target: Target, lm: Target) -> SharedHead:
    """Put the target's embedding and head in the place of those of `lm`; returns the head."""
    if lm.hidden_size > target.hidden_size:
        raise UserError(
            f"drafter.model.embeddings=shared: the draft model's states have {lm.hidden_size} numbers, more than the "
            f"target's {target.hidden_size}: use own, or a smaller drafter.model.hidden_size."
        )
    narrow = widen = None
    if lm.hidden_size < target.hidden_size:
        narrow = nn.Linear(target.hidden_size, lm.hidden_size, bias=False, device=lm.device, dtype=lm.dtype)
        widen = nn.Linear(lm.hidden_size, target.hidden_size, bias=False, device=lm.device, dtype=lm.dtype)
        with torch.no_grad():
            embedding: Any = target.embedding
            narrow.weight.copy_(principal([embedding.weight], lm.hidden_size))
            widen.weight.copy_(principal([target.head.weight], lm.hidden_size).t())
    shared = SharedEmbedding(target, narrow, lm.dtype)
    head = SharedHead(target.head, widen)
    lm.model.set_input_embeddings(shared)
    lm.model.set_output_embeddings(_HeadModule(head))
    lm.embedding, lm.head, lm.vocab_size = shared, head, target.vocab_size
    return head
