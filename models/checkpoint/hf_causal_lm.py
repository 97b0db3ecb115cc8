"""A draft model as a Hugging Face folder: for transformers' assisted generation, vLLM's draft_model, GGUF converters.

Beside the model it holds the target's tokenizer, and a generation_config.json with which transformers drafts as many
tokens as we would. An embedding and a head that are the target's are written out, multiplied by the maps before them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from models.checkpoint import layout, llama, native, snippets
from models.checkpoint.layout import Config, Manifest, dtype_keys
from models.drafter.distilled_lm import DistilledLM, SharedEmbedding
from models.drafter.draft_lm import DraftLM
from models.target import Target
from models.target.head import Head
from models.vocab import DraftVocab

_NAME = "hf_causal_lm"
TAKES = (DraftLM, DistilledLM)
USE = f"{snippets.TRANSFORMERS}\n{snippets.vllm('draft_model')}"
_KEYS = ("architectures", "model_type", "vocab_size", "dtype")
_GENERATION = "generation_config.json"
_LEFT_OUT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
_LM = f"{DraftLM.__module__}.{DraftLM.__name__}"
_DEFAULT_DEPTH = 4


def manifest(config: Config, names: set[str]) -> Manifest:
    """The tensors that transformers' own model of such a config.json has, tied ones once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_config_of(config))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del shapes[_name_of(model, model.get_output_embeddings())]
    return Manifest(shapes, _KEYS)


def _config_of(config: Config) -> Any:
    rest = dict(config)
    return AutoConfig.for_model(rest.pop("model_type"), **rest)


def _name_of(model: nn.Module, part: nn.Module) -> str:
    return next(f"{name}.weight" for name, module in model.named_modules() if module is part)


def save(drafter: Any, target: Target, export: native.Export, folder: Path, card: str) -> None:
    """Write the folder. Raises UserError for a drafter that is no language model of the target's whole vocabulary."""
    layout.require(_NAME, drafter, TAKES, lambda: _obstacles(drafter, target))
    config, tensors = _written_out(drafter, target)
    generation = {
        "num_assistant_tokens": export.num_speculative_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
        "eos_token_id": sorted(target.stop_token_ids) or None,
    }
    generation = {key: value for key, value in generation.items() if value is not None}

    def also(temporary: Path) -> None:
        assert target.tokenizer is not None
        target.tokenizer.save_pretrained(temporary)
        (temporary / _GENERATION).write_text(json.dumps(generation, indent=2) + "\n")

    layout.write(
        folder,
        _NAME,
        drafter,
        export,
        tensors=tensors,
        config=config,
        foretell=manifest,
        more_record={"generation_config": generation},
        card=card,
        also=also,
    )


def _obstacles(drafter: Any, target: Target) -> dict[str, bool]:
    lm, shares = drafter.lm, isinstance(drafter.lm.embedding, SharedEmbedding)
    of_target = layout.obstacles_of_target(target, head=False) if shares else {}
    plain = Head.of(target.head.linear, lm.config)
    other_scale = (plain.scale, plain.softcap) != (drafter.head.scale, drafter.head.softcap)
    return {
        "its draft vocabulary is reduced (train with draft_vocab_size=null)": drafter.vocab.reduced,
        f"it has {lm.vocab_size} tokens, and the target {target.vocab_size}": lm.vocab_size != target.vocab_size,
        "the target's logits are scaled or capped, and a model of its architecture's are not": other_scale,
        "the target has no tokenizer to go with it": target.tokenizer is None,
        **of_target,
    }


def _written_out(drafter: Any, target: Target) -> tuple[Config, dict[str, Tensor]]:
    """config.json and tensors of a model that stands by itself."""
    lm, embedding = drafter.lm, drafter.lm.embedding
    shares = isinstance(embedding, SharedEmbedding)
    config = json.loads(lm.model.config.to_json_string(use_diff=False))
    config = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    if shares:
        tied = embedding.narrow is None and target.head.weight is target.embedding.weight
        config["tie_word_embeddings"] = tied
    config |= {"architectures": [type(lm.model).__name__], **dtype_keys(lm.dtype)}
    if "rope_theta" in (config.get("rope_parameters") or {}):
        config |= llama.rope_keys(config["rope_parameters"])
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(_config_of(config))
    first, last = (_name_of(plain, part) for part in (plain.get_input_embeddings(), plain.get_output_embeddings()))
    held = lm.model.state_dict()
    if isinstance(drafter, DistilledLM):  # its matrices may be products
        base = lm.model.base_model_prefix
        held |= {f"{base}.{name.removeprefix('model.')}": tensor for name, tensor in drafter.dense_tensors().items()}
    tensors = {name: tensor for name, tensor in held.items() if name in plain.state_dict()}
    if shares:
        tensors[first] = _product(embedding.weight, None if embedding.narrow is None else embedding.narrow.weight.t())
        tensors[last] = _product(drafter.head.weight, None if drafter.widen is None else drafter.widen.weight)
    if config["tie_word_embeddings"]:
        tensors.pop(last, None)
    return config, {name: tensor.to(lm.dtype) for name, tensor in tensors.items()}


def _product(wide: Tensor, narrow: Tensor | None) -> Tensor:
    """A matrix (V, D) through a map (D, D'), where there is one."""
    return wide if narrow is None else wide.to(narrow.dtype) @ narrow


def read(folder: Path) -> native.Export:
    """What the folder says of itself; the drafter is a draft model, whatever it was trained as."""
    model = {"_target_": _LM, "name_or_path": str(folder)}
    if layout.recorded_format(folder) is not None:
        contents = layout.read(folder, manifest)
        record = layout.read_json(folder / layout.RECORD, folder)
        layout.refuse_changes(
            folder / _GENERATION, record["generation_config"], layout.read_json(folder / _GENERATION, folder)
        )
        assert contents.export is not None
        return replace(contents.export, model=model)
    layout.read_json(folder / layout.CONFIG, folder)
    depth = _DEFAULT_DEPTH
    if (folder / _GENERATION).exists():
        depth = layout.read_json(folder / _GENERATION, folder).get("num_assistant_tokens") or depth
    return native.Export(folder.name, model, {"name": "", "fingerprint": "", "load": {}}, int(depth), {})


def load(folder: Path, target: Target) -> Any:
    """The draft model in the folder. Raises UserError for one that is damaged, or is no draft model for the target."""
    export = read(folder)
    if export.target["fingerprint"]:
        native.refuse_other_target(export, target, folder)
    model = {"_target_": _LM, "name_or_path": str(folder)}
    return native.build(model, target, DraftVocab(target.vocab_size)).eval()


def recognises(config: Config, names: set[str]) -> bool:
    """A causal language model of transformers."""
    causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.get("architectures") or ())
    drafts = any(part in name for name in names for part in ("eh_proj", "input_proj")) or names & {
        "fc.weight",
        "mtp.fc.weight",
    }
    return causal and not drafts and any("embed" in name or "wte" in name for name in names)
