"""Tiny targets with random weights, one per Hugging Face architecture.

Every weight is random, norms and biases too: a dropped bias or a norm applied twice then shows in the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from models.target import Target

VOCAB_SIZE = 61
WINDOW = 5  # smaller than every context in the tests

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "eager"}

# Supported architectures: name → Hugging Face model type, and what differs from _COMMON.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biased": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama3_rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 24,
            }
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2_mixed": ("qwen2", {"use_sliding_window": True, **_MIXED}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mistral_full": ("mistral", {"sliding_window": None}),
    "ministral": ("ministral", {"head_dim": 8, **_MIXED}),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2": (
        "gemma2",
        {"head_dim": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, **_MIXED},
    ),
    "gemma3": ("gemma3_text", {"head_dim": 8, **_MIXED}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "phi": ("phi", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere2": ("cohere2", {"logit_scale": 0.5, "head_dim": 8, **_MIXED}),
    "granite": (
        "granite",
        {"logits_scaling": 3.0, "residual_multiplier": 0.7, "embedding_multiplier": 2.0, "attention_multiplier": 0.2},
    ),
    "opt": ("opt", {"ffn_dim": 48, "init_std": 0.2, "word_embed_proj_dim": 32, "pad_token_id": 0}),
    "falcon": ("falcon", {"multi_query": True, "new_decoder_architecture": False, "alibi": False, "bias": True}),
    "falcon_grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    "stablelm": ("stablelm", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _MIXED),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "smollm3": ("smollm3", {"use_sliding_window": False, "no_rope_layers": [1, 0, 1]}),
    "smollm3_rope": ("smollm3", {"use_sliding_window": False, "no_rope_layers": [1, 1, 1]}),
    "glm4": ("glm4", {"head_dim": 8}),
    "exaone4": ("exaone4", {"head_dim": 8, **_MIXED}),
    "gptj": ("gptj", {"rotary_dim": 4}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "mixtral": ("mixtral", {"sliding_window": WINDOW, "num_local_experts": 4, **_EXPERTS}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "head_dim": 8, **_EXPERTS}),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 4, "head_dim": 8, "rope_parameters": {"rope_type": "default"}, **_MIXED, **_EXPERTS},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            **_EXPERTS,
        },
    ),
}


def random_model(
    architecture: str = "llama", *, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A random model of `architecture`, its config changed by `overrides`."""
    model_type, options = ARCHITECTURES[architecture]
    known = AutoConfig.for_model(model_type)
    common = {key: value for key, value in _COMMON.items() if hasattr(known, key)}
    config = AutoConfig.for_model(model_type, **(common | options | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def random_target(
    architecture: str = "llama", *, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any
) -> Target:
    """A target around `random_model`, named after its architecture."""
    return Target(random_model(architecture, dtype=dtype, seed=seed, **overrides), name=architecture)


@contextmanager
def layer_calls(target: Target) -> Iterator[list[int]]:
    """The numbers of the target's layers that are run within, in turn, whichever forward pass it has."""
    calls: list[int] = []
    hooks = [
        layer.register_forward_hook(lambda *_, index=index: calls.append(index))
        for index, layer in enumerate(target.layers)
    ]
    lean: Any = target._lean
    layers = [] if lean is None else lean._layers

    def counted(index: int, layer: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *inputs: calls.append(index) or layer(*inputs)  # type: ignore[func-returns-value]

    try:
        if lean is not None:
            lean._layers = [counted(index, layer) for index, layer in enumerate(layers)]
        yield calls
    finally:
        if lean is not None:
            lean._layers = layers
        for hook in hooks:
            hook.remove()
