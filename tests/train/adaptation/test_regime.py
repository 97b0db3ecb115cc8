"""The loss at tested positions against loops, values and gradients; and that learning it makes drafts better."""

import copy
import math

import pytest
import torch

from engine.loop import generate
from engine.settings import DecodeSettings
from models.errors import UserError
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.adaptation import EAGLE, LOSS, OPTIMIZER, equal, learner_of, records_of
from tests.helpers.drafters import build_shaken, prompts, tiny_target
from train.adaptation.batches import replay_batch
from train.adaptation.regime import LossSettings, OnlineRegime, OptimizerSettings, tail_divergence
from train.adaptation.replay import ReplayBuffer

DECODE = DecodeSettings(12, 3, stop_token_ids=frozenset())


@pytest.fixture(scope="module")
def target():
    return tiny_target(torch.float64)


@pytest.fixture
def drafter(target):
    return build_shaken(EAGLE, target, DraftVocab(target.vocab_size), seed=3)


def divergence_by_loop(log_q: list[float], ids: list[int], probs: list[float], tail: float) -> float:
    known = [(i, p) for i, p in zip(ids, probs, strict=True) if i >= 0]
    if len(known) == len(log_q):
        tail = 0.0
    total = sum(p for _, p in known) + tail
    rest = sum(math.exp(x) for i, x in enumerate(log_q) if i not in [k for k, _ in known])
    found = sum(p / total * (math.log(p / total) - log_q[i]) for i, p in known if p > 0)
    return found + (tail / total * (math.log(tail / total) - math.log(rest)) if tail > 0 else 0.0)


def laws(rows: int, vocab: int, kept: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    p = (2 * torch.randn(rows, vocab, generator=stream, dtype=torch.float64)).softmax(-1)
    probs, ids = p.topk(kept)
    return torch.randn(rows, vocab, generator=stream, dtype=torch.float64), probs, ids


@pytest.mark.parametrize("kept", [1, 3, 8])
@pytest.mark.parametrize("unproposable", [False, True])
def test_divergence_with_a_tail_is_the_loops(kept: int, unproposable: bool) -> None:
    logits, probs, ids = laws(6, 8, kept)
    if unproposable:
        ids = torch.where(torch.arange(kept) == 0, -1, ids)
        if kept == 1:
            ids[:2] = 3  # in some rows nothing but the tail is known
    logits.requires_grad_()
    found = tail_divergence(logits.log_softmax(-1), ids, probs, whole=kept == 8 and not unproposable)
    log_q = logits.log_softmax(-1)
    tails = (1 - probs.sum(-1)).clamp(min=0).tolist()
    expected = [
        divergence_by_loop(*row) for row in zip(log_q.tolist(), ids.tolist(), probs.tolist(), tails, strict=True)
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-10, rtol=1e-8)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    step = 1e-6
    for row, column in ((0, 0), (2, 5), (5, 7)):
        moved = logits.detach().clone()
        moved[row, column] += step
        change = tail_divergence(moved.log_softmax(-1), ids, probs, whole=kept == 8 and not unproposable) - found
        assert float(change[row].detach()) / step == pytest.approx(float(gradient[row, column]), abs=1e-4)


def test_the_whole_law_gives_the_whole_divergence_and_less_a_lower_bound() -> None:
    logits, probs, ids = laws(20, 12, 12)
    log_q = logits.log_softmax(-1).requires_grad_()
    p = torch.zeros(20, 12, dtype=torch.float64).scatter(-1, ids, probs)
    full = (p * (p.log() - log_q)).sum(-1)
    found = tail_divergence(log_q, ids, probs, whole=True)
    torch.testing.assert_close(found, full)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), log_q, retain_graph=True)[0], torch.autograd.grad(full.sum(), log_q)[0]
    )
    cut = tail_divergence(log_q, ids[:, :4], probs[:, :4])
    assert bool((cut <= full + 1e-12).all()) and bool((cut >= 0).all()) and bool((cut < full - 1e-3).any())


@pytest.mark.parametrize("steps", ["tested", "all"])
def test_the_loss_is_a_loop_over_positions(target, drafter, steps: str) -> None:
    """Each position by itself: the drafter unrolls the text before it, and the last row tells its law."""
    records = records_of(target, drafter, prompts([4, 7, 5], 64, seed=2), DECODE, law_tokens=64)
    loss = {**LOSS, "steps": steps, "position_decay": 0.7}
    regime = OnlineRegime(drafter, target, LossSettings(**loss), OptimizerSettings(**OPTIMIZER), depth=3, seed=0)
    positions = [torch.arange(len(r.place))[::2] for r in records]
    found = regime.training_losses(replay_batch(records, positions, torch.device("cpu")), 0)
    total, weight, count = torch.zeros((), dtype=torch.float64), 0.0, 0
    for record, chosen in zip(records, positions, strict=True):
        for index in chosen.tolist():
            place, depth = int(record.place[index]), int(record.depth[index])
            for ahead in range(3) if steps == "all" else [depth]:
                row = place - 2 - ahead
                if row < 0:
                    continue
                ids = record.token_ids[None, :place]  # nothing of the position or behind it
                hidden = target(ids, capture_layers=drafter.capture_layers).hidden
                following = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
                features = TargetFeatures(ids, following, hidden, torch.tensor([place]))
                *_, last = drafter.unroll(features, ahead + 1)
                log_q = drafter.logits(last[0, row], ahead).log_softmax(-1)
                p = torch.zeros(64, dtype=torch.float64).scatter(
                    0, record.law_ids[index], record.law_probs[index].double()
                )
                divergence = torch.special.xlogy(p, p).sum() - (p * log_q).sum()
                total = total + 0.7**ahead * (divergence - 0.1 * log_q[record.token_ids[place]])
                weight, count = weight + 0.7**ahead, count + 1
    assert int(found["positions"]) == count > 5
    torch.testing.assert_close(found["loss"].double(), total / weight, atol=1e-5, rtol=1e-5)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    for ours, theirs in zip(
        torch.autograd.grad(found["loss"], trained), torch.autograd.grad(total / weight, trained), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lora", [None, {"rank": 8, "alpha": 16}])
def test_learning_makes_drafts_better_and_adapters_alone_change(target, drafter, lora) -> None:
    asked = prompts([4, 7, 5, 6], 64, seed=2)
    before = generate(target, asked, DECODE, drafter).stats
    learner = learner_of(copy.deepcopy(drafter), target, lora, updates={"steps": 30})
    frozen = {name: t.clone() for name, t in learner.drafter.state_dict().items() if "lora" not in name}
    learner.update(records_of(target, drafter, asked, DECODE), ReplayBuffer(4, "reservoir"))
    learnt = copy.deepcopy(drafter)
    learnt.load_state_dict(learner.weights())
    after = generate(target, asked, DECODE, learnt.eval()).stats
    assert after.block_efficiency > before.block_efficiency + 0.5
    if lora is not None:
        assert all(torch.equal(t, frozen[name]) for name, t in learner.drafter.state_dict().items() if name in frozen)
    assert not equal(learner.weights(), drafter.state_dict())


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4}])
def test_what_is_served_is_the_moving_average_of_the_weights(target, drafter, lora) -> None:
    records = records_of(target, drafter, prompts([4, 7, 5, 6], 64, seed=2), DECODE)
    followed, raw = (
        learner_of(copy.deepcopy(drafter), target, lora, updates={"steps": 1, "average": share}) for share in (0.8, 0.0)
    )
    expected = {name: t.clone() for name, t in raw.drafter.state_dict().items()}
    for _ in range(3):
        for learner in (followed, raw):
            learner.update(records, ReplayBuffer(4, "reservoir"))
        for name, tensor in raw.drafter.state_dict().items():
            expected[name] = 0.8 * expected[name] + 0.2 * tensor
    with followed.averaged() as averaged:
        for name, tensor in averaged.state_dict().items():
            torch.testing.assert_close(tensor, expected[name])
    assert equal(followed.drafter.state_dict(), raw.drafter.state_dict())  # it learns on from the last weights
    raw.drafter.load_state_dict(expected)
    raw._average = raw.state()["drafter"]
    served = followed.weights()
    assert all(torch.allclose(tensor, served[name]) for name, tensor in raw.weights().items())
    assert any(not torch.allclose(served[name], t) for name, t in drafter.state_dict().items())


def test_a_learner_goes_on_the_same_from_its_state(target, drafter) -> None:
    records = records_of(target, drafter, prompts([4, 7, 5, 6, 3], 64, seed=2), DECODE)
    buffer = ReplayBuffer(4, "priority")
    for record in records[:3]:
        buffer.add(record)
    lora, updates = {"rank": 2, "dropout": 0.2}, {"average": 0.5}
    first, second = (learner_of(copy.deepcopy(drafter), target, lora, updates=updates) for _ in range(2))
    first.update(records[3:], buffer)
    second.load_state(first.state())
    for learner in (first, second):
        learner.update(records[2:], buffer)
    assert equal(first.weights(), second.weights()) and first.step == second.step == 4


def test_a_mix_has_fresh_and_replayed_records_once_each(target, drafter) -> None:
    records = records_of(target, drafter, prompts([4] * 12, 64, seed=2), DECODE)
    buffer = ReplayBuffer(12, "reservoir")
    for record in records:
        buffer.add(record)
    learner = learner_of(copy.deepcopy(drafter), target, updates={"requests": 6, "fresh_share": 0.5})
    for step in range(5):
        learner.step = step
        mixed = [record.request for record in learner._mix(records[8:], buffer)]
        assert len(mixed) == len(set(mixed)) == 6 and sum(request >= 8 for request in mixed) >= 3
    assert learner._mix([], ReplayBuffer(3, "reservoir")) == []
    assert len(learner._mix(records[8:], ReplayBuffer(3, "reservoir"))) == 4  # all that there are


def test_a_step_on_positions_that_no_depth_learns_changes_nothing(target, drafter) -> None:
    """Positions that were tested deeper, where only the first step is learnt: there is still a gradient, of zeros."""
    records = records_of(target, drafter, prompts([4, 7, 5, 6], 64, seed=2), DECODE)
    deep = [record for record in records if int(record.depth.max()) > 0]
    learner = learner_of(copy.deepcopy(drafter), target, loss={"steps": "tested", "num_steps": 1})
    batch = replay_batch(deep, [record.depth.argmax()[None] for record in deep], torch.device("cpu"))
    found = learner.regime.training_losses(batch, 0)
    assert found["positions"] == 0 and found["loss"] == 0
    found["loss"].backward()
    assert all(p.grad is None or not p.grad.any() for p in learner.drafter.parameters())


def test_what_cannot_learn_is_refused(target, drafter) -> None:
    from models.checkpoint import native

    lookup = native.build({"_target_": "models.drafter.prompt_lookup.PromptLookupDrafter"}, target, DraftVocab(64))
    with pytest.raises(UserError, match="PromptLookupDrafter has no weights"):
        learner_of(lookup, target)
    for wrong, named in (({"distill": 0.0, "task": 0.0}, "not both 0"), ({"steps": "some"}, "loss.steps")):
        with pytest.raises(UserError, match=named):
            learner_of(copy.deepcopy(drafter), target, loss=wrong)
