"""A target that is trained together with its drafter: by low-rank matrices beside its own (LoRA), or whole.

The original stays beside it, unchanged: what is trained by LoRA shares its weights, so that the original is just the
adapted target with its adapter off. What was learnt is written as a whole Hugging Face folder, or as a peft adapter
that is merged into the original's weights when it is loaded. Both ways give the same weights and the same
`fingerprint`, which is not the original's: nothing that was made for the one is taken for something of the other.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from models.errors import UserError
from models.lora import inject, merge_adapters
from models.target.target import Target

MARK = "draftsmith_adaptation"  # a key of the model's config, and so a part of the fingerprint
_PREFIX = "base_model.model."  # of peft's files
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Lora:
    """W + alpha/rank · B·A for the linear layers named in `target_modules`, or "all-linear" but the head (2106.09685).

    A (rank, K) is random and B (F, rank) zero, so that nothing is changed at first. `dropout` is of what A reads.
    """

    rank: int
    alpha: float
    dropout: float
    target_modules: str | tuple[str, ...]


class AdaptedTarget(Target):
    """`original` with an adapter, drawn from `seed`, or for None a copy of it whose every weight may be trained.

    `trained` holds the parameters, in float32 at least. They are frozen until somebody asks for their gradients.
    Raises UserError for modules that the target lacks or whose adapter drafters would not see, and for a copy in a
    dtype that would round small steps away.
    """

    def __init__(self, original: Target, lora: Lora | None, seed: int = 0) -> None:
        if lora is None and original.dtype not in (torch.float32, torch.float64):
            raise UserError(f"A target is not trained whole in {original.dtype}: use target.dtype=float32.")
        shared = [] if lora is None else [*original.model.parameters(), *original.model.buffers()]
        model = _copied(original.model, shared)
        if lora is not None:
            _attach(model, lora, seed)
        named = dict(model.named_parameters())
        chosen = [name for name in named if lora is None or "lora_" in name]
        super().__init__(model, original.tokenizer, f"{original.name} (adapted)")
        self.lora, self.trained = lora, tuple(named[name] for name in chosen)
        self._original = (original,)  # in a tuple, so that it is no part of this module

    @property
    def original(self) -> Target:
        return self._original[0]

    def accelerate(self) -> None:
        """Nothing: its weights change."""

    @contextmanager
    def learning(self, seed: int) -> Iterator[None]:
        """Passes in here have the adapter's dropout, drawn from `seed`."""
        dropouts = [m for name, m in self.model.named_modules() if ".lora_dropout." in name]
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            for dropout in dropouts:
                dropout.train()
            try:
                yield
            finally:
                for dropout in dropouts:
                    dropout.eval()

    def finished(self) -> Target:
        """What was learnt, as a target of its own that is marked as adapted."""
        model = _copied(self.model, [])
        merge_adapters(model)
        return Target(_marked(model, _digest(self._learnt(), self._scale)), self.tokenizer, self.name)

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter alone, as peft reads it. Raises UserError where there is none."""
        if self.lora is None:
            raise UserError("drafter.training.backbone.export=separate: a target that is trained whole has no adapter.")
        folder.mkdir(parents=True)
        save_file(self._learnt(), folder / _WEIGHTS, metadata={"format": "pt"})
        self.model.peft_config["default"].save_pretrained(str(folder))
        path = folder / _CONFIG
        described = json.loads(path.read_text())
        described["target_modules"] = sorted(described["target_modules"])  # peft's set has any order
        path.write_text(json.dumps(described, indent=2) + "\n")

    @property
    def _scale(self) -> float | None:
        return None if self.lora is None else self.lora.alpha / self.lora.rank

    def _learnt(self) -> dict[str, Tensor]:
        if self.lora is None:
            return {name: p.detach().cpu() for name, p in self.model.named_parameters()}
        from peft import get_peft_model_state_dict

        found = get_peft_model_state_dict(self.model)
        return {f"{_PREFIX}{name}": t.detach().cpu().contiguous() for name, t in found.items()}


def save_target(target: Target, folder: Path) -> None:
    """Write a whole target as `target.source=hf` reads it: config, weights, and its tokenizer where it has one."""
    target.model.save_pretrained(folder)
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(folder)


def merge_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with the adapter of `folder` merged into its weights, and marked as adapted.

    Raises UserError where the folder holds no LoRA in safetensors, or not one that fits the model.
    """
    from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict

    try:
        tensors = load_file(folder / _WEIGHTS)
        config = LoraConfig.from_pretrained(str(folder))
        inject(config, model)
        ours = {f"{_PREFIX}{name}": tensor for name, tensor in get_peft_model_state_dict(model).items()}
        wrong = sorted(ours.keys() ^ tensors.keys())
        wrong += sorted(name for name in ours.keys() & tensors.keys() if ours[name].shape != tensors[name].shape)
        if not wrong:
            set_peft_model_state_dict(model, {name.removeprefix(_PREFIX): t for name, t in tensors.items()})
    except Exception as error:  # whatever peft makes of a damaged or foreign folder
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"Cannot load the adapter in {str(folder)!r}: {reason}.") from error
    if wrong:
        raise UserError(f"The adapter in {str(folder)!r} does not fit the target: {', '.join(wrong[:3])}.")
    merge_adapters(model)
    return _marked(model, _digest(tensors, config.lora_alpha / config.r))


def _copied(model: PreTrainedModel, shared: Iterable[Tensor]) -> PreTrainedModel:
    """A copy of a model with the tensors `shared` in common, and without the fast routes of its layers."""
    routes = [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
    made: PreTrainedModel = copy.deepcopy(model, {id(t): t for t in shared} | {id(route): None for route in routes})
    for module in made.modules():
        vars(module).pop("forward", None)
    return made


def _attach(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    from peft import LoraConfig

    modules = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=modules,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject(config, model)
        except ValueError as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"drafter.training.backbone.target_modules={modules}: {reason}") from error
    outer: Any = (model.get_input_embeddings(), model.get_output_embeddings())
    if any("lora_" in name for part in outer for name, _ in part.named_parameters()):
        raise UserError(
            f"drafter.training.backbone.target_modules={modules}: neither the embedding nor the head can have an "
            "adapter, since drafters share them."
        )


def _marked(model: PreTrainedModel, mark: str) -> PreTrainedModel:
    config: Any = model.config
    setattr(config, MARK, mark)
    return model


def _digest(tensors: dict[str, Tensor], scale: float | None) -> str:
    """A hash of what was learnt: the same in whatever form it is written, and in whatever dtype it is loaded later."""
    digest = hashlib.sha256(repr(scale).encode())
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
