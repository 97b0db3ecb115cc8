"""What a target checks, refuses and tells of itself; test_architectures.py compares its numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from engine.loop import generate
from engine.settings import DecodeSettings
from models import tree
from models.errors import UserError
from models.target import Target
from models.target.head import Head
from tests.helpers.models import ARCHITECTURES, random_model, random_target

_mask = tree.attention_mask


def _mask_without_tree(lengths: Tensor, num_queries: int, **options: Any) -> Tensor:
    return _mask(lengths, num_queries, **(options | {"tree": None}))


def _slots_for_depths(parents: Tensor) -> Tensor:
    return torch.arange(parents.shape[1]).expand_as(parents)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_check_accepts(architecture: str) -> None:
    random_target(architecture).check()


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_accepts_the_rounding_of_narrow_types(architecture: str, dtype: torch.dtype) -> None:
    random_target(architecture, dtype=dtype).check()


def _keep_doubled(store: dict[int, Tensor], index: int) -> Any:
    return lambda module, args, kwargs: store.update({index: 2 * args[0]})


def _forget_the_past(self: Any, keys: Tensor, values: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return keys, values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("where", "fault", "message"),
    [
        ("models.tree.attention_mask", _mask_without_tree, "branching drafts"),
        ("models.tree.depths", _slots_for_depths, "branching drafts"),
        ("models.target.capture._keep_input", _keep_doubled, "the states captured"),
        ("models.target.head.Head.__call__", lambda self, hidden: 1.3 * self.linear(hidden), "what its head makes"),
        ("models.cache._Layer.update", _forget_the_past, "does not run"),
    ],
)
def test_check_sees_faults(dtype: torch.dtype, where: str, fault: Any, message: str) -> None:
    target = random_target("llama", dtype=dtype)
    with mock.patch(where, fault), pytest.raises(UserError, match=message):
        target.check()


@pytest.mark.parametrize("architecture", ["phi", "cohere", "gemma2"])
def test_check_sees_a_bias_a_scale_or_a_cap_that_is_left_out(architecture: str) -> None:
    target = random_target(architecture)
    unbiased = torch.nn.Linear(32, 61, bias=False)
    unbiased.weight = target.head.linear.weight
    target.head = {
        "phi": Head(unbiased),
        "cohere": Head(target.head.linear, scale=1.0),
        "gemma2": Head(target.head.linear, softcap=None),
    }[architecture]
    with pytest.raises(UserError, match=f"{architecture!r} is not supported: its logits are not what its head makes"):
        target.check()


_COMMON = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "pad_token_id": None}
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_next": (
        {
            "intermediate_size": 32,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        "linear_attention",
    ),
    "mamba": ({}, "linear_attention"),
    "llama4_text": (
        {"intermediate_size": 32, "intermediate_size_mlp": 32, "num_local_experts": 1, "attention_chunk_size": 8},
        "chunked_attention",
    ),
    "gpt_neo": ({"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]]}, "attention_layers"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 4}, "alibi"),
    "falcon": ({"alibi": True}, "alibi"),
    "bloom": ({"n_layer": 4, "n_head": 4}, "does not run with our cache and masks"),
    "doge": ({"intermediate_size": 48}, "keep_window_size"),
    "opt": ({"ffn_dim": 48, "word_embed_proj_dim": 16, "pad_token_id": 0}, "reads 16 numbers per token"),
    "bert": ({"is_decoder": True, "intermediate_size": 48, "pad_token_id": 0}, "what its head makes"),
}


@pytest.mark.parametrize("model_type", _REFUSED)
def test_what_cannot_work_is_refused_by_name(model_type: str) -> None:
    options, reason = _REFUSED[model_type]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(_COMMON | options)))
    with pytest.raises(UserError, match=f"{model_type}.*not supported.*{reason}"):
        Target(model, name="mine").check()


def test_attention_that_reads_no_masks_is_refused() -> None:
    model = random_model("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UserError, match="flex_attention attention: load it with attn_implementation=sdpa or eager"):
        Target(model)


def test_the_text_part_of_a_multimodal_model_works() -> None:
    text = {**_COMMON, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "sliding_window": 5}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    target = Target(AutoModelForCausalLM.from_config(config).double())
    target.check()  # the vision tower has as many layers as the text model
    assert target.num_layers == 4 and target.hidden_size == 32


def test_the_head_over_all_tokens_is_the_head_itself() -> None:
    head = random_target().head
    assert head.rows(None) is head
    holder = torch.nn.Module()
    holder.head = head
    assert not list(holder.parameters()) and not holder.state_dict()  # nothing for an optimizer or a checkpoint
    assert not any(w.requires_grad for w in head.rows(torch.tensor([3, 1])).linear.parameters())


def test_layers_are_counted_by_what_enters_them() -> None:
    target = random_target(num_hidden_layers=3)
    assert [target.layer_index(layer) for layer in (0, 2, 3, -1)] == [0, 2, 3, 3]
    for layer in (4, -2):
        with pytest.raises(UserError, match=f"capture layer {layer} does not exist: 'llama' has states 0 to 3"):
            target(torch.tensor([[1]]), capture_layers=(layer,))


def test_a_failed_forward_pass_leaves_no_hooks_behind() -> None:
    target = random_target()
    with pytest.raises(IndexError):
        target(torch.tensor([[10**6]]), capture_layers=(0, 1))
    assert not any(layer._forward_pre_hooks for layer in target.layers)


def test_nothing_is_captured_unless_asked_for() -> None:
    assert random_target()(torch.tensor([[1, 2]])).hidden is None


@pytest.mark.parametrize("architecture", ["gemma3", "llama_tied"])
def test_embed_is_the_state_that_enters_layer_0(architecture: str) -> None:
    target, ids = random_target(architecture), torch.tensor([[5, 9, 60]])
    torch.testing.assert_close(target.embedding(ids), target(ids, capture_layers=(0,)).hidden, atol=0, rtol=0)


def test_a_target_stays_frozen_and_without_dropout_inside_a_module_in_training() -> None:
    target, ids = random_target("gpt2", embd_pdrop=0.5, resid_pdrop=0.5), torch.tensor([[5, 9, 60]])
    before = target(ids).last
    torch.nn.ModuleList([target]).train()
    assert torch.equal(target(ids).last, before)
    assert not before.requires_grad and not any(parameter.requires_grad for parameter in target.parameters())


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "llama"])
def test_padding_may_run_past_the_last_position(architecture: str) -> None:
    target, ids = random_target(architecture, max_position_embeddings=12), torch.randint(3, 61, (2, 12))
    expected = target.model(input_ids=ids, use_cache=False).logits
    cache = target.new_cache(2, 15)
    target.step(ids[:, :10], cache)
    cache.commit(torch.tensor([10, 5]))
    new = torch.stack([torch.cat([ids[0, 10:], torch.zeros(3, dtype=torch.int64)]), ids[1, 5:10]])
    logits = target.head(target.step(new, cache).last)
    torch.testing.assert_close(logits[0, :2], expected[0, 10:], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(logits[1], expected[1, 5:10], atol=1e-10, rtol=1e-10)


def test_longrope_ends_the_context_where_its_frequencies_would_change() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}
    target = random_target(
        "phi3", max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=rope
    )
    assert target.max_positions == 16
    target.check()
    prompts = [[5, 6, 7], [8] * 12]  # the second meets the end of the context long before the first has 10 tokens
    settings = DecodeSettings(max_new_tokens=10, stop_token_ids=frozenset())
    together = generate(target, prompts, settings).token_ids
    assert [len(answer) for answer in together] == [10, 4]
    assert together == [generate(target, [prompt], settings).token_ids[0] for prompt in prompts]


def _tokenizer(size: int) -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(size)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), eos_token="w4")


def test_a_padded_vocabulary_keeps_the_rows_of_the_head() -> None:
    target = Target(random_model(vocab_size=64), _tokenizer(50))
    assert len(target.tokenizer) == 50 and target.vocab_size == 64
    target.check()
    assert target.head(target(torch.tensor([[1, 2]])).last).shape == (1, 2, 64)


@pytest.mark.parametrize(
    ("configured", "tokenizer", "expected"),
    [(2, None, {2}), ([7, 9], None, {7, 9}), (None, None, set()), ([7, 9], 4, {4, 7, 9}), (None, 4, {4})],
)
def test_stop_tokens_come_from_generation_config_and_tokenizer(
    configured: Any, tokenizer: int | None, expected: set[int]
) -> None:
    model = random_model()
    model.generation_config.eos_token_id = configured
    target = Target(model, None if tokenizer is None else SimpleNamespace(eos_token_id=tokenizer))
    assert target.stop_token_ids == expected


def test_the_fingerprint_tells_configs_and_tokenizers_apart(tmp_path: Any) -> None:
    model = random_model()
    fingerprint = Target(model, _tokenizer(50)).fingerprint
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert Target(again, _tokenizer(50)).fingerprint == fingerprint  # neither place nor dtype matter
    assert Target(random_model(seed=1), _tokenizer(50)).fingerprint == fingerprint  # nor do the weights
    others = [
        Target(model).fingerprint,
        Target(model, _tokenizer(51)).fingerprint,
        Target(random_model(rms_norm_eps=1e-3), _tokenizer(50)).fingerprint,
        Target(random_model("llama_tied"), _tokenizer(50)).fingerprint,
    ]
    assert len({fingerprint, *others}) == 5


def test_the_weights_fingerprint_sees_a_change_anywhere() -> None:
    model = random_model()
    original = Target(model).weights_fingerprint
    assert Target(random_model()).weights_fingerprint == original
    for name, parameter in model.named_parameters():
        middle = parameter.numel() // 2
        kept = parameter.data.flatten()[middle].clone()
        parameter.data.view(-1)[middle] += 0.01
        assert Target(model).weights_fingerprint != original, name
        parameter.data.view(-1)[middle] = kept
    assert Target(model).weights_fingerprint == original
