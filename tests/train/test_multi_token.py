"""Several tokens ahead as tasks: against plain autograd on losses by loops; what is alive meanwhile; resuming."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import lightning
import pytest
import torch
from torch import Tensor, nn

from conf.compose import composed
from data.loader import Batch, StepBatches, step_loader
from engine.loop import generate
from engine.settings import DecodeSettings
from models.drafter.mtp import SequentialMTP
from models.errors import UserError
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, prompts, shaken, tiny_target
from train.callbacks import AtomicCheckpoints, BlockEfficiency
from train.divergences import Divergence
from train.gradient_projection import random_orders
from train.multi_token import MultiToken, with_gradients

SETTINGS: dict[str, Any] = {
    "max_steps": 100, "lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0, "warmup_fraction": 0.05,
    "losses": {"kl": 1.0, "cross_entropy": 0.3}, "temperature": 1.0, "lk_eta": 3.0, "num_steps": 3, "chunk_rows": 4,
    "start": "least_squares", "weights": {"by": "exponential", "beta": 0.6}, "projection": False, "curriculum": {},
    "seed": 5,
}  # fmt: skip
MODELS = {
    "sequential": {"_target_": "models.drafter.mtp.SequentialMTP"},
    "blocks": {"_target_": "models.drafter.mtp.SequentialMTP", "num_blocks": 2},
    "parallel": {"_target_": "models.drafter.mtp_parallel.ParallelMTP", "num_heads": 3},
    "cascaded": {"_target_": "models.drafter.mtp_cascaded.CascadedMTP", "num_heads": 3},
    "hierarchical": {"_target_": "models.drafter.mtp_hierarchical.HierarchicalMTP"},
}
EXACT = {"atol": 1e-11, "rtol": 1e-11}


@pytest.fixture(scope="module")
def target() -> Target:
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return tiny_target(torch.float64, sharpness=2.0, **sizes)


def module_of(name: str, target: Target, **changes: Any) -> MultiToken:
    return MultiToken(build_shaken(MODELS[name], target, DraftVocab(20)), target, **SETTINGS | changes)


def losses_by_loop(module: MultiToken, target: Target, batch: Batch, num_steps: int) -> list[Tensor]:
    """Token by token: what step s says of x_{t+2+s} in row t, against the target's own logits before that token."""
    logits = target.model(input_ids=batch.token_ids).logits.detach()
    divergence = Divergence(SETTINGS["losses"])
    means = []
    for step, hidden in enumerate(module.drafter.unroll(module.features(batch)[0], num_steps)):
        found = []
        for row in range(len(logits)):
            for t in range(logits.shape[1] - 2 - step):
                if batch.loss_mask[row, t + 2 + step]:
                    ours, theirs = module.drafter.logits(hidden[row, t]), logits[row, t + 1 + step]
                    said = batch.token_ids[row, t + 2 + step]
                    found.append(divergence(ours[None], theirs[None], said[None])[0])
        means.append(torch.stack(found).mean())
    return means


def gradients(loss: Tensor, module: MultiToken, **options: Any) -> dict[str, Tensor]:
    """Of all parameters, zero where the loss does not depend on one."""
    named = dict(module.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, **options)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **EXACT, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_loops(name: str, target: Target, batch: Batch) -> None:
    module = module_of(name, target)
    losses, factors = losses_by_loop(module, target, batch, 3), [0.6**i / 1.96 for i in range(3)]
    expected = sum(f * loss for f, loss in zip(factors, losses, strict=True))
    found = module.training_losses(batch, 0)
    torch.testing.assert_close(found["loss"], expected, **EXACT)
    for ahead, (factor, loss) in enumerate(zip(factors, losses, strict=True)):
        suffix = f"_{ahead}" if ahead else ""
        assert float(found[f"weight{suffix}"]) == pytest.approx(factor)
        assert float(found[f"divergence{suffix}"]) == pytest.approx(loss.item())
    theirs = gradients(expected, module)
    assert all(g.abs().max() > 1e-9 for g in theirs.values())
    check_equal(gradients(found["loss"], module), theirs)


@pytest.mark.parametrize("name", ["sequential", "blocks", "parallel", "cascaded"])
def test_projection_is_pcgrad_over_shared_parameters(name: str, target: Target, batch: Batch) -> None:
    """Written out on the gradients of losses by loops; parameters of one head get what they would without it."""
    module = module_of(name, target, projection=True, weights={"by": "uniform"})
    tasks = [gradients(loss / 3, module, retain_graph=True) for loss in losses_by_loop(module, target, batch, 3)]
    reached = {n: sum(bool(task[n].abs().max() > 0) for task in tasks) for n in tasks[0]}
    shared = [n for n, count in reached.items() if count > 1]
    if name in ("parallel", "cascaded"):
        assert set(reached) - set(shared) == {n for n in reached if "heads." in n}
    vectors = [torch.cat([task[n].flatten() for n in shared]) for task in tasks]
    projected, times = [v.clone() for v in vectors], 0
    for i, order in enumerate(random_orders(3, SETTINGS["seed"], 7)):
        for j in order:
            product = projected[i] @ vectors[j]
            if product < 0:
                projected[i] = projected[i] - product / (vectors[j] @ vectors[j]) * vectors[j]
                times += 1
    found = module.training_losses(batch, 7)
    assert float(found["conflict_rate"]) == pytest.approx(times / 6)
    ours, total = gradients(found["loss"], module), torch.stack(projected).sum(0)
    torch.testing.assert_close(torch.cat([ours[n].flatten() for n in shared]), total, **EXACT)
    for n in set(reached) - set(shared):
        torch.testing.assert_close(ours[n], sum(task[n] for task in tasks), **EXACT)


class Torn(SequentialMTP):
    """A drafter whose second step says of every token the opposite of the first."""

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        return super().logits(hidden) * (-1 if step == 1 else 1)


def test_conflicts_are_projected_away(target: Target, batch: Batch) -> None:
    torch.manual_seed(0)
    drafter = shaken(Torn(target, DraftVocab(20)))
    losses = {}
    for projection in (False, True):
        module = MultiToken(drafter, target, **SETTINGS | {"num_steps": 2, "projection": projection})
        losses[projection] = module.training_losses(batch, 0)
    plain, projected = (gradients(losses[p]["loss"], module) for p in (False, True))
    assert losses[True]["loss"].item() == pytest.approx(losses[False]["loss"].item())
    assert float(losses[True]["conflict_rate"]) == 1
    assert any(not torch.allclose(plain[n], projected[n]) for n in plain)


def test_gradnorm_weighs_the_gradients_and_learns(target: Target, batch: Batch) -> None:
    module = module_of("parallel", target, weights={"by": "gradnorm", "lr": 0.2})
    losses = losses_by_loop(module, target, batch, 3)
    tasks = [gradients(loss, module, retain_graph=True) for loss in losses]
    found = module.training_losses(batch, 0)
    check_equal(gradients(found["loss"], module), {n: sum(t[n] for t in tasks) / 3 for n in tasks[0]})
    lengths = torch.stack([torch.cat([t[n].flatten() for n in t if "heads" not in n]).norm() for t in tasks])
    expected = 1 - 0.2 * (lengths - lengths.mean()).sign() * lengths  # all losses are at their first value
    torch.testing.assert_close(module.weights.weights, expected * 3 / expected.sum(), **EXACT)
    assert float(module.training_losses(batch, 1)["weight"]) == pytest.approx(float(expected[0] / expected.sum()))


def test_what_the_weights_learn_is_no_matter_of_projection(target: Target) -> None:
    """Gradients (1, 0) and (−1/2, 1/2) become (1/2, 1/2) and (0, 1/2), whatever their log-variances learn."""
    module = module_of("parallel", target, weights={"by": "uncertainty"}, projection=True)
    parameter = next(module.drafter.parameters())
    x, y = parameter.flatten()[:2]
    tasks: Any = [module.weights.weigh(loss, i, 2) for i, loss in enumerate((x, (y - x) / 2))]
    loss, told = module._from_gradients(tasks, step=0)
    loss.backward()
    assert parameter.grad is not None and float(told["conflict_rate"]) == 1
    torch.testing.assert_close(parameter.grad.flatten()[:2], torch.tensor([0.5, 1.0]).double(), **EXACT)
    expected = torch.stack([1 - x, 1 - (y - x) / 2])
    grad = module.weights.log_variance.grad
    assert grad is not None
    torch.testing.assert_close(grad[:2], expected.detach().float())


def test_uncertainty_is_trained_with_the_drafter(target: Target, batch: Batch) -> None:
    for name in ("sequential", "parallel"):
        module = module_of(name, target, weights={"by": "uncertainty"})
        with torch.no_grad():
            module.weights.log_variance.copy_(torch.tensor([0.5, 0.0, -0.5]))
        s = module.weights.log_variance
        expected = sum((-s[i]).exp() * loss + s[i] for i, loss in enumerate(losses_by_loop(module, target, batch, 3)))
        found = module.training_losses(batch, 0)
        torch.testing.assert_close(found["loss"], expected.to(found["loss"].dtype), atol=1e-6, rtol=1e-6)
        ours, theirs = gradients(found["loss"], module), gradients(expected, module)
        torch.testing.assert_close(ours.pop("weights.log_variance"), theirs.pop("weights.log_variance"))
        for n, g in theirs.items():
            torch.testing.assert_close(ours[n], g, atol=1e-7, rtol=1e-5)  # the variances are in float32
        assert module.configure_optimizers()["optimizer"].param_groups[0]["params"][-1] is module.weights.log_variance


@pytest.mark.parametrize("projection", [False, True], ids=["plain", "projected"])
@pytest.mark.parametrize("name", ["sequential", "parallel", "cascaded"])
def test_one_heads_logits_and_states_are_alive_at_a_time(
    name: str, projection: bool, target: Target, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When any logits are computed, all earlier ones are gone, whichever chunk or head they were of."""
    module = module_of(name, target, projection=projection)
    drafter, made, states = module.drafter, [], []
    logits = drafter.logits

    def watched(hidden: Tensor, step: int = 0) -> Tensor:
        assert not any(ref() is not None for ref in made), f"{len(made)} earlier chunks, step {step}"
        result = logits(hidden, step)
        made.append(weakref.ref(result))
        return result

    monkeypatch.setattr(drafter, "logits", watched)
    if hasattr(drafter, "ahead") and not projection:
        ahead = drafter.ahead

        def watched_ahead(*arguments: Any) -> Tensor:
            assert not any(ref() is not None for ref in states)
            result = ahead(*arguments)
            states.append(weakref.ref(result))
            return result

        monkeypatch.setattr(drafter, "ahead", watched_ahead)
    gc.disable()  # nothing may wait for the collector of cycles
    try:
        module.training_losses(batch, 0)["loss"].backward()
    finally:
        gc.enable()
    assert len(made) > 6  # several chunks of three heads
    assert not states or len(states) == 3


def test_the_curriculum_says_how_many_tokens_are_trained(target: Target, batch: Batch) -> None:
    for name in ("sequential", "parallel"):
        module = module_of(name, target, curriculum={"by": "steps", "every": 2}, max_steps=6)
        for step, count in enumerate([1, 1, 2, 2, 3, 3]):
            found = module.training_losses(batch, step)
            assert found["num_steps"] == count and ("divergence_1" in found) == (count > 1)
            expected = sum(
                0.6**i / sum(0.6**j for j in range(count)) * loss
                for i, loss in enumerate(losses_by_loop(module, target, batch, count))
            )
            torch.testing.assert_close(found["loss"], expected, **EXACT)
        module._batches_per_step = 2
        assert module.training_losses(batch, 3)["num_steps"] == 1


def test_gradients_that_are_given_are_scaled_and_left_out() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    loss = with_gradients(torch.tensor(3.0), [a, b], [torch.tensor([1.0, 2.0]), None])
    assert loss == 3
    (loss / 2).backward()
    assert a.grad.tolist() == [0.5, 1.0] and b.grad is None


def answers(target: Target) -> StepBatches:
    start = prompts([3, 5, 4, 2], 20)
    said = generate(target, start, DecodeSettings(max_new_tokens=16)).token_ids
    rows = [{"token_ids": p + a, "loss_mask": [0] * len(p) + [1] * len(a)} for p, a in zip(start, said, strict=True)]
    return StepBatches(datasets.Dataset.from_list(rows), 2, 32, seed=0)


@pytest.mark.parametrize("name", MODELS)
def test_training_starts_at_the_best_linear_map(name: str, target: Target) -> None:
    """Of normalised inputs, over supervised rows one by one, onto states that the norm then gives their size."""
    module, batches = module_of(name, target), answers(target)
    module.start(batches)
    read, wanted = [], []
    for ids, mask in zip(batches.token_ids, batches.loss_mask, strict=True):
        hidden = target(torch.tensor([ids]), capture_layers=(2,)).hidden[0]
        parts = [target.embedding(torch.tensor(ids[1:])), hidden[:-1]]
        fusion = next(m for m in module.drafter.modules() if hasattr(m, "enorm"))
        both = torch.cat([fusion.enorm(parts[0]), fusion.hnorm(parts[1])], dim=-1)
        for t in range(len(ids) - 2):
            if mask[t + 2]:
                read.append(both[t])
                wanted.append(hidden[t + 1])
    x, y = torch.stack(read), torch.stack(wanted)
    ridge = 1e-3 * x.square().sum() / x.shape[1]
    weight = torch.linalg.solve(x.t() @ x + ridge * torch.eye(x.shape[1]), x.t() @ y).t()
    norm = next(m.norm for m in module.drafter.modules() if hasattr(m, "norm"))
    torch.testing.assert_close(fusion.eh_proj.weight * norm.weight[:, None], weight, atol=1e-8, rtol=1e-6)
    assert norm.weight.min() > 0
    other = module_of(name, target, start="random")
    before = {n: p.clone() for n, p in other.drafter.state_dict().items()}
    other.start(batches)
    assert all(torch.equal(p, before[n]) for n, p in other.drafter.state_dict().items())


class Stop(lightning.Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step, self.counts = path, step, []

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        self.counts.append(pl_module.curriculum.num_steps(0, 0))
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def test_a_resumed_run_has_the_curriculum_and_weights_of_an_undisturbed_one(target: Target, tmp_path: Path) -> None:
    """Validation acceptance raises the number of tokens on the way, before and after the stop."""
    batches, settings = answers(target), DecodeSettings(8, 3)
    ends, counts = [], []
    for stops in ([12], [6, 12]):
        for index, stop in enumerate(stops):
            curriculum = {"by": "acceptance", "patience": 2, "least_gain": 0.5}
            module = module_of(
                "sequential", target, max_steps=12, curriculum=curriculum, weights={"by": "gradnorm"}, projection=True
            )
            measured = BlockEfficiency(target, prompts([3, 4], 20), settings, 2, tmp_path / "best.safetensors")
            watch = Stop(tmp_path / "last.ckpt", stop)
            trainer = lightning.Trainer(
                accelerator="cpu", max_steps=12, max_epochs=-1, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
                callbacks=[measured, watch], default_root_dir=tmp_path, plugins=[AtomicCheckpoints()],
            )  # fmt: skip
            done = 0 if index == 0 else stops[index - 1]
            trainer.fit(module, step_loader(batches, done, 12), ckpt_path=str(watch.path) if index else None)
            counts.append(watch.counts)
        ends.append(module)
    assert counts[0] == counts[1] + counts[2] and counts[1][-1] < counts[2][-1]
    for (name, a), b in zip(ends[0].state_dict().items(), ends[1].state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_epochs_are_those_of_the_answers(target: Target) -> None:
    """Five answers in batches of two: an epoch is 2.5 of them, whatever a step is."""
    start = prompts([3, 5, 4, 2, 6], 20)
    rows = [{"token_ids": p + [7] * 12, "loss_mask": [0] * len(p) + [1] * 12} for p in start]
    batches = StepBatches(datasets.Dataset.from_list(rows), 2, 32, seed=0)
    module = module_of("sequential", target, curriculum={"by": "epochs"})
    assert [float(module.training_losses(batches[0], step)["num_steps"]) for step in (0, 9)] == [1, 1]  # not known yet
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=1, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        accumulate_grad_batches=2,
    )  # fmt: skip
    trainer.fit(module, step_loader(batches, 0, 2))
    counts = [float(module.training_losses(batches[0], step)["num_steps"]) for step in (0, 2, 3, 4, 5, 9)]
    assert counts == [1, 1, 2, 2, 3, 3]
    by_steps = module_of("sequential", target, curriculum={"by": "steps", "every": 2})
    by_steps._batches_per_step = 2
    counts = [float(by_steps.training_losses(batches[0], batch)["num_steps"]) for batch in (0, 3, 4, 7, 8, 99)]
    assert counts == [1, 1, 2, 2, 3, 3]


def test_senseless_settings_are_refused(target: Target) -> None:
    with pytest.raises(UserError, match="num_steps is 4, but"):
        module_of("parallel", target, num_steps=4)
    for name, own in (("parallel", 3), ("cascaded", 3), ("blocks", 2)):
        with pytest.raises(
            UserError, match=rf"num_steps is 1, but {own} tokens ahead .* last {own - 1} would draft as"
        ):
            module_of(name, target, num_steps=1)
    for name in ("sequential", "hierarchical"):  # one block, which drafts further by itself
        assert module_of(name, target, num_steps=1).num_steps == 1
    with pytest.raises(UserError, match="least_squares or random"):
        module_of("sequential", target, start="zero")
    with pytest.raises(TypeError, match="pacience"):
        module_of("sequential", target, curriculum={"pacience": 2})


@pytest.mark.parametrize("family", ["mtp_parallel", "mtp_cascaded"])
def test_all_heads_are_trained_however_many_there_are(family: str) -> None:
    options = composed("train", [f"+drafter={family}", "drafter.model.num_heads=2"])
    assert options["drafter"]["training"]["num_steps"] == 2


class Shifted(SequentialMTP):
    """Tells of x_{t+1+s} in row t, where it should of x_{t+2+s}."""

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        late = torch.cat([features.next_token_ids[:, :1], features.next_token_ids[:, :-1]], dim=1)
        for hidden in super().unroll(replace(features, next_token_ids=late), num_steps):
            yield torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1)


def test_a_drafter_that_is_late_by_one_starts_worse(target: Target) -> None:
    batches, found = answers(target), []
    for drafter_class in (SequentialMTP, Shifted):
        torch.manual_seed(0)
        module = MultiToken(drafter_class(target, DraftVocab(20)), target, **SETTINGS)
        module.start(batches)
        found.append(float(module.training_losses(batches[0], 0)["top1_agreement"]))
    assert found[0] > found[1] + 0.3
