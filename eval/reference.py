"""A plain re-implementation of what other engines compute of an exported folder: no cache, no batch, nothing of ours.

Drafter and target read the whole text again for every token. The drafters are written from the names that engines give
their tensors, and from config.json, not from our modules: what is compared with our engine is what the files say. The
target is transformers' own forward pass.

S rows, D hidden size, H heads, L captured layers, V target and Vd draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eval.rounds import Round, Trace
from models.checkpoint.native import read_tensors
from models.errors import UserError
from models.target import Target

Propose = Callable[[list[int], Sequence[Tensor]], list[int]]  # text, and the target's states of all but its last token


def decode(target: Target, propose: Propose, context: list[int], num_tokens: int) -> Trace:
    """Greedy decoding until there are `num_tokens` tokens: draft, take what the target would have said, and go on."""
    text, start, rounds = list(context), len(context), []
    _, choices = _read(target, text)
    text.append(choices[-1])
    while len(text) - start < num_tokens:
        states, _ = _read(target, text[:-1])
        draft = propose(text, states)
        _, choices = _read(target, text + draft)
        after = choices[len(text) - 1 :]
        accepted = next((i for i, token in enumerate(draft) if token != after[i]), len(draft))
        text += after[: accepted + 1]
        rounds.append(Round(draft, accepted))
    return Trace(text[start:], rounds)


def _read(target: Target, text: list[int]) -> tuple[Sequence[Tensor], list[int]]:
    """States (S, D) that enter each layer, with the last behind the final norm; and the likeliest next tokens."""
    out = target.model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
    return [state[0] for state in out.hidden_states], out.logits[0].argmax(-1).tolist()


def proposer(folder: Path, format_name: str, target: Target, num_tokens: int) -> Propose:
    """What the folder's drafter proposes; `format_name` is one of `FORMATS`."""
    config = json.loads((folder / "config.json").read_text())
    return FORMATS[format_name](folder, config, target, num_tokens)


def look_up(max_ngram: int, min_ngram: int, num_tokens: int) -> Propose:
    """What followed the first place of the longest ending that occurs earlier in the text."""

    def propose(text: list[int], states: Sequence[Tensor]) -> list[int]:
        for size in range(max_ngram, min_ngram - 1, -1):
            for start in range(len(text) - size):
                if text[start : start + size] == text[-size:]:
                    return text[start + size : start + size + num_tokens]
        return []

    return propose


def language_model(folder: Path, config: dict[str, Any], target: Target, num_tokens: int) -> Propose:
    """The next tokens of any causal language model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype, use_safetensors=True).eval()

    def propose(text: list[int], states: Sequence[Tensor]) -> list[int]:
        draft: list[int] = []
        for _ in range(num_tokens):
            logits = model(input_ids=torch.tensor([text + draft]), use_cache=False).logits[0, -1]
            draft.append(int(logits.argmax()))
        return draft

    return propose


def medusa(folder: Path, config: dict[str, Any], target: Target, num_tokens: int) -> Propose:
    """One head after the other on the last state, under vLLM's names or FasterDecoding's."""
    tensors = {name: t.to(target.dtype) for name, t in read_tensors(folder / "model.safetensors").items()}
    theirs = "medusa_num_heads" in config
    layers = config["medusa_num_layers" if theirs else "num_hidden_layers"]
    token_map = tensors.get("token_map")
    biased = config.get("medusa_fc_bias", theirs)

    def propose(text: list[int], states: Sequence[Tensor]) -> list[int]:
        draft = []
        for head in range(num_tokens):
            hidden = states[-1][-1]
            for layer in range(layers):
                name = f"{head}.{layer}.linear" if theirs else f"blocks.{head}.layers.{layer}"
                inner = tensors[f"{name}.weight"] @ hidden
                if biased:
                    inner = inner + tensors[f"{name}.bias"]
                hidden = hidden + inner * torch.sigmoid(inner)
            shared = 0 if config.get("original_lm_head") else head
            head_name = f"{head}.{layers}.weight" if theirs else f"lm_heads.{shared}.weight"
            token = int((tensors[head_name] @ hidden).argmax())
            draft.append(token if token_map is None else int(token_map[token]))
        return draft

    return propose


def eagle(folder: Path, config: dict[str, Any], target: Target, num_tokens: int) -> Propose:
    """EAGLE-1: a layer over fc([emb(x_{t+1}); f_t]); the target's head reads what comes out, which is f_{t+1} to it."""
    tensors = {name: t.to(target.dtype) for name, t in read_tensors(folder / "model.safetensors").items()}
    table, head = _own_or_targets(tensors, target)

    def propose(text: list[int], states: Sequence[Tensor]) -> list[int]:
        hidden, tokens = states[-1], list(text[1:])
        for _ in range(num_tokens):
            x = torch.cat([table[tokens], hidden], dim=-1) @ tensors["fc.weight"].t()
            if "fc.bias" in tensors:
                x = x + tensors["fc.bias"]
            for index in range(config["num_hidden_layers"]):
                name = f"layers.{index}."
                read = x if index == 0 else _norm(x, tensors[f"{name}input_layernorm.weight"], config)
                x = x + _attention(read, tensors, name, config)
                x = x + _mlp(_norm(x, tensors[f"{name}post_attention_layernorm.weight"], config), tensors, name)
            tokens.append(int((head @ x[-1]).argmax()))
            hidden = torch.cat([hidden, x[-1:]])
        return tokens[len(text) - 1 :]

    return propose


def eagle3(folder: Path, config: dict[str, Any], target: Target, num_tokens: int, behind: int = 0) -> Propose:
    """EAGLE-3: h = fc of three states; a layer reads [norm(emb); norm(h)] and adds to h; norm and head of its own.

    The file's layer ids are those of the states entering a layer, or with `behind` 1, of those that leave it.
    """
    raw = read_tensors(folder / "model.safetensors")
    offsets, tensors = raw.get("d2t"), {n: t.to(target.dtype) for n, t in raw.items() if t.is_floating_point()}
    table, _ = _own_or_targets(tensors, target)
    settings = {**config.get("transformer_layer_config", {}), **config}
    name = "layers.0." if "layers.0.hidden_norm.weight" in tensors else "midlayer."
    captured = _captured(config, target, behind)

    def propose(text: list[int], states: Sequence[Tensor]) -> list[int]:
        parts = [states[layer] for layer in captured]
        if settings.get("fc_norm"):
            parts = [_norm(part, tensors[f"fc_norm.{i}.weight"], settings) for i, part in enumerate(parts)]
        hidden, tokens = torch.cat(parts, dim=-1) @ tensors["fc.weight"].t(), list(text[1:])
        for _ in range(num_tokens):
            read = [
                _norm(table[tokens], tensors[f"{name}input_layernorm.weight"], settings),
                _norm(hidden, tensors[f"{name}hidden_norm.weight"], settings),
            ]
            x = read[1] if settings.get("norm_before_residual") else hidden
            x = x + _attention(torch.cat(read, dim=-1), tensors, name, settings)
            x = x + _mlp(_norm(x, tensors[f"{name}post_attention_layernorm.weight"], settings), tensors, name)
            normed = _norm(x[-1:], tensors["norm.weight"], settings)
            token = int((tensors["lm_head.weight"] @ normed[0]).argmax())
            tokens.append(token if offsets is None else token + int(offsets[token]))
            hidden = torch.cat([hidden, normed if settings.get("norm_output") else x[-1:]])
        return tokens[len(text) - 1 :]

    return propose


class Spelling(NamedTuple):
    """What a multi-token prediction module's tensors are called; {n} is the target's number of layers."""

    prefix: str
    token_norm: str
    state_norm: str
    projection: str
    last_norm: str
    layer: str = ""
    state_first: bool = False  # whether the projection reads [state; emb]
    hides_first: bool = True  # whether the first row's embedding is zero
    centred: bool = False  # whether norms multiply by 1 + weight


def mtp(folder: Path, config: dict[str, Any], target: Target, num_tokens: int, names: Spelling) -> Propose:
    """A layer over a projection of [norm(emb); norm(state)]; its output, normed, is the next state and the head's."""
    raw, prefix = read_tensors(folder / "model.safetensors"), names.prefix.format(n=target.num_layers)
    tensors = {name: t.to(target.dtype) + (names.centred and "norm" in name) for name, t in raw.items()}
    table, head = _own_or_targets(tensors, target)
    layer = f"{prefix}{names.layer}"

    def propose(text: list[int], states: Sequence[Tensor]) -> list[int]:
        hidden, tokens = states[-1], list(text[1:])
        for _ in range(num_tokens):
            embedded = table[tokens].clone()
            if names.hides_first:
                embedded[0] = 0
            read = [
                _norm(embedded, tensors[f"{prefix}{names.token_norm}.weight"], config),
                _norm(hidden, tensors[f"{prefix}{names.state_norm}.weight"], config),
            ]
            x = torch.cat(read[::-1] if names.state_first else read, dim=-1)
            x = x @ tensors[f"{prefix}{names.projection}.weight"].t()
            x = x + _attention(_norm(x, tensors[f"{layer}input_layernorm.weight"], config), tensors, layer, config)
            x = x + _mlp(_norm(x, tensors[f"{layer}post_attention_layernorm.weight"], config), tensors, layer)
            x = _norm(x[-1:], tensors[f"{prefix}{names.last_norm}.weight"], config)
            tokens.append(int((head @ x[0]).argmax()))
            hidden = torch.cat([hidden, x])
        return tokens[len(text) - 1 :]

    return propose


def _captured(config: dict[str, Any], target: Target, behind: int) -> list[int]:
    """The states that are fused, as those entering a layer; where the file names none, those of SafeAILab's code."""
    key = "eagle_aux_hidden_state_layer_ids"
    ids = config.get(key) or config.get("eagle_config", {}).get(key)
    if ids is None:
        return [2, target.num_layers // 2, target.num_layers - 3]
    return [index + behind for index in ids]


def _own_or_targets(tensors: dict[str, Tensor], target: Target) -> tuple[Tensor, Tensor]:
    """The embedding (V, D), which a file may bring along, and the target's head (V, D)."""
    embedding: Any = target.embedding
    return tensors.get("embed_tokens.weight", embedding.weight), target.head.weight


def _norm(x: Tensor, weight: Tensor, config: dict[str, Any]) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()


def _mlp(x: Tensor, tensors: dict[str, Tensor], name: str) -> Tensor:
    gate, up, down = (tensors[f"{name}mlp.{part}_proj.weight"].t() for part in ("gate", "up", "down"))
    gated = x @ gate
    return (gated * torch.sigmoid(gated) * (x @ up)) @ down


def _attention(x: Tensor, tensors: dict[str, Tensor], name: str, config: dict[str, Any]) -> Tensor:
    """Causal attention of rows (S, ·) at positions 0 to S − 1, head by head."""
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    groups = heads // config["num_key_value_heads"]
    query, key, value = (x @ tensors[f"{name}self_attn.{part}_proj.weight"].t() for part in "qkv")
    later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    found = []
    for head in range(heads):
        shared = head // groups
        q = _turned(query[:, head * size : (head + 1) * size], config)
        k = _turned(key[:, shared * size : (shared + 1) * size], config)
        scores = (q @ k.t() / size**0.5).masked_fill(later, float("-inf"))
        found.append(scores.softmax(-1) @ value[:, shared * size : (shared + 1) * size])
    return torch.cat(found, dim=-1) @ tensors[f"{name}self_attn.o_proj.weight"].t()


def _turned(x: Tensor, config: dict[str, Any]) -> Tensor:
    """RoPE: halves of a head (S, ·) turned against each other by position · θ^(−2i / size)."""
    rope = config["rope_parameters"]
    if rope["rope_type"] != "default":
        raise UserError(f"engine=reference knows RoPE of the default kind, not {rope['rope_type']!r}.")
    half = x.shape[-1] // 2
    frequency = rope["rope_theta"] ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.outer(torch.arange(len(x), dtype=torch.float32), frequency)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[:, :half], x[:, half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


_DEEPSEEK = Spelling("model.layers.{n}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
_QWEN3_NEXT = Spelling(
    "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.", hides_first=False, centred=True
)
FORMATS: dict[str, Callable[[Path, dict[str, Any], Target, int], Propose]] = {
    "vllm_eagle": eagle,
    "safeailab_eagle": eagle,
    "sglang_eagle": eagle,
    "vllm_eagle3": eagle3,
    "speculators_eagle3": eagle3,
    "sglang_eagle3": partial(eagle3, behind=1),
    "safeailab_eagle3": eagle3,
    "vllm_medusa": medusa,
    "fasterdecoding_medusa": medusa,
    "hf_causal_lm": language_model,
    "deepseek_mtp": partial(mtp, names=_DEEPSEEK),
    "qwen3_next_mtp": partial(mtp, names=_QWEN3_NEXT),
}
