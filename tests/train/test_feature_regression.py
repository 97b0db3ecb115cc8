"""What the training module supervises: alignment, masks, weights, noise and schedule, against loops over positions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import datasets
import lightning
import pytest
import torch
from torch import Tensor, nn

from data.loader import Batch, StepBatches
from models.checkpoint import native
from models.errors import UserError
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, tiny_target
from train.feature_regression import FeatureRegression

PUBLISHED: dict[str, Any] = {
    "max_steps": 100, "lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0, "warmup_fraction": 0.05,
    "regression": "mse", "w_reg": 1.0, "w_cls": 0.1, "w_top_k": 0.0, "top_k": 10, "noise": 0.0, "num_steps": 1,
    "position_decay": 1.0, "chunk_rows": 4, "start": "least_squares", "seed": 0,
}  # fmt: skip
EAGLE = {"_target_": "models.drafter.eagle.EagleDrafter"}
EXACT = {"atol": 1e-11, "rtol": 1e-11}
KEPT = torch.tensor([0, 2, 3, 4, 7, 9, 10, 13, 14, 18])


class Scripted(nn.Module):
    """A drafter whose estimates are the states of the text itself, `shift` rows further on than they should be.

    What the text does not hold is NaN: whoever supervises such a row gets a NaN for a loss.
    """

    def __init__(self, target: Target, shift: int = 0, reduced: bool = False) -> None:
        super().__init__()
        self.vocab = DraftVocab(target.vocab_size, KEPT if reduced else None)
        self.capture_layers = (target.num_layers,)
        self.scale = nn.Parameter(torch.ones((), dtype=target.dtype))
        self._head, self.shift = (target.head.rows(self.vocab.token_ids),), shift

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        return self._head[0](hidden)

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        assert features.hidden is not None
        for step in range(num_steps):
            ahead = step + 1 + self.shift
            rest = features.hidden[:, ahead:]
            missing = rest.new_full((len(rest), features.hidden.shape[1] - rest.shape[1], rest.shape[2]), float("nan"))
            yield torch.cat([rest, missing], dim=1) * self.scale


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(
        torch.float64, vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, sharpness=2.0
    )


def module_of(drafter: nn.Module, target: Target, **changes: Any) -> FeatureRegression:
    return FeatureRegression(drafter, target, **(PUBLISHED | changes))


def features_of(target: Target, drafter: nn.Module, batch: Batch) -> TargetFeatures:
    return module_of(drafter, target).features(batch)[0]


def losses_by_loop(
    module: FeatureRegression, target: Target, features: TargetFeatures, loss_mask: Tensor
) -> dict[str, Tensor]:
    """Position by position: the estimate of row t at step s against the state and the law behind x_{t+1+s}."""
    true, drafter = features.hidden, module.drafter
    assert true is not None
    head = target.head.rows(drafter.vocab.token_ids)
    parts: dict[str, Tensor] = {"loss": torch.zeros((), dtype=true.dtype)}
    for step, estimate in enumerate(drafter.unroll(features, module.num_steps)):
        reg, cls, top, agree, count = 0.0, 0.0, 0.0, 0, 0
        for row in range(len(true)):
            for t in range(true.shape[1]):
                about = t + 2 + step  # the token whose law is estimated
                if about >= true.shape[1] or not loss_mask[row, about]:
                    continue
                count += 1
                f, f_hat = true[row, t + 1 + step], estimate[row, t]
                difference = (f_hat - f).abs()
                huber = torch.where(difference < 1, 0.5 * difference**2, difference - 0.5)
                reg = reg + (difference**2 if module.regression == "mse" else huber).mean()
                p, log_q = head(f).softmax(-1), drafter.logits(f_hat).log_softmax(-1)
                cls = cls - (p * log_q).sum()
                for token in sorted(range(len(p)), key=lambda x: -float(p[x]))[: module.top_k]:
                    top = top - p[token] * log_q[token]
                agree += int(p.argmax()) == int(log_q.argmax())
        name = f"_{step}" if step else ""
        parts |= {f"regression{name}": reg / count, f"classification{name}": cls / count}
        parts[f"top1_agreement{name}"] = torch.tensor(agree / count)
        if module.w_top_k:
            parts[f"top_k{name}"] = top / count
        weighted = module.w_reg * reg + module.w_cls * cls + module.w_top_k * top
        parts["loss"] = parts["loss"] + module.position_decay**step * weighted / count
    return parts


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"regression": "smooth_l1", "w_reg": 0.7, "w_cls": 0.3, "chunk_rows": 512},
        {"num_steps": 3, "position_decay": 0.8, "chunk_rows": 3},
        {"num_steps": 3, "w_top_k": 1.5, "top_k": 4, "chunk_rows": 3},
    ],
    ids=["published", "smooth_l1", "three-steps", "hass"],
)
@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
def test_losses_and_gradients_are_those_of_loops(changes: Any, reduced: bool, target: Target, batch: Batch) -> None:
    drafter = build_shaken(EAGLE, target, DraftVocab(20, KEPT if reduced else None))
    module = module_of(drafter, target, **changes)
    features = features_of(target, drafter, batch)
    found = module.losses(features, batch.loss_mask)
    expected = losses_by_loop(module, target, features, batch.loss_mask)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.detach().double(), atol=1e-7, rtol=1e-7, msg=name)
    torch.testing.assert_close(found["loss"], expected["loss"], **EXACT)
    parameters = dict(drafter.named_parameters())
    theirs = torch.autograd.grad(expected["loss"], list(parameters.values()))
    ours = torch.autograd.grad(found["loss"], list(parameters.values()))
    for name, a, b in zip(parameters, ours, theirs, strict=True):
        assert b.abs().max() > 1e-6, name
        torch.testing.assert_close(a, b, **EXACT, msg=name)


@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
def test_true_next_states_have_no_regression_loss_and_full_agreement(
    reduced: bool, target: Target, batch: Batch
) -> None:
    drafter = Scripted(target, reduced=reduced)
    module = module_of(drafter, target, num_steps=3)
    found = module.losses(features_of(target, drafter, batch), batch.loss_mask)
    for name in ("", "_1", "_2"):
        assert found[f"regression{name}"] == 0
        assert found[f"top1_agreement{name}"] == 1
    assert torch.isfinite(found["loss"])  # no row beyond the text was supervised


@pytest.mark.parametrize("shift", [-1, 1])
def test_states_shifted_by_one_are_noticed(shift: int, target: Target, batch: Batch) -> None:
    drafter = Scripted(target, shift)
    module = module_of(drafter, target)
    features = features_of(target, drafter, batch)
    found = module.losses(features, batch.loss_mask)
    assert not found["regression"] < 0.1  # it is NaN where the shift runs beyond the text
    assert found["top1_agreement"] < 0.7
    inner = batch.loss_mask.clone()
    inner[:, -1] = False
    assert module.losses(features, inner)["regression"] > 0.1


def test_only_supervised_positions_count(target: Target, batch: Batch) -> None:
    """The states that are regressed and the laws that are matched, elsewhere, may be anything."""
    drafter = Scripted(target)
    module = module_of(drafter, target, num_steps=2)
    features = features_of(target, drafter, batch)
    assert features.hidden is not None
    needed = torch.zeros_like(batch.loss_mask)
    needed[:, :-1] = batch.loss_mask[:, 1:]  # the state before each token that the target said
    spoilt = features.hidden.masked_fill(~needed[..., None], float("nan"))
    changed = TargetFeatures(features.token_ids, features.next_token_ids, spoilt, features.lengths)
    expected = module.losses(features, batch.loss_mask)
    for name, value in module.losses(changed, batch.loss_mask).items():
        assert torch.equal(value, expected[name]), name
    for row, t in needed.nonzero().tolist():
        if t > 0 and batch.loss_mask[row, 2:].any():
            one = features.hidden.clone()
            one[row, t] = float("nan")
            missing = TargetFeatures(features.token_ids, features.next_token_ids, one, features.lengths)
            assert not module.losses(missing, batch.loss_mask)["loss"].isfinite(), (row, t)


def test_a_batch_with_nothing_to_learn_gives_zero(target: Target, batch: Batch) -> None:
    drafter = build_shaken(EAGLE, target, DraftVocab(20))
    module = module_of(drafter, target, num_steps=2)
    found = module.losses(features_of(target, drafter, batch), torch.zeros_like(batch.loss_mask))
    assert found["loss"] == 0 and found["top1_agreement"] == 0
    found["loss"].backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in drafter.parameters())


@pytest.mark.parametrize("length", [1, 2, 3])
def test_texts_too_short_for_a_step_are_no_error(length: int, target: Target, batch: Batch) -> None:
    drafter = build_shaken(EAGLE, target, DraftVocab(20))
    short = Batch(batch.token_ids[:, :length], torch.ones(4, length, dtype=torch.bool), torch.full((4,), length), None)
    found = module_of(drafter, target, num_steps=3).losses(features_of(target, drafter, short), short.loss_mask)
    assert (found["classification"] > 0) == (length > 2)
    assert found["classification_1"] == 0 and found["classification_2"] == 0


def test_training_reads_the_states_of_the_head_and_the_tokens_that_follow(target: Target, batch: Batch) -> None:
    drafter = Scripted(target)
    features = features_of(target, drafter, batch)
    assert features.hidden is not None
    logits = target.model(input_ids=batch.token_ids).logits
    torch.testing.assert_close(target.head(features.hidden), logits, **EXACT)
    assert not features.hidden.requires_grad
    assert torch.equal(features.token_ids, batch.token_ids)
    assert torch.equal(features.next_token_ids[:, :-1], batch.token_ids[:, 1:])
    assert (features.next_token_ids[:, -1] == 0).all()
    cached = batch._replace(hidden=torch.full((4, 12, 16), 7.0))
    assert features_of(target, drafter, cached).hidden is cached.hidden


def test_a_training_step_is_the_loss_with_the_noise_of_its_step(target: Target, batch: Batch) -> None:
    drafter = build_shaken(EAGLE, target, DraftVocab(20))
    module = module_of(drafter, target, noise=0.1, seed=3)
    features = features_of(target, drafter, batch)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign,assignment]
    module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign,assignment]
    expected = module.losses(features, batch.loss_mask, noise_seed=3_000_009)["loss"]
    assert torch.equal(module.training_step(batch, 0), expected)
    assert not torch.equal(module.losses(features, batch.loss_mask, noise_seed=3_000_010)["loss"], expected)


def noise_of(module: FeatureRegression, features: TargetFeatures, seed: int | None) -> Tensor:
    noisy = module._with_noise(features, seed)
    assert noisy.hidden is not None and features.hidden is not None
    assert noisy.token_ids is features.token_ids and noisy.next_token_ids is features.next_token_ids
    return noisy.hidden - features.hidden


@pytest.mark.parametrize(("noise", "length"), [(0.1, 64), (0.1, 512), (0.3, 256)])
def test_noise_is_uniform_of_the_published_width(noise: float, length: int, target: Target) -> None:
    module = module_of(Scripted(target), target, noise=noise)
    ids = torch.zeros(8, length, dtype=torch.int64)
    features = TargetFeatures(ids, ids, torch.zeros(8, length, 16, dtype=torch.float64), torch.full((8,), length))
    values, width = noise_of(module, features, 5).flatten(), noise * 512 / length
    assert values.abs().max() <= width
    quantiles = torch.quantile(values[:8000], torch.linspace(0.05, 0.95, 19, dtype=torch.float64))
    torch.testing.assert_close(
        quantiles, width * torch.linspace(-0.9, 0.9, 19, dtype=torch.float64), atol=0.04 * width, rtol=0
    )


def test_noise_is_that_of_its_seed_and_none_without(target: Target, batch: Batch) -> None:
    module = module_of(Scripted(target), target, noise=0.1)
    features = features_of(target, module.drafter, batch)
    torch.manual_seed(1)
    first = noise_of(module, features, 8)
    torch.manual_seed(2)
    assert torch.equal(noise_of(module, features, 8), first)
    assert not torch.equal(noise_of(module, features, 9), first)
    assert (noise_of(module, features, None) == 0).all()
    module.noise = 0.0
    assert (noise_of(module, features, 8) == 0).all()


def test_noise_is_on_what_is_read_and_not_on_what_is_regressed(target: Target, batch: Batch) -> None:
    """The scripted drafter repeats what it reads: its loss is then the noise's own mean square."""
    drafter = Scripted(target)
    module = module_of(drafter, target, noise=0.1)
    features = features_of(target, drafter, batch)
    added = noise_of(module, features, 8)[:, 1:-1][batch.loss_mask[:, 2:]]
    found = module.losses(features, batch.loss_mask, noise_seed=8)
    torch.testing.assert_close(found["regression"], added.square().mean(), **EXACT)


def test_learning_rate_warms_up_and_falls_to_zero(target: Target) -> None:
    module = module_of(Scripted(target), target, lr=2e-3, max_steps=40, warmup_fraction=0.1)
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]
    assert scheduler["interval"] == "step"
    rates = []
    for _ in range(41):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler["scheduler"].step()
    assert rates[:5] == pytest.approx([0.5e-3, 1e-3, 1.5e-3, 2e-3, 2e-3])
    cosine = [1e-3 * (1 + math.cos(math.pi * (step - 4) / 36)) for step in range(4, 41)]
    assert rates[4:] == pytest.approx(cosine, abs=1e-12)
    assert rates[22] == pytest.approx(1e-3) and rates[40] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("max_steps", "fraction"), [(1, 0.05), (3, 0.0), (5, 1.0)])
def test_the_schedule_has_no_gap_in_short_runs(max_steps: int, fraction: float, target: Target) -> None:
    module = module_of(Scripted(target), target, max_steps=max_steps, warmup_fraction=fraction)
    scales = [module._lr_scale(step) for step in range(max_steps)]
    assert all(0 < scale <= 1 for scale in scales) and max(scales) == 1


def test_the_optimizer_is_as_configured_and_has_the_drafters_parameters_only(target: Target) -> None:
    drafter = native.build(EAGLE, target, DraftVocab(20))
    optimizer = module_of(drafter, target, betas=(0.8, 0.9), weight_decay=0.3).configure_optimizers()["optimizer"]
    assert isinstance(optimizer, torch.optim.AdamW)
    (group,) = optimizer.param_groups
    assert group["betas"] == (0.8, 0.9) and group["weight_decay"] == 0.3
    assert {id(p) for p in group["params"]} == {id(p) for p in drafter.parameters()}


def test_the_module_neither_saves_nor_moves_the_target(target: Target) -> None:
    """Lightning moves the module to the CPU when training ends, and would take along what it holds of the target."""
    drafter = Scripted(target)
    module = module_of(drafter, target)
    assert set(module.state_dict()) == {"drafter.scale"}
    assert not set(module.modules()) & set(target.modules())
    assert all(p is drafter.scale for p in module.parameters())


def test_training_changes_the_drafter_and_leaves_the_target_alone(target: Target, batch: Batch) -> None:
    drafter = build_shaken(EAGLE, target, DraftVocab(20))
    frozen = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, precision="64-true",
    )  # fmt: skip
    trainer.fit(module_of(drafter, target, num_steps=2), torch.utils.data.DataLoader([batch] * 2, batch_size=None))
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in target.model.state_dict().items())
    assert all(not torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
    assert target.head.weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"regression": "l3"}, "regression is 'l3': choose mse or smooth_l1"),
        ({"num_steps": 0}, "num_steps is 0: it must be at least 1"),
        ({"chunk_rows": -1}, "chunk_rows is -1: it must be at least 1"),
    ],
)
def test_senseless_settings_are_refused(changes: dict[str, Any], said: str, target: Target) -> None:
    with pytest.raises(UserError, match=said):
        module_of(Scripted(target), target, **changes)


def test_bfloat16_states_are_counted_in_float32(target: Target) -> None:
    """600 rows that all agree: a bfloat16 counter taken up by ones stops at 256."""
    drafter = Scripted(target)
    module = module_of(drafter, target, chunk_rows=1)
    rows = torch.randn(600, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    head = target.head.weight.bfloat16()
    module._head = lambda hidden: nn.functional.linear(hidden, head)
    drafter._head = (module._head,)
    loss, counted = module._classification(rows, rows)
    assert counted["top1_agreement"] == 600
    logits = nn.functional.linear(rows, head).double()
    expected = -(logits.softmax(-1) * logits.log_softmax(-1)).sum()
    assert counted["classification"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.item() == pytest.approx(module.w_cls * expected.item(), rel=1e-5)


# The least-squares start


def test_training_starts_at_the_best_linear_map(target: Target, batch: Batch) -> None:
    """The first estimates are those of a ridge regression over supervised positions, one by one."""
    drafter = build_shaken(EAGLE, target, DraftVocab(target.vocab_size))
    rows = [
        {"token_ids": ids[:n].tolist(), "loss_mask": mask[:n].int().tolist()}
        for ids, mask, n in zip(batch.token_ids, batch.loss_mask, batch.lengths.tolist(), strict=True)
    ]
    batches = StepBatches(datasets.Dataset.from_list(rows), 1, 12, seed=0)
    module_of(drafter, target).start(batches)
    hidden = target(batch.token_ids, capture_layers=(target.num_layers,)).hidden
    read, wanted = [], []
    for b, n in enumerate(batch.lengths.tolist()):
        for t in range(n - 2):
            if batch.loss_mask[b, t + 2]:
                read.append(torch.cat([target.embedding(batch.token_ids[b, t + 1]), hidden[b, t]]))
                wanted.append(hidden[b, t + 1])
    x, y = torch.stack(read), torch.stack(wanted)
    assert len(x) > 8
    ridge = 1e-3 * x.square().sum() / x.shape[1]
    weight = torch.linalg.solve(x.t() @ x + ridge * torch.eye(x.shape[1]), x.t() @ y).t()
    torch.testing.assert_close(drafter.fc.weight.detach(), weight, atol=1e-8, rtol=1e-6)
    features = features_of(target, drafter, batch)
    (estimate,) = drafter.unroll(features, 1)
    fused = torch.cat([target.embedding(features.next_token_ids), hidden], dim=-1)
    torch.testing.assert_close(estimate, fused @ drafter.fc.weight.t(), **EXACT)


def test_windows_and_later_estimates_start_at_the_best_linear_maps_too(target: Target, batch: Batch) -> None:
    """The later ones as maps of the first estimate, over rows all of whose states come before what the target said."""
    drafter = build_shaken(EAGLE | {"feature_window": 2, "num_future": 2}, target, DraftVocab(target.vocab_size))
    rows = [
        {"token_ids": ids[:n].tolist(), "loss_mask": mask[:n].int().tolist()}
        for ids, mask, n in zip(batch.token_ids, batch.loss_mask, batch.lengths.tolist(), strict=True)
    ]
    with pytest.raises(UserError, match="num_steps is 1, but 2 tokens ahead have weights of their own"):
        module_of(drafter, target, num_steps=1)
    module_of(drafter, target, num_steps=2).start(StepBatches(datasets.Dataset.from_list(rows), 1, 12, seed=0))
    hidden = target(batch.token_ids, capture_layers=(target.num_layers,)).hidden
    read, first, second = [], [], []
    for b, n in enumerate(batch.lengths.tolist()):
        pairs = [torch.zeros(32, dtype=torch.float64)]
        for t in range(n - 3):
            pairs.append(torch.cat([target.embedding(batch.token_ids[b, t + 1]), hidden[b, t]]))
            if batch.loss_mask[b, t + 2] and batch.loss_mask[b, t + 3]:
                read.append(torch.cat(pairs[-2:]))
                first.append(hidden[b, t + 1])
                second.append(hidden[b, t + 2])
    x, y, z = torch.stack(read), torch.stack(first), torch.stack(second)
    assert len(x) > 5
    weights = []
    for inputs, outputs in ((x, y), (None, z)):
        inputs = x @ weights[0].t() if inputs is None else inputs
        ridge = 1e-3 * inputs.square().sum() / inputs.shape[1] * torch.eye(inputs.shape[1])
        weights.append(torch.linalg.solve(inputs.t() @ inputs + ridge, inputs.t() @ outputs).t())
    torch.testing.assert_close(drafter.fc.weight.detach(), weights[0], atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(drafter.further[0].weight.detach(), weights[1], atol=1e-8, rtol=1e-6)


def test_there_are_no_more_likeliest_tokens_than_the_drafter_proposes(target: Target, batch: Batch) -> None:
    """All of them together are the soft cross-entropy."""
    drafter = build_shaken(EAGLE, target, DraftVocab(20, KEPT))
    module = module_of(drafter, target, w_top_k=1.0, top_k=15)
    found = module.losses(features_of(target, drafter, batch), batch.loss_mask)
    torch.testing.assert_close(found["top_k"], found["classification"], **EXACT)
    with pytest.raises(UserError, match="top_k is 0"):
        module_of(drafter, target, top_k=0)


def test_a_random_start_changes_nothing(target: Target, batch: Batch) -> None:
    drafter = build_shaken(EAGLE, target, DraftVocab(target.vocab_size))
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    rows = [{"token_ids": batch.token_ids[0].tolist(), "loss_mask": batch.loss_mask[0].int().tolist()}]
    module_of(drafter, target, start="random").start(StepBatches(datasets.Dataset.from_list(rows), 1, 12, seed=0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
    with pytest.raises(UserError, match="least_squares or random"):
        module_of(drafter, target, start="zero")
