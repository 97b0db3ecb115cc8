"""A drafter with a predictor of lengths: it drafts as the neural one, and the engine asks its predictor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.draft_length import Fixed, Learnt
from engine.loop import check_settings, generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.drafter.draft_length import DraftLengthDrafter
from models.drafter.eagle import EagleDrafter
from models.errors import UserError
from models.length_predictor import ChainFeatures, LengthPredictor
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import prompts, shaken, tiny_target

EAGLE = {"_target_": "models.drafter.eagle.EagleDrafter"}
SETTINGS = DecodeSettings(20, 5, stop_token_ids=frozenset())


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(torch.float64)


@pytest.fixture(scope="module")
def vocab() -> DraftVocab:
    return DraftVocab(64, torch.arange(0, 64, 2))


@pytest.fixture(scope="module")
def eagle(target: Target, vocab: DraftVocab) -> EagleDrafter:
    torch.manual_seed(0)
    drafter: EagleDrafter = shaken(EagleDrafter(target, vocab))
    return drafter


def saved(drafter: Any, model: dict[str, Any], target: Target, folder: Path) -> Path:
    about = {"name": target.name, "fingerprint": target.fingerprint, "load": {}}
    native.save(drafter, native.Export("some", model, about, 5, {}), drafter.vocab, folder, "card")
    return folder


def test_it_drafts_as_the_neural_drafter_of_the_export_and_needs_no_folder(
    target: Target, eagle: EagleDrafter, tmp_path: Path
) -> None:
    folder = saved(eagle, EAGLE, target, tmp_path / "eagle")
    drafter = DraftLengthDrafter(target, DraftVocab(64), export=str(folder)).eval()
    assert drafter.pretrained and drafter.vocab.size == eagle.vocab.size
    start = prompts([4, 1, 7], 64)
    fixed = replace(SETTINGS, draft_length=Fixed())
    expected = generate(target, start, fixed, eagle).stats
    found = generate(target, start, fixed, drafter).stats
    assert (found.drafted == expected.drafted).all() and (found.accepted == expected.accepted).all()
    drafter.length_predictor.thresholds.fill_(0.37)
    model = {"_target_": "models.drafter.draft_length.DraftLengthDrafter", "export": str(folder), "neural": None}
    whole = saved(drafter, model, target, tmp_path / "whole")
    for file in folder.iterdir():
        file.unlink()
    loaded = native.load(whole, target)
    assert loaded.length_predictor.thresholds[0].item() == pytest.approx(0.37)
    assert loaded.vocab.size == eagle.vocab.size
    shaken_predictor(loaded)
    shaken_predictor(drafter)
    ours, theirs = (generate(target, start, SETTINGS, d).stats for d in (drafter, loaded))
    assert (ours.drafted == theirs.drafted).all()


def shaken_predictor(drafter: DraftLengthDrafter) -> None:
    torch.manual_seed(1)
    for parameter in drafter.length_predictor.parameters():
        parameter.data.normal_()


def test_the_engine_asks_its_predictor_unless_told_otherwise(target: Target, eagle: EagleDrafter) -> None:
    drafter = shaken(DraftLengthDrafter(target, DraftVocab(64), neural=EAGLE))
    last = drafter.length_predictor.layers[-1]
    last.weight.data.zero_()
    start = prompts([4, 1], 64)
    for bias, threshold, drafted in [(2.0, 0.9, 1), (2.0, 0.65, 4), (2.0, 0.0, 5), (9.0, 0.5, 5)]:
        last.bias.data.fill_(bias)  # of all tokens alike, sigmoid(2) = 0.88 survive
        drafter.length_predictor.thresholds.fill_(threshold)
        stats = generate(target, start, SETTINGS, drafter).stats
        assert stats.drafts[:, drafted - 1].min() > 0
        assert stats.drafts[:, drafted:].sum() == 0
        assert (
            generate(target, start, replace(SETTINGS, draft_length=Learnt()), drafter).stats.drafts == stats.drafts
        ).all()
        fixed = generate(target, start, replace(SETTINGS, draft_length=Fixed()), drafter).stats
        assert fixed.drafts[:, 4].min() > 0


def test_a_drafter_without_laws_is_refused(target: Target) -> None:
    lookup = {"_target_": "models.drafter.prompt_lookup.PromptLookupDrafter"}
    with pytest.raises(UserError, match="PromptLookupDrafter draws no chains from laws"):
        DraftLengthDrafter(target, DraftVocab(64), neural=lookup)
    with pytest.raises(UserError, match=r"drafter\.model\.export or drafter\.model\.neural"):
        DraftLengthDrafter(target, DraftVocab(64))


def test_learnt_needs_a_predictor(target: Target, eagle: EagleDrafter) -> None:
    with pytest.raises(UserError, match="needs an export with a predictor, and EagleDrafter has none"):
        check_settings(target, eagle, replace(SETTINGS, draft_length=Learnt()))


def test_features_by_hand() -> None:
    features = ChainFeatures(torch.tensor([0.25, 1.0]))
    laws = torch.tensor([[[0.5, 0.5], [1.0, 0.0]], [[0.75, 0.25], [0.5, 0.5]]])
    chances = torch.tensor([[0.5, 1.0], [0.25, 0.0]])
    found = []
    for law, chance in zip(laws, chances, strict=True):
        features.look(law)
        found.append(features.add(chance))
    ln = torch.log
    half, quarter = ln(torch.tensor(0.5)), ln(torch.tensor(0.25))
    mixed = -(0.75 * ln(torch.tensor(0.75)) + 0.25 * quarter)
    expected = [
        [[0.25, -half, half, 0, 0], [1, 0, 0, 0, 0]],
        [[0.25, mixed, quarter, half, 1], [1, -half, ln(torch.tensor(1e-6)), 0, 1]],
    ]
    torch.testing.assert_close(torch.stack(found), torch.tensor(expected))


def test_features_are_centred_and_scaled() -> None:
    predictor = LengthPredictor()
    rows = torch.randn(6, 5)
    expected = predictor(rows)
    predictor.center.copy_(torch.arange(5))
    predictor.scale.copy_(torch.arange(1, 6))
    torch.testing.assert_close(predictor(rows * predictor.scale + predictor.center), expected)
