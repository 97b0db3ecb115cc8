"""Training of blocks: losses against loops over single tokens, values and gradients; weights, anchors, confidences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from data.loader import Batch
from models.drafter.medusa import MedusaDrafter
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import build_shaken, tiny_target
from train.block_parallel import BlockParallel, PositionWeights
from train.divergences import Divergence

SETTINGS: dict[str, Any] = {
    "max_steps": 100, "lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0, "warmup_fraction": 0.05,
    "losses": {"cross_entropy": 0.1, "tvd": 1.8}, "temperature": 1.0, "lk_eta": 3.0, "num_anchors": None,
    "weights": {"by": "exponential", "length": 4.0}, "w_confidence": 0.7, "skip_unproposable": True, "chunk_rows": 8,
    "seed": 5,
}  # fmt: skip
CLASS = "models.drafter.dflash.DFlashDrafter"
DSPARK = {"predict_at_anchor": True, "markov_rank": 5, "confidence": True}
MODELS = {
    "dflash": {"_target_": CLASS, "block_size": 4, "num_layers": 2},
    "dspark": {"_target_": CLASS, "block_size": 3, "num_layers": 1, **DSPARK},
}
EXACT = {"atol": 1e-11, "rtol": 1e-11}


@pytest.fixture(scope="module")
def target() -> Target:
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    return tiny_target(torch.float64, sharpness=2.0, **sizes)


def module_of(name: str, target: Target, reduced: bool = False, **changes: Any) -> BlockParallel:
    vocab = DraftVocab(20, torch.tensor([t for t in range(20) if t not in (1, 4, 9, 12)]) if reduced else None)
    return BlockParallel(build_shaken(MODELS[name], target, vocab), target, **SETTINGS | changes)


def weights_by_loop(settings: dict[str, Any], chances: list[float]) -> list[float]:
    """Of a block that counts up to the end of `chances`, those of the text's own tokens."""
    count = len(chances)
    if settings["by"] == "uniform":
        return [1.0] * count
    if settings["by"] == "exponential":
        return [float(torch.exp(torch.tensor(-j / settings["length"], dtype=torch.float64))) for j in range(count)]
    found = []
    for j in range(count):
        total = 0.0
        for i in range(j, count):
            product = 1.0
            for k in range(i + 1):
                product *= (1 - settings["floor"]) * chances[k] + settings["floor"]
            total += product
        found.append(total)
    return found


def loss_by_loops(module: BlockParallel, target: Target, batch: Batch) -> tuple[Tensor, dict[str, list[float]]]:
    """Block by block and token by token: the loss, and at each position all divergences and chances of acceptance."""
    drafter, vocab = module.drafter, module.drafter.vocab
    logits = target.model(input_ids=batch.token_ids).logits.detach()
    divergence = Divergence(SETTINGS["losses"])
    steps = list(drafter.unroll(module.features(batch)[0], drafter.max_depth))
    known = list(range(20)) if vocab.token_ids is None else vocab.token_ids.tolist()
    blocks: list[Tensor] = []
    told: dict[str, list[float]] = {
        f"{kind}{s}": [] for kind in ("divergence", "acceptance") for s in range(len(steps))
    }
    for text in range(len(logits)):
        for row in range(logits.shape[1]):
            losses, errors, chances = [], [], []
            for step, hidden in enumerate(steps):
                place = row + 2 + step
                if place >= logits.shape[1] or not batch.loss_mask[text, place]:
                    break
                if int(logits[text, place - 1].argmax()) not in known:
                    break  # such a position is not supervised
                ours, theirs = drafter.logits(hidden[text, row], step), logits[text, place - 1, known]
                token = int(batch.token_ids[text, place])
                said = known.index(token) if token in known else -1
                losses.append(divergence(ours[None], theirs[None], torch.tensor([said]))[0])
                q, p = ours.softmax(-1), theirs.softmax(-1)
                chances.append(float(q[said].detach()) if said >= 0 else 0.0)
                if drafter.confidence_head is not None:  # what tokens that it cannot propose have is not accepted
                    p = logits[text, place - 1].softmax(-1)[known]
                alpha = float(torch.minimum(p, q).sum().detach())
                told[f"divergence{step}"].append(float(losses[-1].detach()))
                told[f"acceptance{step}"].append(alpha)
                if drafter.confidence_head is not None:
                    c = drafter.confidence_head(hidden[text, row]).sigmoid()
                    errors.append(-alpha * c.log() - (1 - alpha) * (1 - c).log())
            if losses:
                weights = weights_by_loop(SETTINGS["weights"] | module_weights(module), chances)
                both = losses if not errors else [a + 0.7 * b for a, b in zip(losses, errors, strict=True)]
                blocks.append(torch.stack([w * x for w, x in zip(weights, both, strict=True)]).sum())
    return torch.stack(blocks).mean(), told


def module_weights(module: BlockParallel) -> dict[str, Any]:
    return {"by": module.weights.by, "length": module.weights.length, "floor": module.weights.floor}


def gradients(loss: Tensor, module: BlockParallel) -> dict[str, Tensor]:
    named = dict(module.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, found, strict=True))


@pytest.mark.parametrize("weights", [{"length": 4.0}, {"by": "dpace", "floor": 0.3}, {"by": "uniform"}], ids=str)
@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_loops(
    name: str, reduced: bool, weights: dict[str, Any], target: Target, batch: Batch
) -> None:
    module = module_of(name, target, reduced, weights=weights)
    expected, told = loss_by_loops(module, target, batch)
    found = module.training_losses(batch, 0)
    torch.testing.assert_close(found["loss"], expected, **EXACT)
    for step in range(module.drafter.max_depth):
        for kind in ("divergence", "acceptance"):
            values = told[f"{kind}{step}"]
            assert len(values) > 3 or (reduced and step > 0)
            suffix = f"_{step}" if step else ""
            assert float(found[f"{kind}{suffix}"]) == pytest.approx(sum(values) / max(1, len(values)), rel=1e-5)
    theirs, ours = gradients(expected, module), gradients(found["loss"], module)
    for parameter, value in theirs.items():
        assert value.abs().max() > 1e-9, parameter
        torch.testing.assert_close(ours[parameter], value, **EXACT, msg=lambda m, n=parameter: f"{n}: {m}")


def test_anchors_are_supervised_rows_chosen_anew(target: Target, batch: Batch) -> None:
    supervised = [[t for t in range(10) if batch.loss_mask[b, t + 2]] for b in range(4)]
    everything = module_of("dflash", target)
    rows, chosen = everything.anchors(batch.loss_mask, 0)
    for text in range(4):
        assert sorted(rows[text, chosen[text]].tolist()) == supervised[text]
    some = module_of("dflash", target, num_anchors=2)
    seen: set[tuple[int, ...]] = set()
    for step in range(20):
        rows, chosen = some.anchors(batch.loss_mask, step)
        again, _ = some.anchors(batch.loss_mask, step)
        assert torch.equal(rows, again) and rows.shape == (4, 2)
        for text in range(4):
            found = rows[text, chosen[text]].tolist()
            assert len(set(found)) == len(found) == min(2, len(supervised[text])) and set(found) <= set(
                supervised[text]
            )
        seen.add(tuple(sorted(rows[0].tolist())))
    assert len(seen) > 5


def test_blocks_of_fewer_anchors_are_some_of_all(target: Target, batch: Batch) -> None:
    """With one anchor a text the loss is another one in each step; nothing to learn is no loss."""
    module = module_of("dflash", target, num_anchors=1)
    losses = {round(module.training_losses(batch, step)["loss"].item(), 9) for step in range(40)}
    assert len(losses) > 5
    nothing = batch._replace(loss_mask=torch.zeros_like(batch.loss_mask))
    assert module.training_losses(nothing, 0)["loss"].item() == 0.0


def test_dpace_counts_what_hangs_on_a_token() -> None:
    """Written out: three tokens of chances 1, 0 and 1/2, the last one unknown."""
    chances = torch.tensor([[1.0, 0.0, 0.5], [1.0, 0.0, 0.5]])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    found = PositionWeights("dpace", floor=0.5)(chances, valid)
    torch.testing.assert_close(found, torch.tensor([[1 + 0.5 + 0.375, 0.5 + 0.375, 0.375], [1.5, 0.5, 0.0]]))


def test_no_gradient_teaches_the_draft_to_be_confident(target: Target, batch: Batch) -> None:
    """α is detached: W₂, which moves α but is not read by the head, learns the same whatever the confidences weigh."""
    found = []
    for weight in (0.0, 5.0):
        module = module_of("dspark", target, w_confidence=weight)
        found.append(gradients(module.training_losses(batch, 0)["loss"], module))
    second = "drafter.markov_head.markov_w2.weight"
    torch.testing.assert_close(found[0][second], found[1][second], **EXACT)
    head = "drafter.confidence_head.proj.weight"
    assert (found[0][head] == 0).all() and found[1][head].abs().max() > 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_anchors": 0}, "num_anchors is 0"),
        ({"weights": {"by": "linear"}}, "weights.by is 'linear': choose exponential, dpace, uniform"),
        ({"weights": {"length": 0.0}}, "weights.length is 0"),
        ({"weights": {"floor": 1.5}}, "weights.floor is 1.5"),
        ({"weights": {"lenght": 1.0}}, "weights: got an unexpected keyword argument 'lenght'"),
    ],
)
def test_senseless_settings_are_refused(changes: dict[str, Any], message: str, target: Target) -> None:
    with pytest.raises(UserError, match=message):
        module_of("dflash", target, **changes)


def test_another_drafter_is_refused(target: Target) -> None:
    with pytest.raises(UserError, match=r"MedusaDrafter is not trained by drafter.training._target_=train.block"):
        BlockParallel(MedusaDrafter(target, DraftVocab(20)), target, **SETTINGS)
