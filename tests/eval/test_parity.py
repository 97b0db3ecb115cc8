"""Cases, verdicts, the table and the exit code; vLLM itself where its environment is there (slow)."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from conf.compose import ROOT
from engine.settings import DecodeSettings
from eval import engines, parity, provenance
from eval.engines import Answers, Task
from eval.parity import Case, cases, run
from eval.parity_table import print_parity
from eval.parity_verdict import at_zero, broken, sampled
from eval.rounds import VLLM, Counts, count, trace
from models.checkpoint import native
from models.drafter.distilled_lm import DistilledLM
from models.drafter.eagle import EagleDrafter
from models.drafter.prompt_lookup import PromptLookupDrafter
from models.errors import UserError
from models.sampling import SamplingParams
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.drafters import shaken
from tests.helpers.engines import VLLM_PYTHON, needs_vllm

SAMPLED = {"seed": 0, "significance": 1e-3}
LOOKUP = {"_target_": "models.drafter.prompt_lookup.PromptLookupDrafter", "prefer": "earliest"}
LAYERS = {"_target_": "models.drafter.distilled_lm.DistilledLM", "start": "first_layers", "num_layers": 5}
EAGLE = {"_target_": "models.drafter.eagle.EagleDrafter"}


def options(**changes: Any) -> dict[str, Any]:
    """conf/parity.yaml, with few and short answers, changed."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "parity.yaml").read_text())
    found = {key: value for key, value in found.items() if key not in ("defaults", "hydra")}
    assert changes.keys() <= found.keys()
    return found | {"num_prompts": 3, "max_new_tokens": 8} | changes


def written(tiny: Target, folder: Path, drafter: Any, model: dict[str, Any]) -> str:
    place = {"name": tiny.name, "fingerprint": tiny.fingerprint, "load": {"source": "tiny", "dtype": "float32"}}
    described = native.Export("mine", model, place, 3, {})
    native.save(drafter, described, drafter.vocab, folder / "export", "")
    return str(folder / "export")


@pytest.fixture(scope="module")
def lookup(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    drafter = PromptLookupDrafter(tiny, DraftVocab(tiny.vocab_size), prefer="earliest")
    return written(tiny, tmp_path_factory.mktemp("lookup"), drafter, LOOKUP)


@pytest.fixture(scope="module")
def draft_lm(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target's first layers with some noise."""
    drafter = DistilledLM(tiny, DraftVocab(tiny.vocab_size), start="first_layers", num_layers=5)
    return written(tiny, tmp_path_factory.mktemp("lm"), shaken(drafter, amount=0.003), LAYERS)


def test_cases_are_the_one_or_those_of_the_list() -> None:
    one = options(export="a/run/export", format="vllm_eagle")
    assert cases(one) == [Case("a/run/export", "vllm_eagle", None, "vllm", 0.0)]
    assert cases(one)[0].name == "run-vllm-vllm_eagle-T0"
    several = cases(one | {"cases": [{"engine": "reference"}, {"export": "b", "format": None, "temperature": 1}]})
    assert several == [
        Case("a/run/export", "vllm_eagle", None, "reference", 0.0),
        Case("b", None, None, "vllm", 1),
    ]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "There is no export to compare"),
        ({"export": ["a", "b"]}, r"export is \['a', 'b'\]: give one, or a list of cases"),
        ({"export": "a", "engine": "sglang"}, "engine is 'sglang': choose vllm, transformers, reference"),
        ({"export": "a", "files": "b"}, "files=b needs the format"),
        ({"cases": []}, "cases is empty"),
        ({"export": "a", "temperature": 1, "engine": "reference"}, "engine=reference is compared at temperature 0"),
        ({"cases": [{"export": "a/run/export"}, {"export": "b/run/export"}]}, "Two cases are called run-vllm-files-T0"),
        ({"export": "a", "temperature": -1}, "temperature is -1"),
        ({"export": "a", "temperature": 1, "num_prompts": 5, "samples": 2}, "10 answers .* are too few"),
        ({"cases": [{"exprt": "a"}]}, "cases has .*: give mappings of export, format, files, engine, temperature"),
        ({"export": "a", "format": "vllm_eagle", "engine": "transformers"}, "does not read format=vllm_eagle"),
    ],
)
def test_senseless_cases_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        run(options(**changes))


def test_the_cases_of_make_parity_are_cases() -> None:
    small = yaml.safe_load((ROOT / "parity" / "small.yaml").read_text())
    found = cases(options(cases=small["cases"]))
    assert len({case.name for case in found}) == len(found) == 20
    for case in found:
        engines.refuse_unreadable(case.engine, case.format)


def test_without_vllms_environment_it_is_said_how_to_make_it(lookup: str) -> None:
    with pytest.raises(UserError, match=r"no interpreter '.venv-no/bin/python': run `make vllm-env`"):
        run(options(export=lookup, vllm={"python": ".venv-no/bin/python"}))


def test_equal_counts_pass_and_are_kept(
    lookup: str,
    draft_lm: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While this code is that of a revision; what is not committed may be anything."""
    known, revision = provenance.provenance(), "abc"
    monkeypatch.setattr(provenance, "provenance", lambda: known | {"git_revision": revision})
    both = [
        {"export": export, "format": name, "engine": engine}
        for export, name in ((lookup, None), (draft_lm, "hf_causal_lm"))
        for engine in ("transformers", "reference")
    ]
    asked = options(cases=both, output=str(tmp_path), num_prompts=2, max_new_tokens=10)
    assert run(asked)
    report = json.loads((tmp_path / "parity.json").read_text())
    assert [case["passed"] for case in report["cases"]] == [True] * 4
    assert all(case["same_answers"] == case["prompts"] == 2 for case in report["cases"])
    assert all(case["ours"] == case["theirs"] and case["cause"] is None for case in report["cases"])
    lm = report["cases"][3]["ours"]
    assert 0 < lm["accepted"] < lm["drafted"] and lm["accepted_per_position"][0] >= lm["accepted_per_position"][1] > 0
    assert report["provenance"]["versions"]["torch"]
    capsys.readouterr()
    assert run(asked) and capsys.readouterr().out.count("passed before") == 4
    assert run(asked | {"cases": both[:1], "seed": 1}) and "passed before" not in capsys.readouterr().out
    for _ in range(2):
        revision = "abc-dirty"
        assert run(asked | {"cases": both[:1]}) and "passed before" not in capsys.readouterr().out


def test_a_case_that_cannot_be_is_refused_before_any_is_run(
    tiny: Target, lookup: str, draft_lm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity.Bench, "result", lambda *_: pytest.fail("one was run"))
    both = [{"export": lookup, "engine": "reference"}, {"export": draft_lm, "format": "vllm_eagle", "engine": "vllm"}]
    with pytest.raises(UserError, match="vllm_eagle takes EagleDrafter, not DistilledLM"):
        run(options(cases=both, output=str(tmp_path), vllm={"python": sys.executable}))
    drafter = PromptLookupDrafter(tiny, DraftVocab(tiny.vocab_size))
    latest = written(tiny, tmp_path / "latest", drafter, {"_target_": LOOKUP["_target_"]})
    with pytest.raises(UserError, match=r"earliest place of a match.*drafter\.model\.prefer=earliest"):
        run(options(export=latest, engine="transformers", output=str(tmp_path)))


def test_files_of_another_drafter_fail_with_a_cause(
    tiny: Target, draft_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other engine loads what is in `files`: here, fewer of the target's layers."""
    drafter = DistilledLM(tiny, DraftVocab(tiny.vocab_size), start="first_layers", num_layers=2)
    from models.checkpoint import format_of

    format_of("hf_causal_lm").save(drafter, tiny, native.read(Path(draft_lm)), tmp_path / "files", "")
    asked = {"export": draft_lm, "format": "hf_causal_lm", "engine": "transformers", "output": str(tmp_path)}
    assert not run(options(**asked, files=str(tmp_path / "files")))
    (case,) = json.loads((tmp_path / "parity.json").read_text())["cases"]
    assert case["cause"].startswith("position 0 accepts less") and case["same_answers"] == 3
    assert "layer, norm, RoPE" in capsys.readouterr().out


def test_a_failure_is_exit_code_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "plain", lambda config: {})
    monkeypatch.setattr(parity, "run", lambda options: False)
    with pytest.raises(SystemExit) as stopped:
        parity.job({})  # type: ignore[arg-type]
    assert stopped.value.code == 1
    monkeypatch.setattr(parity, "run", lambda options: True)
    parity.job({})  # type: ignore[arg-type]


def doctored(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Stand a changed re-implementation in for vLLM."""

    def runner(settings: dict[str, Any], work: Path) -> Any:
        def answer(task: Task) -> Answers:
            made = engines.run_reference(replace(task, temperature=0.0))
            return Answers([change(i, c) for i, c in enumerate(made.counts)], VLLM, {"vllm": "doctored"})

        return answer

    monkeypatch.setattr(engines, "vllm_runner", runner)
    monkeypatch.setattr(parity, "check_vllm", lambda python: None)


def test_a_case_that_breaks_while_it_runs_is_shown_with_the_others(
    lookup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaking(task: Task) -> Answers:
        raise RuntimeError("2 rounds make 3 tokens\nand more")

    monkeypatch.setattr(engines, "run_transformers", breaking)
    both = [{"export": lookup, "engine": engine} for engine in ("transformers", "reference")]
    assert not run(options(cases=both, output=str(tmp_path), num_prompts=1))
    first, second = json.loads((tmp_path / "parity.json").read_text())["cases"]
    why = "could not be compared. RuntimeError: 2 rounds make 3 tokens"
    assert not first["passed"] and first["cause"] == why and second["passed"]
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("│") and "lookup" in line]
    assert "FAILED" in rows[0] and "equal" in rows[1] and len(rows) == 2
    assert why in " ".join(out.split())


def test_what_breaks_is_told_in_a_sentence_and_raised_under_debug(tmp_path: Path) -> None:
    assert broken(UserError("no such tensor."))["cause"] == "could not be compared. no such tensor."
    assert broken(ValueError())["failed"] == "ValueError: nothing was said"
    case, bench = Case("a/run/export", None, None, "reference", 0.0), parity.Bench({"debug": True}, tmp_path)
    bench._keys[case] = None
    with pytest.raises(UserError, match="is not an export"):
        bench.result(case)


def test_one_doctored_count_fails(lookup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = options(export=lookup, output=str(tmp_path))
    doctored(monkeypatch, lambda i, c: c if i != 1 else replace(c, accepted=[c.accepted[0] + 1, *c.accepted[1:]]))
    assert not run(asked)
    (case,) = json.loads((tmp_path / "parity.json").read_text())["cases"]
    assert case["unequal"] == [1] and case["same_answers"] == 3
    doctored(monkeypatch, lambda i, c: c)
    assert run(asked)  # a case that failed is run again


def test_other_answers_fail_and_say_by_what_gap(
    lookup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doctored(monkeypatch, lambda i, c: c if i != 2 else replace(c, token_ids=[*c.token_ids[:5], 7, *c.token_ids[6:]]))
    assert not run(options(export=lookup, output=str(tmp_path)))
    out = " ".join(capsys.readouterr().out.split())
    assert "answers part (prompt 2, token 5, logits" in out and "the target itself differs there" in out
    assert run(options(export=lookup, output=str(tmp_path), near_tie=1e3))
    out = " ".join(capsys.readouterr().out.split())
    assert "the answers to prompt 2 part at token 5" in out and "near-tie, so that this prompt is left out" in out


@pytest.mark.parametrize("same", [True, False])
def test_sampled_counts_are_judged_by_their_law(
    same: bool, draft_lm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own engine with other seeds stands in for vLLM, at the same temperature or at another one."""

    def runner(settings: dict[str, Any], work: Path) -> Any:
        def answer(task: Task) -> Answers:
            heat = SamplingParams(task.temperature if same else 0.0)
            made = []
            for context, seed in zip(task.contexts, task.seeds, strict=True):
                found = trace(task.target, task.drafter, context, DecodeSettings(12, 3, heat, seed=1000 + seed))
                made.append(count(found, VLLM, max_new_tokens=12, positions=3, stop=task.stop))
            return Answers(made, VLLM, {"vllm": "ours"})

        return answer

    monkeypatch.setattr(engines, "vllm_runner", runner)
    monkeypatch.setattr(parity, "check_vllm", lambda python: None)
    asked = {"export": draft_lm, "format": "hf_causal_lm", "temperature": 3.0, "output": str(tmp_path)}
    assert run(options(**asked, num_prompts=2, samples=10, max_new_tokens=12)) is same
    (case,) = json.loads((tmp_path / "parity.json").read_text())["cases"]
    assert (case["p_value"] >= 1e-3) is same and case["prompts"] == 20
    assert (case["cause"] is None) if same else ("two laws" in case["cause"])
    assert [sum(h) for h in case["histograms"]] == [case[side]["drafts"] for side in ("ours", "theirs")]


def test_an_engine_that_drafts_nothing_fails_at_any_temperature() -> None:
    """Nothing accepted, in no round: no law is another one."""
    task: Any = None
    drafting, silent = Counts([1, 2], 2, 6, [0, 0, 0]), Counts([1, 2], 0, 0, [0, 0, 0])
    judged = sampled(task, [drafting] * 9, [silent] * 9, SAMPLED)
    assert not judged["passed"] and judged["cause"].startswith("it drafted nothing: the drafter is not in use there")
    judged = sampled(task, [silent] * 9, [drafting] * 9, SAMPLED)
    assert not judged["passed"] and judged["cause"].startswith("ours drafted nothing, so train the drafter longer")


def test_equal_counts_of_drafts_that_are_never_accepted_show_nothing() -> None:
    task: Any = None
    for accepted in (0, 1):
        counts = Counts([1, 2], 2, 6, [accepted, 0, 0])
        judged = at_zero(task, [counts] * 3, [counts] * 3, {"near_tie": 1e-3})
        assert judged["passed"] is bool(accepted)
        assert (judged["cause"] or "").startswith("" if accepted else "nothing was accepted")
        assert accepted or "train the drafter longer, or take prompts like those" in judged["cause"]
        assert (judged["note"] or "").startswith("nothing was accepted from position 1 on" if accepted else "")
    nothing = sampled(task, [counts := Counts([1, 2], 2, 6, [0, 0, 0])] * 9, [counts] * 9, SAMPLED)
    assert nothing["p_value"] == 1 and not nothing["passed"] and nothing["cause"].startswith("nothing was accepted")
    full = Counts([1, 2], 2, 6, [2, 1, 1])
    assert at_zero(task, [full], [full], {"near_tie": 1e-3})["note"] is None
    assert sampled(task, [full] * 9, [full] * 9, SAMPLED)["passed"]


def test_the_table_shows_both_sides_where_they_differ() -> None:
    counts = {"drafts": 10, "drafted": 30, "accepted": 12, "accepted_per_position": [8, 3, 1]}
    case = {
        "name": "a", "drafter": "eagle", "format": None, "engine": "vllm", "temperature": 0.0, "passed": False,
        "num_speculative_tokens": 3, "same_answers": 4, "prompts": 4, "ours": counts,
        "theirs": counts | {"accepted": 11, "accepted_per_position": [7, 3, 1]}, "cause": "position 0 accepts less",
        "note": "nothing was accepted from position 3 on",
    }  # fmt: skip
    drawn = case | {"passed": True, "p_value": 0.25, "cause": None, "temperature": 1.0}
    out = io.StringIO()
    print_parity([case, drawn], Console(file=out, width=200))
    shown = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "eagle" in line
    ]
    assert shown == [
        ["eagle", "–", "vllm", "0", "3", "4 of 4", "10", "30", "12 or 11", "8 3 1 or 7 3 1", "DIFFERS"],
        ["eagle", "–", "vllm", "1", "3", "4 of 4", "10", "30", "12 or 11", "8 3 1 or 7 3 1", "one law, p = 0.25"],
    ]
    assert (
        "a: position 0 accepts less" in out.getvalue()
        and "a: nothing was accepted from position 3 on" in out.getvalue()
    )


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_vllm_counts_what_we_count(tiny: Target, lookup: str, draft_lm: str, tmp_path: Path) -> None:
    """Look-up, a draft model and an untrained EAGLE layer, each in vLLM itself; and the sampled law of one.

    Where the files lie has "eagle3" in it, by which vLLM would take the draft model for something else.
    """
    drafter = EagleDrafter(tiny, DraftVocab(tiny.vocab_size))
    eagle = written(tiny, tmp_path / "eagle", shaken(drafter, amount=0.01), EAGLE)
    asked = [
        {"export": lookup},
        {"export": lookup, "format": "native"},
        {"export": draft_lm, "format": "hf_causal_lm"},
        {"export": eagle, "format": "vllm_eagle"},
        {"export": draft_lm, "format": "hf_causal_lm", "temperature": 1.0},
    ]
    settings = options()["vllm"] | {"python": VLLM_PYTHON}
    output = tmp_path / "eagle3"
    assert run(options(cases=asked, output=str(output), vllm=settings, num_prompts=6, max_new_tokens=24))
    report = json.loads((output / "parity.json").read_text())
    assert all(case["theirs"]["accepted"] > 0 for case in report["cases"][:3])
