"""Drafters in every format that they go into, as files in a folder, and a plain engine for each architecture.

The engines know a drafter by its file alone: they read tensors by the names that its loader reads, the target by
transformers' own forward pass, and compute everything again for each drafted token, with no cache.

S rows, D hidden size, V target vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint import format_of, native
from models.sampling import SamplingParams
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.characters import with_characters
from tests.helpers.drafters import ReplayedRandom, build_shaken, prompts, recorded_logits, stacked, tiny_target
from tests.helpers.models import random_model

VOCAB_SIZE = 56
TOKENS = 4
IDS = prompts([13], VOCAB_SIZE, seed=3)[0]
EAGLE, EAGLE3 = "models.drafter.eagle.EagleDrafter", "models.drafter.eagle3.Eagle3Drafter"
MEDUSA, MTP = "models.drafter.medusa.MedusaDrafter", "models.drafter.mtp.SequentialMTP"
DRAFT_LM, DISTILLED = "models.drafter.draft_lm.DraftLM", "models.drafter.distilled_lm.DistilledLM"
LOW_RANK = {"rank": 8, "share": "layers", "train_shared": True}
ALL_OF_EAGLE31 = {"fc_norm": True, "norm_output": True, "norm_before_residual": True}


@dataclass(frozen=True)
class Case:
    """A drafter that goes into a format, by its class and arguments; `reduced`: half of the vocabulary."""

    format: str
    drafter: str
    arguments: dict[str, Any] = field(default_factory=dict)
    reduced: bool = False
    target: str = "four"
    save: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> dict[str, Any]:
        return {"_target_": self.drafter, **self.arguments}

    def __str__(self) -> str:
        about = "-".join([self.drafter.rpartition(".")[2], *map(str, self.arguments), *self.save])
        return f"{self.format}-{about}{'-reduced' if self.reduced else ''}"


CASES = [
    Case("vllm_eagle", EAGLE),
    Case("vllm_eagle", EAGLE, {"num_layers": 2, "num_key_value_heads": 4, "intermediate_size": 40}),
    Case("safeailab_eagle", EAGLE),
    Case("safeailab_eagle", EAGLE, {"fc_bias": True}),
    Case("sglang_eagle", EAGLE),
    Case("sglang_eagle", EAGLE, {"fc_bias": True}),
    Case("vllm_eagle3", EAGLE3, reduced=True),
    Case("vllm_eagle3", EAGLE3, {**ALL_OF_EAGLE31, "capture_layers": [0, 1, 2, 3]}),
    Case("sglang_eagle3", EAGLE3, {"head_dim": 32}, reduced=True),
    Case("safeailab_eagle3", EAGLE3, reduced=True, target="eight"),
    Case("speculators_eagle3", EAGLE3, reduced=True),
    Case("speculators_eagle3", EAGLE3, ALL_OF_EAGLE31),
    Case("vllm_medusa", MEDUSA, {"num_heads": 4, "num_layers": 2}),
    Case("vllm_medusa", MEDUSA, {"num_heads": 4, "unembedding": "shared"}, reduced=True),
    Case("fasterdecoding_medusa", MEDUSA, {"num_heads": 4}),
    Case("hf_causal_lm", DRAFT_LM, {"num_layers": 1}),
    Case("hf_causal_lm", DISTILLED, {"start": "first_layers", "num_layers": 2, "embeddings": "shared"}),
    Case("hf_causal_lm", DISTILLED, {"num_layers": 1, "hidden_size": 32, "head_dim": 16, "embeddings": "shared"}),
    Case("hf_causal_lm", DISTILLED, {"num_layers": 2, "low_rank": LOW_RANK}),
    Case("deepseek_mtp", MTP, {"hide_first": True}),
    Case("deepseek_mtp", MTP, {"hide_first": True}, save={"stitch": True}),
    Case("qwen3_next_mtp", MTP),
    Case("mimo_mtp", MTP, {"hide_first": True, "before_norm": True}, target="qwen2"),
    Case("mimo_mtp", MTP, {"hide_first": True, "before_norm": True}, target="qwen2", save={"stitch": True}),
]


@cache
def target_of(name: str) -> Target:
    """A random target in float64 with a tokenizer: `four` or `eight` layers, or one of Qwen2's shape."""
    if name == "qwen2":
        model = random_model("qwen2", vocab_size=VOCAB_SIZE, num_hidden_layers=2, hidden_size=64)
        return with_characters(Target(model, name="qwen2"))
    layers = {"four": 4, "eight": 8}[name]
    return with_characters(tiny_target(torch.float64, vocab_size=VOCAB_SIZE, num_hidden_layers=layers))


def drafter_of(case: Case) -> Any:
    """The drafter with random weights."""
    ids = torch.arange(0, VOCAB_SIZE, 2) if case.reduced else None
    return build_shaken(case.model, target_of(case.target), DraftVocab(VOCAB_SIZE, ids))


def described(case: Case) -> native.Export:
    """What its export says of itself."""
    target = target_of(case.target)
    place = {"name": target.name, "fingerprint": target.fingerprint, "load": {"source": "tiny"}}
    return native.Export("mine", case.model, place, 3, {"data": None})


def save(case: Case, folder: Path) -> Any:
    """Write the drafter to `folder`; returns it."""
    drafter = drafter_of(case)
    format_of(case.format).save(drafter, target_of(case.target), described(case), folder, "# a card\n", **case.save)
    return drafter


def tensor_file(case: Case) -> str:
    """The file that holds the drafter's tensors."""
    return "model-mtp.safetensors" if case.save else "model.safetensors"


def edited(folder: Path, file: str, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a file in place."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)


def edited_config(folder: Path, change: Callable[[dict[str, Any]], Any], name: str = "config.json") -> None:
    """Change a JSON file in place."""
    config = json.loads((folder / name).read_text())
    change(config)
    (folder / name).write_text(json.dumps(config))


def drafted(drafter: Any, target: Target, ids: list[int] = IDS) -> tuple[Tensor, list[int]]:
    """Greedy draft logits (TOKENS, V), −inf outside the draft vocabulary, and tokens behind `ids`."""
    text = torch.tensor([ids])
    with torch.no_grad(), recorded_logits(drafter) as logits:
        hidden = target(text[:, :-1], capture_layers=drafter.capture_layers).hidden
        features = TargetFeatures(text[:, :-1], text[:, 1:], hidden, torch.tensor([len(ids) - 1]))
        draft = drafter.propose(
            drafter.new_state(1, 32),
            features,
            num_speculative_tokens=TOKENS,
            sampling=SamplingParams(0.0),
            random=ReplayedRandom([]),
        )
    law = torch.full((TOKENS, target.vocab_size), float("-inf"), dtype=target.dtype)
    law[:, drafter.vocab.to_target(torch.arange(drafter.vocab.size))] = stacked(logits, draft)[0]
    return law, draft.token_ids[0].tolist()


@dataclass
class PlainEngine:
    """What a folder and a target hold, and a decoder layer written from the tensors' names."""

    folder: Path
    target: Target

    def __post_init__(self) -> None:
        self.config = json.loads((self.folder / "config.json").read_text())
        self.layer = self.config.get("transformer_layer_config", self.config)
        self.tensors = load_file(self.folder / "model.safetensors")
        self.head = self.target.model.lm_head.weight
        self.embedding = self.target.model.get_input_embeddings().weight

    def states(self, ids: list[int]) -> tuple[Tensor, ...]:
        """transformers' own hidden_states of the text, (S, D) each: those entering layer 0, 1, ..; last the head's."""
        with torch.no_grad():
            found = self.target.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        return tuple(state[0] for state in found)

    def before_norm(self, ids: list[int]) -> Tensor:
        """What enters the target's final norm: (S, D)."""
        found: list[Tensor] = []
        hook = self.target.model.base_model.norm.register_forward_pre_hook(lambda module, given: found.append(given[0]))
        self.states(ids)
        hook.remove()
        return found[0][0]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.layer["rms_norm_eps"]).sqrt() * self.tensors[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.tensors.get(f"{name}.bias")
        return x @ self.tensors[f"{name}.weight"].t() + (0 if bias is None else bias)

    def turned(self, x: Tensor) -> Tensor:
        """RoPE on (S, E) of one head."""
        half = x.shape[-1] // 2
        frequencies = self.layer["rope_theta"] ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = (torch.arange(len(x), dtype=torch.float32)[:, None] * frequencies).to(x)
        first, second = x[:, :half], x[:, half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def attention(self, x: Tensor, prefix: str) -> Tensor:
        """Causal attention over all rows of what the layer reads, head by head."""
        heads = self.layer["num_attention_heads"]
        size = self.layer.get("head_dim") or self.layer["hidden_size"] // heads
        group = heads // self.layer["num_key_value_heads"]
        queries, keys, values = (self.linear(x, f"{prefix}{part}_proj").split(size, dim=-1) for part in "qkv")
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        out = []
        for head, query in enumerate(queries):
            scores = self.turned(query) @ self.turned(keys[head // group]).t() / size**0.5
            out.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ values[head // group])
        return self.linear(torch.cat(out, dim=-1), f"{prefix}o_proj")

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        gate = self.linear(x, f"{prefix}gate_proj")
        return self.linear(gate * gate.sigmoid() * self.linear(x, f"{prefix}up_proj"), f"{prefix}down_proj")

    def behind(self, x: Tensor, residual: Tensor, prefix: str) -> Tensor:
        """A layer's output: attention over x on top of the residual stream, and the MLP behind a norm."""
        hidden = residual + self.attention(x, f"{prefix}self_attn.")
        return hidden + self.mlp(self.norm(hidden, f"{prefix}post_attention_layernorm.weight"), f"{prefix}mlp.")


Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # tokens (S,), states (S, D) → logits (V,), states fed back


def chain(states: Tensor, ids: list[int], num_tokens: int, step: Step) -> tuple[Tensor, list[int]]:
    """Draft behind `ids` greedily: row t reads token t + 1 beside the state of token t, or what was fed back for it.

    Returns logits (num_tokens, V) and tokens.
    """
    tokens, rows, logits = list(ids[1:]), states, []
    for _ in range(num_tokens):
        law, outputs = step(torch.tensor(tokens), rows)
        logits.append(law)
        tokens.append(int(law.argmax()))
        rows = torch.cat([rows, outputs[-1:]])
    return torch.stack(logits), tokens[len(ids) - 1 :]


def eagle(engine: PlainEngine, ids: list[int], num_tokens: int) -> tuple[Tensor, list[int]]:
    """EAGLE-1: fc reads [emb; state]; layer 0 has no input norm, others have; the target's head reads the output."""

    def step(tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        x = engine.linear(torch.cat([engine.embedding[tokens], states], dim=-1), "fc")
        for index in range(engine.config["num_hidden_layers"]):
            prefix = f"layers.{index}."
            x = engine.behind(x if index == 0 else engine.norm(x, f"{prefix}input_layernorm.weight"), x, prefix)
        return engine.head @ x[-1], x

    return chain(engine.states(ids[:-1])[-1], ids, num_tokens, step)


def eagle3(engine: PlainEngine, ids: list[int], num_tokens: int, layers: list[int]) -> tuple[Tensor, list[int]]:
    """EAGLE-3 on the states that enter `layers`."""
    wrapped = engine.config.get("speculators_model_type") is not None
    prefix = "layers.0." if wrapped else "midlayer."
    before = engine.config.get("norm_before_residual", wrapped)

    def step(tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        read = engine.norm(states, f"{prefix}hidden_norm.weight")
        embedded = engine.norm(engine.embedding[tokens], f"{prefix}input_layernorm.weight")
        hidden = engine.behind(torch.cat([embedded, read], dim=-1), read if before else states, prefix)
        normed = engine.norm(hidden, "norm.weight")
        law = torch.full((len(engine.embedding),), float("-inf"), dtype=hidden.dtype)
        offsets = engine.tensors.get("d2t", torch.zeros(engine.config["draft_vocab_size"], dtype=torch.int64))
        law[torch.arange(len(offsets)) + offsets] = engine.tensors["lm_head.weight"] @ normed[-1]
        return law, normed if engine.config.get("norm_output") else hidden

    found = engine.states(ids[:-1])
    captured = [found[layer] for layer in layers]
    if engine.config.get("fc_norm"):
        captured = [engine.norm(state, f"fc_norm.{index}.weight") for index, state in enumerate(captured)]
    return chain(engine.linear(torch.cat(captured, dim=-1), "fc"), ids, num_tokens, step)


def medusa(engine: PlainEngine, ids: list[int], num_tokens: int) -> tuple[Tensor, list[int]]:
    """Medusa by vLLM's names or FasterDecoding's: every head on the last row's state, biases only if they count."""
    state, laws = engine.states(ids[:-1])[-1][-1], []
    config = engine.config
    theirs = "medusa_num_heads" in config
    for head in range(num_tokens):
        x = state
        for layer in range(config["medusa_num_layers" if theirs else "num_hidden_layers"]):
            name = f"{head}.{layer}.linear" if theirs else f"blocks.{head}.layers.{layer}"
            inner = engine.tensors[f"{name}.weight"] @ x
            inner = inner + (engine.tensors[f"{name}.bias"] if config.get("medusa_fc_bias") else 0)
            x = x + inner * inner.sigmoid()
        shared = config.get("original_lm_head")
        name = f"{head}.{config['medusa_num_layers']}.weight" if theirs else f"lm_heads.{0 if shared else head}.weight"
        law = torch.full((config["vocab_size"],), float("-inf"), dtype=x.dtype)
        law[engine.tensors.get("token_map", torch.arange(config["vocab_size"]))] = engine.tensors[name] @ x
        laws.append(law)
    return torch.stack(laws), [int(law.argmax()) for law in laws]


@dataclass(frozen=True)
class MTPNames:
    """How a multi-token prediction module is spelt: what its tensors begin with, and its parts."""

    prefix: str
    token_norm: str
    state_norm: str
    projection: str
    last_norm: str
    layer: str = ""
    state_first: bool = False
    hides_first: bool = True
    before_norm: bool = False  # the target's state is read as it enters the final norm
    centred: bool = False  # norms multiply by 1 + weight


def mtp(engine: PlainEngine, ids: list[int], num_tokens: int, names: MTPNames) -> tuple[Tensor, list[int]]:
    """A sequential module, whose output behind the last norm is both read by the target's head and fed back."""
    if names.centred:
        engine.tensors = {k: t + 1 if "norm" in k else t for k, t in engine.tensors.items()}
    layer = f"{names.prefix}{names.layer}"

    def step(tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        embedded = engine.embedding[tokens].clone()
        if names.hides_first:
            embedded[0] = 0
        token = engine.norm(embedded, f"{names.prefix}{names.token_norm}.weight")
        state = engine.norm(states, f"{names.prefix}{names.state_norm}.weight")
        parts = [state, token] if names.state_first else [token, state]
        x = engine.linear(torch.cat(parts, dim=-1), f"{names.prefix}{names.projection}")
        x = engine.behind(engine.norm(x, f"{layer}input_layernorm.weight"), x, layer)
        x = engine.norm(x, f"{names.prefix}{names.last_norm}.weight")
        return engine.head @ x[-1], x

    found = engine.before_norm(ids[:-1]) if names.before_norm else engine.states(ids[:-1])[-1]
    return chain(found, ids, num_tokens, step)
