"""Medusa against loops over rows in plain tensors, its start and its names, and that the contract's checks bite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from torch import Tensor, nn

from conf.compose import ROOT, plain
from data.loader import Batch
from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.drafter import accelerate_drafter
from models.drafter.medusa import MedusaDrafter
from models.errors import UserError
from models.linear import Product
from models.sampling import RequestRandom, SamplingParams
from models.target import Target
from models.tree import DynamicTree, StaticTree
from models.tree_drafting import Expander
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import (
    Observed,
    build_shaken,
    check_draft,
    check_fresh,
    check_unroll,
    generate_observed,
    prompts,
    propose_at_every_length,
    shaken,
    tiny_target,
)
from tests.helpers.memorising import LEAST_ACCEPTANCE, answered, memorise
from tests.helpers.models import random_target
from train.law_matching import LawMatching
from train.settings import instantiate

MODEL = {"_target_": "models.drafter.medusa.MedusaDrafter", "num_heads": 3}
CLOSE = {"atol": 1e-10, "rtol": 1e-10}
GREEDY, SAMPLED = SamplingParams(), SamplingParams(1.0)
KEPT = torch.arange(1, 64, 3)
VOCABS = {"all tokens": None, "some tokens": KEPT}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64)


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    return composed()


def composed(*overrides: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        return plain(hydra.compose("train", overrides=["+drafter=medusa", "trainer=cpu", *overrides]))


def features_of(target: Target, batch_size: int = 2, num_rows: int = 7) -> TargetFeatures:
    ids = torch.tensor(prompts([num_rows + 1] * batch_size, target.vocab_size, seed=4))
    with torch.no_grad():
        hidden = target(ids[:, :-1], capture_layers=(-1,)).hidden
    return TargetFeatures(ids[:, :-1], ids[:, 1:], hidden, torch.full((batch_size,), num_rows))


def head_by_loop(weights: dict[str, Tensor], head: int, state: Tensor, unembedding: Tensor | None = None) -> Tensor:
    """Logits (Vd,) of one head for one state (D,), from the tensors that a checkpoint holds."""
    layer = 0
    while (name := f"blocks.{head}.layers.{layer}") + ".weight" in weights:
        inner = weights[f"{name}.weight"] @ state + weights[f"{name}.bias"]
        state = state + inner / (1 + (-inner).exp())
        layer += 1
    assert layer > 0
    return (weights[f"lm_heads.{head}.weight"] if unembedding is None else unembedding) @ state


# What a head says.


@pytest.mark.parametrize("unembedding", ["full", "shared"])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("architecture", ["llama_tied", "gemma2", "cohere", "granite", "phi"])
@torch.no_grad()
def test_every_head_begins_as_the_targets_own(architecture: str, vocab: str, unembedding: str) -> None:
    """Biases, scales and softcaps of the target's head included."""
    target = random_target(architecture)
    kept = None if VOCABS[vocab] is None else torch.arange(1, target.vocab_size, 3)
    model = MODEL | {"num_layers": 2, "unembedding": unembedding}
    drafter = native.build(model, target, DraftVocab(target.vocab_size, kept))
    features = features_of(target)
    expected = target.model(input_ids=features.token_ids).logits
    for step, hidden in enumerate(drafter.unroll(features, 3)):
        assert torch.equal(hidden, features.hidden)
        found = drafter.logits(hidden, step)
        torch.testing.assert_close(found, expected if kept is None else expected[..., kept], **CLOSE)


@pytest.mark.parametrize("unembedding", ["full", "shared"])
@pytest.mark.parametrize("vocab", VOCABS)
@torch.no_grad()
def test_unroll_is_the_loop_over_rows_and_heads(vocab: str, unembedding: str, target: Target) -> None:
    model = MODEL | {"num_layers": 2, "unembedding": unembedding}
    drafter = build_shaken(model, target, DraftVocab(64, VOCABS[vocab]))
    weights, features = drafter.state_dict(), features_of(target)
    assert features.hidden is not None
    own = target.model.get_output_embeddings().weight
    shared = None if unembedding == "full" else own if VOCABS[vocab] is None else own[KEPT]
    for step, hidden in enumerate(drafter.unroll(features, 3)):
        logits = drafter.logits(hidden, step)
        for row in range(2):
            for t in range(7):
                expected = head_by_loop(weights, step, features.hidden[row, t], shared)
                torch.testing.assert_close(logits[row, t], expected, **CLOSE)


@pytest.mark.parametrize("vocab", VOCABS)
@torch.no_grad()
def test_a_proposal_is_what_the_heads_say_of_the_last_committed_state(vocab: str, target: Target) -> None:
    drafter = build_shaken(MODEL, target, DraftVocab(64, VOCABS[vocab]))
    features = features_of(target, 2, 6)
    assert features.hidden is not None
    ragged = TargetFeatures(features.token_ids, features.next_token_ids, features.hidden, torch.tensor([6, 4]))
    draft = drafter.propose(
        drafter.new_state(2, 12), ragged, num_speculative_tokens=3, sampling=GREEDY, random=RequestRandom([0, 1], 3)
    )
    ids = torch.arange(64) if VOCABS[vocab] is None else KEPT
    for b, length in enumerate([6, 4]):
        said = [head_by_loop(drafter.state_dict(), k, features.hidden[b, length - 1]) for k in range(3)]
        assert draft.token_ids[b].tolist() == [int(ids[logits.argmax()]) for logits in said]
    assert draft.lengths is None and draft.probs is None


@pytest.mark.parametrize("shape", [StaticTree((-1, -1, 0, 1, 1, 3), (0, 2, 1, 0, 1, 0)), DynamicTree(3, 2, 7)])
@torch.no_grad()
def test_a_level_of_a_tree_is_one_heads_likeliest_tokens(shape: StaticTree | DynamicTree, target: Target) -> None:
    drafter = build_shaken(MODEL, target, DraftVocab(64, KEPT))
    features = features_of(target, 1, 5)
    assert features.hidden is not None
    draft = drafter.propose_tree(
        drafter.new_state(1, 12), features, shape=shape, children="top", sampling=GREEDY, random=RequestRandom([0], 9)
    )
    ranked = [
        KEPT[head_by_loop(drafter.state_dict(), k, features.hidden[0, 4]).argsort(descending=True)].tolist()
        for k in range(3)
    ]
    parents, tokens = draft.parents[0].tolist(), draft.token_ids[0].tolist()
    depth: list[int] = []
    for node, parent in enumerate(parents):
        depth.append(0 if parent < 0 else depth[parent] + 1)
        ranks = shape.ranks[node : node + 1] if isinstance(shape, StaticTree) else (0, 1)
        assert tokens[node] in [ranked[depth[node]][rank] for rank in ranks]
    assert len(tokens) == shape.num_nodes and max(depth) == 2
    assert len(set(zip(parents, tokens, strict=True))) == len(tokens)


# What it consists of.


@pytest.mark.parametrize("unembedding", ["full", "shared"])
def test_tensors_have_the_published_names_and_each_head_its_own(unembedding: str, target: Target) -> None:
    """formats.md, Medusa: the names that vLLM reads."""
    drafter = native.build(MODEL | {"num_layers": 2, "unembedding": unembedding}, target, DraftVocab(64, KEPT))
    expected: dict[str, tuple[int, ...]] = {}
    for head in range(3):
        for layer in range(2):
            expected |= {f"blocks.{head}.layers.{layer}.weight": (64, 64), f"blocks.{head}.layers.{layer}.bias": (64,)}
        if unembedding == "full":
            expected[f"lm_heads.{head}.weight"] = (len(KEPT), 64)
    assert {name: tuple(t.shape) for name, t in drafter.state_dict().items()} == expected
    assert {name for name, _ in drafter.named_parameters()} == set(expected)
    assert len({p.data_ptr() for p in drafter.parameters()}) == len(expected)
    assert not {p.data_ptr() for p in drafter.parameters()} & {p.data_ptr() for p in target.parameters()}
    assert all(p.requires_grad for p in drafter.parameters())
    assert not any(p.requires_grad for p in target.parameters())


@pytest.mark.parametrize("unembedding", ["full", "shared"])
def test_a_heads_tensors_have_a_say_in_its_own_logits_alone(unembedding: str, target: Target) -> None:
    drafter = build_shaken(MODEL | {"num_layers": 2, "unembedding": unembedding}, target, DraftVocab(64))
    features = features_of(target)
    for step, hidden in enumerate(drafter.unroll(features, 3)):
        weight = torch.linspace(-1, 1, 64, dtype=torch.float64)
        said = (drafter.logits(hidden, step) * weight).sum()
        grads = torch.autograd.grad(said, list(drafter.parameters()), allow_unused=True)
        for (name, _), grad in zip(drafter.named_parameters(), grads, strict=True):
            assert (grad is not None and bool(grad.abs().max() > 1e-3)) == (name.split(".")[1] == str(step)), name
        own = {id(p) for p in drafter.logit_parameters(step)}
        unembeddings = {id(p) for name, p in drafter.named_parameters() if name.startswith(f"lm_heads.{step}.")}
        assert own == unembeddings and len(own) == (unembedding == "full")


def test_the_targets_frozen_head_and_own_ones_get_fast_routes() -> None:
    target = tiny_target()
    for unembedding, count in (("full", 3 * 2), ("shared", 3 + 1)):
        drafter = build_shaken(MODEL | {"unembedding": unembedding}, target, DraftVocab(64, KEPT))
        accelerate_drafter(drafter)
        linears = {*(m for m in drafter.modules() if isinstance(m, nn.Linear)), *(h.linear for h in drafter._heads)}
        assert len(linears) == count
        assert all(isinstance(vars(linear).get("forward"), Product) for linear in linears)


def test_a_bfloat16_target_has_float32_heads() -> None:
    target = random_target("llama", dtype=torch.bfloat16)
    ids = torch.tensor([[3, 4, 5]])
    features = TargetFeatures(ids, ids, target(ids, capture_layers=(-1,)).hidden, torch.tensor([3]))
    for unembedding, dtype in (("full", torch.float32), ("shared", torch.bfloat16)):
        drafter = native.build(MODEL | {"unembedding": unembedding}, target, DraftVocab(target.vocab_size))
        assert {p.dtype for p in drafter.parameters()} == {torch.float32}
        (hidden,) = drafter.unroll(features, 1)
        assert (hidden.dtype, drafter.logits(hidden).dtype) == (torch.float32, dtype)


# How deep drafts can be.


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_longer_chains_end_with_the_last_head(sampling: SamplingParams, target: Target) -> None:
    drafter, start = build_shaken(MODEL, target, DraftVocab(64)), prompts([5, 2, 9], 64)
    features = features_of(target, 3)
    drafts = [
        drafter.propose(
            drafter.new_state(3, 20), features, num_speculative_tokens=count, sampling=sampling, random=random
        )
        for count, random in ((6, RequestRandom([0, 1, 2], 6)), (3, RequestRandom([0, 1, 2], 6)))
    ]
    assert drafts[0].token_ids.shape == (3, 6) and drafts[0].lengths.tolist() == [3, 3, 3]
    assert drafts[1].lengths is None
    longer = DecodeSettings(1000, 6, sampling, frozenset())
    made = generate(target, start, longer, Observed(drafter, [check_draft, check_unroll, check_fresh]))
    assert made.stats.drafted[:, :3].sum() > 0 and made.stats.drafted[:, 3:].sum() == 0
    if sampling.greedy:
        assert torch.equal(drafts[0].token_ids[:, :3], drafts[1].token_ids)
        assert made.token_ids == generate(target, start, longer).token_ids
    else:
        assert drafts[0].probs.shape == (3, 6, 64)


def test_deeper_trees_and_more_steps_are_refused(target: Target) -> None:
    drafter = build_shaken(MODEL, target, DraftVocab(64))
    for shape in (StaticTree.chain(4), DynamicTree(4, 2, 8)):
        with pytest.raises(UserError, match="4 tokens deep, but MedusaDrafter looks 3 tokens ahead"):
            generate(target, [[3, 4]], DecodeSettings(8, tree=shape), drafter)
        with pytest.raises(UserError, match="4 tokens deep, but MedusaDrafter looks 3 tokens ahead"):
            drafter.propose_tree(
                drafter.new_state(1, 12), features_of(target, 1), shape=shape, children="top", sampling=GREEDY,
                random=RequestRandom([0], 9),
            )  # fmt: skip
    with pytest.raises(UserError, match="4 steps are asked of 3 Medusa heads"):
        next(drafter.unroll(features_of(target), 4))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_heads": 0}, "drafter.model.num_heads is 0"),
        ({"num_layers": 0}, "drafter.model.num_layers is 0"),
        ({"unembedding": "tied"}, "drafter.model.unembedding is 'tied': choose full or shared"),
    ],
)
def test_senseless_arguments_are_refused(arguments: dict[str, Any], sentence: str, target: Target) -> None:
    with pytest.raises(UserError, match=sentence):
        native.build(MODEL | arguments, target, DraftVocab(64))


# What it learns.


def module_of(drafter: Any, target: Target, options: dict[str, Any], **changes: Any) -> LawMatching:
    module = instantiate(options["drafter"]["training"] | changes, drafter, target, max_steps=50, seed=0)
    assert isinstance(module, LawMatching)
    return module


def test_the_steps_of_training_are_the_heads(target: Target) -> None:
    options = composed("drafter.model.num_heads=3")
    assert options["drafter"]["training"]["num_steps"] == 3
    drafter = build_shaken(options["drafter"]["model"], target, DraftVocab(64))
    assert module_of(drafter, target, options).num_steps == 3
    with pytest.raises(UserError, match="num_steps is 4, but the drafter looks 3 tokens ahead only"):
        module_of(drafter, target, options, num_steps=4)


@pytest.mark.parametrize("vocab", VOCABS)
def test_hard_labels_are_the_published_loss(vocab: str, target: Target, options: dict[str, Any]) -> None:
    """Σ_i 0.8^i · cross-entropy of logits[i][:, :−(2+i)] against ids[:, 2+i:], heads i = 0, 1, ..; gradients too.

    As there, what has no label counts in no mean.
    """
    drafter = build_shaken(MODEL, target, DraftVocab(64, VOCABS[vocab]))
    module = module_of(drafter, target, options, losses={"cross_entropy": 1.0}, num_steps=3, chunk_rows=3)
    ids = torch.tensor(prompts([12, 12], 64, seed=2))
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[0, 4:], mask[1, 6:9] = True, True
    hidden = target(ids, capture_layers=(-1,)).hidden
    weights = dict(drafter.named_parameters())
    draft_ids = {token: i for i, token in enumerate(range(64) if VOCABS[vocab] is None else KEPT.tolist())}
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(3):
        losses = []
        for row in range(2):
            for t in range(12 - (2 + i)):
                if mask[row, t + 2 + i]:
                    logits = head_by_loop(weights, i, hidden[row, t])
                    label = draft_ids.get(int(ids[row, t + 2 + i]))
                    losses += [] if label is None else [logits.logsumexp(0) - logits[label]]
        expected = expected + 0.8**i * sum(losses) / len(losses)
    found = module.training_losses(Batch(ids, mask, torch.tensor([12, 9]), None), 0)["loss"]
    torch.testing.assert_close(found, expected, **CLOSE)
    grads = [torch.autograd.grad(loss, list(weights.values())) for loss in (found, expected)]
    for name, ours, theirs in zip(weights, *grads, strict=True):
        assert theirs.abs().max() > 1e-6, name
        torch.testing.assert_close(ours, theirs, **CLOSE, msg=name)


# The contract's checks notice a drafter that is wrong by one.


class StatesLate(MedusaDrafter):
    """Training reads h_{t−1} in row t."""

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        assert features.hidden is not None
        late = torch.cat([features.hidden[:, :1], features.hidden[:, :-1]], dim=1)
        return super().unroll(
            TargetFeatures(features.token_ids, features.next_token_ids, late, features.lengths), num_steps
        )


class HeadsAhead(MedusaDrafter):
    """Training takes the next head for each step."""

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        assert features.hidden is not None
        for step in range(num_steps):
            yield self.head_states(features.hidden, (step + 1) % self.max_depth)


class DraftReadsPadding(MedusaDrafter):
    """Drafting reads the last row of the batch, whatever a request's own length is."""

    def expander(self, state: Any, committed: TargetFeatures) -> Expander:
        full = torch.full_like(committed.lengths, committed.token_ids.shape[1])
        return super().expander(
            state, TargetFeatures(committed.token_ids, committed.next_token_ids, committed.hidden, full)
        )


class DraftReadsOneEarlier(MedusaDrafter):
    """Drafting reads the row before the last committed one."""

    def expander(self, state: Any, committed: TargetFeatures) -> Expander:
        shorter = (committed.lengths - 1).clamp(min=1)
        return super().expander(
            state, TargetFeatures(committed.token_ids, committed.next_token_ids, committed.hidden, shorter)
        )


def wrong(drafter_class: type[MedusaDrafter], target: Target) -> MedusaDrafter:
    torch.manual_seed(0)
    return shaken(drafter_class(target, DraftVocab(64)))


@pytest.mark.parametrize("mutant", [StatesLate, HeadsAhead, DraftReadsPadding, DraftReadsOneEarlier])
def test_training_that_differs_from_decoding_by_one_is_noticed(mutant: type[MedusaDrafter], target: Target) -> None:
    text = prompts([12], 64)[0]
    for sampling in (GREEDY, SAMPLED):
        with pytest.raises(AssertionError, match="not close"):
            propose_at_every_length(target, wrong(mutant, target), text, 4, sampling, [check_unroll])
    with pytest.raises(AssertionError, match="not close"):
        settings = DecodeSettings(12, 4, GREEDY, frozenset())
        generate_observed(target, wrong(mutant, target), [text[:5], text[:2]], settings, [check_unroll])


@pytest.mark.parametrize("architecture", ["llama_tied", "gemma2", "gpt2", "cohere", "granite", "phi"])
def test_other_architectures(architecture: str) -> None:
    target = random_target(architecture)
    vocab = DraftVocab(target.vocab_size, torch.arange(0, target.vocab_size, 2))
    drafter, start = build_shaken(MODEL, target, vocab), prompts([5, 11, 3], target.vocab_size)
    settings = DecodeSettings(12, 3, GREEDY, frozenset())
    made, seen = generate_observed(target, drafter, start, settings, [check_draft, check_unroll, check_fresh])
    assert made.token_ids == generate(target, start, settings).token_ids
    assert len(seen.committed_counts) > 2


def test_heads_that_learn_each_others_tokens_are_not_accepted(options: dict[str, Any], tmp_path: Path) -> None:
    target = tiny_target()
    rates = []
    for drafter_class, unembedding in ((MedusaDrafter, "full"), (MedusaDrafter, "shared"), (HeadsAhead, "full")):
        torch.manual_seed(0)
        drafter = drafter_class(target, DraftVocab(64), unembedding=unembedding)
        rates.append(memorise(drafter, target, answered(target), options, tmp_path, 200).acceptance_rate)
    assert min(rates[:2]) > LEAST_ACCEPTANCE
    assert rates[2] < 0.6
