"""A small language model as the drafter (2211.17192, 2302.01318): it reads the same tokens, and samples the draft.

The model runs in the same machinery as the target does, so whatever can be a target can be a drafter: it needs a
linear head, a cache that can be cut and safetensors. It must share the target's tokenizer; its vocabulary may be padded
to another size. The export holds the model's config, and so needs no folder.

B batch, S rows, R new rows, N drafted tokens, D hidden size of the draft model, V target and Vd draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from typing_extensions import Unpack

from models.attention_maps import states_and_maps
from models.cache import KVCache
from models.errors import UserError
from models.law_drafting import DraftsChains
from models.layers import LayerSizes, layer_config, moved_up
from models.linear import accelerate
from models.target import Target, load_target
from models.target.head import Head
from models.types import TargetFeatures
from models.vocab import DraftVocab

_DTYPES = ("float32", "float64", "bfloat16", "float16")
NEW_LAYERS = 2
_LEFT_OUT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


class LMSizes(LayerSizes, total=False):
    """Sizes of a new draft model; None, and those left out, are the target's, and `NEW_LAYERS` layers."""

    num_layers: int | None
    hidden_size: int | None


class DraftLMState:
    """Keys of all committed tokens, the last one too; what was drafted behind them is dropped at the next call."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.committed = cache.lengths  # (B,) tokens that are confirmed; 0 before the first call

    def select(self, rows: list[int]) -> None:
        """Keep the requests `rows`, in that order."""
        self.cache.select(rows)
        self.committed = self.committed[rows]


class LMDrafter(DraftsChains, nn.Module):
    """A drafter that is the language model `lm`, over those tokens of `vocab` that it has.

    `pretrained` says that its weights are not random. A `head` that is not its own is neither trained nor saved.
    """

    def __init__(self, lm: Target, vocab: DraftVocab, *, pretrained: bool, head: Head | None = None) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.capture_layers: tuple[int, ...] = ()
        self.vocab = _shared_tokens(vocab, lm.vocab_size)
        chosen = torch.arange(vocab.vocab_size) if self.vocab.token_ids is None else self.vocab.token_ids
        self._lm = (lm,)  # in a tuple: the parts that make up the drafter are the next two
        self.model = lm.model.base_model
        whole = lm.head if head is None else head
        self.head = whole if len(chosen) == lm.vocab_size else whole.rows(chosen)
        own = head is None and self.head.weight is not lm.embedding.weight
        self.lm_head = self.head.linear if own else None
        self.requires_grad_(True)

    @property
    def lm(self) -> Target:
        """The draft model."""
        return self._lm[0]

    @property
    def export_arguments(self) -> dict[str, Any]:
        """What an export says in place of a folder and sizes, so that it can be loaded without the folder."""
        config = json.loads(self.lm.model.config.to_json_string(use_diff=True))
        nothing = dict.fromkeys(("name_or_path", *get_type_hints(LMSizes)))
        return {**nothing, "config": {key: value for key, value in config.items() if key not in _LEFT_OUT}}

    def accelerate(self) -> None:
        """Prepare for inference, for good; see `Target.accelerate`."""
        self.lm.accelerate()
        accelerate([self.head.linear])

    def transformers_options(self, num_tokens: int) -> dict[str, Any]:
        """What makes transformers' `generate` draft with the same model, to be compared with."""
        generation: Any = self.lm.model.generation_config
        generation.num_assistant_tokens = num_tokens
        generation.num_assistant_tokens_schedule = "constant"
        generation.assistant_confidence_threshold = 0.0
        return {"assistant_model": self.lm.model}

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Draft logits (..., Vd) of the draft model's states (..., D)."""
        return self.head(hidden)

    def logit_parameters(self, step: int = 0) -> list[nn.Parameter]:
        """The head's own, as far as they are trained."""
        return [p for p in self.head.linear.parameters() if p.requires_grad]

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        """Yield the draft model's own states (B, S, D) at x_{t+1+s} in row t of step s = 0, 1, ...

        All steps are one pass over the text, moved up by one row each; the last s rows of step s repeat the last.
        """
        return self.steps(self.states(features)[-1], num_steps)

    def states(self, features: TargetFeatures, layers: tuple[int, ...] = ()) -> list[Tensor]:
        """For training: states (B, S, D) entering the draft model's `layers`, and the last, at x_{t+1} in row t."""
        text = torch.cat([features.token_ids[:, :1], features.next_token_ids], dim=1)
        out = self.lm(self._known(text), capture_layers=layers)
        entering = () if out.hidden is None else out.hidden.chunk(len(layers), dim=-1)
        return [state[:, 1:] for state in (*entering, out.last)]

    def states_and_maps(self, features: TargetFeatures) -> tuple[list[Tensor], list[Tensor]]:
        """For training: states (B, S, D) behind every layer, as `states` has them, and attention (B, H, S + 1, S + 1).

        Row and column t of the latter are x_t.
        """
        text = torch.cat([features.token_ids[:, :1], features.next_token_ids], dim=1)
        hidden, maps = states_and_maps(self.lm, self._known(text))
        return [state[:, 1:] for state in hidden[1:]], list(maps)

    def steps(self, hidden: Tensor, num_steps: int) -> Iterator[Tensor]:
        """The states of step 0, 1, ... from those of step 0, as `unroll` yields them."""
        for _ in range(num_steps):
            yield hidden
            hidden = moved_up(hidden)

    def new_state(self, batch_size: int, max_len: int) -> DraftLMState:
        """Memory for requests of at most `max_len` rows, those of a draft included."""
        return DraftLMState(self.lm.new_cache(batch_size, max_len + 1))  # rows are pairs of tokens: one token more

    def expander(self, state: DraftLMState, committed: TargetFeatures) -> DraftLMExpander:
        """Take in the confirmed tokens; what follows them is then told along one chain, token by token."""
        return DraftLMExpander(self, state, self._take_in(state, committed))

    def _take_in(self, state: DraftLMState, committed: TargetFeatures) -> Tensor:
        """Drop the old draft, read the confirmed tokens, and return the state (B, D) behind the last of them."""
        cache = state.cache
        cache.truncate(state.committed)
        token_ids, counts = committed.next_token_ids, committed.lengths
        if not state.committed.any():  # the first token of all is no row's next one
            token_ids, counts = torch.cat([committed.token_ids[:, :1], token_ids], dim=1), counts + 1
        token_ids = token_ids[:, : int(counts.max())]
        hidden = self.lm.step(self._known(token_ids), cache).last
        cache.commit(counts)
        state.committed = cache.lengths
        return hidden[torch.arange(len(counts), device=hidden.device), (counts - 1).to(hidden.device)]

    def _known(self, token_ids: Tensor) -> Tensor:
        """Ids of padding that only the target's vocabulary has, which no text holds, become ones that can be read."""
        return token_ids.clamp(max=self.lm.vocab_size - 1) if self.lm.vocab_size < self.vocab.vocab_size else token_ids


class DraftLM(LMDrafter):
    """The language model in the folder `name_or_path`, or a new one of the given `config` or sizes.

    Without both, the new model is a Llama of the target's sizes but for those given, with an embedding and a head of
    its own. Raises UserError for a folder that is missing, has another tokenizer or an architecture that cannot be a
    target, for a config that makes no model, and for sizes beside a model that has its own.
    """

    def __init__(
        self,
        target: Target,
        vocab: DraftVocab,
        *,
        name_or_path: str | None = None,
        config: dict[str, Any] | None = None,
        dtype: str | None = None,
        **sizes: Unpack[LMSizes],
    ) -> None:
        lm = open_lm(target, name_or_path=name_or_path, config=config, dtype=dtype, **sizes)
        super().__init__(lm, vocab, pretrained=name_or_path is not None)


class DraftLMExpander:
    """What the draft model says along a chain, as long as that finds room in its context."""

    def __init__(self, drafter: LMDrafter, state: DraftLMState, hidden: Tensor) -> None:
        self.room = (drafter.lm.max_positions + 1 - state.committed).clamp(min=0)
        self._drafter, self._cache, self._hidden = drafter, state.cache, hidden  # (B, D) behind the last token

    def root(self) -> Tensor:
        """Draft logits (B, 1, Vd) behind the last committed token."""
        return self._drafter.logits(self._hidden)[:, None]

    def below(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Draft logits (B, 1, Vd) behind the next token (B, 1) of the chain."""
        logits = self.score_chain(token_ids)
        self.keep(1)
        return logits

    def score_chain(self, token_ids: Tensor) -> Tensor:
        """Draft logits (B, Q, Vd) behind each token of the chain (B, Q), in one pass."""
        return self._drafter.logits(self._drafter.lm.step(self._drafter._known(token_ids), self._cache).last)

    def keep(self, num_tokens: int) -> None:
        """Go on behind the first tokens of those just read."""
        self._cache.commit(torch.full_like(self._cache.lengths, num_tokens))


def open_lm(
    target: Target,
    *,
    name_or_path: str | None,
    config: dict[str, Any] | None,
    dtype: str | None,
    **sizes: Unpack[LMSizes],
) -> Target:
    """The draft model in a folder, or a new one with random weights; raises UserError as `DraftLM` says."""
    given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    _refuse_contradictions(name_or_path, config, list(given))
    number_type = lm_dtype(dtype, target)
    if name_or_path is not None:
        return _read(name_or_path, target, number_type)
    if config is not None:
        lm = new_lm(_config_of(config), target, number_type)
        lm.check()
        return lm
    return new_lm(layer_config(target, **{"num_layers": NEW_LAYERS} | given), target, number_type)


def _refuse_contradictions(name_or_path: str | None, config: dict[str, Any] | None, given: list[str]) -> None:
    if name_or_path is not None and config is not None:
        raise UserError(
            "drafter.model has both name_or_path and config: a folder has a config of its own, so drop one."
        )
    if given and (name_or_path is not None or config is not None):
        own = "name_or_path" if name_or_path is not None else "config"
        raise UserError(f"drafter.model.{given[0]} shapes a new draft model, but {own} has its own sizes: drop one.")


def lm_dtype(name: str | None, target: Target) -> torch.dtype:
    """The dtype of that name, or the target's, float32 at least. Raises UserError for an unknown name."""
    if name is not None and name not in _DTYPES:
        raise UserError(f"drafter.model.dtype is {name!r}: choose {', '.join(_DTYPES)}, or null for the target's.")
    found: torch.dtype = getattr(torch, name) if name else torch.promote_types(target.dtype, torch.float32)
    return found


def _read(folder: str, target: Target, dtype: torch.dtype) -> Target:
    """The model in a folder, checked as a target is, and its tokens compared with the target's."""
    if not Path(folder).expanduser().is_dir():
        raise UserError(f"drafter.model.name_or_path: there is no folder {folder!r}.")
    name = str(dtype).removeprefix("torch.")
    try:
        lm = load_target("hf", name_or_path=folder, dtype=name, device=str(target.device))
    except UserError as error:
        raise UserError(f"drafter.model.name_or_path: the model in {folder!r} cannot draft. {error}") from error
    _refuse_other_tokens(target, lm, folder)
    return lm


def _refuse_other_tokens(target: Target, lm: Target, folder: str) -> None:
    """Ids must mean the same tokens. How text becomes tokens is the target's business alone."""
    if target.tokenizer is None or lm.tokenizer is None:
        raise UserError(
            f"Target {target.name!r} has no tokenizer to compare with that of the draft model in {folder!r}: "
            "load the target from a folder that holds its tokenizer."
        )
    theirs, ours = target.tokenizer.get_vocab(), lm.tokenizer.get_vocab()
    different = sorted(token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token))
    if different:
        ids = [vocab.get(different[0], "none") for vocab in (theirs, ours)]
        raise UserError(
            f"drafter.model.name_or_path: the model in {folder!r} has another tokenizer than {target.name!r}: "
            f"{len(different)} tokens differ ({different[0]!r} is {ids[0]} for the target and {ids[1]} there). "
            "Choose a draft model of the target's family."
        )


def _config_of(values: dict[str, Any]) -> PreTrainedConfig:
    if not isinstance(values, dict) or "model_type" not in values:
        raise UserError("drafter.model.config lacks model_type: give the whole config.json of a causal language model.")
    rest = dict(values)
    try:
        config: PreTrainedConfig = AutoConfig.for_model(rest.pop("model_type"), **rest)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(f"drafter.model.config makes no model: {_last_line(error)}") from error
    return config


def new_lm(config: PreTrainedConfig, target: Target, dtype: torch.dtype) -> Target:
    """A model with random weights."""
    try:
        model = AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"drafter.model.config makes no model: {_last_line(error)}") from error
    return Target(model.to(device=target.device, dtype=dtype), name="the new draft model")


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return (lines[-1] if isinstance(error, StrictDataclassError) else lines[0]).strip()[:200]


def _shared_tokens(vocab: DraftVocab, lm_vocab_size: int) -> DraftVocab:
    """The part of the draft vocabulary that the draft model has: vocabularies are padded to different sizes."""
    if vocab.token_ids is None and lm_vocab_size >= vocab.vocab_size:
        return vocab
    token_ids = torch.arange(vocab.vocab_size) if vocab.token_ids is None else vocab.token_ids
    return DraftVocab(vocab.vocab_size, token_ids[token_ids < lm_vocab_size])
