"""A draft language model against its own forward pass over whole texts; its tokens, its export, and its refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import MambaConfig, MambaForCausalLM

from engine.loop import DecodeSettings, generate
from models.checkpoint import native
from models.drafter import accelerate_drafter
from models.drafter.draft_lm import DraftLM, DraftLMState
from models.errors import UserError
from models.sampling import RequestRandom, SamplingParams, probabilities
from models.target import Target, load_target
from models.target.load import TINY
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import (
    Proposal,
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
from tests.helpers.models import VOCAB_SIZE, random_model

MODEL = {"_target_": "models.drafter.draft_lm.DraftLM"}
GREEDY, SAMPLED = SamplingParams(), SamplingParams(0.9, top_k=9)
NO_STOP = DecodeSettings(1000, 4, stop_token_ids=frozenset())
KEPT = torch.arange(1, 64, 3)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64)


def config_of(architecture: str, **overrides: Any) -> dict[str, Any]:
    """What a random model's config.json holds."""
    config: dict[str, Any] = json.loads(random_model(architecture, **overrides).config.to_json_string())
    return config


# The oracle: the model's own forward pass over the whole text, for every drafted token again.


def check_whole_text(drafter: DraftLM, proposal: Proposal) -> None:
    size = drafter.lm.vocab_size
    for row, known in enumerate(proposal.history.token_ids):
        text = [*known, proposal.history.pending[row]]
        for depth, token in enumerate(proposal.draft.token_ids[row].tolist()):
            if len(text) <= drafter.lm.max_positions:
                ids = torch.tensor([[min(t, size - 1) for t in text]])
                with torch.no_grad():
                    hidden = drafter.lm.model.base_model(ids, use_cache=False).last_hidden_state[0, -1]
                    expected = drafter.logits(hidden)
                torch.testing.assert_close(proposal.logits[row, depth], expected, atol=1e-8, rtol=1e-8)
            text.append(token)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("architecture", ["llama_tied", "gpt2", "gemma3", "qwen3", "cohere"])
def test_drafts_are_what_the_model_says_of_the_whole_text(
    architecture: str, sampling: SamplingParams, target: Target
) -> None:
    """Tied heads, learned positions, sliding windows; 61 tokens where the target has 64."""
    drafter = build_shaken(MODEL | {"config": config_of(architecture)}, target, DraftVocab(64))
    start = prompts([5, 11, 1, 20], 64)
    checks = [check_draft, check_whole_text, check_fresh, check_unroll]
    settings = DecodeSettings(1000, 4, sampling, frozenset())
    made, seen = generate_observed(target, drafter, start, settings, checks)
    assert seen.proposals > 5
    if sampling.greedy:
        assert made.token_ids == generate(target, start, settings).token_ids
        assert seen.committed_counts == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_training_reads_what_drafting_reads(sampling: SamplingParams, target: Target) -> None:
    drafter = build_shaken(MODEL | {"num_layers": 1, "hidden_size": 32}, target, DraftVocab(64, KEPT))
    text = prompts([16], 64)[0]
    propose_at_every_length(target, drafter, text, 5, sampling, [check_draft, check_unroll, check_whole_text])


def test_gradients_reach_all_parameters(target: Target) -> None:
    for arguments in ({}, {"config": config_of("llama_tied")}):
        drafter = build_shaken(MODEL | arguments, target, DraftVocab(64, KEPT))
        ids = torch.tensor(prompts([9, 9], 61))
        features = TargetFeatures(ids[:, :-1], ids[:, 1:], None, torch.tensor([8, 8]))
        loss = sum(drafter.logits(hidden).square().sum() for hidden in drafter.unroll(features, 2))
        names, parameters = zip(*drafter.named_parameters(), strict=True)
        for name, grad in zip(names, torch.autograd.grad(loss, parameters), strict=True):
            assert grad.abs().max() > 1e-3, name


class SkipsTheFirstToken(DraftLM):
    def _take_in(self, state: DraftLMState, committed: TargetFeatures) -> torch.Tensor:
        if not state.committed.any():
            late = committed.next_token_ids[:, :1]
            committed = TargetFeatures(late, committed.next_token_ids, None, committed.lengths)
        return super()._take_in(state, committed)


class KeepsItsDraft(DraftLM):
    def _take_in(self, state: DraftLMState, committed: TargetFeatures) -> torch.Tensor:
        state.committed = state.cache.lengths
        return super()._take_in(state, committed)


class ForgetsOne(DraftLM):
    def _take_in(self, state: DraftLMState, committed: TargetFeatures) -> torch.Tensor:
        if state.committed.any():
            state.committed = state.committed - 1
        return super()._take_in(state, committed)


class ReadsThePadding(DraftLM):
    """The state behind the longest request's last token is taken for all."""

    def _take_in(self, state: DraftLMState, committed: TargetFeatures) -> torch.Tensor:
        longest = torch.full_like(committed.lengths, int(committed.lengths.max()))
        return super()._take_in(
            state, TargetFeatures(committed.token_ids, committed.next_token_ids, committed.hidden, longest)
        )


@pytest.mark.parametrize("mutant", [SkipsTheFirstToken, KeepsItsDraft, ForgetsOne, ReadsThePadding])
def test_the_oracle_notices_mistakes(mutant: type[DraftLM], target: Target) -> None:
    torch.manual_seed(0)
    drafter = shaken(mutant(target, DraftVocab(64), num_layers=1))
    with pytest.raises(AssertionError):
        generate_observed(target, drafter, prompts([5, 2], 64), NO_STOP, [check_whole_text])


# Vocabularies and contexts of other sizes than the target's.


@pytest.mark.parametrize("size", [VOCAB_SIZE, 70], ids=["smaller", "larger"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "full"])
def test_a_law_over_another_padding_is_cut_or_padded(size: int, tied: bool, reduced: bool, target: Target) -> None:
    config = config_of("llama_tied" if tied else "llama", vocab_size=size)
    vocab = DraftVocab(64, torch.tensor([2, 7, 40, 62]) if reduced else None)
    drafter = build_shaken(MODEL | {"config": config}, target, vocab)
    ids = torch.tensor([[5, 9, 63, 3]])  # 63 is padding that a model of 61 tokens lacks
    committed = TargetFeatures(ids[:, :-1], ids[:, 1:], None, torch.tensor([3]))
    draft = drafter.propose(
        drafter.new_state(1, 9), committed, num_speculative_tokens=1, sampling=SamplingParams(1.0),
        random=RequestRandom([0], 1),
    )  # fmt: skip
    inside = [t for t in ([2, 7, 40, 62] if reduced else range(64)) if t < size]
    with torch.no_grad():
        hidden = drafter.model(ids.clamp(max=size - 1), use_cache=False).last_hidden_state[0, -1]
        full = reduced or size > 64  # then the head is a part of the model's, as a copy that was shaken by itself
        head = drafter.lm_head if full or not tied else drafter.lm.model.lm_head
        law = probabilities(head(hidden)[: len(inside)], SamplingParams(1.0))
    expected = torch.zeros(64, dtype=torch.float64)
    expected[inside] = law
    torch.testing.assert_close(draft.probs[0, 0], expected, atol=1e-9, rtol=0)
    assert drafter.vocab.size == len(inside)


def test_the_head_is_the_models_own_rows(target: Target) -> None:
    torch.manual_seed(3)
    for size, token_ids in ((64, KEPT), (70, None), (61, None)):
        drafter = native.build(
            MODEL | {"config": config_of("llama", vocab_size=size)}, target, DraftVocab(64, token_ids)
        )
        chosen = torch.arange(min(64, size)) if token_ids is None else token_ids
        assert torch.equal(drafter.head.weight, drafter.lm.model.lm_head.weight[chosen])


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_full_context_ends_the_drafting(architecture: str, target: Target) -> None:
    """The model reads 16 tokens and the target 32: behind them nothing is drafted, up to them everything is."""
    drafter = build_shaken(
        MODEL | {"config": config_of(architecture, max_position_embeddings=16)}, target, DraftVocab(64)
    )
    lengths: dict[int, int] = {}

    def note(drafter: DraftLM, proposal: Proposal) -> None:
        draft = proposal.draft
        for row, known in enumerate(proposal.history.token_ids):
            text = len(known) + 1
            lengths[text] = draft.token_ids.shape[1] if draft.lengths is None else int(draft.lengths[row])
            expected = sum(text + i <= 16 for i in range(draft.token_ids.shape[1]))
            assert lengths[text] == expected

    start = prompts([9, 3, 20], 64)
    made, _ = generate_observed(target, drafter, start, NO_STOP, [check_whole_text, note])
    assert made.token_ids == generate(target, start, NO_STOP).token_ids
    assert {lengths[text] for text in lengths} >= {0, 4}
    alone = generate(target, [prompts([20], 64)[0]], NO_STOP, drafter)
    assert alone.stats.drafted.sum() == 0
    assert alone.token_ids == generate(target, [prompts([20], 64)[0]], NO_STOP).token_ids


# Folders.


@pytest.fixture(scope="module")
def bundled() -> Target:
    return load_target("tiny", device="cpu", dtype="float64")


@pytest.fixture
def folder(bundled: Target, tmp_path: Path) -> Path:
    """Two layers of a random Llama with the bundled target's tokenizer."""
    path = tmp_path / "lm"
    model = random_model("llama_tied", dtype=torch.float32, vocab_size=bundled.vocab_size)
    model.save_pretrained(path)
    assert bundled.tokenizer is not None
    bundled.tokenizer.save_pretrained(path)
    return path


def build(target: Target, folder: Path, **arguments: Any) -> DraftLM:
    drafter: DraftLM = native.build(
        MODEL | {"name_or_path": str(folder)} | arguments, target, DraftVocab(target.vocab_size)
    )
    return drafter.eval()


def test_the_targets_own_model_is_accepted_whole(bundled: Target) -> None:
    drafter = build(bundled, TINY)
    made = generate(bundled, [bundled.encode("def main("), bundled.encode("import")], DecodeSettings(24, 4), drafter)
    assert made.stats.acceptance_rate == 1
    sampled = DecodeSettings(24, 4, SamplingParams(1.0, top_p=0.9))
    assert generate(bundled, [bundled.encode("def main(")], sampled, drafter).stats.acceptance_rate == 1


def test_an_export_needs_no_folder(bundled: Target, folder: Path, tmp_path: Path) -> None:
    drafter = build(bundled, folder)
    assert drafter.pretrained and drafter.lm_head is None
    stored, ours = load_file(folder / "model.safetensors"), drafter.state_dict()
    assert stored.keys() == ours.keys()
    assert all(torch.equal(ours[name], tensor.double()) for name, tensor in stored.items())
    model = MODEL | {"name_or_path": str(folder)}
    described = native.Export("some", model, {"name": "t", "fingerprint": bundled.fingerprint, "load": {}}, 4, {})
    native.save(drafter, described, drafter.vocab, tmp_path / "e", "card")
    shutil.rmtree(folder)
    assert str(folder) not in (tmp_path / "e" / "config.json").read_text()
    loaded = native.load(tmp_path / "e", bundled)
    start = [bundled.encode("def main("), bundled.encode("import os\n")]
    settings = DecodeSettings(16, 4)
    made = [generate(bundled, start, settings, d) for d in (drafter, loaded)]
    assert made[0].token_ids == made[1].token_ids
    assert (made[0].stats.accepted == made[1].stats.accepted).all()
    ids = torch.tensor([start[0]])
    assert torch.equal(drafter.lm(ids).last, loaded.lm(ids).last)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_dtype_is_the_targets_or_the_one_asked_for(dtype: str | None, folder: Path) -> None:
    target = load_target("tiny", device="cpu", dtype="bfloat16")
    drafter = build(target, folder, dtype=dtype)
    assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16 if dtype else torch.float32}
    made = generate(target, [target.encode("def main(")], DecodeSettings(8, 3, SamplingParams(1.0)), drafter)
    assert made.stats.drafted.sum() > 0


def test_acceleration_is_the_models_own(folder: Path) -> None:
    target = load_target("tiny", device="cpu")
    drafter = build(target, folder)
    ids = torch.tensor([target.encode("def main(argv):")])
    with torch.inference_mode():
        before = drafter.logits(drafter.lm(ids).last)
        accelerate_drafter(drafter)
        after = drafter.logits(drafter.lm(ids).last)
    assert drafter.lm._lean is not None and "forward" in vars(drafter.head.linear)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


def swapped(folder: Path) -> None:
    """Two tokens change places."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    first, second = [token for token in vocab if token.isalpha()][:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(content))


def unsupported(folder: Path) -> None:
    config = MambaConfig(vocab_size=2048, hidden_size=16, state_size=4, num_hidden_layers=2)
    MambaForCausalLM(config).save_pretrained(folder)


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (swapped, "has another tokenizer than 'tiny': 2 tokens differ"),
        (
            unsupported,
            r"cannot draft\. Target .*: the architecture 'mamba' is not supported",
        ),
        (without_weights, "cannot draft. Cannot load the target"),
        (shutil.rmtree, "drafter.model.name_or_path: there is no folder '.*lm'"),
    ],
)
def test_a_folder_that_cannot_draft_is_refused(damage: Any, sentence: str, bundled: Target, folder: Path) -> None:
    damage(folder)
    with pytest.raises(UserError, match=sentence) as error:
        build(bundled, folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_a_tokenizer_that_is_stored_otherwise_is_the_same(bundled: Target, folder: Path) -> None:
    """Padding and truncation settings are no part of what ids mean."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text()) | {"truncation": {
        "direction": "Right", "max_length": 7, "strategy": "LongestFirst", "stride": 0
    }}  # fmt: skip
    path.write_text(json.dumps(content))
    assert build(bundled, folder).vocab.size == bundled.vocab_size


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name_or_path": "a", "config": {"model_type": "llama"}}, "both name_or_path and config"),
        ({"name_or_path": "a", "num_layers": 3}, "num_layers shapes a new draft model, but name_or_path has"),
        ({"config": {"model_type": "llama"}, "head_dim": 8}, "head_dim shapes a new draft model, but config has"),
        ({"config": {"hidden_size": 8}}, "config lacks model_type"),
        ({"config": "llama"}, "config lacks model_type"),
        ({"config": {"model_type": "lama"}}, "config makes no model: Unrecognized model identifier: lama"),
        ({"config": {"model_type": "t5"}}, "config makes no model: Unrecognized configuration class"),
        ({"config": {"model_type": "llama", "hidden_size": "x"}}, "config makes no model: .*expected int, got str"),
        ({"dtype": "int8"}, "dtype is 'int8': choose float32"),
        ({"num_attention_heads": 3}, "cannot share evenly"),
    ],
)
def test_senseless_arguments_are_refused(arguments: dict[str, Any], sentence: str, target: Target) -> None:
    with pytest.raises(UserError, match=sentence):
        native.build(MODEL | arguments, target, DraftVocab(64))


def test_a_new_model_has_the_sizes_asked_for(target: Target) -> None:
    config = native.build(MODEL, target, DraftVocab(64)).lm.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (2, 64, 64)
    sizes = {"num_layers": 3, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 6, "head_dim": 4}
    drafter = native.build(MODEL | sizes, target, DraftVocab(64))
    config = drafter.lm.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (3, 24, 40)
    assert (config.num_attention_heads, config.head_dim, drafter.pretrained) == (6, 4, False)
    assert all(parameter.requires_grad for parameter in drafter.parameters())
    assert not {p.data_ptr() for p in target.parameters()} & {p.data_ptr() for p in drafter.parameters()}
