"""Reptile and first-order MAML against their formulas, and a start that learns its domains faster."""

import copy

import pytest
import torch
from torch import nn

from data.streams import Request, Stream
from engine.settings import DecodeSettings
from models.errors import UserError
from models.vocab import DraftVocab
from tests.helpers.adaptation import EAGLE, learner_of
from tests.helpers.drafters import build_shaken, prompts, tiny_target
from train.adaptation.meta import MetaSettings, adapted_loss, check_domains, pre_adapt
from train.adaptation.sections import BufferSettings
from train.meta import Batches, collect, served

CENTRES = {"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([2.0, -1.0])}


def quadratic(parameter: nn.Parameter):
    def loss(domain: str, number: int) -> torch.Tensor:
        return 0.5 * (parameter - CENTRES[domain] - 0.01 * number).square().sum()

    return loss


@pytest.mark.parametrize("by", ["reptile", "fomaml"])
def test_the_outer_step_is_the_formula(by: str) -> None:
    parameter = nn.Parameter(torch.tensor([5.0, 5.0]))
    settings = MetaSettings(by, outer_steps=3, inner_steps=2, outer_lr=0.3, inner_lr=0.1, clip=100.0)
    pre_adapt([parameter], quadratic(parameter), ["a", "b"], settings)
    theta = torch.tensor([5.0, 5.0])
    for outer, domain in enumerate("aba"):
        moved = theta.clone()
        for inner in range(2):
            moved = moved - 0.1 * (moved - CENTRES[domain] - 0.01 * (3 * outer + inner))
        gradient = moved - CENTRES[domain] - 0.01 * (3 * outer + 2)
        theta = theta + 0.3 * (moved - theta) if by == "reptile" else theta - 0.3 * gradient
    torch.testing.assert_close(parameter.detach(), theta)


def test_gradients_are_clipped_together_and_a_comparison_changes_nothing() -> None:
    parameter = nn.Parameter(torch.tensor([5.0, 5.0]))
    settings = MetaSettings("reptile", 1, 1, outer_lr=1.0, inner_lr=1.0, clip=0.5)
    before = parameter.detach().clone()
    found = adapted_loss([parameter], quadratic(parameter), "a", settings, 0)
    assert torch.equal(parameter, before) and found < float(quadratic(parameter)("a", 1))
    pre_adapt([parameter], quadratic(parameter), ["a"], settings)
    assert float((parameter - before).norm()) == pytest.approx(0.5)


@pytest.mark.parametrize("by", ["reptile", "fomaml"])
def test_a_start_learns_its_domains_in_fewer_steps(by: str) -> None:
    target = tiny_target(torch.float64)
    drafter = build_shaken(EAGLE, target, DraftVocab(64), seed=3)
    decode = DecodeSettings(12, 3, stop_token_ids=frozenset())
    records = {
        name: served(target, drafter, prompts([5] * 6, 64, seed=seed), decode, name, 8)
        for seed, name in enumerate(("a", "b"))
    }
    learner = learner_of(copy.deepcopy(drafter), target)
    parameters = [p for p in learner.drafter.parameters() if p.requires_grad]
    loss = Batches(learner.regime, records, 2)
    settings = MetaSettings(by, outer_steps=16, inner_steps=3, outer_lr=0.5, inner_lr=0.2)
    before = {name: adapted_loss(parameters, loss, name, settings, 0) for name in records}
    pre_adapt(parameters, loss, ["a", "b"], settings)
    after = {name: adapted_loss(parameters, loss, name, settings, 0) for name in records}
    assert all(after[name] < before[name] - 0.1 for name in records)


def test_domains_that_are_kept_out_are_not_answered(monkeypatch) -> None:
    asked = [Request([5, number, domain], "abc"[domain]) for number in range(6) for domain in range(3)]
    monkeypatch.setattr("data.streams.open_stream", lambda *given: Stream(asked, []))
    target = tiny_target(torch.float64)
    drafter = build_shaken(EAGLE, target, DraftVocab(64), seed=3)
    decode = DecodeSettings(8, 3, stop_token_ids=frozenset())
    guard = {"num_prompts": 1}
    given = {"adaptation": {"requests": 18, "guard": guard}, "batch": 1, "requests": 2, "stream": "", "seed": 0}
    options = {**given, "meta": {"inner_steps": 1}}
    for out, left in (([], "abc"), (["b"], "ac")):
        found = collect(options, BufferSettings(8, "reservoir", 4, None, "ids", out), target, drafter, decode)
        assert [sorted(each) for each in found] == [list(left)] * 2
        assert all(int(record.token_ids[2]) == "abc".index(d) for each in found for d in each for record in each[d])
    with pytest.raises(UserError, match="keep_out has 'd'"):
        collect(options, BufferSettings(8, "reservoir", 4, None, "ids", ["d"]), target, drafter, decode)


def test_senseless_settings_are_refused() -> None:
    with pytest.raises(UserError, match=r"meta\.by"):
        MetaSettings("maml")
    with pytest.raises(UserError, match="inner_lr"):
        MetaSettings(inner_lr=0.0)
    for found in ({"a": 9}, {"a": 9, "b": 1}):
        with pytest.raises(UserError, match="over domains"):
            check_domains(found, 2)
