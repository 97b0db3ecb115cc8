"""EAGLE-1 against a loop over rows in plain tensors, its names and sharing, and that the contract's checks bite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from torch import Tensor

from conf.compose import ROOT, plain
from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.drafter.eagle import EagleDrafter
from models.layers import UnrolledMemory, unrolled_mask
from models.sampling import RequestRandom, SamplingParams
from models.state_feedback import FeedbackState
from models.target import Target
from models.types import Draft, TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import (
    LEAST_P_VALUE,
    build_shaken,
    check_draft,
    check_fresh,
    check_unroll,
    five_token_target,
    generate_observed,
    prompts,
    propose_at_every_length,
    sampled_p_value,
    shaken,
    tiny_target,
)
from tests.helpers.looped_layers import LoopedLayers
from tests.helpers.memorising import LEAST_ACCEPTANCE, answered, memorise
from tests.helpers.models import random_target

MODEL = {"_target_": "models.drafter.eagle.EagleDrafter"}
CLOSE = {"atol": 1e-10, "rtol": 1e-10}
GREEDY, SAMPLED = SamplingParams(), SamplingParams(1.0)
OTHER_ROPE = {"rope_type": "default", "rope_theta": 50.0}
KEPT = torch.arange(1, 64, 3)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64)


@pytest.fixture(scope="module")
def small_target() -> Target:
    return five_token_target()


def features_of(target: Target, batch_size: int = 2, num_rows: int = 7) -> TargetFeatures:
    ids = torch.tensor(prompts([num_rows + 1] * batch_size, target.vocab_size, seed=4))
    with torch.no_grad():
        hidden = target(ids[:, :-1], capture_layers=(-1,)).hidden
    return TargetFeatures(ids[:, :-1], ids[:, 1:], hidden, torch.full((batch_size,), num_rows))


# The oracle: loops over rows, from the tensors that a checkpoint holds.


class LoopedEagle(LoopedLayers):
    """One request: fc([emb(x_{t+1}); f_t]) and the layers, row by row."""

    def __init__(self, drafter: EagleDrafter, target: Target) -> None:
        weights = {name.removeprefix("stack."): tensor for name, tensor in drafter.state_dict().items()}
        super().__init__(weights, drafter.config)
        self.embedding = target.model.get_input_embeddings().weight

    def estimate(self, token: int, state: Tensor, position: int) -> Tensor:
        return self.row(self.weights["fc.weight"] @ torch.cat([self.embedding[token], state]), position)


def unrolled_by_loop(drafter: EagleDrafter, target: Target, features: TargetFeatures, num_steps: int) -> Tensor:
    """For every row: take in the rows up to it, then feed estimates back: (num_steps, B, S, D); NaN beyond the text."""
    assert features.hidden is not None
    batch_size, num_rows, size = features.hidden.shape
    out = torch.full((num_steps, batch_size, num_rows, size), float("nan"), dtype=features.hidden.dtype)
    for b in range(batch_size):
        request, text = LoopedEagle(drafter, target), features.next_token_ids[b].tolist()
        for t in range(num_rows):
            out[0, b, t] = request.estimate(text[t], features.hidden[b, t], t)
            drafted = 0
            for step in range(1, min(num_steps, num_rows - t)):
                out[step, b, t] = request.estimate(text[t + step], out[step - 1, b, t], t + step)
                drafted += 1
            request.forget(drafted)
    return out


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        ({}, {}),
        ({"num_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 10}, {}),
        ({"intermediate_size": 40}, {"rope_parameters": OTHER_ROPE, "rms_norm_eps": 0.1}),
    ],
    ids=["target-shaped", "two-layers", "other-rope-and-eps"],
)  # fmt: skip
@torch.no_grad()
def test_unroll_is_the_loop_over_rows(arguments: dict[str, Any], overrides: dict[str, Any]) -> None:
    target = tiny_target(torch.float64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, **overrides)
    drafter = build_shaken(MODEL | arguments, target, DraftVocab(64))
    features = features_of(target)
    expected = unrolled_by_loop(drafter, target, features, 4)
    for step, hidden in enumerate(drafter.unroll(features, 4)):
        inside = hidden.shape[1] - step
        torch.testing.assert_close(hidden[:, :inside], expected[step, :, :inside], atol=1e-6, rtol=0)  # RoPE is float32


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_unrolled_mask_is_the_rule_written_out(step: int) -> None:
    size, mask = 5, unrolled_mask(5, step, torch.device("cpu"))
    assert (mask is None) == (step == 0)
    if mask is not None:
        for row in range(size):
            for column in range((step + 1) * size):
                made_at, of = divmod(column, size)
                assert mask[0, 0, row, column] == (of <= row if made_at == 0 else of == row)


@torch.no_grad()
def test_a_proposal_is_the_loop_and_the_targets_own_head(target: Target) -> None:
    drafter = build_shaken(MODEL, target, DraftVocab(64, KEPT))
    features = features_of(target, 2, 6)
    lengths = torch.tensor([6, 4])
    ragged = TargetFeatures(features.token_ids, features.next_token_ids, features.hidden, lengths)
    draft = drafter.propose(
        drafter.new_state(2, 12), ragged, num_speculative_tokens=3, sampling=GREEDY, random=RequestRandom([0, 1], 3)
    )
    unembedding = target.model.get_output_embeddings().weight
    for b, length in enumerate(lengths.tolist()):
        request = LoopedEagle(drafter, target)
        for t in range(length):
            estimate = request.estimate(int(ragged.next_token_ids[b, t]), ragged.hidden[b, t], t)
        tokens: list[int] = []
        for position in range(length, length + 3):
            scores = {token: float(unembedding[token] @ estimate) for token in KEPT.tolist()}
            tokens.append(max(scores, key=lambda token: scores[token]))
            estimate = request.estimate(tokens[-1], estimate, position)
        assert draft.token_ids[b].tolist() == tokens


# What it consists of.


def test_parameters_have_the_published_names_and_nothing_of_the_target_is_among_them(target: Target) -> None:
    """formats.md, EAGLE-1: a fc without bias, no input norm, no final norm, no embedding, no head."""
    drafter = native.build(MODEL, target, DraftVocab(64, KEPT))
    shapes = {name.removeprefix("stack."): tuple(t.shape) for name, t in drafter.state_dict().items()}
    assert shapes == {
        "fc.weight": (64, 128),
        "layers.0.self_attn.q_proj.weight": (64, 64),
        "layers.0.self_attn.k_proj.weight": (32, 64),
        "layers.0.self_attn.v_proj.weight": (32, 64),
        "layers.0.self_attn.o_proj.weight": (64, 64),
        "layers.0.mlp.gate_proj.weight": (128, 64),
        "layers.0.mlp.up_proj.weight": (128, 64),
        "layers.0.mlp.down_proj.weight": (64, 128),
        "layers.0.post_attention_layernorm.weight": (64,),
    }
    assert {name for name, _ in drafter.named_parameters()} == set(drafter.state_dict())
    theirs = {parameter.data_ptr() for parameter in target.parameters()}
    assert not theirs & {parameter.data_ptr() for parameter in drafter.parameters()}
    assert all(parameter.requires_grad for parameter in drafter.parameters())


def test_later_layers_keep_their_input_norm(target: Target) -> None:
    names = set(native.build(MODEL | {"num_layers": 2}, target, DraftVocab(64)).state_dict())
    assert "stack.layers.1.input_layernorm.weight" in names
    assert "stack.layers.0.input_layernorm.weight" not in names


def test_embedding_and_head_are_the_targets_own(target: Target) -> None:
    drafter = build_shaken(MODEL, target, DraftVocab(64))
    hidden = torch.randn(3, 64, dtype=torch.float64)
    assert torch.equal(drafter.logits(hidden), target.head(hidden))
    reduced = build_shaken(MODEL, target, DraftVocab(64, KEPT))
    torch.testing.assert_close(reduced.logits(hidden), target.head(hidden)[:, KEPT], **CLOSE)
    ids = torch.tensor([[3, 9]])
    read = torch.cat([target.model.get_input_embeddings().weight[ids], hidden[None, :2]], dim=-1)
    torch.testing.assert_close(drafter.fuse(ids, hidden[None, :2]), read @ drafter.fc.weight.T, **CLOSE)
    assert drafter.capture_layers == (4,)


@torch.no_grad()
def test_every_tensor_has_a_say_in_the_estimates(target: Target) -> None:
    drafter, features = build_shaken(MODEL, target, DraftVocab(64)), features_of(target)
    before = list(drafter.unroll(features, 2))
    for name, parameter in drafter.named_parameters():
        kept = parameter.clone()
        parameter *= 1.1
        for ours, theirs in zip(drafter.unroll(features, 2), before, strict=True):
            assert (ours - theirs).abs().max() > 1e-3, name
        parameter.copy_(kept)


def test_gradients_of_all_steps_reach_all_parameters(target: Target) -> None:
    drafter, features = build_shaken(MODEL, target, DraftVocab(64)), features_of(target)
    for step, hidden in enumerate(drafter.unroll(features, 3)):
        grads = torch.autograd.grad(hidden.square().sum(), list(drafter.parameters()), retain_graph=True)
        assert all(grad.abs().max() > 1e-3 for grad in grads), step


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_reduced_vocabulary_proposes_target_ids(sampling: SamplingParams, target: Target) -> None:
    """A full-vocabulary twin with the other tokens ruled out proposes the same tokens with the same laws."""
    drafter, twin = (build_shaken(MODEL, target, vocab) for vocab in (DraftVocab(64, KEPT), DraftVocab(64)))
    excluded = torch.ones(64, dtype=torch.bool)
    excluded[KEPT] = False
    twin.logits = lambda hidden: target.head(hidden).masked_fill(excluded, float("-inf"))
    features = features_of(target, 16)
    options = {"num_speculative_tokens": 4, "sampling": sampling}
    drafts = [
        d.propose(d.new_state(16, 20), features, random=RequestRandom(list(range(16)), 4), **options)
        for d in (drafter, twin)
    ]
    assert torch.equal(drafts[0].token_ids, drafts[1].token_ids)
    assert len(drafts[0].token_ids.unique()) > 5 and not excluded[drafts[0].token_ids].any()
    if sampling.greedy:
        assert drafts[0].probs is None
    else:
        assert drafts[0].probs.shape == (16, 4, 64)
        torch.testing.assert_close(drafts[0].probs, drafts[1].probs, **CLOSE)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.9, top_k=3)], ids=["greedy", "sampled"])
def test_a_request_is_answered_in_a_batch_as_alone(sampling: SamplingParams, small_target: Target) -> None:
    drafter = build_shaken(MODEL, small_target, DraftVocab(5))
    start = prompts([3, 9, 1, 20, 6], 5)
    settings = DecodeSettings(1000, 4, sampling, frozenset())
    together = generate(small_target, start, settings, drafter)
    assert 0 < together.stats.acceptance_rate < 1
    for index, prompt in enumerate(start):
        alone = generate(small_target, [prompt], settings, drafter, seeds=[index])
        assert alone.token_ids[0] == together.token_ids[index]
        assert (alone.stats.accepted[0] == together.stats.accepted[index]).all()


@pytest.mark.parametrize(
    "architecture", ["llama_tied", "llama3_rope", "qwen3", "gemma2", "gemma3", "gpt2", "phi", "granite"]
)
def test_other_architectures(architecture: str) -> None:
    """Embedding factors, softcaps, head scales and biases, sliding windows, partial or no rotary positions."""
    target = random_target(architecture)
    drafter = build_shaken(MODEL, target, DraftVocab(target.vocab_size, torch.arange(0, target.vocab_size, 2)))
    start = prompts([5, 11, 3], target.vocab_size)
    settings = DecodeSettings(12, 4, GREEDY, frozenset())
    made, seen = generate_observed(target, drafter, start, settings, [check_draft, check_unroll, check_fresh])
    assert made.token_ids == generate(target, start, settings).token_ids
    assert len(seen.committed_counts) > 2
    if architecture.startswith("gemma"):  # scales its embeddings
        embedded = target.model(input_ids=torch.tensor(start[:1]), output_hidden_states=True).hidden_states[0]
        torch.testing.assert_close(drafter._embedding[0](torch.tensor(start[:1])), embedded, **CLOSE)


# The contract's checks notice a drafter that is wrong by one.


class TokensLate(EagleDrafter):
    """Training reads x_t beside f_t, where decoding reads x_{t+1}."""

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        late = TargetFeatures(features.token_ids, features.token_ids, features.hidden, features.lengths)
        return super().unroll(late, num_steps)


class StatesLate(EagleDrafter):
    """Training reads f_{t−1} beside x_{t+1}."""

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        assert features.hidden is not None
        late = torch.cat([features.hidden[:, :1], features.hidden[:, :-1]], dim=1)
        return super().unroll(
            TargetFeatures(features.token_ids, features.next_token_ids, late, features.lengths), num_steps
        )


class _OwnUnroll(EagleDrafter):
    advance_positions = advance_tokens = read_own_rows = True

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        memory, hidden, ids = UnrolledMemory(), features.hidden, features.next_token_ids
        positions = torch.arange(ids.shape[1])[None]
        for step in range(num_steps):
            mask = unrolled_mask(ids.shape[1], step, ids.device)
            if mask is not None and not self.read_own_rows:
                mask = mask.clone()
                mask[..., -ids.shape[1] :] = mask[..., : ids.shape[1]]
            hidden = self.stack(self.fuse(ids, hidden), positions + step * self.advance_positions, memory, mask)
            yield hidden
            if self.advance_tokens:
                ids = torch.cat([ids[:, 1:], ids[:, -1:]], dim=1)


class UnrollPositionsStay(_OwnUnroll):
    advance_positions = False


class UnrollTokensStay(_OwnUnroll):
    advance_tokens = False


class UnrollReadsOtherRows(_OwnUnroll):
    read_own_rows = False


class DraftPositionsAhead(EagleDrafter):
    """Drafted rows are placed one position too far on."""

    def expander(self, state: FeedbackState, committed: TargetFeatures) -> Any:
        made: Any = super().expander(state, committed)
        begin = made._rows.begin

        def ahead(parents: Tensor) -> Any:
            positions, mask = begin(parents)
            return positions + 1, mask

        made._rows.begin = ahead
        return made


class KeepsItsDraft(EagleDrafter):
    """Committed rows are put behind the drafted ones, which are not dropped."""

    def propose(self, state: FeedbackState, committed: TargetFeatures, **options: Any) -> Draft:
        state.committed = state.cache.lengths
        return super().propose(state, committed, **options)


class ForgetsOne(EagleDrafter):
    """The last committed row is dropped together with the draft."""

    def propose(self, state: FeedbackState, committed: TargetFeatures, **options: Any) -> Draft:
        state.committed = (state.committed - 1).clamp(min=0)
        return super().propose(state, committed, **options)


def wrong(drafter_class: type[EagleDrafter], target: Target) -> EagleDrafter:
    torch.manual_seed(0)
    return shaken(drafter_class(target, DraftVocab(64)))


@pytest.mark.parametrize(
    "mutant",
    [TokensLate, StatesLate, UnrollPositionsStay, UnrollTokensStay, UnrollReadsOtherRows, DraftPositionsAhead],
)
def test_training_that_differs_from_decoding_by_one_is_noticed(mutant: type[EagleDrafter], target: Target) -> None:
    text = prompts([12], 64)[0]
    for sampling in (GREEDY, SAMPLED):
        with pytest.raises(AssertionError, match="not close"):
            propose_at_every_length(target, wrong(mutant, target), text, 4, sampling, [check_unroll])
    with pytest.raises(AssertionError, match="not close"):
        settings = DecodeSettings(12, 4, GREEDY, frozenset())
        generate_observed(target, wrong(mutant, target), [text[:5], text[:2]], settings, [check_unroll])


def test_the_rewritten_unroll_itself_is_right(target: Target) -> None:
    propose_at_every_length(target, wrong(_OwnUnroll, target), prompts([12], 64)[0], 4, GREEDY, [check_unroll])


@pytest.mark.parametrize("mutant", [KeepsItsDraft, ForgetsOne])
def test_a_cache_that_keeps_too_much_or_too_little_is_noticed(mutant: type[EagleDrafter], target: Target) -> None:
    settings = DecodeSettings(16, 4, GREEDY, frozenset())
    with pytest.raises(AssertionError):
        generate_observed(target, wrong(mutant, target), prompts([5, 2], 64), settings, [check_fresh])


class ReportsAnotherTemperature(EagleDrafter):
    """The law handed on is that of temperature 1 / 1.5, where the tokens were drawn at 1."""

    def propose(self, state: FeedbackState, committed: TargetFeatures, **options: Any) -> Draft:
        draft = super().propose(state, committed, **options)
        law = draft.probs**1.5
        return replace(draft, probs=law / law.sum(-1, keepdim=True))


@pytest.mark.parametrize("seed", [10, 11, 12])
def test_a_law_that_is_not_what_tokens_were_drawn_from_is_noticed(seed: int, small_target: Target) -> None:
    torch.manual_seed(seed)
    drafter = shaken(ReportsAnotherTemperature(small_target, DraftVocab(5)), seed)
    assert sampled_p_value(small_target, drafter, SAMPLED) < LEAST_P_VALUE


def test_a_drafter_that_is_trained_beside_the_tokens_it_will_read_is_not_accepted(tmp_path: Path) -> None:
    """200 steps are enough for the right one; the wrong one was at 0.57 even after 800."""
    target = tiny_target()
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        options = plain(hydra.compose("train", overrides=["+drafter=eagle", "trainer=cpu"]))
    rates = {}
    for drafter_class in (EagleDrafter, TokensLate):
        torch.manual_seed(0)
        drafter = drafter_class(target, DraftVocab(64))
        rates[drafter_class] = memorise(drafter, target, answered(target), options, tmp_path, 200).acceptance_rate
    assert rates[TokensLate] < LEAST_ACCEPTANCE < rates[EagleDrafter]


def test_a_bfloat16_target_has_a_float32_drafter_whose_angles_are_not_rounded() -> None:
    target = random_target("llama", dtype=torch.bfloat16)
    drafter = EagleDrafter(target, DraftVocab(target.vocab_size))
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    ids = torch.tensor([[3, 4, 5]])
    features = TargetFeatures(ids, ids, target(ids, capture_layers=(-1,)).hidden, torch.tensor([3]))
    (hidden,) = drafter.unroll(features, 1)
    assert (hidden.dtype, drafter.logits(hidden).dtype) == (torch.float32, torch.bfloat16)
    far = torch.tensor([[90]])
    exact = drafter.stack.rotary(hidden, far)
    rounded = drafter.bfloat16().stack.rotary(hidden, far)
    for ours, theirs in zip(rounded, exact, strict=True):
        assert torch.equal(ours, theirs)
