"""What an experiment takes at its full size, reckoned as docs/experiments.md says: from models without weights.

Target and drafter are built on torch's meta device with the sizes that the targets' repositories publish. What a
drafter keeps for its gradients is counted on one of the same proportions, `SCALE` times narrower, and scaled up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from models.checkpoint import native
from models.recompute import recompute_activations
from models.target import Target
from models.vocab import DraftVocab
from train import memory
from train.block_parallel import BlockParallel
from train.settings import instantiate

TOKENS = 800  # a text, prompt and answer, on average
PEAK_FLOPS, SHARE = 989e12, 0.4  # of an H100 or H200 in bfloat16, and what of it is reached
SCALE = 8
_WEIGHT_BYTES = 16  # of a CUDA device for each of DFlash's attention weights, in the one layer that is computed again
_COUNTED_BYTES = 2  # of them on the CPU, without their gradients

_QWEN3 = {"vocab_size": 151936, "num_attention_heads": 32, "head_dim": 128, "tie_word_embeddings": False}
_LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
REPOSITORIES: dict[str, dict[str, Any]] = {  # of each the numbers in its config.json
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, **_LLAMA,
    },
    "meta-llama/Llama-3.2-1B-Instruct": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "mistralai/Mistral-7B-Instruct-v0.3": {
        "model_type": "mistral", "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "sliding_window": None, **_LLAMA,
    },
    "Qwen/Qwen3-8B": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_key_value_heads": 8, **_QWEN3,
    },
    "Qwen/Qwen3-30B-A3B-Instruct-2507": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, **_QWEN3,
    },
}  # fmt: skip
_WIDTHS = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip


def regime_of(options: dict[str, Any], scale: int = 1, device: str = "meta") -> Any:
    """The training of an experiment, of models `scale` times narrower; on the CPU they have random weights."""

    def narrower(sizes: dict[str, Any]) -> dict[str, Any]:
        return {key: max(1, value // scale) if key in _WIDTHS and value else value for key, value in sizes.items()}

    repository, model = narrower(REPOSITORIES[options["target"]["name_or_path"]]), narrower(options["drafter"]["model"])
    size = options["draft_vocab_size"]
    if scale > 1:  # whose vocabulary and depth what a drafter keeps does not depend on
        repository |= {"vocab_size": 2000, "num_hidden_layers": 10}
        repository |= {"num_experts": 2, "num_experts_per_tok": 1} if "num_experts" in repository else {}
        size = None if size is None else 500
    if (name := model.pop("name_or_path", None)) is not None:
        model["config"] = narrower(REPOSITORIES[name]) | {"vocab_size": repository["vocab_size"]}
    unchecked = mock.patch.object(Target, "check")  # there are no numbers to check a draft model by
    with torch.random.fork_rng(devices=[]), torch.device(device), unchecked:
        config = AutoConfig.for_model(**repository, max_position_embeddings=8192)
        target = Target(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        vocab = DraftVocab(target.vocab_size, None if size is None else torch.arange(size, device="cpu"))
        drafter = native.build(model, target, vocab).train()
    if options["fit"]["activation_checkpointing"]:
        recompute_activations(drafter)
    return instantiate(
        options["drafter"]["training"], drafter, target, max_steps=options["fit"]["max_steps"], seed=options["seed"]
    )


def trained(regime: Any) -> int:
    """How many parameters are trained."""
    return sum(p.numel() for p in regime.parameters() if p.requires_grad)


def epochs(options: dict[str, Any]) -> float:
    """How often a text is seen: optimizer steps · batches of a step · texts of a batch, over all texts."""
    fit, batches = options["fit"], options["trainer"]["accumulate_grad_batches"]
    return float(fit["max_steps"] * batches * fit["batch_size"] / options["data"]["sizes"]["train"])


def memory_bytes(options: dict[str, Any]) -> float:
    """The most that is alive on the GPU: of the training, or while the target answers."""
    regime, fit, rows = regime_of(options), options["fit"], options["data"]["max_tokens"]
    kept = _activations(options)
    with mock.patch.object(memory, "_activations", lambda *_: kept), mock.patch.object(memory, "_bytes", _bytes):
        training = memory.peak(regime, fit["batch_size"], rows, online=True, dtype=torch.bfloat16).total
    return max(training, _answering_bytes(options, regime.target))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """As `train.memory._bytes`, of tensors that have no addresses."""
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


def _answering_bytes(options: dict[str, Any], target: Target) -> float:
    """The target, and keys and values of a chunk of its longest answers."""
    config, answers = target.config, options["data"]["answers"]
    row = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    rows = answers["chunk_size"] * (answers["max_prompt_tokens"] + answers["max_new_tokens"])
    return 2 * (sum(p.numel() for p in target.model.parameters()) + row * rows)


def _activations(options: dict[str, Any]) -> tuple[int, int]:
    """What the drafter keeps of a batch at its full width, and what one layer computes again."""
    regime = regime_of(options, SCALE, "cpu")
    grown = _grown_in_blocks if isinstance(regime, BlockParallel) else _grown
    fit, rows = options["fit"], options["data"]["max_tokens"]
    with mock.patch.object(memory, "_grown", grown):
        kept, recomputed = memory._activations(regime, fit["batch_size"], rows, torch.bfloat16)
    if isinstance(regime, BlockParallel):
        blocks, block = fit["batch_size"] * regime.num_anchors, regime.drafter.block_size
        weights = SCALE * regime.drafter.config.num_attention_heads * blocks * block * (rows + block)
        recomputed += (_WEIGHT_BYTES - _COUNTED_BYTES) * weights
    return kept, recomputed


def _grown(regime: Any, batch_size: int, num_rows: int, dtype: torch.dtype) -> int:
    """As `train.memory._grown`, of the wide drafter: weights grow by SCALE², rows and heads by SCALE."""
    sizes = [(b, s) for b in (1, 2) for s in (16, 32)]
    kept = torch.tensor([float(memory._kept(regime, b, s, dtype)) for b, s in sizes], dtype=torch.float64)
    terms = torch.tensor([[1, b * s, s * s, b * s * s] for b, s in sizes], dtype=torch.float64)
    weights, each, masks, pairs = torch.linalg.solve(terms, kept).clamp(min=0).tolist()
    tokens = batch_size * num_rows
    return round(SCALE**2 * weights + SCALE * each * tokens + masks * num_rows**2 + SCALE * pairs * tokens * num_rows)


def _grown_in_blocks(regime: Any, batch_size: int, num_rows: int, dtype: torch.dtype) -> int:
    """The same of blocks behind `num_anchors` rows of each text, of which few are counted."""
    drafter, few = regime.drafter, 8

    def kept(anchors: int, rows: int = num_rows) -> int:
        frozen = regime.target.model.parameters()
        place = torch.arange(anchors)[None]
        with memory.saved_storages([*drafter.parameters(), *frozen]) as found, memory._in(regime, dtype):
            told = drafter.told_behind(memory._zeros(regime, 1, rows), place)
        del told
        return sum(found.values())

    weights = 2 * trained(regime)
    block = (kept(2 * few) - kept(few)) / few
    each = kept(few) - few * block - weights
    return round(SCALE**2 * weights + SCALE * batch_size * (each + block * regime.num_anchors))


def disk_bytes(options: dict[str, Any]) -> float:
    """Two checkpoints and one that is being written, each of weights and two moments, and the best weights."""
    return (3 * 12 + 4) * trained(regime_of(options))


def state_bytes(options: dict[str, Any]) -> int:
    """Of the target's states that a cache would keep of a token."""
    regime = regime_of(options)
    return 2 * len(regime.capture_layers) * regime.target.hidden_size


def hours_per_epoch(options: dict[str, Any]) -> float:
    """Products alone, at SHARE of the peak."""
    regime = regime_of(options)
    parameters = sum(p.numel() for p in regime.target.model.parameters())
    experts = [p.numel() for name, p in regime.target.model.named_parameters() if ".experts." in name]
    config = regime.target.config
    if experts:
        parameters -= sum(experts) * (1 - config.num_experts_per_tok / config.num_experts)
    passes = {"eagle3": regime.num_steps, "mtp": regime.num_steps}.get(options["drafter"]["name"], 1.0)
    if isinstance(regime, BlockParallel):
        passes = regime.num_anchors * regime.drafter.block_size / TOKENS
    each = 8 if options["fit"]["activation_checkpointing"] else 6
    tokens = options["data"]["sizes"]["train"] * TOKENS
    return (2 * parameters + each * trained(regime) * passes) * tokens / (SHARE * PEAK_FLOPS) / 3600
