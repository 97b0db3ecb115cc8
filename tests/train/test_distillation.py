"""Layer losses and texts of the drafter's own against loops, and a run that is broken off and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor

from data.loader import Batch, step_loader
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, tiny_target
from tests.helpers.memorising import Text, answered
from train.distillation import Distillation
from train.law_matching import LawMatching
from train.on_policy import continue_answers

LAWS: dict[str, Any] = {
    "max_steps": 100, "lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0, "warmup_fraction": 0.05,
    "losses": {"kl": 1.0, "cross_entropy": 0.3}, "temperature": 1.0, "lk_eta": 3.0, "num_steps": 2,
    "position_decay": 0.8, "chunk_rows": 4, "seed": 0,
}  # fmt: skip
SETTINGS: dict[str, Any] = LAWS | {
    "w_layers": 0.0, "layer_map": None, "normalize_layers": False, "on_policy_ratio": 0.0,
    "on_policy_temperature": 1.0, "refresh_every": 3, "importance": "taylor", "choose_layers": "even",
    "calibration_batches": 1, "measure_units": False,
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


def trained(small: Target, text: Text, steps: list[int], folder: Path) -> dict[str, Tensor]:
    """Weights after the last of `steps`; at each of the others the run is broken off, and goes on from a checkpoint."""
    resume = None
    for until in steps:
        drafter = build_shaken(MODEL | {"num_layers": 1, "hidden_size": 32}, small, DraftVocab(64), seed=0)
        settings = SETTINGS | {"w_layers": 0.5, "on_policy_ratio": 0.5, "refresh_every": 4, "max_steps": steps[-1]}
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


def test_a_run_that_goes_on_between_two_times_ends_with_the_same_weights(
    small: Target, text: Text, tmp_path: Path
) -> None:
    undisturbed = trained(small, text, [11], tmp_path / "a")
    broken_off = trained(small, text, [6, 11], tmp_path / "b")  # texts are of step 4, the next of step 8
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
        ({"w_layers": 1.0, "layer_map": [1]}, r"layer_map is \[1\]: give a layer from 1 to 3 of the target for each"),
        ({"w_layers": 1.0, "layer_map": [1, 4]}, r"layer_map is \[1, 4\]"),
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
