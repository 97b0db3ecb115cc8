"""A plain re-implementation of what other engines compute of an exported folder: no cache, no batch, nothing of ours.

Drafter and target read the whole text again for every token. The drafters are written from the names that engines give
their tensors, and from config.json, not from our modules: what is compared with our engine is what the files say. The
target is transformers' own forward pass.

S rows, D hidden size, H heads, L captured layers, N drafted tokens, V target and Vd draft vocabulary.
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
from models.checkpoint import layout
from models.errors import UserError
from models.target import Target


class States(NamedTuple):
    """Of a text (S, D): those that enter each layer, the last of them behind the final norm; and what enters that."""

    entering: Sequence[Tensor]
    before_norm: Tensor


# Of a text, and the target's states of all but its last token: the next tokens, and their logits (N, V), −∞ where none
# is drafted.
Draft = Callable[[list[int], States], tuple[list[int], Tensor]]
Propose = Callable[[list[int], States], list[int]]


def decode(target: Target, propose: Propose, context: list[int], num_tokens: int) -> Trace:
    """Greedy decoding until there are `num_tokens` tokens: draft, take what the target would have said, and go on."""
    text, start, rounds = list(context), len(context), []
    _, choices = read(target, text)
    text.append(choices[-1])
    while len(text) - start < num_tokens:
        states, _ = read(target, text[:-1])
        draft = propose(text, states)
        _, choices = read(target, text + draft)
        after = choices[len(text) - 1 :]
        accepted = next((i for i, token in enumerate(draft) if token != after[i]), len(draft))
        text += after[: accepted + 1]
        rounds.append(Round(draft, accepted))
    return Trace(text[start:], rounds)


def read(target: Target, text: list[int]) -> tuple[States, list[int]]:
    """The target's states of a text, and the likeliest next token behind each of its tokens."""
    found: list[Any] = []
    hook = target.layers[-1].register_forward_hook(lambda module, given, output: found.append(output))
    try:
        ids = torch.tensor([text], device=target.device)
        out = target.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    finally:
        hook.remove()
    last = found[0] if isinstance(found[0], Tensor) else found[0][0]
    return States([state[0] for state in out.hidden_states], last[0]), out.logits[0].argmax(-1).tolist()


def drafter(folder: Path, format_name: str, target: Target, num_tokens: int) -> Draft:
    """What the folder's drafter drafts; `format_name` is one of `FORMATS`."""
    config = json.loads((folder / "config.json").read_text())
    return FORMATS[format_name](folder, config, target, num_tokens)


def proposer(folder: Path, format_name: str, target: Target, num_tokens: int) -> Propose:
    """As `drafter`, the tokens alone."""
    draft = drafter(folder, format_name, target, num_tokens)
    return lambda text, states: draft(text, states)[0]


def look_up(max_ngram: int, min_ngram: int, num_tokens: int) -> Propose:
    """What followed the first place of the longest ending that occurs earlier in the text."""

    def propose(text: list[int], states: States) -> list[int]:
        for size in range(max_ngram, min_ngram - 1, -1):
            for start in range(len(text) - size):
                if text[start : start + size] == text[-size:]:
                    return text[start + size : start + size + num_tokens]
        return []

    return propose


class Tensors(dict[str, Tensor]):
    """Those of a folder on the target's device, in its dtype where they are floating-point numbers."""

    def __init__(self, folder: Path, target: Target) -> None:
        raw = layout.read_tensors(folder)
        place, dtype = target.device, target.dtype
        super().__init__((name, t.to(place, dtype if t.is_floating_point() else t.dtype)) for name, t in raw.items())
        self._folder = folder

    def __missing__(self, name: str) -> Tensor:
        raise UserError(f"{str(self._folder)!r} lacks {name}.")


def language_model(folder: Path, config: dict[str, Any], target: Target, num_tokens: int) -> Draft:
    """The next tokens of any causal language model."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype, use_safetensors=True)
    model.to(target.device).eval()

    def draft(text: list[int], states: States) -> tuple[list[int], Tensor]:
        def step(tokens: list[int]) -> Tensor:
            ids = torch.tensor([tokens], device=target.device)
            logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, -1]
            return logits

        return _chain(text, num_tokens, step)

    return draft


def medusa(folder: Path, config: dict[str, Any], target: Target, num_tokens: int) -> Draft:
    """One head after the other on the last state, under vLLM's names or FasterDecoding's."""
    tensors = Tensors(folder, target)
    theirs = "medusa_num_heads" in config
    layers = config["medusa_num_layers" if theirs else "num_hidden_layers"]
    biased = config.get("medusa_fc_bias", theirs)

    def draft(text: list[int], states: States) -> tuple[list[int], Tensor]:
        laws = []
        for head in range(num_tokens):
            hidden = states.entering[-1][-1]
            for layer in range(layers):
                name = f"{head}.{layer}.linear" if theirs else f"blocks.{head}.layers.{layer}"
                inner = tensors[f"{name}.weight"] @ hidden
                if biased:
                    inner = inner + tensors[f"{name}.bias"]
                hidden = hidden + inner * torch.sigmoid(inner)
            shared = 0 if config.get("original_lm_head") else head
            head_name = f"{head}.{layers}.weight" if theirs else f"lm_heads.{shared}.weight"
            laws.append(_spread(tensors[head_name] @ hidden, tensors.get("token_map"), target))
        return [int(law.argmax()) for law in laws], torch.stack(laws)

    return draft


def eagle(folder: Path, config: dict[str, Any], target: Target, num_tokens: int) -> Draft:
    """EAGLE-1: a layer over fc([emb(x_{t+1}); f_t]); the target's head reads what comes out, which is f_{t+1} to it."""
    tensors = Tensors(folder, target)
    table, head = _own_or_targets(tensors, target)

    def draft(text: list[int], states: States) -> tuple[list[int], Tensor]:
        hidden = [states.entering[-1]]

        def step(tokens: list[int]) -> Tensor:
            x = torch.cat([table[tokens[1:]], torch.cat(hidden)], dim=-1) @ tensors["fc.weight"].t()
            if "fc.bias" in tensors:
                x = x + tensors["fc.bias"]
            for index in range(config["num_hidden_layers"]):
                name = f"layers.{index}."
                read = x if index == 0 else _norm(x, tensors[f"{name}input_layernorm.weight"], config)
                x = x + _attention(read, tensors, name, config)
                x = x + _mlp(_norm(x, tensors[f"{name}post_attention_layernorm.weight"], config), tensors, name)
            hidden.append(x[-1:])
            return head @ x[-1]

        return _chain(text, num_tokens, step)

    return draft


def eagle3(folder: Path, config: dict[str, Any], target: Target, num_tokens: int, behind: int = 0) -> Draft:
    """EAGLE-3: h = fc of three states; a layer reads [norm(emb); norm(h)] and adds to h; norm and head of its own.

    The file's layer ids are those of the states entering a layer, or with `behind` 1, of those that leave it.
    """
    tensors = Tensors(folder, target)
    table, _ = _own_or_targets(tensors, target)
    wrapped = "transformer_layer_config" in config
    settings = {"norm_before_residual": wrapped, **config.get("transformer_layer_config", {}), **config}
    name = "layers.0." if "layers.0.hidden_norm.weight" in tensors else "midlayer."
    captured = _captured(config, target, behind)

    def draft(text: list[int], states: States) -> tuple[list[int], Tensor]:
        parts = [states.entering[layer] for layer in captured]
        if settings.get("fc_norm"):
            parts = [_norm(part, tensors[f"fc_norm.{i}.weight"], settings) for i, part in enumerate(parts)]
        hidden = [torch.cat(parts, dim=-1) @ tensors["fc.weight"].t()]

        def step(tokens: list[int]) -> Tensor:
            before = torch.cat(hidden)
            embedded = _norm(table[tokens[1:]], tensors[f"{name}input_layernorm.weight"], settings)
            normed = _norm(before, tensors[f"{name}hidden_norm.weight"], settings)
            x = normed if settings["norm_before_residual"] else before
            x = x + _attention(torch.cat([embedded, normed], dim=-1), tensors, name, settings)
            x = x + _mlp(_norm(x, tensors[f"{name}post_attention_layernorm.weight"], settings), tensors, name)
            last = _norm(x[-1:], tensors["norm.weight"], settings)
            hidden.append(last if settings.get("norm_output") else x[-1:])
            return _spread(tensors["lm_head.weight"] @ last[0], _token_ids(tensors), target)

        return _chain(text, num_tokens, step)

    return draft


def dflash(folder: Path, config: dict[str, Any], target: Target, num_tokens: int) -> Draft:
    """DFlash: one block of masks behind the text, and DSpark's correction by the token before, where there is one."""
    tensors, masks = Tensors(folder, target), config["dflash_config"]
    table, head = _own_or_targets(tensors, target)
    head, token_ids = tensors.get("lm_head.weight", head), _token_ids(tensors)
    corrected = "markov_head.markov_w1.weight" in tensors

    def draft(text: list[int], states: States) -> tuple[list[int], Tensor]:
        captured = torch.cat([states.entering[layer + 1] for layer in masks["target_layer_ids"]], dim=-1)
        context = _norm(captured @ tensors["fc.weight"].t(), tensors["hidden_norm.weight"], config)
        x = table[[text[-1], *[masks["mask_token_id"]] * (config["block_size"] - 1)]]
        for index in range(config["num_hidden_layers"]):
            name = f"layers.{index}."
            read = torch.cat([context, _norm(x, tensors[f"{name}input_layernorm.weight"], config)])
            x = x + _attention(read, tensors, name, config, causal=False)[len(context) :]
            x = x + _mlp(_norm(x, tensors[f"{name}post_attention_layernorm.weight"], config), tensors, name)
        told = _norm(x, tensors["norm.weight"], config)[0 if corrected else 1 :]

        def step(tokens: list[int]) -> Tensor:
            logits = head @ told[len(tokens) - len(text)]
            if corrected:
                first, second = (tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
                logits = logits + second @ first[tokens[-1]]
            return _spread(logits, token_ids, target)

        return _chain(text, min(num_tokens, len(told)), step)

    return draft


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
    before_norm: bool = False  # whether the target's state is the one that enters the final norm
    centred: bool = False  # whether norms multiply by 1 + weight


def mtp(folder: Path, config: dict[str, Any], target: Target, num_tokens: int, names: Spelling) -> Draft:
    """A layer over a projection of [norm(emb); norm(state)]; its output, normed, is the next state and the head's."""
    prefix = names.prefix.format(n=target.num_layers)
    tensors = Tensors(folder, target)
    if names.centred:
        tensors.update({name: t + 1 for name, t in tensors.items() if "norm" in name})
    table, head = _own_or_targets(tensors, target)
    layer = f"{prefix}{names.layer}"

    def draft(text: list[int], states: States) -> tuple[list[int], Tensor]:
        hidden = [states.before_norm if names.before_norm else states.entering[-1]]

        def step(tokens: list[int]) -> Tensor:
            embedded = table[tokens[1:]].clone()
            if names.hides_first:
                embedded[0] = 0
            read = [
                _norm(embedded, tensors[f"{prefix}{names.token_norm}.weight"], config),
                _norm(torch.cat(hidden), tensors[f"{prefix}{names.state_norm}.weight"], config),
            ]
            x = torch.cat(read[::-1] if names.state_first else read, dim=-1)
            x = x @ tensors[f"{prefix}{names.projection}.weight"].t()
            x = x + _attention(_norm(x, tensors[f"{layer}input_layernorm.weight"], config), tensors, layer, config)
            x = x + _mlp(_norm(x, tensors[f"{layer}post_attention_layernorm.weight"], config), tensors, layer)
            hidden.append(_norm(x[-1:], tensors[f"{prefix}{names.last_norm}.weight"], config))
            return head @ hidden[-1][0]

        return _chain(text, num_tokens, step)

    return draft


def _chain(text: list[int], num_tokens: int, step: Callable[[list[int]], Tensor]) -> tuple[list[int], Tensor]:
    """The likeliest tokens behind `text`, one after the other; `step` tells the logits (V,) behind all so far."""
    tokens, laws = list(text), []
    for _ in range(num_tokens):
        laws.append(step(tokens))
        tokens.append(int(laws[-1].argmax()))
    return tokens[len(text) :], torch.stack(laws)


def _spread(logits: Tensor, token_ids: Tensor | None, target: Target) -> Tensor:
    """Logits of the draft vocabulary `token_ids` (Vd,) as those of all tokens (V,)."""
    if token_ids is None:
        return logits
    return logits.new_full((target.vocab_size,), float("-inf")).index_copy(0, token_ids, logits)


def _token_ids(tensors: dict[str, Tensor]) -> Tensor | None:
    """The target's ids (Vd,) of a draft vocabulary."""
    offsets = tensors.get("d2t")
    return None if offsets is None else torch.arange(len(offsets), device=offsets.device) + offsets


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


def _linear(x: Tensor, tensors: dict[str, Tensor], name: str) -> Tensor:
    y = x @ tensors[f"{name}.weight"].t()
    return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y


def _attention(
    x: Tensor, tensors: dict[str, Tensor], name: str, config: dict[str, Any], *, causal: bool = True
) -> Tensor:
    """Attention of rows (S, ·) at positions 0 to S − 1, head by head; queries and keys have norms in some files."""
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    groups = heads // config["num_key_value_heads"]
    query, key, value = (_linear(x, tensors, f"{name}self_attn.{part}_proj") for part in "qkv")
    norms = [tensors.get(f"{name}self_attn.{part}_norm.weight") for part in "qk"]
    unread = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
    unread = unread if causal else torch.zeros_like(unread)
    found = []
    for head in range(heads):
        shared = head // groups
        own = query[:, head * size : (head + 1) * size], key[:, shared * size : (shared + 1) * size]
        q, k = (
            _turned(rows if norm is None else _norm(rows, norm, config), config)
            for rows, norm in zip(own, norms, strict=True)
        )
        scores = (q @ k.t() / size**0.5).masked_fill(unread, float("-inf"))
        found.append(scores.softmax(-1) @ value[:, shared * size : (shared + 1) * size])
    return torch.cat(found, dim=-1) @ tensors[f"{name}self_attn.o_proj.weight"].t()


def _turned(x: Tensor, config: dict[str, Any]) -> Tensor:
    """RoPE: halves of a head (S, ·) turned against each other by position · θ^(−2i / size)."""
    rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config["rope_theta"]}
    if rope["rope_type"] != "default" or config.get("rope_scaling"):
        raise UserError(f"engine=reference knows RoPE of the default kind, not {rope['rope_type']!r}.")
    half = x.shape[-1] // 2
    frequency = rope["rope_theta"] ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angle = torch.outer(torch.arange(len(x), dtype=torch.float32, device=x.device), frequency)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[:, :half], x[:, half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


_DEEPSEEK = Spelling("model.layers.{n}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
_MIMO = Spelling(
    "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm",
    state_first=True, before_norm=True,
)  # fmt: skip
_QWEN3_NEXT = Spelling(
    "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.", hides_first=False, centred=True
)
FORMATS: dict[str, Callable[[Path, dict[str, Any], Target, int], Draft]] = {
    "vllm_eagle": eagle,
    "safeailab_eagle": eagle,
    "sglang_eagle": eagle,
    "vllm_eagle3": eagle3,
    "speculators_eagle3": eagle3,
    "sglang_eagle3": partial(eagle3, behind=1),
    "safeailab_eagle3": eagle3,
    "vllm_dflash": dflash,
    "vllm_dspark": dflash,
    "vllm_medusa": medusa,
    "fasterdecoding_medusa": medusa,
    "hf_causal_lm": language_model,
    "deepseek_mtp": partial(mtp, names=_DEEPSEEK),
    "mimo_mtp": partial(mtp, names=_MIMO),
    "qwen3_next_mtp": partial(mtp, names=_QWEN3_NEXT),
}
