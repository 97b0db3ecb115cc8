"""The predictor of lengths: what is logged, what it learns of rounds that were made up, and the whole job."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
import torch
from torch import Tensor

from conf.compose import ROOT, plain
from data import prompts as data_prompts
from data.stdlib import documents
from engine.draft_length import Fixed
from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.drafter.draft_length import DraftLengthDrafter
from models.drafter.eagle import EagleDrafter
from models.errors import UserError
from models.length_predictor import LengthPredictor
from models.sampling import SamplingParams
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import five_token_target, prompts, shaken, tiny_target
from train import pipeline
from train.draft_length import (
    DraftLengthTraining,
    LoggedRounds,
    best_thresholds,
    fit,
    lengths_at,
    log_rounds,
    time_rounds,
    tokens_per_cost,
)

EAGLE = {"_target_": "models.drafter.eagle.EagleDrafter"}
MOST = 6


# ---- rounds that were made up ----


def made_up(rounds: int, seed: int) -> LoggedRounds:
    """Up to some token of each draft all is certain, and there the entropy is high and the token wrong.

    The chances themselves say nothing: half of the right tokens have a low one.
    """
    generator = torch.Generator().manual_seed(seed)
    right = torch.randint(0, MOST + 1, (rounds,), generator=generator)
    position = torch.arange(MOST).expand(rounds, -1)
    features = torch.rand(rounds, MOST, 5, generator=generator)
    features[..., 1] = torch.where(position < right[:, None], 0.2, 3.0) + 0.1 * features[..., 1]
    features[..., 4] = position.float()
    return LoggedRounds(features, torch.full((rounds,), MOST), right, torch.arange(rounds) % 10)


def test_it_learns_the_best_length_of_every_round() -> None:
    """At a tenth of a check a token, all right ones are worth drafting, and the wrong one is the sign to stop."""
    torch.manual_seed(0)
    predictor, costs = LengthPredictor(), [1 + 0.1 * n for n in range(MOST + 1)]
    report = fit(predictor, made_up(2000, 0), costs, max_steps=300, lr=1e-2, seed=0)
    test = made_up(500, 1)
    with torch.no_grad():
        survival = predictor(test.features).sigmoid().cumprod(1)
    lengths = lengths_at(survival, test.drafted, predictor.thresholds[:MOST])
    known = (test.accepted + 1).clamp(max=MOST)
    assert (lengths == known).float().mean() > 0.98
    assert tokens_per_cost(lengths, test, costs) > 0.99 * tokens_per_cost(known, test, costs)
    best_fixed = max(tokens_per_cost(torch.full((500,), n), test, costs) for n in range(1, MOST + 1))
    assert tokens_per_cost(lengths, test, costs) > 1.05 * best_fixed
    assert "2000 rounds logged" in report


def test_dear_tokens_are_not_drafted_on() -> None:
    torch.manual_seed(0)
    predictor = LengthPredictor()
    fit(predictor, made_up(1000, 0), [1 + 3.0 * n for n in range(MOST + 1)], max_steps=100, lr=1e-2, seed=0)
    test = made_up(200, 1)
    with torch.no_grad():
        survival = predictor(test.features).sigmoid().cumprod(1)
    assert lengths_at(survival, test.drafted, predictor.thresholds[:MOST]).tolist() == [1] * 200


def test_only_tested_tokens_are_learnt_from() -> None:
    logged = made_up(2000, 0)
    changed = LoggedRounds(logged.features.clone(), logged.drafted, logged.accepted, logged.prompt)
    changed.features[~logged.tested] = 77.0
    found = []
    for rounds in (logged, changed):
        torch.manual_seed(0)
        found.append(LengthPredictor())
        fit(found[-1], rounds, [1.0] * (MOST + 1), max_steps=5, lr=1e-2, seed=0)
    for (name, a), b in zip(found[0].state_dict().items(), found[1].state_dict().values(), strict=True):
        if name != "thresholds":
            assert torch.equal(a, b), name


def test_lengths_thresholds_and_rates_by_hand() -> None:
    survival = torch.tensor([[0.9, 0.5, 0.4], [0.3, 0.2, 0.1], [0.9, 0.9, 0.9]])
    drafted, accepted = torch.tensor([3, 3, 2]), torch.tensor([2, 0, 2])
    assert lengths_at(survival, drafted, torch.full((3,), 0.5)).tolist() == [2, 1, 2]
    assert lengths_at(survival, drafted, torch.tensor([0.05, 0.2, 0.0])).tolist() == [3, 2, 2]
    logged = LoggedRounds(torch.zeros(3, 3, 5), drafted, accepted, torch.zeros(3))
    costs = [1.0, 1.5, 2.0, 2.5]
    assert tokens_per_cost(torch.tensor([2, 1, 2]), logged, costs) == pytest.approx((3 + 1 + 3) / (2 + 1.5 + 2))
    thresholds, rate = best_thresholds(survival, logged, costs)
    assert lengths_at(survival, drafted, thresholds).tolist() == [2, 1, 2]
    assert rate == pytest.approx(7 / 5.5)
    assert logged.tested.tolist() == [[True] * 3, [True, False, False], [True, True, False]]


def test_where_survival_says_nothing_the_best_fixed_length_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    accepted = torch.where(torch.rand(400, generator=generator) < 0.5, 2, 5)
    logged = LoggedRounds(torch.zeros(400, 6, 5), torch.full((400,), 6), accepted, torch.zeros(400))
    for step, length in ((0.6, 2), (0.1, 5), (3.0, 1)):
        costs = [1 + step * n for n in range(7)]
        rates = {n: tokens_per_cost(torch.full((400,), n), logged, costs) for n in range(1, 7)}
        assert max(rates, key=lambda n: rates[n]) == length
        thresholds, rate = best_thresholds(torch.full((400, 6), 0.5), logged, costs)
        assert lengths_at(torch.full((400, 6), 0.5), logged.drafted, thresholds).tolist() == [length] * 400
        assert rate == pytest.approx(rates[length])


# ---- rounds of the engine ----


@pytest.fixture(scope="module")
def small() -> Target:
    return five_token_target()


@pytest.fixture
def drafter(small: Target) -> DraftLengthDrafter:
    torch.manual_seed(0)
    drafter: DraftLengthDrafter = shaken(DraftLengthDrafter(small, DraftVocab(5), neural=EAGLE))
    return drafter


def test_the_log_is_what_the_engine_counts_of_whole_drafts(small: Target, drafter: DraftLengthDrafter) -> None:
    texts = prompts([4, 2, 9, 1, 6], 5)
    settings = DecodeSettings(14, 3, stop_token_ids=frozenset(), seed=3)
    sampling = [SamplingParams(), SamplingParams(1.0)]
    logged = log_rounds(small, drafter, texts, settings, sampling, batch_size=2)
    rows = []
    for law in sampling:
        for index, text in enumerate(texts):
            decode = DecodeSettings(14, 3, law, frozenset(), draft_length=Fixed())
            rows.append((index, generate(small, [text], decode, drafter, seeds=[3 + index]).stats))
    for index in range(len(texts)):
        mine = logged.select(logged.prompt == index)
        stats = [s for i, s in rows if i == index]
        drafts = sum(s.drafts.sum(0) for s in stats)
        assert [(mine.drafted > n).sum() for n in range(3)] == drafts.tolist()
        assert mine.accepted.sum() == sum(s.accepted.sum() for s in stats)
        assert mine.tested.sum() == sum(s.tested.sum() for s in stats)
    position, chain = logged.features[..., 4], logged.features[..., 3]
    inside = torch.arange(3) < logged.drafted[:, None]
    assert torch.equal(position, torch.arange(3.0).expand_as(position) * inside)
    before = logged.features[..., 2].cumsum(1).roll(1, 1)
    before[:, 0] = 0
    torch.testing.assert_close(chain, before * inside)
    assert (logged.features[..., 1][inside] > 0).all() and (logged.features[inside].shape[0] > 40)


def test_rounds_are_timed_at_every_length(small: Target, drafter: DraftLengthDrafter) -> None:
    costs = time_rounds(small, drafter, prompts([4, 2], 5), DecodeSettings(9, 3))
    assert costs.counts[0] == 0 and min(costs.counts[1:]) >= 2
    table = costs.table()
    assert 0 < table[1] <= table[2] <= table[3]


class _AlwaysThree:
    """Says that token 3 follows, whatever came before."""

    room = None

    def __init__(self, batch_size: int) -> None:
        self._logits = torch.eye(5)[3].expand(batch_size, 1, 5)

    def root(self) -> Tensor:
        return self._logits

    def below(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        return self._logits


def test_long_drafts_are_timed_though_all_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft of 20 that is right is 21 tokens of the answer, and the first one of an answer does not count."""
    target = tiny_target(vocab_size=5, hidden_size=16, intermediate_size=32, max_position_embeddings=128)
    drafter: DraftLengthDrafter = shaken(DraftLengthDrafter(target, DraftVocab(5), neural=EAGLE))
    monkeypatch.setattr(drafter.neural, "expander", lambda state, committed: _AlwaysThree(len(committed.lengths)))
    always_three = SamplingParams(logit_bias=((3, 1e4),))
    costs = time_rounds(target, drafter, prompts([4], 5), DecodeSettings(9, 20, always_three))
    assert costs.counts[0] == 0 and min(costs.counts[1:]) >= 2


def test_prompts_without_room_are_said(small: Target, drafter: DraftLengthDrafter) -> None:
    full = prompts([small.max_positions - 1] * 2, 5)
    with pytest.raises(UserError, match="behind the first 2 prompts, which leave no room"):
        time_rounds(small, drafter, full, DecodeSettings(9, 3))


@pytest.mark.parametrize(("prompt", "which"), [(0, "held out, one of every 5"), (4, "that are learnt from")])
def test_rounds_of_one_side_only_are_said(prompt: int, which: str) -> None:
    logged = made_up(20, 0)
    one_side = LoggedRounds(logged.features, logged.drafted, logged.accepted, torch.full((20,), prompt))
    with pytest.raises(UserError, match=f"No round was drafted behind the prompts {which}.*num_prompts"):
        fit(LengthPredictor(), one_side, [1.0] * (MOST + 1), max_steps=1, lr=1e-2, seed=0)


def test_senseless_training_is_refused(small: Target, drafter: DraftLengthDrafter) -> None:
    options: dict[str, Any] = {"num_speculative_tokens": 3, "max_steps": 1, "seed": 0}
    with pytest.raises(UserError, match="EagleDrafter has no predictor"):
        DraftLengthTraining(EagleDrafter(small, DraftVocab(5)), small, **options)
    with pytest.raises(UserError, match="num_prompts is 4"):
        DraftLengthTraining(drafter, small, num_prompts=4, **options)


# ---- the main job ----


def test_the_predictor_is_trained_exported_and_drafts(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [document for split in data_prompts.SPLITS for document in itertools.islice(documents(split), 4)]
    monkeypatch.setattr(data_prompts, "documents", lambda: few)
    torch.manual_seed(0)
    eagle = EagleDrafter(tiny, DraftVocab(tiny.vocab_size)).eval()
    about = {"name": tiny.name, "fingerprint": tiny.fingerprint, "load": {"source": "tiny"}}
    native.save(eagle, native.Export("eagle", EAGLE, about, 4, {}), eagle.vocab, tmp_path / "eagle", "card")
    small = [
        "trainer=cpu",
        "data.sizes.train=6",
        "data.sizes.validation=1",
        "data.sizes.test=2",
        "data.answers.max_new_tokens=16",
        f"data.folder={tmp_path / 'data'}",
        "decode.max_new_tokens=12",
        "measure.num_prompts=1",
        "measure.temperatures=[0]",
        "fit.max_steps=5",
        "drafter.training.num_prompts=6",
        "drafter.training.max_new_tokens=10",
        "drafter.training.cost=0.2",
    ]
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        options = plain(
            hydra.compose("train", ["+drafter=draft_length", f"drafter.model.export={tmp_path / 'eagle'}", *small])
        )
    assert options["drafter"]["training"]["num_speculative_tokens"] == 8
    run = tmp_path / "run"
    pipeline.run_job(options, run)
    printed = capsys.readouterr().out
    assert "rounds logged. A draft ends where" in printed and "as before the export" in printed
    (result,) = json.loads((run / "acceptance.json").read_text())["results"]
    assert result["draft_length"] == {"policy": "learnt"}
    loaded = native.load(run / "export", tiny)
    assert (loaded.length_predictor.scale != 1).any()
    for name, tensor in eagle.state_dict().items():
        assert torch.equal(loaded.neural.state_dict()[name], tensor), name
    assert native.read(run / "export").num_speculative_tokens == 8


def test_too_few_prompts_are_said(drafter: DraftLengthDrafter, small: Target) -> None:
    training = DraftLengthTraining(drafter, small, num_speculative_tokens=3, max_steps=1, seed=0)
    with pytest.raises(UserError, match="4 training prompts"):
        training.learn(SimpleNamespace(token_ids=[[1, 2, 3]] * 4, loss_mask=[[0, 0, 1]] * 4))  # type: ignore[arg-type]


def test_the_prompt_of_an_answer_is_what_stands_before_it(
    drafter: DraftLengthDrafter, small: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: Any = SimpleNamespace(token_ids=[[i, 2, 3, 4] for i in range(5)], loss_mask=[[0, 0, 1, 1]] * 5)
    seen: list[list[int]] = []

    def log(target: Target, drafter: Any, texts: list[list[int]], *rest: Any) -> LoggedRounds:
        seen.extend(texts)
        return made_up(50, 0)

    monkeypatch.setattr("train.draft_length.log_rounds", log)
    options: dict[str, Any] = {"num_speculative_tokens": MOST, "max_steps": 1, "seed": 0, "cost": 0.1}
    DraftLengthTraining(drafter, small, **options).learn(texts)
    assert seen == [[i, 2] for i in range(5)]
