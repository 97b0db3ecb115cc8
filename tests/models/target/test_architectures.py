"""The frozen target against Hugging Face's own forward pass, for every supported architecture.

The oracle is one uncached forward over one sequence at a time, without padding, masks or cache of ours.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from engine.loop import generate
from engine.settings import DecodeSettings
from models import tree
from models.cache import KVCache
from models.target import Target
from models.target.lean import LeanDecoder
from tests.helpers.models import ARCHITECTURES, VOCAB_SIZE, WINDOW, layer_calls, random_target

CONTEXTS = (9, 4, 7)  # ragged, and on both sides of the sliding window
assert min(CONTEXTS) < WINDOW < max(CONTEXTS)
TOLERANCE = {  # they compute a softmax, or the experts' scores, in float32 whatever the weights are
    "gemma2": 2e-6,
    "gpt_oss": 2e-6,
    "deepseek_v3": 2e-6,
}  # and Hugging Face's norms of the lean ones

LEAN = ("llama", "llama_tied", "llama_biased", "llama3_rope", "qwen2", "qwen3", "mistral_full", "smollm3_rope")
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)
every_forward_pass = pytest.mark.parametrize("architecture", [*ARCHITECTURES, *(f"lean {name}" for name in LEAN)])


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@cache
def target_of(architecture: str) -> Target:
    """A random target; "lean NAME" computes it by `LeanDecoder`, which `accelerate` does not take in float64."""
    target = random_target(architecture.removeprefix("lean "))
    if architecture.startswith("lean "):
        target.name = architecture
        target._lean = LeanDecoder.of(target.model.get_decoder())
        assert target._lean is not None
    return target


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))


def uncached(target: Target, ids: list[int]) -> Tensor:
    """Logits (S, V) of one sequence, by the model alone."""
    return target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def assert_same(target: Target, ours: Tensor, theirs: Tensor) -> None:
    tolerance = TOLERANCE.get(target.name, 2e-6 if target.name.startswith("lean ") else 1e-10)
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@every_forward_pass
def test_the_head_makes_the_models_logits_of_the_last_state(architecture: str) -> None:
    target, ids = target_of(architecture), random_ids(2, 12)
    out = target(ids, capture_layers=(target.num_layers,))
    logits = target.model(input_ids=ids, use_cache=False).logits
    assert logits.std() > 0.05  # a head that gives nearly nothing would prove nothing
    assert_same(target, target.head(out.last), logits)
    assert_same(target, target.head(out.hidden), logits)
    chosen = torch.tensor([5, 2, 40])
    assert_same(target, target.head.rows(chosen)(out.last), logits[..., chosen])


@every_forward_pass
def test_padding_on_the_right_does_not_disturb_a_forward_pass(architecture: str) -> None:
    target, ids = target_of(architecture), random_ids(2, 16)
    padded = ids.clone()
    padded[0, 9:] = 0
    layers = tuple(range(target.num_layers + 1))
    ours, theirs = target(padded, capture_layers=layers).hidden, target(ids, capture_layers=layers).hidden
    assert_same(target, ours[0, :9], theirs[0, :9])
    assert_same(target, ours[1], theirs[1])


@every_forward_pass
def test_captured_states_are_hugging_faces_hidden_states(architecture: str) -> None:
    target, ids = target_of(architecture), random_ids(2, 12)
    states = target.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    n = target.num_layers
    assert len(states) == n + 1
    order = (2, 0, -1, 1, n)  # as asked for, not sorted
    hidden = target(ids, capture_layers=order).hidden
    assert_same(target, hidden, torch.cat([states[j] for j in order], -1))
    assert (states[0] - states[1]).abs().max() > 1e-3


@every_forward_pass
def test_states_alone_are_the_same_and_stop_at_the_last_layer_needed(architecture: str) -> None:
    target, ids = target_of(architecture), random_ids(2, 12)
    whole = target(ids, capture_layers=tuple(range(target.num_layers + 1))).hidden
    assert whole is not None
    states = whole.chunk(target.num_layers + 1, dim=-1)
    for order in ((1,), (2, 0), (0,), (1, -1)):
        with layer_calls(target) as calls:
            hidden = target.states(ids, order)
        assert torch.equal(hidden, torch.cat([states[j] for j in order], -1))
        assert calls == list(range(target.num_layers if -1 in order else max(order)))


@every_architecture
def test_the_last_state_has_gone_through_the_final_norm_once(architecture: str) -> None:
    target, ids = target_of(architecture), random_ids(2, 12)
    outputs: list[Any] = []
    hook = target.layers[-1].register_forward_hook(lambda module, args, output: outputs.append(output))
    last = target(ids).last
    hook.remove()
    before = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    decoder = target.model.get_decoder()
    names = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
    (norm,) = (getattr(decoder, name) for name in names if hasattr(decoder, name))
    torch.testing.assert_close(last, norm(before), atol=1e-12, rtol=0)
    assert (last - before).abs().max() > 1e-2
    assert (last - norm(last)).abs().max() > 1e-2


@every_forward_pass
def test_cached_steps_of_a_ragged_batch_equal_the_uncached_forward(architecture: str) -> None:
    target, texts = target_of(architecture), random_ids(3, 26)
    expected = torch.stack([uncached(target, text) for text in texts.tolist()])
    cache, done = target.new_cache(3, 26), [0, 0, 0]
    for width, counts in (
        (9, CONTEXTS),
        (1, (1, 1, 1)),
        (3, (3, 1, 2)),
        (4, (4, 0, 2)),
        (2, (1, 2, 2)),
        (5, (5, 4, 4)),
    ):
        rows = torch.stack([texts[b, start : start + width] for b, start in enumerate(done)])
        for b, count in enumerate(counts):
            rows[b, count:] = 0  # padding
        logits = target.head(target.step(rows, cache).last)
        for b, count in enumerate(counts):
            assert_same(target, logits[b, :count], expected[b, done[b] : done[b] + count])
        cache.commit(torch.tensor(counts))
        done = [start + count for start, count in zip(done, counts, strict=True)]
    assert done == cache.lengths.tolist() == [23, 12, 18]


@every_forward_pass
def test_a_batch_of_equal_lengths_needs_no_mask_for_single_rows(architecture: str) -> None:
    target, texts = target_of(architecture), random_ids(2, 16, seed=1)
    expected = torch.stack([uncached(target, text) for text in texts.tolist()])
    cache = target.new_cache(2, 16)
    for start, stop in ((0, 8), *((i, i + 1) for i in range(8, 16))):
        out = target.step(texts[:, start:stop], cache, capture_layers=(1,))
        assert_same(target, target.head(out.last), expected[:, start:stop])
        cache.commit(torch.tensor([stop - start] * 2))


TREES = (  # several roots, branches, a chain longer than the window
    ([-1, 0, 0, 1, 2, 2, 4], [0, 2, 4, 6]),
    ([-1, -1, 0, 2, 1, 4, 5], [1, 4]),
    ([-1, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
)


def check_tree_steps(target: Target) -> None:
    """Every node of a ragged batch of trees, then steps behind an accepted branch, against uncached paths."""
    contexts = [random_ids(length, seed=b).tolist() for b, length in enumerate(CONTEXTS)]
    cache = target.new_cache(3, 32)
    prompt = torch.zeros(3, max(CONTEXTS), dtype=torch.int64)
    for b, context in enumerate(contexts):
        prompt[b, : len(context)] = torch.tensor(context)
    target.step(prompt, cache)
    cache.commit(torch.tensor(CONTEXTS))

    nodes, parents = random_ids(3, 7, seed=9), torch.tensor([parents for parents, _ in TREES])
    logits = target.head(target.step(nodes, cache, parents=parents).last)
    for b in range(3):
        for node in range(7):
            path, at = [], node
            while at >= 0:
                path.insert(0, int(nodes[b, at]))
                at = int(parents[b, at])
            assert_same(target, logits[b, node], uncached(target, contexts[b] + path)[-1])

    accepted = torch.full((3, 7), -1)
    for b, (_, path) in enumerate(TREES):
        accepted[b, : len(path)] = torch.tensor(path)
        contexts[b] += nodes[b, path].tolist()
    cache.commit(torch.tensor([len(path) for _, path in TREES]), accepted)
    assert cache.lengths.tolist() == [len(context) for context in contexts]
    new = random_ids(3, 2, seed=10)
    logits = target.head(target.step(new, cache).last)
    for b in range(3):
        assert_same(target, logits[b], uncached(target, contexts[b] + new[b].tolist())[-2:])


@every_forward_pass
def test_tree_steps_equal_uncached_paths(architecture: str) -> None:
    check_tree_steps(target_of(architecture))


_mask, _depths, _commit = tree.attention_mask, tree.depths, KVCache.commit


def _mask_without_tree(lengths: Tensor, num_queries: int, **options: Any) -> Tensor:
    return _mask(lengths, num_queries, **(options | {"tree": None}))


def _mask_without_depth(lengths: Tensor, num_queries: int, **options: Any) -> Tensor:
    return _mask(lengths, num_queries, **(options | {"depth": None}))


def _mask_with_wider_window(lengths: Tensor, num_queries: int, *, window: int = 0, **options: Any) -> Tensor:
    return _mask(lengths, num_queries, window=window and window + 1, **options)


def _slots_for_depths(parents: Tensor) -> Tensor:
    return torch.arange(parents.shape[1]).expand_as(parents)


def _commit_without_path(self: KVCache, counts: Tensor, path: Tensor | None = None) -> None:
    _commit(self, counts)


@pytest.mark.parametrize(
    ("architecture", "where", "fault"),
    [
        ("llama", "models.tree.attention_mask", _mask_without_tree),
        ("lean llama", "models.tree.attention_mask", _mask_without_tree),
        ("gpt2", "models.tree.attention_mask", _mask_without_tree),
        ("mistral", "models.tree.attention_mask", _mask_without_depth),
        ("gemma3", "models.tree.attention_mask", _mask_with_wider_window),
        ("llama", "models.tree.depths", _slots_for_depths),
        ("opt", "models.tree.depths", _slots_for_depths),
        ("llama", "models.cache.KVCache.commit", _commit_without_path),
    ],
)
def test_the_tree_test_can_fail(architecture: str, where: str, fault: Any) -> None:
    with mock.patch(where, fault), pytest.raises(AssertionError, match="not close"):
        check_tree_steps(target_of(architecture))


@every_forward_pass
def test_plain_decoding_is_hugging_faces_greedy_generation(architecture: str) -> None:
    target = target_of(architecture)
    prompts = [random_ids(length, seed=length).tolist() for length in (7, 3)]
    ours = generate(target, prompts, DecodeSettings(max_new_tokens=14)).token_ids
    for prompt, answer in zip(prompts, ours, strict=True):
        options = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
        theirs = target.model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert answer == theirs.tolist()


@every_architecture
def test_acceleration_changes_no_result_of_any_architecture(architecture: str) -> None:
    """Those of a Llama's shape become lean, those that have its parts and compute something else stay as they are."""
    target, ids = random_target(architecture, dtype=torch.float32), random_ids(2, 12)
    expected = target.model(input_ids=ids, use_cache=False).logits
    weights = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    target.accelerate()
    assert (target._lean is not None) == (architecture in LEAN)
    target.check()
    torch.testing.assert_close(target.head(target(ids).last), expected, atol=1e-4, rtol=1e-4)
    after = target.model.state_dict()
    assert weights.keys() == after.keys() and all(torch.equal(after[name], weight) for name, weight in weights.items())


def test_a_lean_decoder_that_computes_something_else_is_dropped() -> None:
    target = random_target("llama", dtype=torch.float32)
    with mock.patch("models.target.lean._RmsNorm.__call__", lambda norm, x: x * norm.weight):
        target.accelerate()
    assert target._lean is None
