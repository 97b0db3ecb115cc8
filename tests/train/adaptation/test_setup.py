"""What the command line says becomes a session, or one sentence before the first request is served."""

import json
from pathlib import Path
from typing import Any

import hydra
import pytest

from conf.compose import ROOT, plain
from data import prompts, streams
from data.stdlib import Document
from models.checkpoint import native
from models.errors import UserError
from models.target import Target, load_target
from models.vocab import DraftVocab
from tests.helpers.adaptation import few_documents, tiny_export
from train import meta, pipeline, run
from train.adapt import adapt
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
        ("adaptation.updates.wait=-1", "adaptation.updates.wait is -1"),
        ("adaptation.updates.wait=300", "adaptation.buffer.capacity 256: nothing would ever be learnt"),
        ("adaptation.buffer.retention_requests=8", "adaptation.buffer.retention_requests 8: nothing would ever be"),
        ("adaptation.loss.steps=some", "choose tested or all"),
        ("adaptation.loss.distill=-1", "distill -1"),
        ("adaptation.optimizer.lr=-1", "adaptation.optimizer.lr is -1"),
        ("adaptation.lora={rank: 0}", "adaptation.lora.rank is 0"),
        ("adaptation.drift.warm_up=1", "adaptation.drift.warm_up is 1"),
        ("adaptation.guard.stop_loss=0.01", "it must not be below max_loss"),
        ("adaptation.versions.keep=1", "adaptation.versions.keep is 1"),
        ("+adaptation.pool.experts.prose=NOWHERE", "NOWHERE"),
        ("adaptation.guard.enabled=maybe", "adaptation.guard.enabled is 'maybe': it must be true or false"),
        ("adaptation.buffer.capacity=2.5", "adaptation.buffer.capacity is 2.5: it must be a whole number"),
        ("adaptation.buffer.keep_out=prose", "adaptation.buffer.keep_out is 'prose': it must be a list of words"),
        ("adaptation.buffer.retention_requests=all", "is 'all': it must be a whole number or null"),
        ("adaptation.optimizer.betas=[0.9]", "adaptation.optimizer.betas is [0.9]"),
        ("+adaptation.pool.experts.adapted=NOWHERE", "which is the drafter that learns"),
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


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("adaptation.temperature=-1", "temperature is -1"),
        ("adaptation.temperature=warm", "adaptation.temperature is 'warm': it must be a number"),
        ("adaptation.versions.keep=1", "adaptation.versions.keep is 1"),
        ("adaptation.loss.steps=some", "choose tested or all"),
        ("adaptation.optimizer.lr=-1", "adaptation.optimizer.lr is -1"),
        ("adaptation.lora={rank: 0}", "adaptation.lora.rank is 0"),
        ("adaptation.lora=8", "adaptation.lora is 8: give names and values"),
        ("adaptation.stream=nowhere", "choose shift, instructions, hostile or a JSONL file"),
        ("+drafter=prompt_lookup", "PromptLookupDrafter has no weights"),
    ],
)
def test_a_run_that_is_to_adapt_refuses_mistakes_before_it_trains(override, sentence, monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "run_job", lambda *given: pytest.fail("the long work has begun"))
    drafter = [] if override.startswith("+drafter") else ["+drafter=eagle"]
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        config = hydra.compose("train", overrides=[*drafter, "+adaptation=replay", "trainer=cpu", override])
    with pytest.raises(UserError) as caught:
        run.job(config)
    assert sentence in str(caught.value)


def test_meta_learning_refuses_before_it_answers_requests(target, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(meta, "collect", lambda *given: pytest.fail("the long work has begun"))
    lookup = {"_target_": "models.drafter.prompt_lookup.PromptLookupDrafter"}
    named = {"name": "tiny", "fingerprint": target.fingerprint, "load": {"source": "tiny"}}
    drafter = native.build(lookup, target, DraftVocab(target.vocab_size))
    native.save(drafter, native.Export("some", lookup, named, 3, {}), drafter.vocab, tmp_path / "export", "")
    for override, sentence in (
        ("seed=1", "PromptLookupDrafter has no weights"),
        ("adaptation.lora={rank: 2}", r"adaptation\.lora is for train/adapt\.py"),
        ("meta.inner_steps=2.5", r"meta\.inner_steps is 2\.5"),
        ("+meta.steps=1", r"^meta: got an unexpected keyword argument 'steps'"),
    ):
        with pytest.raises(UserError, match=sentence):
            meta.pre_adapt_export(options("meta", f"export={tmp_path / 'export'}", override))


def test_a_stream_too_short_to_learn_from_is_told(export: Path, tmp_path: Path, capsys) -> None:
    found = adapt(options("adapt", f"export={export}", f"output={tmp_path / 'session'}", *SMALL))
    assert "nothing is learnt before there are 24 requests: serve more, or lower" in capsys.readouterr().out
    assert not any(entry["acceptance_rate"].difference for entry in found["compared"])


def test_a_file_goes_on_with_more_of_its_requests(export: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(  # the bundled target has no chat template
        streams, "_requests", lambda target, asked: [streams.Request(target.encode(p.turns[0]), "all") for p in asked]
    )
    prompts_file = tmp_path / "asked.jsonl"
    prompts_file.write_text("".join(json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(9)))
    given = ["adapt", f"export={export}", f"output={tmp_path / 'session'}", *SMALL, f"stream={prompts_file}"]
    opened = open_session(options(*given))
    assert len(opened.stream.requests) == 4 and opened.stream.left_out == 3
    more = open_session(options(*given, "adaptation.requests=6"))
    assert [r.token_ids for r in more.stream.requests[:4]] == [r.token_ids for r in opened.stream.requests]
    with pytest.raises(UserError, match=r"another adaptation\.requests"):
        open_session(options(*given, "adaptation.requests=3"))
    shift = ["adapt", f"export={export}", f"output={tmp_path / 'shift'}", *SMALL]
    open_session(options(*shift))
    with pytest.raises(UserError, match=r"another adaptation\.requests"):
        open_session(options(*shift, "adaptation.requests=6"))


def test_a_session_goes_on_only_with_its_own_settings(export: Path, tmp_path: Path) -> None:
    given = ["adapt", f"export={export}", f"output={tmp_path}", *SMALL]
    open_session(options(*given))
    open_session(options(*given, "debug=true"))
    with pytest.raises(UserError, match=r"another adaptation\.optimizer\.lr, seed: choose another output, or delete"):
        open_session(options(*given, "adaptation.optimizer.lr=1e-3", "seed=1"))


def test_a_run_hands_its_export_on() -> None:
    """What train/run.py tells of a run is all that train/adapt.py asks for, and the export says which target."""
    told = options("train", "+drafter=eagle", "+adaptation=replay", "trainer=cpu", "adaptation.requests=7")
    given = adapted_options({k: v for k, v in told.items() if k != "adaptation"}, told["adaptation"], Path("run"))
    asked = options("adapt", "export=run/export", "adaptation.requests=7")
    assert given.keys() == asked.keys() and given["target"].keys() == asked["target"].keys()
    assert given["decode"].keys() == asked["decode"].keys() and given["adaptation"] == asked["adaptation"]
    assert (given["export"], given["stream"], given["output"]) == ("run/export", "shift", None)
    assert given["target"]["source"] is None
