"""Every drafter of conf/drafter, with a full and a reduced draft vocabulary, random and trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hydra
import pytest
import torch

from conf.compose import ROOT, plain
from engine.loop import generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.sampling import SamplingParams
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.characters import with_characters
from tests.helpers.drafters import as_float64, build_shaken, five_token_target, tiny_target
from tests.helpers.memorising import Text, Trained, answered, memorise
from train.backbone import backbone_of

NAMES = [path.stem for path in sorted((ROOT / "drafter").glob("*.yaml"))]


@dataclass(frozen=True)
class Recipe:
    """One yaml: all options of a run with it, and whether its draft vocabulary is reduced."""

    options: dict[str, Any]
    reduced: bool

    @property
    def model(self) -> dict[str, Any]:
        return self.options["drafter"]["model"]

    @property
    def training(self) -> dict[str, Any] | None:
        return self.options["drafter"].get("training")


@pytest.fixture(scope="session", params=NAMES)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        return plain(hydra.compose("train", overrides=[f"+drafter={request.param}", "trainer=cpu"]))


@pytest.fixture(scope="session", params=[False, True], ids=["full", "reduced"])
def recipe(request: pytest.FixtureRequest, options: dict[str, Any]) -> Recipe:
    return Recipe(options, request.param)


@pytest.fixture(scope="session")
def target32() -> Target:
    return with_characters(tiny_target())


@pytest.fixture(scope="session")
def target(target32: Target) -> Target:
    return as_float64(target32)


@pytest.fixture(scope="session")
def small_target() -> Target:
    return with_characters(five_token_target())


@pytest.fixture(scope="session")
def text(target32: Target) -> Text:
    return answered(target32)


@pytest.fixture(scope="session")
def vocab(recipe: Recipe, target32: Target, text: Text) -> DraftVocab:
    """All tokens, or those that the answers hold and a few of the others."""
    counts = text.batches.token_counts(target32.vocab_size)
    return DraftVocab.most_frequent(counts, int((counts > 0).sum()) + 3 if recipe.reduced else None)


@pytest.fixture
def drafter(recipe: Recipe, target: Target, vocab: DraftVocab) -> Any:
    """The drafter in float64, with random weights."""
    return build_shaken(recipe.model, target, vocab)


@pytest.fixture
def small_drafter(recipe: Recipe, small_target: Target) -> Any:
    """The drafter for `small_target`, with random weights: the first whose drafts are not nearly always refused."""
    vocab = DraftVocab(5, torch.tensor([0, 2, 3]) if recipe.reduced else None)
    settings = DecodeSettings(4, 3, SamplingParams(0.8, top_k=4, top_p=0.85), frozenset())
    for seed in range(5):
        drafter = build_shaken(recipe.model, small_target, vocab, seed)
        if generate(small_target, [[3, 0, 4, 1]] * 200, settings, drafter).stats.acceptance_rate > 0.15:
            break
    return drafter


@pytest.fixture(scope="session")
def all_trained() -> dict[str, Trained]:
    """What was trained so far: pytest takes a drafter up again later, among the tests of another vocabulary."""
    return {}


@pytest.fixture(scope="session")
def trained(
    recipe: Recipe,
    target32: Target,
    text: Text,
    vocab: DraftVocab,
    all_trained: dict[str, Trained],
    tmp_path_factory: pytest.TempPathFactory,
) -> Trained:
    """The drafter after its own training on `text`."""
    if (key := repr(recipe)) in all_trained:
        return all_trained[key]
    if not recipe.training:
        pytest.skip("this drafter is not trained")
    adapted = backbone_of(recipe.training).adapt(target32, seed=0)
    torch.manual_seed(0)
    drafter = native.build(recipe.model, adapted, vocab)
    if not hasattr(drafter, "unroll") and not hasattr(drafter, "count"):
        pytest.skip("what this drafter learns proposes nothing")
    made = memorise(drafter, adapted, text, recipe.options, tmp_path_factory.mktemp("features"))
    return all_trained.setdefault(key, made)
