"""What law matching supervises: alignment, masks and weights, against loops over positions."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
from torch import Tensor, nn

from data.loader import Batch, StepBatches
from models.errors import UserError
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, tiny_target
from train.divergences import Divergence
from train.law_matching import LawMatching
from train.training_time_test import TrainingTimeTest

SETTINGS: dict[str, Any] = {
    "max_steps": 100, "lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0, "warmup_fraction": 0.05,
    "losses": {"kl": 1.0, "cross_entropy": 0.3}, "temperature": 1.0, "lk_eta": 3.0, "num_steps": 2,
    "position_decay": 0.8, "chunk_rows": 4, "seed": 0,
}  # fmt: skip
DRAFT_LM = {"_target_": "models.drafter.draft_lm.DraftLM", "num_layers": 1}
EXACT = {"atol": 1e-11, "rtol": 1e-11}
KEPT = torch.tensor([0, 2, 3, 4, 7, 9, 11, 13, 14, 18])  # of the first choices 3, 8, 11, 17


class Scripted(nn.Module):
    """A drafter that reads layer 1, and whose laws are the target's own, `shift` tokens further on than they should be.

    What the text does not hold is NaN: whoever supervises such a row gets a NaN for a loss.
    """

    def __init__(self, target: Target, shift: int = 0) -> None:
        super().__init__()
        self.vocab, self.capture_layers = DraftVocab(target.vocab_size), (1,)
        self.scale = nn.Parameter(torch.ones((), dtype=target.dtype))
        self._target, self.shift = (target,), shift

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        return self._target[0].head(hidden)

    def logit_parameters(self, step: int = 0) -> list[nn.Parameter]:
        return []

    def unroll(self, features: TargetFeatures, num_steps: int) -> Iterator[Tensor]:
        assert features.hidden is not None
        target = self._target[0]
        out = target(features.token_ids, capture_layers=(1, target.num_layers)).hidden
        assert out is not None
        read, states = out.chunk(2, dim=-1)
        assert torch.equal(features.hidden, read)
        for step in range(num_steps):
            rest = states[:, step + 1 + self.shift :]
            missing = rest.new_full((len(rest), states.shape[1] - rest.shape[1], rest.shape[2]), float("nan"))
            yield torch.cat([rest, missing], dim=1) * self.scale


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(
        torch.float64, vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, sharpness=2.0
    )


def losses_by_loop(module: LawMatching, target: Target, batch: Batch) -> dict[str, Tensor]:
    """Token by token: what step s says of x_{t+2+s} in row t, against the target's own logits before that token."""
    logits = target.model(input_ids=batch.token_ids).logits
    drafter = module.drafter
    soft, hard = (Divergence({name: weight}) for name, weight in SETTINGS["losses"].items())
    kept = torch.arange(20) if drafter.vocab.token_ids is None else drafter.vocab.token_ids
    parts: dict[str, Tensor] = {"loss": torch.zeros((), dtype=logits.dtype)}
    for step, hidden in enumerate(drafter.unroll(module.features(batch)[0], module.num_steps)):
        total, alpha, agree, count = 0.0, 0.0, 0, 0
        surprise, proposable = torch.zeros((), dtype=logits.dtype), 0
        for row in range(len(logits)):
            for t in range(logits.shape[1]):
                about = t + 2 + step
                if about >= logits.shape[1] or not batch.loss_mask[row, about]:
                    continue
                if module.skip_unproposable and logits[row, about - 1].argmax() not in kept:
                    continue
                count += 1
                ours, theirs = drafter.logits(hidden[row, t]), logits[row, about - 1][kept]
                said = int(batch.token_ids[row, about])
                total = total + soft(ours[None], theirs[None], torch.tensor([-1]))[0]
                if said in kept:
                    label = torch.tensor([kept.tolist().index(said)])
                    surprise, proposable = surprise + hard(ours[None], theirs[None], label)[0], proposable + 1
                alpha = alpha + torch.minimum(ours.softmax(-1), theirs.softmax(-1)).sum()
                agree += int(ours.argmax()) == int(theirs.argmax())
        name = f"_{step}" if step else ""
        divergence = total / count + surprise / max(1, proposable)
        assert (proposable < count) == drafter.vocab.reduced
        parts |= {f"divergence{name}": divergence, f"acceptance{name}": alpha / count}
        parts[f"top1_agreement{name}"] = torch.tensor(agree / count)
        parts["loss"] = parts["loss"] + 0.8**step * divergence
    return parts


@pytest.mark.parametrize("hidden_states", ["online", "cached"])
@pytest.mark.parametrize(
    ("reduced", "skip"), [(False, False), (True, False), (True, True)], ids=["full", "reduced", "skipping"]
)
def test_losses_and_gradients_are_those_of_loops(
    reduced: bool, skip: bool, hidden_states: str, target: Target, batch: Batch
) -> None:
    drafter = build_shaken(DRAFT_LM, target, DraftVocab(20, KEPT if reduced else None))
    module = LawMatching(drafter, target, **SETTINGS, skip_unproposable=skip)
    expected = losses_by_loop(module, target, batch)
    if hidden_states == "cached":
        batch = batch._replace(hidden=target(batch.token_ids, capture_layers=module.capture_layers).hidden)
    found = module.training_losses(batch, 0)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.detach().double(), atol=1e-6, rtol=1e-6, msg=name)
    torch.testing.assert_close(found["loss"], expected["loss"], **EXACT)
    parameters = dict(drafter.named_parameters())
    theirs = torch.autograd.grad(expected["loss"], list(parameters.values()))
    ours = torch.autograd.grad(found["loss"], list(parameters.values()))
    for name, a, b in zip(parameters, ours, theirs, strict=True):
        assert b.abs().max() > 1e-6, name
        torch.testing.assert_close(a, b, **EXACT, msg=name)


def test_only_positions_that_the_drafter_can_propose_are_kept(target: Target, batch: Batch) -> None:
    """All of them with the whole vocabulary, else those before which the target's first choice is one of KEPT."""
    first = target.model(input_ids=batch.token_ids).logits.argmax(-1)
    states = target(batch.token_ids).last
    for vocab, kept in ((DraftVocab(20), torch.arange(20)), (DraftVocab(20, KEPT), KEPT)):
        module = LawMatching(build_shaken(DRAFT_LM, target, vocab), target, **SETTINGS, skip_unproposable=True)
        found = module._proposable(states, batch.loss_mask)
        for row, column in batch.loss_mask.nonzero().tolist():
            assert found[row, column] == (int(first[row, column - 1]) in kept.tolist())
        assert not (found & ~batch.loss_mask).any()
    assert 0 < found.sum() < batch.loss_mask.sum()
    nothing = torch.zeros_like(batch.loss_mask)
    assert not module._proposable(states, nothing).any()


def test_the_targets_own_laws_are_matched_wholly(target: Target, batch: Batch) -> None:
    """Also shows that a drafter that reads another layer gets that layer alone, and the laws come from the last."""
    module = LawMatching(Scripted(target), target, **SETTINGS | {"losses": {"kl": 1.0}, "num_steps": 3})
    assert module.capture_layers == (1, target.num_layers)
    found = module.training_losses(batch, 0)
    assert found["loss"].item() == pytest.approx(0, abs=1e-12)
    for name in ("", "_1", "_2"):
        assert found[f"acceptance{name}"].item() == pytest.approx(1, abs=1e-6)
        assert found[f"top1_agreement{name}"] == 1


@pytest.mark.parametrize("shift", [-1, 1])
def test_laws_shifted_by_one_are_noticed(shift: int, target: Target, batch: Batch) -> None:
    found = LawMatching(Scripted(target, shift), target, **SETTINGS).training_losses(batch, 0)
    assert found["top1_agreement"] < 0.7
    assert not found["divergence"] < 0.1  # it is NaN where the shift runs beyond the text


def test_a_batch_with_nothing_to_learn_gives_zero(target: Target, batch: Batch) -> None:
    drafter = build_shaken(DRAFT_LM, target, DraftVocab(20))
    nothing = batch._replace(loss_mask=torch.zeros_like(batch.loss_mask))
    found = LawMatching(drafter, target, **SETTINGS).training_losses(nothing, 0)
    assert found["loss"] == 0 and found["acceptance"] == 0
    found["loss"].backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in drafter.parameters())


def test_eagle3_starts_from_the_states_that_it_can_tell_best(target: Target, batch: Batch) -> None:
    """By loops: fc onto the target's own state in units of its root mean square, then what the next state has more."""
    model = {"_target_": "models.drafter.eagle3.Eagle3Drafter", "capture_layers": [0, 1]}
    drafter = build_shaken(model, target, DraftVocab(20))
    rows = [
        {"token_ids": ids[:n].tolist(), "loss_mask": mask[:n].int().tolist()}
        for ids, mask, n in zip(batch.token_ids, batch.loss_mask, batch.lengths.tolist(), strict=True)
    ]
    batches = StepBatches(datasets.Dataset.from_list(rows), 1, 12, seed=0)
    module = TrainingTimeTest(drafter, target, **SETTINGS, start="least_squares")
    with mock.patch.object(drafter, "start_layers", wraps=drafter.start_layers) as start_layers:
        module.start(batches)
    low, high, last = target(batch.token_ids, capture_layers=(0, 1, 2)).hidden.chunk(3, dim=-1)
    places = [(b, t) for b, n in enumerate(batch.lengths.tolist()) for t in range(n - 2) if batch.loss_mask[b, t + 2]]
    x = torch.stack([torch.cat([low[p], high[p]]) for p in places])
    y = torch.stack([last[p] for p in places])
    scale = y.square().mean(0).sqrt()
    torch.testing.assert_close(drafter.norm.weight.detach(), scale, **EXACT)
    torch.testing.assert_close(drafter.fc.weight.detach().t() * scale, ridge_by_definition(x, y), atol=1e-8, rtol=1e-6)
    h = x @ drafter.fc.weight.detach().t()
    layer = drafter.stack.layers[0]
    tokens = target.embedding(torch.stack([batch.token_ids[b, t + 1] for b, t in places]))
    z = torch.cat([layer.input_layernorm(tokens), layer.hidden_norm(h)], dim=-1).detach()
    more = torch.stack([last[b, t + 1] for b, t in places]) / scale - h
    weight, read = start_layers.call_args.args
    torch.testing.assert_close(weight.t(), ridge_by_definition(z, more), atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(read, z.t() @ z / len(z), **EXACT)
    assert float(x.square().mean()) < 1 and module.fc_lr_multiple == 1


def test_eagle3_learns_slower_what_reads_long_states(target: Target, batch: Batch) -> None:
    """In proportion to their root mean square; also in a resumed run, which did not start and does not know it."""
    long = copy.deepcopy(target)
    with torch.no_grad():
        long.model.get_input_embeddings().weight.mul_(30)
    model = {"_target_": "models.drafter.eagle3.Eagle3Drafter", "capture_layers": [0, 1]}
    drafter = build_shaken(model, long, DraftVocab(20))
    rows = {"token_ids": batch.token_ids[:1].tolist(), "loss_mask": [[0] * 2 + [1] * (batch.token_ids.shape[1] - 2)]}
    module, resumed = (TrainingTimeTest(drafter, long, **SETTINGS, start="least_squares") for _ in range(2))
    module.start(StepBatches(datasets.Dataset.from_dict(rows), 1, 12, seed=0))
    read = long(batch.token_ids[:1], capture_layers=(0, 1)).hidden[:, :-2]
    multiple = 1 / float(read.square().mean().sqrt())
    assert module.fc_lr_multiple == pytest.approx(multiple) and multiple < 0.9
    made, again = (m.configure_optimizers() for m in (module, resumed))
    again["optimizer"].load_state_dict(made["optimizer"].state_dict())
    again["lr_scheduler"]["scheduler"].load_state_dict(made["lr_scheduler"]["scheduler"].state_dict())
    for found in (made, again):
        for _ in range(2):
            others, fc = found["optimizer"].param_groups
            assert fc["params"] == [drafter.fc.weight] and fc["lr"] == pytest.approx(multiple * others["lr"])
            assert not any(p is drafter.fc.weight for p in others["params"])
            found["optimizer"].step()
            found["lr_scheduler"]["scheduler"].step()


def ridge_by_definition(x: Tensor, y: Tensor) -> Tensor:
    weight = 1e-3 * x.square().sum() / x.shape[1] * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.inv(x.t() @ x + weight) @ x.t() @ y


def test_a_start_is_known_and_the_drafters_own(target: Target) -> None:
    drafter = build_shaken({"_target_": "models.drafter.eagle3.Eagle3Drafter"}, target, DraftVocab(20))
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    TrainingTimeTest(drafter, target, **SETTINGS, start="random").start(None)  # type: ignore[arg-type]
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
    with pytest.raises(UserError, match="least_squares or random"):
        TrainingTimeTest(drafter, target, **SETTINGS, start="zero")
    with pytest.raises(UserError, match="DraftLM is not trained by"):
        TrainingTimeTest(build_shaken(DRAFT_LM, target, DraftVocab(20)), target, **SETTINGS, start="random")


def test_misspelt_settings_are_refused(target: Target) -> None:
    drafter = build_shaken(DRAFT_LM, target, DraftVocab(20))
    with pytest.raises(TypeError, match="weight_decya"):
        LawMatching(drafter, target, **SETTINGS, weight_decya=0.1)
    with pytest.raises(UserError, match="num_steps is 0"):
        LawMatching(drafter, target, **SETTINGS | {"num_steps": 0})
