"""What the command line says becomes a session, or one sentence before the first request is served."""

from pathlib import Path
from typing import Any

import hydra
import pytest

from conf.compose import ROOT, plain
from data import prompts
from data.stdlib import Document
from models.errors import UserError
from models.target import Target, load_target
from tests.helpers.adaptation import few_documents, tiny_export
from train.adaptation.setup import open_session
from train.run import adapted_options

SMALL = ["stream=shift", "adaptation.requests=4", "decode.max_new_tokens=4", "adaptation.guard.num_prompts=2"]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("tiny")


@pytest.fixture(scope="module")
def export(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_export(target, tmp_path_factory.mktemp("drafter") / "export")


@pytest.fixture(scope="module")
def few() -> list[Document]:
    return few_documents()


@pytest.fixture(autouse=True)
def _a_few_documents(monkeypatch: pytest.MonkeyPatch, few: list[Document]) -> None:
    monkeypatch.setattr(prompts, "documents", lambda: few)


def options(root: str, *overrides: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        return plain(hydra.compose(root, overrides=list(overrides)))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("stream=nowhere", "choose shift, instructions, hostile or a JSONL file"),
        ("export=NOWHERE", "NOWHERE"),
        ("adaptation.requests=100000", "lower adaptation.requests"),
        ("adaptation.temperature=-1", "temperature is -1"),
        ("adaptation.when=never", "choose always or drift"),
        ("adaptation.buffer.keep=all", "choose reservoir, recency, priority"),
        ("adaptation.buffer.persist=text", "choose ids or hashes"),
        ("adaptation.buffer.law_tokens=0", "adaptation.buffer.law_tokens is 0"),
        ("adaptation.buffer.keep_out=[proze]", "adaptation.buffer.keep_out has 'proze'"),
        ("adaptation.updates.draw=best", "choose uniform, recency, priority"),
        ("adaptation.loss.steps=some", "choose tested or all"),
        ("adaptation.loss.distill=-1", "distill -1"),
        ("adaptation.optimizer.lr=-1", "adaptation.optimizer.lr is -1"),
        ("adaptation.lora={rank: 0}", "adaptation.lora.rank is 0"),
        ("adaptation.drift.warm_up=1", "adaptation.drift.warm_up is 1"),
        ("adaptation.guard.stop_loss=0.01", "it must not be below max_loss"),
        ("adaptation.versions.keep=1", "adaptation.versions.keep is 1"),
        ("+adaptation.pool.experts.prose=NOWHERE", "NOWHERE"),
        ("+adaptation.guard.evry=1", "adaptation.guard: got an unexpected keyword argument 'evry'"),
    ],
)
def test_a_mistake_is_one_sentence_before_the_first_request(
    override: str, sentence: str, export: Path, tmp_path: Path
) -> None:
    given = options("adapt", f"export={export}", f"output={tmp_path / 'session'}", *SMALL, override)
    with pytest.raises(UserError) as caught:
        open_session(given)
    assert sentence in str(caught.value)
    assert not (tmp_path / "session").exists()


def test_a_session_goes_on_only_with_its_own_settings(export: Path, tmp_path: Path) -> None:
    given = ["adapt", f"export={export}", f"output={tmp_path}", *SMALL]
    open_session(options(*given))
    open_session(options(*given, "debug=true"))
    with pytest.raises(UserError, match=r"another adaptation\.optimizer\.lr, seed: choose another output, or delete"):
        open_session(options(*given, "adaptation.optimizer.lr=1e-3", "seed=1"))


def test_a_run_hands_its_export_on() -> None:
    """What train/run.py tells of a run is all that train/adapt.py asks for, and the export says which target."""
    run = options("train", "+drafter=eagle", "+adaptation=replay", "trainer=cpu", "adaptation.requests=7")
    given = adapted_options({k: v for k, v in run.items() if k != "adaptation"}, run["adaptation"], Path("run"))
    asked = options("adapt", "export=run/export", "adaptation.requests=7")
    assert given.keys() == asked.keys() and given["target"].keys() == asked["target"].keys()
    assert given["decode"].keys() == asked["decode"].keys() and given["adaptation"] == asked["adaptation"]
    assert (given["export"], given["stream"], given["output"]) == ("run/export", "shift", None)
    assert given["target"]["source"] is None
