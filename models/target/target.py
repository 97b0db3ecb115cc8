"""The frozen target: any Hugging Face causal language model, with hidden-state capture at named layers.

Layers are counted by the states that enter them: 0 is the embedding's output, j the state entering layer j, and the
number of layers n (or −1) the state that the head reads. In every architecture here that last one has already gone
through the final norm, so that head(state) is the model's own logits; `check` proves it, and refuses an architecture
for which it, or decoding with our cache and masks, does not hold.

B batch, S rows, Q new rows, W key slots, L captured layers, D hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from models import packing, tree
from models.cache import KVCache
from models.errors import UserError
from models.linear import accelerate
from models.target.capture import ending_before, states_entering
from models.target.head import Head, linears_of
from models.target.lean import LeanDecoder

_VOLATILE_CONFIG_KEYS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "architectures")
# Config keys of attention that masks cannot express, and that a short check would not see: local layers (GPT-Neo), keys
# chosen by what they hold (Doge, DeepSeek), a bias by slot where positions of a tree are meant (MPT).
_UNMASKABLE_KEYS = ("attention_layers", "keep_window_size", "index_topk", "alibi")
ATTENTION = ("sdpa", "eager")  # the implementations that read four-dimensional masks


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """States of one forward pass: `last` (B, S, D) is what the head reads, `hidden` (B, S, L·D) the captured ones."""

    last: Tensor
    hidden: Tensor | None


class Target(nn.Module):
    """A causal language model that is only read, never trained; `models.target.adapted` has one that is.

    `name` is what exports and messages call it. Raises UserError for an architecture that has attention of a kind
    that the engine cannot mask, or a head that does not read states of the hidden size.
    """

    trained: tuple[nn.Parameter, ...] = ()  # what is trained together with a drafter

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name: str = "target"
    ) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config.get_text_config()
        output_embeddings = model.get_output_embeddings()
        if not isinstance(output_embeddings, nn.Linear):
            raise UserError(f"Target {name!r} ({self.config.model_type}) has no linear language-model head.")
        self.head = Head.of(output_embeddings, self.config)
        self.embedding = model.get_input_embeddings()
        self.num_layers: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = output_embeddings.weight.shape[0]
        self.max_positions = _max_positions(self.config)
        if (read := output_embeddings.weight.shape[1]) != self.hidden_size:
            raise UserError(
                f"Target {name!r} ({self.config.model_type}) is not supported: its head reads {read} numbers per "
                f"token, but the states between its layers hold {self.hidden_size}."
            )
        if self.config._attn_implementation not in ATTENTION:
            raise UserError(
                f"Target {name!r} is loaded with {self.config._attn_implementation} attention: load it with "
                f"attn_implementation={' or '.join(ATTENTION)}, which read the masks of drafts."
            )
        self._windows = _attention_windows(self.config, name)
        self._lean: LeanDecoder | None = None
        self.layers = _decoder_layers(model.get_decoder(), self.num_layers, name)

    def train(self, mode: bool = True) -> Target:
        """Stay in evaluation mode, whatever module this is a part of: dropout would change the states."""
        return super().train(False)

    @property
    def original(self) -> Target:
        """The target as it was before it was trained together with a drafter: here itself."""
        return self

    def finished(self) -> Target:
        """The target as it is decoded once training is over: here itself."""
        return self

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self.head.weight.dtype

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer, from the generation config and the tokenizer."""
        found = self.model.generation_config.eos_token_id if self.model.generation_config else None
        ids = set(found if isinstance(found, list) else [] if found is None else [found])
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            ids.add(self.tokenizer.eos_token_id)
        return frozenset(ids)

    def layer_index(self, layer: int) -> int:
        """Resolve −1 and refuse layers that do not exist."""
        index = self.num_layers if layer == -1 else layer
        if not 0 <= index <= self.num_layers:
            raise UserError(f"capture layer {layer} does not exist: {self.name!r} has states 0 to {self.num_layers}.")
        return index

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Token ids of a text as it stands, or with the special tokens (BOS) that the tokenizer puts around a text.

        Raises UserError without a tokenizer.
        """
        ids: list[int] = self.require_tokenizer()(text, add_special_tokens=special_tokens)["input_ids"]
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens left out. Raises UserError without a tokenizer."""
        return str(self.require_tokenizer().decode(token_ids, skip_special_tokens=True))

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises UserError where there is none."""
        if self.tokenizer is None:
            raise UserError(f"Target {self.name!r} has no tokenizer.")
        return self.tokenizer

    def forward(
        self,
        token_ids: Tensor,
        *,
        capture_layers: tuple[int, ...] = (),
        position_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        cache: KVCache | None = None,
        segments: Tensor | None = None,
    ) -> TargetOutput:
        """Run the model over token_ids (B, S) without its head.

        Without a mask, attention is causal: rows padded on the right do not disturb the ones before them. `segments`
        (B, S) tell which of several texts in a row each token is of (`models.packing`), in place of positions and mask.
        """
        if segments is not None:
            position_ids, attention_mask = self._within(segments)
        wanted = [self.layer_index(layer) for layer in capture_layers]
        if self._lean is not None and not isinstance(attention_mask, dict):
            last, captured = self._lean(
                token_ids, position_ids=position_ids, attention_mask=attention_mask, cache=cache, wanted=set(wanted)
            )
        else:
            last, captured = self._hooked(token_ids, position_ids, attention_mask, cache, set(wanted))
        captured[self.num_layers] = last
        hidden = torch.cat([captured[index] for index in wanted], dim=-1) if wanted else None
        return TargetOutput(last, hidden)

    def _within(self, segments: Tensor) -> tuple[Tensor, Tensor | dict[str, Tensor]]:
        """Positions (B, S) of tokens in their own texts, and masks that let them read those alone."""
        masks = {kind: packing.attention_mask(segments, window) for kind, window in self._windows.items()}
        return packing.positions(segments), self._as_read(masks)

    def states(self, token_ids: Tensor, capture_layers: tuple[int, ...], segments: Tensor | None = None) -> Tensor:
        """States (B, S, L·D) of whole texts (B, S) at one layer or more; layers behind the last of them are not run.

        `segments` (B, S) as `forward` has them.
        """
        wanted = [self.layer_index(layer) for layer in capture_layers]
        if (deepest := max(wanted)) == self.num_layers:
            hidden = self(token_ids, capture_layers=capture_layers, segments=segments).hidden
            assert hidden is not None
            return hidden
        positions, mask = (None, None) if segments is None else self._within(segments)
        if self._lean is not None and not isinstance(mask, dict):
            captured = self._lean.entering(token_ids, positions, mask, set(wanted))
        else:
            with states_entering(self.layers, set(wanted)) as captured, ending_before(self.layers[deepest]):
                self.model.base_model(input_ids=token_ids, position_ids=positions, attention_mask=mask, use_cache=False)
        return torch.cat([captured[index] for index in wanted], dim=-1)

    def _hooked(
        self,
        token_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | dict[str, Tensor] | None,
        cache: KVCache | None,
        wanted: set[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The model's own forward pass, and the states entering the layers `wanted`."""
        with states_entering(self.layers, wanted - {self.num_layers}) as captured:
            last: Tensor = self.model.base_model(
                input_ids=token_ids,
                position_ids=position_ids,
                attention_mask=attention_mask,
                cache=cache,
                use_cache=cache is not None,
            ).last_hidden_state
        return last, captured

    def accelerate(self) -> None:
        """Prepare for inference, for good: fewer and larger operations, and products by their fastest routes.

        Results differ in the last bits, as they do with the size of a batch. An architecture whose layers are of
        another shape keeps its own forward pass. Float64 does too: it is for proofs.
        """
        plain = self.dtype != torch.float64 and self.config._attn_implementation == "sdpa"
        if self._lean is None and plain and not any(self._windows.values()):
            self._lean = LeanDecoder.of(self.model.get_decoder())
            try:
                self.check()
            except UserError as error:  # the parts have the names of a Llama's, and compute something else
                logging.getLogger(__name__).info("%s keeps its own forward pass: %s", self.name, error)
                self._lean = None
        linears = linears_of(self.model) if self._lean is None else self._lean.linears
        accelerate([*linears, self.head.linear])

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """An empty cache for `batch_size` requests of at most `capacity` rows, drafts included."""
        return KVCache(self.num_layers, batch_size, capacity, self.device)

    def step(
        self,
        token_ids: Tensor,
        cache: KVCache,
        *,
        capture_layers: tuple[int, ...] = (),
        parents: Tensor | None = None,
    ) -> TargetOutput:
        """Run the new rows token_ids (B, Q) behind what `cache` holds; the caller then commits some of them.

        The rows form a chain, or the tree of `parents` (B, Q) among themselves. Positions past the model's maximum
        are clamped: such rows exist only as padding behind a request's last token.
        """
        num_rows = token_ids.shape[1]
        cache.begin(num_rows)
        lengths = cache.lengths.to(self.device)
        depth = torch.arange(num_rows, device=self.device) if parents is None else tree.depths(parents)
        positions = (lengths[:, None] + depth).clamp(max=self.max_positions - 1)
        return self(
            token_ids,
            capture_layers=capture_layers,
            position_ids=positions,
            attention_mask=self._mask(cache, lengths, num_rows, parents, positions - lengths[:, None]),
            cache=cache,
        )

    def _mask(
        self, cache: KVCache, lengths: Tensor, num_rows: int, parents: Tensor | None, depth: Tensor
    ) -> Tensor | dict[str, Tensor] | None:
        if num_rows == 1 and cache.uniform and not any(self._windows.values()):
            return None  # one row that may read everything
        related = None if parents is None else tree.ancestors(parents)
        masks = {
            kind: tree.attention_mask(
                lengths, num_rows, tree=related, depth=depth, window=window, longest=cache.width - num_rows
            )
            for kind, window in self._windows.items()
        }
        return self._as_read(masks)

    def _as_read(self, masks: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Masks (B, 1, Q, W) bool by the kind of attention, as the model reads them."""
        if self.config._attn_implementation == "eager":  # adds the mask to the scores
            lowest = torch.finfo(self.dtype).min
            masks = {k: torch.zeros_like(m, dtype=self.dtype).masked_fill_(~m, lowest) for k, m in masks.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of config and tokenizer: what a drafter must agree with."""
        # Only what differs from the defaults: a new version of transformers that adds settings changes nothing.
        config = {k: v for k, v in self.model.config.to_diff_dict().items() if k not in _VOLATILE_CONFIG_KEYS}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
        if self.tokenizer is not None:
            backend = getattr(self.tokenizer, "backend_tokenizer", None)
            described = backend.to_str() if backend is not None else sorted(self.tokenizer.get_vocab().items())
            digest.update(json.dumps(described).encode())
        return digest.hexdigest()[:16]

    @cached_property
    def weights_fingerprint(self) -> str:
        """Hash of sums and samples of every weight: what generated answers depend on beside `fingerprint`."""
        digest = hashlib.sha256()
        for name, parameter in self.model.named_parameters():
            flat = parameter.detach().flatten()
            sample = torch.cat([flat[:64], flat[-64:], flat.sum(dtype=torch.float64)[None].to(flat.dtype)])
            digest.update(name.encode() + sample.float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    @torch.no_grad()
    def check(self) -> None:
        """Compare captured states, head, cache and masks with the model's own forward pass on a few random rows.

        Raises UserError, naming the architecture, where they differ by more than rounding, or the model cannot run so.
        """
        refusal = f"Target {self.name!r}: the architecture {self.config.model_type!r} is not supported: "
        ids = torch.randint(self.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0)).to(self.device)
        try:
            own = self.model(input_ids=ids, use_cache=False, output_hidden_states=True)
            plain = self(ids, capture_layers=tuple(range(self.num_layers + 1)))
            drafted, expected = self._branching_logits(ids, own.logits)
            stepped = self._stepped_logits(ids)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{refusal}it does not run with our cache and masks ({reason}).") from error
        assert plain.hidden is not None
        pairs = {
            "the states captured between its layers are not its hidden states": (
                plain.hidden,
                torch.cat(own.hidden_states, dim=-1),
            ),
            "its logits are not what its head makes of the last state": (self.head(plain.last), own.logits),
            "branching drafts behind a cache of ragged lengths get other logits": (drafted, expected),
            "single rows behind a cache get other logits": (stepped, own.logits[:, 6:9]),
        }
        tolerance = {torch.float64: 1e-5, torch.float32: 1e-3}.get(self.dtype, 0.15)
        for what, (ours, theirs) in pairs.items():
            difference = _relative_difference(ours, theirs)
            if not difference <= tolerance:
                raise UserError(f"{refusal}{what} (by {difference:.2g} of their spread).")

    def _stepped_logits(self, ids: Tensor) -> Tensor:
        """Logits of the tokens 6 to 8 of `ids`, one at a time: passes that need no mask."""
        cache = self.new_cache(len(ids), 9)
        logits = []
        for start, stop in ((0, 6), (6, 7), (7, 8), (8, 9)):
            logits.append(self.head(self.step(ids[:, start:stop], cache).last))
            cache.commit(torch.tensor([stop - start] * len(ids)))
        return torch.cat(logits[1:], dim=1)

    def _branching_logits(self, ids: Tensor, own_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of drafts with false branches behind 6 and 4 rows of `ids`, and what they must be."""
        cache = self.new_cache(2, 13)
        self.step(ids[:, :6], cache)
        cache.commit(torch.tensor([6, 4]))
        rows = torch.tensor([[6, 0, 1, 2, 3, 7, 8], [4, 0, 1, 2, 3, 5, 6]], device=ids.device)  # nodes 1 to 4 are false
        parents = torch.tensor([[-1, 0, 0, 0, 0, 0, 5]], device=ids.device).expand(2, -1)
        logits = self.head(self.step(ids.gather(1, rows), cache, parents=parents).last)
        true = [0, 5, 6]
        return logits[:, true], torch.stack([own_logits[row, rows[row, true]] for row in range(2)])


def _relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Root mean square of the difference over the spread of the values; infinite where the shapes differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    spread = theirs.double().std(-1).mean()
    return ((ours.double() - theirs.double()).square().mean().sqrt() / spread).item()


def _max_positions(config: Any) -> int:
    """How many tokens the model reads.

    LongRoPE changes the frequencies of a whole batch once one request passes the original length. Tokens would then
    depend on the neighbours, and cached keys would be wrong, so the context ends there.
    """
    longest: int = getattr(config, "max_position_embeddings", None) or 2**20
    rope = getattr(config, "rope_parameters", None) or {}
    return min(longest, rope["original_max_position_embeddings"]) if rope.get("rope_type") == "longrope" else longest


def _decoder_layers(decoder: nn.Module, num_layers: int, name: str) -> nn.ModuleList:
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise UserError(f"Target {name!r}: found no list of {num_layers} decoder layers to capture states at.")


def _attention_windows(config: Any, name: str) -> dict[str, int]:
    """Kinds of attention and their sliding windows, 0 for none."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = set(getattr(config, "layer_types", None) or [])
    unknown = sorted(kinds - {"full_attention", "sliding_attention"})
    parts = (config, getattr(config, "attn_config", None))
    unknown += [key for key in _UNMASKABLE_KEYS if any(getattr(part, key, None) for part in parts)]
    if unknown:
        raise UserError(
            f"Target {name!r}: the architecture {config.model_type!r} is not supported: it has {', '.join(unknown)}, "
            "but drafts are checked with causal and sliding masks over a key-value cache."
        )
    if not kinds:
        return {"all": window}
    return {kind: window if kind == "sliding_attention" else 0 for kind in sorted(kinds)}
