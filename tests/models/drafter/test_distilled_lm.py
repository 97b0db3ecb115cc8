"""What a distilled draft model begins with, what it shares with its target, and what its export holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.drafter.distilled_lm import DistilledLM
from models.errors import UserError
from models.pruning import best_units, squared_norms
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, prompts
from tests.helpers.models import random_target

MODEL = {"_target_": "models.drafter.distilled_lm.DistilledLM"}
KEPT = torch.arange(1, 61, 3)
EXACT = {"atol": 1e-10, "rtol": 1e-10}
IDS = torch.randint(61, (2, 14), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target("llama", dtype=torch.float64)


def build(target: Target, vocab: DraftVocab | None = None, **arguments: Any) -> DistilledLM:
    torch.manual_seed(0)
    drafter: DistilledLM = native.build(MODEL | arguments, target, vocab or DraftVocab(target.vocab_size))
    return drafter.eval()


def low_rank(rank: int, share: str = "layers", train_shared: bool = True) -> dict[str, Any]:
    return {"rank": rank, "share": share, "train_shared": train_shared}


def logits_of(drafter: DistilledLM) -> Tensor:
    with torch.no_grad():
        return drafter.logits(drafter.lm(IDS).last)


@pytest.mark.parametrize("embeddings", ["own", "copied", "shared"])
@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "qwen2_mixed", "qwen3"])
def test_all_of_its_layers_are_the_target(architecture: str, embeddings: str) -> None:
    target = random_target(architecture)
    expected = target.model(input_ids=IDS).logits.detach()
    for start, sizes in (("first_layers", {"num_layers": 3}), ("strided_layers", {"num_layers": 3}), ("pruned", {})):
        for vocab in (None, DraftVocab(61, KEPT)):
            drafter = build(target, vocab, start=start, embeddings=embeddings, **sizes)
            rows = expected if vocab is None else expected[..., KEPT]
            torch.testing.assert_close(logits_of(drafter), rows, **EXACT)
            assert drafter.pretrained


@pytest.mark.parametrize(("start", "layers"), [("first_layers", (0, 1)), ("strided_layers", (0, 2))])
def test_layers_are_the_targets_own(start: str, layers: tuple[int, ...], target: Target) -> None:
    drafter = build(target, start=start, num_layers=2)
    for place, layer in enumerate(layers):
        ours = drafter.lm.model.get_decoder().layers[place].state_dict()
        theirs = target.model.get_decoder().layers[layer].state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert not {p.data_ptr() for p in drafter.parameters()} & {p.data_ptr() for p in target.parameters()}


def test_a_pruned_start_holds_the_largest_weights_until_it_is_cut(target: Target) -> None:
    drafter = build(target, start="pruned", keep={"layers": 0.67, "groups": 0.5, "channels": 0.25})
    config = drafter.lm.config
    sizes = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.intermediate_size)
    assert sizes == (2, 2, 1, 12)
    assert drafter.units is not None and drafter.units.layers == (0, 2)
    norms = squared_norms(target)
    expected = norms["channels"][[0, 2]].topk(12).indices.sort().values
    assert torch.equal(drafter.units.channels, expected)
    gate = target.model.get_decoder().layers[2].mlp.gate_proj.weight
    assert torch.equal(drafter.lm.model.get_decoder().layers[1].mlp.gate_proj.weight, gate[expected[1]])
    smallest = {kind: -values for kind, values in norms.items()}
    drafter.cut(best_units(smallest, {"groups": 1, "channels": 12}, (0, 1)))
    gate, kept = target.model.get_decoder().layers[1].mlp.gate_proj.weight, drafter.units.channels[1]
    assert torch.equal(drafter.lm.model.get_decoder().layers[1].mlp.gate_proj.weight, gate[kept])
    assert torch.equal(kept, norms["channels"][1].topk(12, largest=False).indices.sort().values)


def test_copied_embeddings_are_trained_and_tied_as_the_targets_are() -> None:
    for architecture in ("llama", "llama_tied"):
        target = random_target(architecture)
        drafter = build(target, embeddings="copied", num_layers=1)
        tied = architecture == "llama_tied"
        assert (drafter.lm_head is None) == tied
        assert torch.equal(drafter.lm.embedding.weight, target.embedding.weight)
        assert torch.equal(drafter.head.weight, target.head.weight)
        assert drafter.lm.embedding.weight.requires_grad and drafter.head.weight.requires_grad
        assert drafter.lm.embedding.weight is not target.embedding.weight


# Shared embeddings.


@pytest.mark.parametrize("hidden_size", [None, 16])
@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
def test_shared_embeddings_are_the_targets_and_in_no_file(
    hidden_size: int | None, reduced: bool, target: Target, tmp_path: Path
) -> None:
    vocab = DraftVocab(61, KEPT if reduced else None)
    model = MODEL | {"embeddings": "shared", "hidden_size": hidden_size, "num_layers": 1}
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    drafter = build_shaken(model, target, vocab)
    assert all(torch.equal(target.model.state_dict()[name], tensor) for name, tensor in before.items())
    assert not any(p.requires_grad for p in target.parameters())
    described = native.Export("some", model, {"name": "t", "fingerprint": target.fingerprint, "load": {}}, 4, {})
    native.save(drafter, described, vocab, tmp_path / "e", "card")
    saved = load_file(tmp_path / "e" / "model.safetensors")
    assert max(tensor.numel() for tensor in saved.values()) < target.vocab_size * 32
    maps = {name for name in saved if "narrow" in name or "widen" in name}
    assert len(maps) == (0 if hidden_size is None else 2)
    loaded = native.load(tmp_path / "e", target)
    assert torch.equal(logits_of(loaded), logits_of(drafter))


def test_narrow_states_are_products_with_the_targets_matrices(target: Target) -> None:
    drafter = build_shaken(MODEL | {"embeddings": "shared", "hidden_size": 16, "num_layers": 1}, target, DraftVocab(61))
    narrow = drafter.state_dict()["model.embed_tokens.narrow.weight"]  # (16, 32)
    assert drafter.widen is not None
    whole = drafter.lm.model.base_model
    ours = whole(inputs_embeds=(target.embedding.weight @ narrow.t())[IDS], use_cache=False).last_hidden_state
    expected = ours @ (target.head.weight @ drafter.widen.weight).t()
    torch.testing.assert_close(logits_of(drafter), expected.detach(), **EXACT)
    torch.testing.assert_close(drafter.lm.model(input_ids=IDS).logits, expected, **EXACT)  # as transformers sees it


def test_the_maps_begin_with_the_best_approximation_of_their_rank(target: Target) -> None:
    drafter = build(target, embeddings="shared", hidden_size=16, num_layers=1)
    narrow = drafter.state_dict()["model.embed_tokens.narrow.weight"]
    embedding = target.embedding.weight
    left, values, right = torch.linalg.svd(embedding, full_matrices=False)
    best = left[:, :16] * values[:16] @ right[:16]
    torch.testing.assert_close(embedding @ narrow.t() @ narrow, best, **EXACT)


@pytest.mark.parametrize(
    ("arguments", "of_the_head"),
    [
        ({"embeddings": "shared"}, set()),
        ({"embeddings": "shared", "hidden_size": 16}, {"widen.weight"}),
        ({"low_rank": low_rank(4)}, {"lm_head.weight"}),
        ({"start": "pruned"}, {"lm_head.weight"}),
    ],
)
def test_gradients_reach_all_that_is_trained(arguments: dict[str, Any], of_the_head: set[str], target: Target) -> None:
    drafter = build_shaken(MODEL | arguments, target, DraftVocab(61, KEPT))
    ids = torch.tensor(prompts([9, 9], 61))
    features = TargetFeatures(ids[:, :-1], ids[:, 1:], None, torch.tensor([8, 8]))
    loss = drafter.logits(next(drafter.unroll(features, 1))).square().sum()
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    for name, grad in zip(names, torch.autograd.grad(loss, parameters), strict=True):
        assert grad.abs().max() > 1e-4, name
    heads = set(map(id, drafter.logit_parameters()))
    assert {name for name, p in zip(names, parameters, strict=True) if id(p) in heads} == of_the_head


# Low rank.


@pytest.mark.parametrize("share", ["layers", "target"])
@pytest.mark.parametrize("architecture", ["llama", "llama_biased", "qwen3"])
def test_of_full_rank_it_is_the_dense_one(architecture: str, share: str) -> None:
    target = random_target(architecture)
    for start in ({"start": "first_layers", "num_layers": 2}, {"start": "pruned", "keep": {"layers": 0.67}}):
        dense, factored = build(target, **start), build(target, **start, low_rank=low_rank(48, share))
        torch.testing.assert_close(logits_of(factored), logits_of(dense), **EXACT)
    single = random_target(architecture, dtype=torch.float32)
    pair = (build(single, num_layers=2, start="first_layers", low_rank=r) for r in (None, low_rank(48, share)))
    torch.testing.assert_close(*map(logits_of, pair), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("share", ["layers", "target"])
def test_its_matrices_are_the_best_of_their_rank(share: str, target: Target) -> None:
    drafter = build(target, start="strided_layers", num_layers=2, low_rank=low_rank(5, share))
    theirs = [dict(layer.named_modules()) for layer in target.layers]
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        source = theirs if share == "target" else [theirs[0], theirs[2]]
        side_by_side = np.concatenate([parts[name].weight.numpy() for parts in source], axis=1)
        kept = np.linalg.svd(side_by_side)[0][:, :5]
        for place, layer in enumerate((0, 2)):
            found = dict(drafter.lm.layers[place].named_modules())[name].weight.detach()
            wanted = kept @ kept.T @ theirs[layer][name].weight.numpy()
            torch.testing.assert_close(found, torch.from_numpy(wanted), **EXACT)


@pytest.mark.parametrize(("share", "train_shared"), [("layers", True), ("target", True), ("target", False)])
@pytest.mark.parametrize("embeddings", ["own", "shared"])
def test_its_export_holds_factors_once_and_can_be_multiplied_out(
    embeddings: str, share: str, train_shared: bool, target: Target, tmp_path: Path
) -> None:
    arguments = {"num_layers": 2, "embeddings": embeddings}
    model = MODEL | arguments | {"low_rank": low_rank(4, share, train_shared)}
    drafter = build_shaken(model, target, DraftVocab(61))
    frozen = {name for name, p in drafter.named_parameters() if not p.requires_grad}
    assert frozen == (set() if train_shared else {n for n in drafter.state_dict() if n.startswith("factors.")})
    described = native.Export("some", model, {"name": "t", "fingerprint": target.fingerprint, "load": {}}, 4, {})
    native.save(drafter, described, drafter.vocab, tmp_path / "e", "card")
    saved = load_file(tmp_path / "e" / "model.safetensors")
    assert sum("factors." in name for name in saved) == 7 and sum(".own." in name for name in saved) == 14
    assert sum(saved[f"factors.mlp_{n}_proj.weight"].numel() for n in ("gate", "up", "down")) == 4 * (48 + 48 + 32)
    loaded = native.load(tmp_path / "e", target)
    assert torch.equal(logits_of(loaded), logits_of(drafter))
    dense = build(target, **arguments)
    dense.load_state_dict(loaded.dense_tensors())
    torch.testing.assert_close(logits_of(dense), logits_of(drafter), **EXACT)
    start, settings = prompts([5, 11], 61), DecodeSettings(12, 4, stop_token_ids=frozenset())
    assert generate(target, start, settings, loaded).token_ids == generate(target, start, settings).token_ids


def test_it_is_cut_before_it_is_factored(target: Target) -> None:
    arguments = {"start": "pruned", "keep": {"layers": 0.67, "channels": 0.25}}
    drafter = build(target, **arguments, low_rank=low_rank(48))
    dense = build(target, **arguments)
    smallest = best_units({k: -v for k, v in squared_norms(target).items()}, {"groups": 2, "channels": 12}, (0, 1))
    before = logits_of(drafter)
    for current in (drafter, dense):
        current.cut(smallest)
    torch.testing.assert_close(logits_of(drafter), logits_of(dense), **EXACT)
    assert (logits_of(drafter) - before).abs().max() > 0.1
    assert {n for n in drafter.state_dict() if "layers.0.mlp" in n} == {
        f"model.layers.0.mlp.{n}_proj.own.weight" for n in ("gate", "up", "down")
    }


def test_an_export_of_a_cut_target_says_its_sizes(target: Target, tmp_path: Path) -> None:
    model = MODEL | {"start": "pruned", "keep": {"groups": 0.5, "channels": 0.5}}
    drafter = build_shaken(model, target, DraftVocab(61))
    described = native.Export("some", model, {"name": "t", "fingerprint": target.fingerprint, "load": {}}, 4, {})
    native.save(drafter, described, drafter.vocab, tmp_path / "e", "card")
    loaded = native.load(tmp_path / "e", target)
    assert torch.equal(logits_of(loaded), logits_of(drafter))
    start, settings = prompts([5, 11], 61), DecodeSettings(12, 4, stop_token_ids=frozenset())
    assert generate(target, start, settings, loaded).token_ids == generate(target, start, settings).token_ids


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"start": "fist_layers"}, "start is 'fist_layers': choose random, first_layers"),
        ({"start": "first_layers", "hidden_size": 8}, "hidden_size is given beside start=first_layers"),
        ({"start": "first_layers", "num_layers": 4}, "num_layers is 4: the target has 3"),
        ({"start": "first_layers", "num_layers": 0}, "num_layers is 0: the target has 3"),
        ({"num_layers": 0}, "num_layers is 0: it must be at least 1"),
        ({"hidden_size": 0}, "hidden_size is 0: it must be at least 1"),
        ({"keep": {"layers": 0.5}}, "keep says what start=pruned leaves, but start is random"),
        ({"start": "first_layers", "keep": {}}, "but start is first_layers: drop one"),
        ({"start": "pruned", "num_layers": 2}, "num_layers is given beside start=pruned"),
        ({"start": "pruned", "keep": {"heads": 0.5}}, "keep has 'heads': choose from layers, groups, channels"),
        ({"start": "pruned", "keep": {"layers": 0}}, r"keep\.layers is 0: it must be above 0"),
        ({"start": "pruned", "name_or_path": "a"}, "name_or_path is given beside start=pruned"),
        ({"low_rank": {"rank": 4}}, "low_rank has rank: give rank, share and train_shared"),
        ({"low_rank": low_rank(0)}, "low_rank.rank is 0: it must be a whole number of at least 1"),
        ({"low_rank": low_rank(4, "all")}, "low_rank.share is 'all': choose layers or target"),
        ({"low_rank": low_rank(4) | {"train_shared": "yes"}}, "train_shared is 'yes': it must be true or false"),
        ({"low_rank": low_rank(4, "target"), "hidden_size": 16}, "o_proj has 16 rows .* and 32 in the target"),
        ({"embeddings": "tied"}, "embeddings is 'tied': choose own, copied, shared"),
        ({"embeddings": "shared", "name_or_path": "a"}, "name_or_path has an embedding of its own"),
        ({"embeddings": "copied", "hidden_size": 16}, "the target's are 61 × 32, and those .* 61 × 16"),
        ({"embeddings": "shared", "hidden_size": 64}, "have 64 numbers, more than the target's 32"),
    ],
)  # fmt: skip
def test_senseless_arguments_are_refused(arguments: dict[str, Any], sentence: str, target: Target) -> None:
    with pytest.raises(UserError, match=sentence):
        build(target, **arguments)


def test_layers_of_several_kinds_are_all_kept() -> None:
    with pytest.raises(UserError, match=r"keep\.layers is 0\.5, but target 'qwen2_mixed' has layers of several kinds"):
        build(random_target("qwen2_mixed"), start="pruned", keep={"layers": 0.5})
    with pytest.raises(UserError, match="cannot be cut"):
        build(random_target("gpt2"), start="first_layers")
