"""A target that is trained with its drafter: when, how fast, by which losses; against plain autograd and loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import lightning
import pytest
import torch
from torch import Tensor

from conf.compose import ROOT, plain
from data.loader import Batch, step_loader
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, prompts, shaken, tiny_target
from tests.helpers.memorising import LEAST_ACCEPTANCE, answered, memorise
from tests.train.test_multi_token import EXACT, MODELS, SETTINGS, answers, gradients, losses_by_loop
from train.backbone import Backbone, backbone_of
from train.callbacks import AtomicCheckpoints, BlockEfficiency
from train.gradient_projection import random_orders
from train.law_matching import LawMatching
from train.multi_token import MultiToken

MEDUSA = {"_target_": "models.drafter.medusa.MedusaDrafter", "num_heads": 3}
DRAFT_LM = {"_target_": "models.drafter.draft_lm.DraftLM", "num_layers": 1}
LORA = {"by": "lora", "rank": 2, "alpha": 4, "drafter_weight": 0.3}
FULL = {"by": "full", "drafter_weight": 0.3, "base": {"kl": 1.0, "cross_entropy": 0.5}}
SIZES = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
NOT_MEDUSAS = ("start", "weights", "projection", "curriculum")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64, sharpness=2.0, **SIZES)


def moved(target: Target, backbone: dict[str, Any]) -> Target:
    """The adapted target on its way, with nothing left at zero."""
    adapted, generator = Backbone(**backbone).adapt(target, seed=1), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in adapted.trained:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return adapted


def multi_token(name: str, adapted: Target, backbone: dict[str, Any], **changes: Any) -> MultiToken:
    drafter = build_shaken(MODELS[name], adapted, DraftVocab(20))
    return MultiToken(drafter, adapted, **SETTINGS | {"backbone": backbone} | changes)


def medusa(adapted: Target, backbone: dict[str, Any], **changes: Any) -> LawMatching:
    settings = {k: v for k, v in SETTINGS.items() if k not in NOT_MEDUSAS}
    hard = {"losses": {"cross_entropy": 1.0}, "position_decay": 0.8, "backbone": backbone}
    return LawMatching(build_shaken(MEDUSA, adapted, DraftVocab(20)), adapted, **settings | hard | changes)


def base_by_loop(adapted: Target, batch: Batch, kl: float, cross_entropy: float) -> Tensor:
    """Token by token, from the models' own logits."""
    log_q = adapted.model(input_ids=batch.token_ids).logits.log_softmax(-1)
    log_p = adapted.original.model(input_ids=batch.token_ids).logits.log_softmax(-1)
    found = []
    for row in range(len(log_q)):
        for t in range(log_q.shape[1] - 1):
            if batch.loss_mask[row, t + 1]:
                p, q = log_p[row, t], log_q[row, t]
                ours = -cross_entropy * q[batch.token_ids[row, t + 1]]
                found.append(ours + kl * sum(p[v].exp() * (p[v] - q[v]) for v in range(20)))
    return torch.stack(found).mean()


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """But for the rounding of transformers' norms, which are in float32 whatever they are given."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max() + 1e-10, name


# When and how fast.


def test_the_schedule_by_value() -> None:
    plan = Backbone(by="lora", drafter_only=0.4, ramp=0.3, drafter_weight=0.2)
    found = [plan.weight(step, 10) for step in range(10)]
    assert found[:4] == [None] * 4 and found[4:] == pytest.approx([0.2 / 3, 0.4 / 3, 0.2, 0.2, 0.2, 0.2])
    assert plan.first_joint_step(10) == 4
    at_once = Backbone(by="full", drafter_weight=0.5)
    assert [at_once.weight(step, 3) for step in range(3)] == [0.5] * 3
    assert Backbone().weight(99, 100) is None and Backbone().first_joint_step(100) == 100
    assert Backbone(by="lora", drafter_only=0.99).first_joint_step(3) == 2  # there is always a joint step


def test_the_drafters_learning_rate_is_a_multiple_of_the_targets(target: Target) -> None:
    backbone = LORA | {"drafter_lr_multiple": 4.0}
    module = medusa(moved(target, backbone), backbone, max_steps=8, lr=1e-2, warmup_fraction=0.25)
    made = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    drafter, adapted = optimizer.param_groups
    assert {id(p) for p in drafter["params"]} == {id(p) for p in module.drafter.parameters()}
    assert {id(p) for p in adapted["params"]} == {id(p) for p in module.target.trained}
    for step in range(8):
        expected = 1e-2 * module._lr_scale(step)
        assert (drafter["lr"], adapted["lr"]) == pytest.approx((expected, expected / 4))
        optimizer.step()
        schedule.step()


def test_steps_are_counted_in_optimizer_steps(target: Target, batch: Batch) -> None:
    backbone = LORA | {"drafter_only": 0.5}
    module = medusa(moved(target, backbone), backbone, max_steps=4)
    module._batches_per_step = 3
    found = ["base" in module.joint_losses(batch, step) for step in (0, 5, 6, 11)]
    assert found == [False, False, True, True]


def test_the_drafter_alone_is_trained_first_on_cached_states(target: Target, batch: Batch, tmp_path: Path) -> None:
    backbone = LORA | {"drafter_only": 0.5}
    adapted = Backbone(**backbone).adapt(target, seed=1)
    module, batches = medusa(adapted, backbone, max_steps=4), answers(target)
    module.cache_states(batches, tmp_path, batches_per_step=3)
    assert [batches[step].hidden is not None for step in (0, 5, 6, 9)] == [True, True, False, False]
    hidden = target(batches[2].token_ids, capture_layers=(2,)).hidden
    mask = torch.arange(hidden.shape[1]) < batches[2].lengths[:, None]
    torch.testing.assert_close(batches[2].hidden[mask], hidden[mask], **EXACT)
    module.joint_losses(batch, 0)["loss"].backward()
    assert all(p.grad is None for p in adapted.trained) and not module.trains_target
    wrong = batch._replace(hidden=torch.ones(*batch.token_ids.shape, 16, dtype=torch.float64))
    assert module.joint_losses(wrong, 0)["loss"] != module.joint_losses(batch, 0)["loss"]
    joint = [module.joint_losses(given, 2)["loss"] for given in (wrong, batch)]  # where no such states are believed
    assert joint[0] == joint[1] and module.trains_target
    read, true = module.features(batch)
    assert read.hidden.requires_grad and not true.requires_grad  # the target learns to be read, not to be guessed
    frozen = medusa(target, {"by": "frozen"}, max_steps=4)
    frozen.cache_states(batches, tmp_path)
    assert batches[99].hidden is not None


# By which losses.


@pytest.mark.parametrize("backbone", [LORA, FULL], ids=["lora", "full"])
def test_the_base_loss_is_that_of_loops(backbone: dict[str, Any], target: Target, batch: Batch) -> None:
    adapted = moved(target, backbone)
    weights = {"kl": 1.0, "cross_entropy": 0.0} | backbone.get("base", {})
    module = medusa(adapted, backbone)
    module.target_parameters.requires_grad_(True)
    expected, found = base_by_loop(adapted, batch, **weights), module.base_loss(module.with_states(batch))
    assert expected > 0.01
    torch.testing.assert_close(found, expected, **EXACT)
    theirs = gradients(expected, module)
    check_equal(gradients(found, module), theirs)
    assert all(g.abs().max() > 1e-9 for n, g in theirs.items() if n.startswith("target"))


def test_the_base_loss_is_zero_where_nothing_was_learnt_yet(target: Target, batch: Batch) -> None:
    """And so is its gradient: the two laws are one."""
    module = medusa(Backbone(**LORA).adapt(target, 0), LORA)
    module.target_parameters.requires_grad_(True)
    base = module.base_loss(module.with_states(batch))
    assert base.item() == pytest.approx(0, abs=1e-12)
    assert all(g.abs().max() < 1e-12 for g in gradients(base, module).values())


def test_answers_alone_can_hold_the_target(target: Target, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = FULL | {"base": {"kl": 0.0, "cross_entropy": 2.0}}
    adapted = moved(target, backbone)
    expected, module = base_by_loop(adapted, batch, 0.0, 2.0), medusa(adapted, backbone)
    module.target_parameters.requires_grad_(True)
    monkeypatch.setattr(target, "forward", lambda *args, **kw: pytest.fail("the original is asked for nothing"))
    torch.testing.assert_close(module.base_loss(module.with_states(batch)), expected, **EXACT)


@pytest.mark.parametrize("backbone", [LORA, FULL], ids=["lora", "full"])
def test_medusa_2_is_the_base_loss_and_weighted_heads(backbone: dict[str, Any], target: Target, batch: Batch) -> None:
    """L_base + λ0 Σ 0.8^k CE_k, the heads written out on the adapted states."""
    adapted = moved(target, backbone)
    module = medusa(adapted, backbone)
    module.target_parameters.requires_grad_(True)
    states, heads = adapted(batch.token_ids).last, module.drafter
    total = base_by_loop(adapted, batch, **{"kl": 1.0, "cross_entropy": 0.0} | backbone.get("base", {}))
    for k in range(3):
        found = []
        for row in range(4):
            for t in range(12 - 2 - k):
                if batch.loss_mask[row, t + 2 + k]:
                    h, layer = states[row, t], heads.blocks[k].layers[0]
                    h = h + torch.nn.functional.silu(layer.weight @ h + layer.bias)
                    found.append(-(heads.lm_heads[k].weight @ h).log_softmax(-1)[batch.token_ids[row, t + 2 + k]])
        total = total + 0.3 * 0.8**k * torch.stack(found).mean()
    found = module.joint_losses(batch, 0)
    torch.testing.assert_close(found["loss"], total, **EXACT)
    assert found["base"].item() + 0.3 * found["drafter_loss"].item() == pytest.approx(total.item())
    check_equal(gradients(found["loss"], module), gradients(total, module))


@pytest.mark.parametrize("backbone", [LORA, FULL], ids=["lora", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_several_tokens_and_the_trunk(name: str, backbone: dict[str, Any], target: Target, batch: Batch) -> None:
    """Plain autograd through the whole target; what is right is the adapted target's law, and has no gradient."""
    adapted = moved(target, backbone)
    module = multi_token(name, adapted, backbone)
    module.target_parameters.requires_grad_(True)
    total = base_by_loop(adapted, batch, **{"kl": 1.0, "cross_entropy": 0.0} | backbone.get("base", {}))
    for ahead, loss in enumerate(losses_by_loop(module, adapted, batch, 3)):
        total = total + 0.3 * 0.6**ahead / 1.96 * loss
    found = module.joint_losses(batch, 0)
    torch.testing.assert_close(found["loss"], total, **EXACT)
    check_equal(gradients(found["loss"], module), gradients(total, module))


@pytest.mark.parametrize(("name", "tied"), [("sequential", True), ("parallel", False)])
def test_the_trunk_is_among_what_is_projected(name: str, tied: bool, batch: Batch) -> None:
    """PCGrad written out: the target's own loss is a task, and its parameters are shared."""
    adapted = moved(tiny_target(torch.float64, sharpness=2.0, tie_word_embeddings=tied, **SIZES), FULL)
    module = multi_token(name, adapted, FULL, projection=True, weights={"by": "uniform"})
    module.target_parameters.requires_grad_(True)
    base, own = base_by_loop(adapted, batch, 1.0, 0.5), losses_by_loop(module, adapted, batch, 3)
    tasks = [gradients(loss, module, retain_graph=True) for loss in (base, *(0.1 * loss for loss in own))]
    reached = {n: sum(bool(task[n].abs().max() > 0) for task in tasks) for n in tasks[0]}
    shared = [n for n, count in reached.items() if count > 1]
    trunk = [n for n in reached if n.startswith("target_parameters")]
    assert set(trunk) <= set(shared) and any(reached[n] == 4 for n in trunk)
    vectors = [torch.cat([task[n].flatten() for n in shared]) for task in tasks]
    projected, times = [v.clone() for v in vectors], 0
    for i, order in enumerate(random_orders(4, SETTINGS["seed"], 7)):
        for j in order:
            product = projected[i] @ vectors[j]
            if product < 0:
                projected[i] = projected[i] - product / (vectors[j] @ vectors[j]) * vectors[j]
                times += 1
    found = module.joint_losses(batch, 7)
    torch.testing.assert_close(found["loss"], base + 0.1 * sum(own), **EXACT)
    assert float(found["conflict_rate"]) == pytest.approx(times / 12)
    ours = gradients(found["loss"], module)
    torch.testing.assert_close(torch.cat([ours[n].flatten() for n in shared]), torch.stack(projected).sum(0), **EXACT)
    for n in set(reached) - set(shared):
        torch.testing.assert_close(ours[n], sum(task[n] for task in tasks), **EXACT)


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(["+drafter=medusa2"], id="medusa2"),
        pytest.param(["+drafter=mtp", "drafter.training.backbone.by=full"], id="mtp, full", marks=pytest.mark.slow),
    ],
)
def test_a_drafter_memorises_what_a_trained_target_says(own: list[str], tmp_path: Path) -> None:
    """With the target trained from the first step; acceptance is the adapted one's, on its own answers."""
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        at_once = ["trainer=cpu", "drafter.training.backbone.drafter_only=0", "drafter.training.backbone.ramp=0"]
        options = plain(hydra.compose("train", overrides=[*own, *at_once]))
    original = tiny_target()
    adapted = backbone_of(options["drafter"]["training"]).adapt(original, seed=0)
    torch.manual_seed(0)
    drafter = native.build(options["drafter"]["model"], adapted, DraftVocab(64))
    found = memorise(drafter, adapted, answered(original), options, tmp_path, 300)
    assert found.acceptance_rate > LEAST_ACCEPTANCE
    ids = torch.tensor([[1, 2, 3]])
    assert (adapted(ids).last - original(ids).last).abs().max() > 1e-3


# Stopping and going on.


class Stop(lightning.Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def trained(target: Target, folder: Path, stops: list[int]) -> LawMatching:
    backbone = LORA | {"dropout": 0.3, "drafter_only": 0.3, "ramp": 0.3}
    batches = answers(target)
    for index, stop in enumerate(stops):
        module = medusa(Backbone(**backbone).adapt(target, 1), backbone, max_steps=10, lr=1e-2)
        watch = Stop(folder / "last.ckpt", stop)
        measured = BlockEfficiency(
            module.target, prompts([3, 4], 20), DecodeSettings(8, 3), 2, folder / "best.safetensors"
        )
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=10, max_epochs=-1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
            callbacks=[measured, watch], default_root_dir=folder, plugins=[AtomicCheckpoints()],
        )  # fmt: skip
        done = stops[index - 1] if index else 0
        trainer.fit(module, step_loader(batches, done, 10), ckpt_path=str(watch.path) if index else None)
    return module


def test_a_resumed_run_has_the_target_of_an_undisturbed_one(target: Target, tmp_path: Path) -> None:
    """Stopped beside the frozen target, and beside the one that is trained, whose dropout goes on as it would have."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    whole, again = trained(target, folders[0], [10]), trained(target, folders[1], [2, 6, 10])
    expected = whole.state_dict()
    assert any(name.startswith("target_parameters.") for name in expected)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    fresh = Backbone(**LORA).adapt(target, 1)
    assert all(not torch.equal(a, b) for a, b in zip(whole.target.trained, fresh.trained, strict=True))

    best = [native.read_tensors(folder / "best.safetensors") for folder in folders]
    assert best[0].keys() == expected.keys() - {k for k in expected if k.startswith("drafter.")} | {
        name.removeprefix("drafter.") for name in expected if name.startswith("drafter.")
    }
    assert all(torch.equal(best[1][name], tensor) for name, tensor in best[0].items())
    other = medusa(Backbone(**LORA).adapt(target, 7), LORA)
    other.load_kept_state(best[0])
    for name, tensor in other.kept_state().items():
        assert torch.equal(tensor, best[0][name]), name
    ids = torch.tensor([[1, 2, 3]])
    shaken(whole.drafter)  # what was kept stands alone
    assert not torch.equal(other.target(ids).last, target(ids).last)


# What makes no sense.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"by": "peft"}, "backbone.by is 'peft': choose frozen, lora, full"),
        ({"export": "both"}, "backbone.export is 'both': choose merged, separate"),
        ({"rank": 2.5}, "backbone.rank is 2.5: it must be a whole number"), ({"base": None}, "backbone.base is None"),
        ({"rank": 0}, "backbone.rank is 0"), ({"drafter_lr_multiple": 0}, "drafter_lr_multiple is 0"),
        ({"drafter_only": 1.0}, "drafter_only is 1.0"), ({"dropout": -0.1}, "dropout is -0.1"),
        ({"by": "full", "export": "separate"}, "has no adapter to stand alone"),
        ({"by": "lora", "base": {"kl": 0}}, "backbone.base is empty"),
        ({"by": "lora", "base": {"kll": 1}}, "backbone.base has 'kll'"),
        ({"rnak": 3}, "unexpected keyword argument 'rnak'"),
    ],
)  # fmt: skip
def test_senseless_settings_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        backbone_of({"backbone": changes})


def test_trainings_without_a_use_for_a_trained_target_are_refused(target: Target) -> None:
    adapted = moved(target, LORA)
    with pytest.raises(ValueError, match="by=frozen"):
        medusa(adapted, {"by": "frozen"})
    with pytest.raises(ValueError, match="by=lora"):
        medusa(target, LORA)
    settings = {k: v for k, v in SETTINGS.items() if k not in NOT_MEDUSAS} | {"position_decay": 1.0, "backbone": LORA}
    with pytest.raises(UserError, match="DraftLM reads no states of the target"):
        LawMatching(build_shaken(DRAFT_LM, adapted, DraftVocab(20)), adapted, **settings)
