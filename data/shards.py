"""Shards of a cache of hidden states: a safetensors file each, in one of three dtypes, with a checksum of all of it.

The checksum stands in the file's own header, so that nothing can part the two: a shard is known to be whole, and to be
the one that is meant, from itself alone.

`int8` keeps round(x / (c·s)), where c is the root mean square of a channel over the shard's tokens, each divided by
its own, and s, of a token and layer, the largest |x / c| among its channels over 127. Targets have a few channels, and
a few tokens, whose states are a hundred times the others': either factor alone would leave the rest next to nothing of
the 255 steps.

Beside the states, or alone, a shard may hold `top_k` laws: of each token the target's K likeliest next ones with the
logarithms of their probabilities. `spread` makes whole laws of them, in which all other tokens are equally likely.

T tokens of a shard, L captured layers, D hidden size, K tokens of a law, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.files import write_tensors

DTYPES = ("same", "bfloat16", "int8")
_ABOUT, _STEPS = "shard", 127


class DamagedShard(Exception):
    """A file that is not whole, or not the one that is meant; the message says which."""


class Error(NamedTuple):
    """Sums over what was stored: the squares of what it differs by, and of itself."""

    difference: float
    whole: float


@dataclass(frozen=True)
class StateLayout:
    """How states of L layers are stored: `dtype` is one of DTYPES, "same" being `original`, in which they come.

    With `top_k`, laws of that many tokens are behind them; both are then read as one tensor, in float32 at least.
    """

    num_layers: int
    hidden_size: int
    dtype: str
    original: torch.dtype
    top_k: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """What a token takes; int8 has a float32 for each of its layers, a law an int32 and a float32 for each of K."""
        law = 8 * (self.top_k or 0)
        if self.dtype == "int8":
            return self.num_layers * (self.hidden_size + 4) + law
        return self.num_layers * self.hidden_size * self._kept.itemsize + law

    @property
    def bytes_per_shard(self) -> int:
        """What a shard takes beside its tokens: a float32 for each channel in int8, else nothing."""
        return 4 * self.num_layers * self.hidden_size if self.dtype == "int8" else 0

    def size_bytes(self, num_tokens: int, num_shards: int) -> int:
        """Size of the states of all tokens, without the headers of some 300 bytes."""
        return num_tokens * self.bytes_per_token + num_shards * self.bytes_per_shard

    @property
    def _kept(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bfloat16" else self.original

    def encode(self, read: Tensor) -> dict[str, Tensor]:
        """States (T, L·D), with laws (T, 2·K) behind them where there are any, as the tensors that are stored."""
        if self.top_k is None:
            return self._encode(read)
        states, log_probs, ids = read.split([read.shape[-1] - 2 * self.top_k, self.top_k, self.top_k], dim=-1)
        laws = {"law_ids": ids.to(torch.int32), "law_log_probs": log_probs.float()}
        return laws if states.shape[-1] == 0 else {**self._encode(states.to(self.original)), **laws}

    def _encode(self, states: Tensor) -> dict[str, Tensor]:
        if self.dtype != "int8":
            return {"states": states.to(self._kept)}
        wide = states.float().unflatten(-1, (self.num_layers, self.hidden_size))  # (T, L, D)
        tiny = torch.finfo(torch.float32).tiny
        alike = wide / wide.square().mean(-1, keepdim=True).sqrt().clamp(min=tiny)
        channels = alike.square().mean(0).sqrt().clamp(min=tiny)  # (L, D)
        even = wide / channels
        tokens = even.abs().amax(-1).clamp(min=tiny * _STEPS) / _STEPS  # (T, L)
        steps = (even / tokens[..., None]).round().to(torch.int8)
        return {"states": steps.flatten(1), "channels": channels.flatten(), "tokens": tokens}

    def decode(self, stored: Mapping[str, Any], rows: slice) -> Tensor:
        """Some tokens of what `encode` gave: (·, L·D) in the dtype in which it came, or with laws (·, L·D + 2·K)."""
        if self.top_k is None:
            return self._decode(stored, rows)
        parts = [stored["law_log_probs"][rows], stored["law_ids"][rows].float()]
        dtype = torch.promote_types(self.original, torch.float32)
        states = [self._decode(stored, rows)] if self.num_layers else []
        return torch.cat([part.to(dtype) for part in (*states, *parts)], dim=-1)

    def _decode(self, stored: Mapping[str, Any], rows: slice) -> Tensor:
        states: Tensor = stored["states"][rows]
        if self.dtype != "int8":
            return states.to(self.original, copy=True)  # not the file itself, which may be written anew
        parts = states.float().unflatten(-1, (self.num_layers, self.hidden_size)) * stored["tokens"][rows][..., None]
        return (parts.flatten(1) * stored["channels"][:]).to(self.original)

    def error(self, read: Tensor, stored: Mapping[str, Tensor]) -> Error:
        """How far the stored states are from those (T, L·D) at the beginning of what was encoded."""
        wanted = read[:, : self.num_layers * self.hidden_size].double()
        found = self.decode(stored, slice(None))[:, : wanted.shape[1]].double()
        return Error(float((found - wanted).square().sum()), float(wanted.square().sum()))


def top_laws(logits: Tensor, top_k: int) -> Tensor:
    """The K likeliest tokens of laws (T, V): logarithms of their probabilities, then their ids, as numbers (T, 2·K)."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_probs, ids = logits.log_softmax(-1, dtype=dtype).topk(top_k, dim=-1)
    return torch.cat([log_probs, ids.to(dtype)], dim=-1)


def spread(laws: Tensor, vocab_size: int, token_ids: Tensor | None = None) -> Tensor:
    """Logits of laws (..., 2·K) over V tokens, or some `token_ids` (Vd,) of these: what K leave is spread evenly."""
    log_probs, ids = laws.chunk(2, dim=-1)
    others = max(1, vocab_size - ids.shape[-1])
    rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(laws.dtype).tiny)
    even = (rest / others).log().expand(*laws.shape[:-1], vocab_size)
    logits = even.scatter(-1, ids.long(), log_probs)
    return logits if token_ids is None else logits[..., token_ids.to(logits.device)]


def write_shard(path: Path, tensors: dict[str, Tensor], key: str) -> None:
    """Write what `encode` gave, whole or not at all. `key` says what states these are."""
    told = {"key": key, "sha256": _checksum(tensors, key)}
    write_tensors(path, tensors, {_ABOUT: json.dumps(told)})  # one entry: several would be in any order


def open_shard(path: Path, key: str, *, known: bool = False) -> dict[str, Any]:
    """The tensors of a file, of which parts can be read without the rest, once all of it was checked.

    A `known` one was checked before. Raises DamagedShard, and FileNotFoundError where there is none.
    """
    try:
        file = safe_open(path, framework="pt")
        told, names = json.loads((file.metadata() or {}).get(_ABOUT, "{}")), sorted(file.keys())
        if told.get("key") != key:
            raise DamagedShard("it holds other states")
        if not known and told.get("sha256") != _checksum({name: file.get_tensor(name) for name in names}, key):
            raise DamagedShard("its checksum is another")
        return {name: file.get_slice(name) for name in names}
    except (SafetensorError, ValueError) as error:
        raise DamagedShard(f"it is no whole safetensors file: {str(error).splitlines()[0]}") from error


def _checksum(tensors: Mapping[str, Tensor], key: str) -> str:
    digest = hashlib.sha256(key.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
    return digest.hexdigest()
