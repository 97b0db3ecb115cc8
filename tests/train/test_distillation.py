"""Layer losses and texts of the drafter's own against loops, and a run that is broken off and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from data.loader import Batch, step_loader
from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.errors import UserError
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, tiny_target
from tests.helpers.memorising import Text, answered
from tests.helpers.models import random_target
from train.callbacks import BlockEfficiency
from train.distillation import Distillation
from train.law_matching import LawMatching
from train.on_policy import continue_answers, mixed

LAWS: dict[str, Any] = {
    "max_steps": 100, "lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0, "warmup_fraction": 0.05,
    "losses": {"kl": 1.0, "cross_entropy": 0.3}, "temperature": 1.0, "lk_eta": 3.0, "num_steps": 2,
    "position_decay": 0.8, "chunk_rows": 4, "seed": 0,
}  # fmt: skip
SETTINGS: dict[str, Any] = LAWS | {
    "w_layers": 0.0, "layer_map": None, "normalize_layers": False, "on_policy_ratio": 0.0,
    "on_policy_temperature": 1.0, "refresh_every": 3, "importance": "taylor", "choose_layers": "even",
    "calibration_batches": 1, "measure_units": False, "w_attention": 0.0, "lora": None,
}  # fmt: skip
MODEL = {"_target_": "models.drafter.distilled_lm.DistilledLM"}
EXACT = {"atol": 1e-11, "rtol": 1e-11}
CLOSE = {"atol": 1e-7, "rtol": 1e-6}  # gradients that are added before, or behind, norms in float32


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(
        torch.float64, vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=3, sharpness=2.0
    )


@pytest.fixture(scope="module")
def batch() -> Batch:
    ids = torch.randint(20, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(3, 12, dtype=torch.bool)
    mask[0, 3:6], mask[0, 8:12], mask[1, 1:7] = True, True, True
    return Batch(ids, mask, torch.tensor([12, 7, 9]), None)


def layers_by_loop(module: Distillation, target: Target, batch: Batch, mapped: tuple[int, ...]) -> Tensor:
    """Position by position, with the states that both models' own forward passes give out."""
    theirs = target.model(input_ids=batch.token_ids, output_hidden_states=True).hidden_states
    lm = module.drafter.lm.model.base_model
    ours = lm(batch.token_ids, output_hidden_states=True, use_cache=False).hidden_states
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(3):
        for t in range(1, 11):
            if not batch.loss_mask[row, t + 1]:
                continue
            count += 1
            for j, layer in enumerate(mapped):
                h, f = module.projections[j](ours[j + 1][row, t]), theirs[layer][row, t]
                if module.normalize_layers:
                    total = total + (h / h.norm() - f / f.norm()).square().sum()
                else:
                    total = total + (h - f).square().mean()
    return total / count


@pytest.mark.parametrize("hidden_states", ["online", "cached"])
@pytest.mark.parametrize(
    ("model", "changes", "mapped"),
    [
        ({"num_layers": 2}, {}, (2, 3)),
        ({"num_layers": 2, "hidden_size": 8}, {"normalize_layers": True, "layer_map": [1, 2]}, (1, 2)),
        ({"start": "strided_layers", "num_layers": 3, "embeddings": "shared"}, {}, (1, 2, 3)),
        ({"num_layers": 1, "hidden_size": 8, "embeddings": "shared"}, {"layer_map": [1]}, (1,)),
    ],
)
def test_layer_losses_and_gradients_are_those_of_loops(
    model: dict[str, Any],
    changes: dict[str, Any],
    mapped: tuple[int, ...],
    hidden_states: str,
    target: Target,
    batch: Batch,
) -> None:
    drafter = build_shaken(MODEL | model, target, DraftVocab(20))
    module = Distillation(drafter, target, **SETTINGS | changes | {"w_layers": 0.7}).double()
    assert module.capture_layers == (*mapped, *([3] if 3 not in mapped else []))
    laws = LawMatching(drafter, target, **LAWS).training_losses(batch, 0)
    layers = layers_by_loop(module, target, batch, mapped)
    expected = laws["loss"] + 0.7 * layers
    if hidden_states == "cached":
        batch = batch._replace(hidden=target(batch.token_ids, capture_layers=module.capture_layers).hidden)
    found = module.training_losses(batch, 0)
    torch.testing.assert_close(found["layers"], layers.detach(), **EXACT)
    torch.testing.assert_close(found["loss"], expected, **EXACT)
    for name, value in laws.items():
        if name != "loss":
            torch.testing.assert_close(found[name], value, **EXACT, msg=name)
    parameters = dict(module.named_parameters())
    theirs = torch.autograd.grad(expected, list(parameters.values()))
    ours = torch.autograd.grad(found["loss"], list(parameters.values()))
    for name, a, b in zip(parameters, ours, theirs, strict=True):
        assert b.abs().max() > 1e-6, name
        torch.testing.assert_close(a, b, **CLOSE, msg=name)


def test_equal_layers_have_no_distance(target: Target, batch: Batch) -> None:
    drafter = build_shaken(MODEL | {"start": "first_layers", "num_layers": 3}, target, DraftVocab(20), seed=0)
    for ours, theirs in zip(drafter.lm.model.parameters(), target.model.parameters(), strict=True):
        ours.data.copy_(theirs)
    drafter.head.weight.data.copy_(target.head.weight)
    found = Distillation(drafter, target, **SETTINGS | {"w_layers": 1.0}).training_losses(batch, 0)
    assert found["layers"].item() == pytest.approx(0, abs=1e-12)
    assert found["divergence"].item() > 0  # cross_entropy of what the target need not have said


# Attention.


def maps_by_loop(model: Any, ids: Tensor) -> list[list[Tensor]]:
    """Row by row, the attention (H, S) of every layer of a Llama: [layer][row · S + t], of queries and keys by hand."""
    states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    cos, sin = model.rotary_emb(states[0], torch.arange(ids.shape[1])[None])
    found = []
    for layer, hidden in zip(model.layers, states, strict=False):
        attention, x = layer.self_attn, layer.input_layernorm(hidden)
        split = (*x.shape[:2], -1, attention.head_dim)
        query, key = (p(x).view(split).transpose(1, 2) for p in (attention.q_proj, attention.k_proj))
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        shared = query.shape[1] // key.shape[1]
        rows = []
        for row in range(len(ids)):
            for t in range(ids.shape[1]):
                heads = []
                for head in range(query.shape[1]):
                    scores = key[row, head // shared, : t + 1] @ query[row, head, t] / attention.head_dim**0.5
                    heads.append(nn.functional.pad(scores.softmax(-1), (0, ids.shape[1] - t - 1)))
                rows.append(torch.stack(heads))
        found.append(rows)
    return found


def attention_by_loop(module: Distillation, target: Target, batch: Batch, mapped: tuple[int, ...], groups: int) -> Any:
    theirs = maps_by_loop(target.model.base_model, batch.token_ids)
    ours = maps_by_loop(module.drafter.lm.model.base_model, batch.token_ids)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(3):
        for t in range(1, 11):
            if not batch.loss_mask[row, t + 1]:
                continue
            count += 1
            for j, layer in enumerate(mapped):
                for group in range(groups):
                    a, b = (maps[row * 12 + t] for maps in (theirs[layer - 1], ours[j]))
                    p, q = (m.chunk(groups)[group].mean(0)[: t + 1] for m in (a, b))
                    total = total + (p * (p / q).log()).sum() / groups
    return total / count


@pytest.mark.parametrize("own_texts", [False, True])
@pytest.mark.parametrize(
    ("model", "changes", "mapped", "groups"),
    [
        ({"num_layers": 2}, {"w_layers": 0.3}, (2, 3), 2),
        ({"start": "first_layers", "num_layers": 2}, {"layer_map": [1, 2]}, (1, 2), 2),
        ({"num_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}, {}, (3,), 1),
    ],
)
def test_attention_losses_and_gradients_are_those_of_loops(
    model: dict[str, Any],
    changes: dict[str, Any],
    mapped: tuple[int, ...],
    groups: int,
    own_texts: bool,
    target: Target,
    batch: Batch,
) -> None:
    drafter = build_shaken(MODEL | model, target, DraftVocab(20))
    if own_texts:
        changes = changes | {"on_policy_ratio": 1.0}
    plain = Distillation(drafter, target, **SETTINGS | {k: v for k, v in changes.items() if k != "layer_map"})
    module = Distillation(drafter, target, **SETTINGS | changes | {"w_attention": 0.7})
    expected, found = plain.training_losses(batch, 0), module.training_losses(batch, 0)
    texts = batch
    if own_texts:
        own = continue_answers(drafter, batch, temperature=1.0, seed=0, stop_token_ids=frozenset())
        texts = mixed(module.with_states(batch), module.with_states(own), torch.ones(3, dtype=torch.bool))
        assert not torch.equal(texts.token_ids, batch.token_ids)
    attention = attention_by_loop(module, target, texts, mapped, groups)
    assert attention > 0.01
    torch.testing.assert_close(found["attention"], attention.detach(), **CLOSE)  # probabilities are in float32
    torch.testing.assert_close(found["loss"], expected["loss"] + 0.7 * attention, **CLOSE)
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    of_maps, of_all, of_others = (
        torch.autograd.grad(loss, parameters, materialize_grads=True)
        for loss in (attention, found["loss"], expected["loss"])
    )
    for name, a, b, c in zip(names, of_maps, of_all, of_others, strict=True):
        torch.testing.assert_close(b, c + 0.7 * a, atol=2e-6, rtol=1e-6, msg=name)
    moved = {name for name, grad in zip(names, of_maps, strict=True) if grad.abs().max() > 1e-4}
    assert {f"model.layers.{j}.self_attn.{p}_proj.weight" for j in range(len(mapped)) for p in "qk"} <= moved


def test_equal_layers_attend_alike(target: Target, batch: Batch) -> None:
    drafter = native.build(MODEL | {"start": "first_layers", "num_layers": 3}, target, DraftVocab(20))
    found = Distillation(drafter, target, **SETTINGS | {"w_attention": 1.0}).training_losses(batch, 0)
    assert found["attention"].item() == pytest.approx(0, abs=1e-7)


# Adapters.

LORA = {"rank": 2, "alpha": 6, "dropout": 0.3, "target_modules": ["q_proj", "down_proj"]}


def test_only_adapters_and_maps_between_layers_are_trained(target: Target, batch: Batch) -> None:
    model = MODEL | {"start": "first_layers", "num_layers": 2}
    drafter = native.build(model, target, DraftVocab(20))
    settings = SETTINGS | {"w_layers": 0.5, "w_attention": 0.5, "lora": LORA}
    module = Distillation(drafter, target, **settings)
    trained_names = {name for name, p in module.named_parameters() if p.requires_grad}
    layers = [f"drafter.model.layers.{j}.{part}" for j in (0, 1) for part in ("self_attn.q_proj", "mlp.down_proj")]
    assert trained_names == {f"{layer}.lora_{x}.default.weight" for layer in layers for x in "AB"}
    loss = module.training_losses(batch, 0)["loss"]
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for n, p in module.named_parameters() if "lora_B" in n)


def test_what_is_measured_and_kept_is_an_ordinary_draft_model(small: Target, text: Text, tmp_path: Path) -> None:
    model = MODEL | {"start": "strided_layers", "num_layers": 1, "embeddings": "shared"}
    drafter = native.build(model, small, DraftVocab(64))
    ordinary = native.build(model, small, DraftVocab(64))
    module = Distillation(drafter, small, **SETTINGS | {"lora": LORA | {"rank": 4}, "lr": 1e-2})
    decode = DecodeSettings(8, 3, stop_token_ids=frozenset())
    measured = BlockEfficiency(small, text.prompts, decode, 6, tmp_path / "best.safetensors")
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=6, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        default_root_dir=tmp_path, callbacks=[measured],
    )  # fmt: skip
    trainer.fit(module, step_loader(text.batches, 0, 6))
    kept, before = native.read_tensors(measured.best), ordinary.state_dict()
    assert kept.keys() == before.keys()
    changed = {name for name in kept if not torch.equal(kept[name], before[name])}
    assert changed == {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"}
    features = TargetFeatures(*(torch.arange(1, 11)[None] + i for i in (0, 1)), None, torch.tensor([10]))
    adapted = next(drafter.eval().unroll(features, 1))
    module.load_kept_state(kept)
    assert drafter.state_dict().keys() == kept.keys()
    ordinary.load_state_dict(kept)
    ours, theirs = (next(d.eval().unroll(features, 1)) for d in (drafter, ordinary))
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(ours, adapted, atol=1e-5, rtol=1e-5)
    assert measured.last_score == generate(small, text.prompts, decode, ordinary).stats.block_efficiency


@pytest.mark.parametrize("low_rank", [None, {"rank": 48, "share": "layers", "train_shared": True}])
def test_a_pruned_start_is_cut_before_it_is_adapted(low_rank: Any, small: Target, text: Text) -> None:
    model = MODEL | {"start": "pruned", "keep": {"layers": 0.5, "channels": 0.25}, "low_rank": low_rank}
    drafter, plain = (native.build(model, small, DraftVocab(64)) for _ in range(2))
    settings = SETTINGS | {"importance": "gradient_ratio"}
    lora = {"rank": 2}
    module = Distillation(drafter, small, **settings | {"lora": lora})
    module.start(text.batches)
    Distillation(plain, small, **settings).start(text.batches)
    kept = module.kept_state()
    assert kept.keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(kept[name], tensor, msg=name)
    assert all("lora_" in name for name, p in drafter.named_parameters() if p.requires_grad)
    assert any("lora_" in name for name, _ in drafter.named_parameters())


# On policy.


@pytest.mark.parametrize("cached", [False, True], ids=["online", "cached"])
def test_rows_of_ones_own_are_scored_by_the_target(cached: bool, target: Target, batch: Batch) -> None:
    """With all rows the drafter's own, a step is law matching on what it said, without a label."""
    drafter = build_shaken(MODEL | {"num_layers": 1}, target, DraftVocab(20))
    module = Distillation(drafter, target, **SETTINGS | {"on_policy_ratio": 1.0})
    seed = 1_000_003 * module.seed + 6
    own = continue_answers(drafter, batch, temperature=1.0, seed=seed, stop_token_ids=frozenset())
    expected = LawMatching(drafter, target, **LAWS | {"losses": {"kl": 1.0}}).training_losses(own, 0)
    if cached:
        batch = batch._replace(hidden=target(batch.token_ids, capture_layers=module.capture_layers).hidden)
    found = module.training_losses(batch, 6)
    torch.testing.assert_close(found["loss"], expected["loss"], **EXACT)
    assert (own.token_ids != batch.token_ids[:, : own.token_ids.shape[1]])[own.loss_mask].float().mean() > 0.5


def test_rows_of_ones_own_do_not_thin_out_the_cross_entropy(target: Target, batch: Batch) -> None:
    """With some rows the drafter's own: their laws and the others', and the labels of the others, each by its count."""
    drafter = build_shaken(MODEL | {"num_layers": 1}, target, DraftVocab(20))
    module = Distillation(drafter, target, **SETTINGS | {"on_policy_ratio": 0.5, "num_steps": 1})
    for step in range(0, 30, 3):
        mixture, labels = module._with_own_texts(module.with_states(batch), step)
        mine = (labels == -1).all(-1)
        theirs = mixture.loss_mask & ~mine[:, None]
        if not mine.any() or not theirs[:, 2:].any() or theirs.sum() == mixture.loss_mask.sum():
            continue
        laws, said = ({"losses": {name: weight}, "num_steps": 1} for name, weight in SETTINGS["losses"].items())
        soft = LawMatching(drafter, target, **LAWS | laws).training_losses(mixture, 0)
        hard = LawMatching(drafter, target, **LAWS | said).training_losses(mixture._replace(loss_mask=theirs), 0)
        found = module.training_losses(batch, step)
        torch.testing.assert_close(found["loss"], soft["loss"] + hard["loss"], **EXACT)
        return
    raise AssertionError("no step had rows of both kinds")


def test_a_share_of_the_rows_is_replaced_and_kept_up_to_the_next_time(target: Target, batch: Batch) -> None:
    drafter = build_shaken(MODEL | {"num_layers": 1}, target, DraftVocab(20))
    module = Distillation(drafter, target, **SETTINGS | {"on_policy_ratio": 0.3})
    replaced, texts = 0, []
    for step in range(120):
        both, labels = module._with_own_texts(module.with_states(batch), step)
        assert module._own_texts is not None
        texts.append(module._own_texts.token_ids.clone())
        rows = (labels[:, :2] == -1).all(-1)
        replaced += int(rows.sum())
        assert torch.equal(both.token_ids[~rows], batch.token_ids[~rows])
        assert torch.equal(labels[~rows], batch.token_ids[~rows])
        width = texts[-1].shape[1]
        assert torch.equal(both.token_ids[rows, :width], texts[-1][rows])
        target_states = target(both.token_ids).last
        for row in range(3):
            length = int(both.lengths[row])
            torch.testing.assert_close(both.hidden[row, :length], target_states[row, :length], atol=1e-6, rtol=1e-6)
    assert 70 < replaced < 146  # 108 of 360, within four standard deviations
    assert all(torch.equal(texts[step], texts[step - step % 3]) for step in range(120))
    assert not torch.equal(texts[0], texts[3])


@pytest.fixture(scope="module")
def small() -> Target:
    return tiny_target(num_hidden_layers=2)


@pytest.fixture(scope="module")
def text(small: Target) -> Text:
    return answered(small)


def trained(
    small: Target, text: Text, steps: list[int], folder: Path, model: dict[str, Any], changes: dict[str, Any]
) -> dict[str, Tensor]:
    """Weights after the last of `steps`; at each of the others the run is broken off, and goes on from a checkpoint."""
    resume = None
    for until in steps:
        drafter = build_shaken(MODEL | model, small, DraftVocab(64), seed=0)
        settings = SETTINGS | changes | {"on_policy_ratio": 0.5, "refresh_every": 4, "max_steps": steps[-1]}
        torch.manual_seed(0)
        module = Distillation(drafter, small, **settings)
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=until, max_epochs=-1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
            default_root_dir=folder,
        )  # fmt: skip
        first = 0 if resume is None else int(torch.load(resume, weights_only=True)["global_step"])
        trainer.fit(module, step_loader(text.batches, first, until), ckpt_path=resume, weights_only=True)
        resume = str(folder / "last.ckpt")
        trainer.save_checkpoint(resume)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ({"num_layers": 1, "hidden_size": 32}, {"w_layers": 0.5}),
        ({"start": "first_layers", "num_layers": 1}, {"lora": LORA, "w_attention": 0.1}),
    ],
)
def test_a_run_that_goes_on_between_two_times_ends_with_the_same_weights(
    model: dict[str, Any], changes: dict[str, Any], small: Target, text: Text, tmp_path: Path
) -> None:
    undisturbed = trained(small, text, [11], tmp_path / "a", model, changes)
    broken_off = trained(small, text, [6, 11], tmp_path / "b", model, changes)  # texts are of step 4, the next of 8
    assert undisturbed.keys() == broken_off.keys()
    assert all(torch.equal(undisturbed[name], broken_off[name]) for name in undisturbed)


# A pruned start.


@pytest.mark.parametrize("choose_layers", ["even", "importance"])
def test_a_pruned_start_is_cut_by_importance(choose_layers: str, small: Target, text: Text) -> None:
    model = MODEL | {"start": "pruned", "keep": {"layers": 0.5, "groups": 0.5, "channels": 0.25}}
    drafter = build_shaken(model, small, DraftVocab(64))
    before = drafter.units
    settings = SETTINGS | {"choose_layers": choose_layers, "measure_units": True, "importance": "gradient_ratio"}
    found = Distillation(drafter, small, **settings).start(text.batches)
    assert found is not None and "acceptance_lost" in found["sensitivity.csv"]
    kept = drafter.units
    assert not torch.equal(kept.channels, before.channels)
    if choose_layers == "even":
        assert kept.layers == before.layers
    for place, layer in enumerate(kept.layers):
        ours = drafter.lm.model.get_decoder().layers[place].mlp.gate_proj.weight
        theirs = small.model.get_decoder().layers[layer].mlp.gate_proj.weight
        assert torch.equal(ours, theirs[kept.channels[place]])


def test_other_starts_are_left_alone(small: Target, text: Text) -> None:
    drafter = build_shaken(MODEL, small, DraftVocab(64))
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    assert Distillation(drafter, small, **SETTINGS).start(text.batches) is None
    assert all(torch.equal(before[name], tensor) for name, tensor in drafter.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"importance": "size"}, "importance is 'size': choose gradient_ratio or taylor"),
        ({"choose_layers": "odd"}, "choose_layers is 'odd': choose even or importance"),
        ({"on_policy_ratio": 1.5}, "on_policy_ratio is 1.5"),
        ({"refresh_every": 0}, "refresh_every is 0"),
        ({"layer_map": [1, 2]}, "layer_map would not be read: it is for drafter.training.w_layers and w_attention"),
        ({"normalize_layers": True}, "normalize_layers would not be read"),
        ({"measure_units": True}, "measure_units would not be read: it is for a drafter that begins as a pruned"),
        ({"w_layers": 1.0, "layer_map": [1]}, r"layer_map is \[1\]: give a layer from 1 to 3 of the target for each"),
        ({"w_layers": 1.0, "layer_map": [1, 4]}, r"layer_map is \[1, 4\]"),
        ({"w_attention": 1.0, "layer_map": [1]}, r"layer_map is \[1\]"),
        ({"lora": {"rank": 2}}, "lora adapts a language model that has weights already"),
    ],
)
def test_senseless_settings_are_refused(changes: dict[str, Any], sentence: str, target: Target) -> None:
    with pytest.raises(UserError, match=sentence):
        Distillation(build_shaken(MODEL, target, DraftVocab(20)), target, **SETTINGS | changes)


def test_drafters_that_read_states_have_neither_layers_nor_texts_of_their_own(target: Target) -> None:
    drafter = build_shaken({"_target_": "models.drafter.eagle.EagleDrafter"}, target, DraftVocab(20))
    with pytest.raises(UserError, match="reads the target's states too"):
        Distillation(drafter, target, **SETTINGS | {"on_policy_ratio": 0.5})
    with pytest.raises(UserError, match="EagleDrafter has no layers to compare"):
        Distillation(drafter, target, **SETTINGS | {"w_layers": 0.5})
    with pytest.raises(UserError, match="w_attention is for language models: EagleDrafter"):
        Distillation(drafter, target, **SETTINGS | {"w_attention": 0.5})
    with pytest.raises(UserError, match="lora adapts a language model"):
        Distillation(drafter, target, **SETTINGS | {"lora": {"rank": 2}})


def test_a_target_that_does_not_tell_its_attention_is_refused() -> None:
    with_sinks = random_target("gpt_oss")
    drafter = native.build(MODEL | {"num_layers": 1}, with_sinks, DraftVocab(61))
    with pytest.raises(UserError, match=r"w_attention: 'gpt_oss' \(gpt_oss\) does not tell .* do not sum to 1"):
        Distillation(drafter, with_sinks, **SETTINGS | {"w_attention": 0.5})
