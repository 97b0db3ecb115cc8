"""The report: from folders written out by hand, whose every number is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest

from conf.compose import ROOT, plain
from engine.__main__ import encode
from engine.loop import generate
from engine.settings import DecodeSettings
from eval.measured_drafts import predicted_efficiency, predicted_speedup
from eval.report import html, job, with_folders
from eval.report_results import decoding_speedup, shown_results
from eval.run_folder import Found, endings, read_folders, read_metrics
from eval.sample import Piece, Sample, coloured, pieces_of, samples
from models.checkpoint import native
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers.written_runs import (
    HOSTILE,
    LONG_NAME,
    PROVENANCE,
    Reader,
    compared_runs,
    report,
    result,
    row,
    whole_run,
    write,
)


def test_every_number_of_a_run_is_on_its_page(tmp_path: Path) -> None:
    page = report(whole_run(tmp_path / "run"))
    assert row(page, "eagle", "0", "chain of 2", "1.90 [1.71, 2.13]")[4:] == [
        "1.23 [1.11, 1.37]", "1.29", "0.56 [0.51, 0.61]", "0.568", "0.457", "2 of 2", "2", "192"]  # fmt: skip
    assert row(page, "eagle", "1", "chain of 2", "accepted / tested")[4:] == ["0.600", "0.500"]
    assert row(page, "eagle", "1", "chain of 2", "accepted / drafts")[4:] == ["0.600", "0.300"]
    assert row(page, "code", "eagle", "0")[4:] == ["2.34 [2.31, 2.37]", "1.41 [1.40, 1.42]", "0.777", "1"]
    assert row(page, "run", "600")[1:] == ["600", "1,430", "1,756,578", "1,228", "1130"]
    assert row(page, "eagle", "0", "speculative")[3:] == ["2.083", "2.083", "6.250", "1.562", "11.979"]
    assert row(page, "eagle", "0", "plain")[3:] == ["2.083", "0.000", "9.896", "0.000", "11.979"]
    assert row(page, "1", "0.611", "0.122") and "2.346 tokens expected" in page
    assert row(page, "version of torch") == ["version of torch", "2.13.0"]
    assert row(page, "data: weights")[1] == "bb40c4f55e245e03" and row(page, "git_revision")[1] == "0123456789ab"
    assert "val/block_efficiency" in page and "step 50: 1.432" in page and "step 100: 1.877" in page
    assert "Best: eagle at T = 0, with 1.90 tokens per target pass and 1.23 times plain" in page


def test_prediction_stands_beside_measurement() -> None:
    """By hand: τ(1) = 1.6, τ(2) = 1 + 0.6 + 0.3; a plain token takes 10 ms, and a round of two 4 + 12 + 3."""
    told = result()
    assert [predicted_efficiency(told, n) for n in range(3)] == pytest.approx([1, 1.6, 1.9])
    assert decoding_speedup(told) == pytest.approx(0.010 * 190 / 1.9)
    assert predicted_speedup(told, 2) == pytest.approx(1.9 / (0.4 + 1.2 + 0.3))
    assert predicted_speedup(told, 1) == pytest.approx(1.6 / (0.2 + (0.7 + 1.2) / 2 + 0.3))
    short = result(num_speculative_tokens=2)
    short["counts"]["drafts"] = [[30.0, 0.0], [20.0, 0.0]]
    assert predicted_efficiency(short, 2) == pytest.approx(1 + 0.5 * 0.6)
    assert predicted_speedup(result(num_nodes=9), 2) is None  # a tree
    assert predicted_efficiency(result(conditional_acceptance=[0.6, None]), 2) == pytest.approx(1.6)


def test_trees_that_nobody_asked_for_and_other_policies_are_told_apart(tmp_path: Path) -> None:
    branched = result("lookahead")
    branched["counts"]["drafted"] = [[120.0, 90.0], [80.0, 60.0]]
    window = result(draft_length={"policy": "window"}, block_efficiency=1.7, conditional_acceptance=[0.8, 0.5])
    window["counts"]["drafts"] = window["counts"]["drafted"] = [[45.0, 30.0], [30.0, 20.0]]
    whole_run(tmp_path / "run", result(), window, branched)
    page = report(tmp_path / "run")
    beside = page.partition("Prediction beside measurement")[2].partition("</table>")[0]
    assert "lookahead" not in beside and row(page, "code", "lookahead", "0")[3] == "trees to depth 2"
    assert row(page, "eagle", "0", "2")[3:] == ["1.900", "1.900", "1.000", "1.000"]
    assert row(page, "eagle, window", "0", "2")[3:5] == ["1.800", "1.700"]  # 1 + 0.75 · 0.8 + 0.5 · 0.8 · 0.5


def test_lengths_of_one_export_share_a_prediction(tmp_path: Path) -> None:
    for length, tau in ((1, 1.55), (2, 1.9)):
        one = result(num_speculative_tokens=length, block_efficiency=tau, num_nodes=length)
        one |= {"conditional_acceptance": [0.6, 0.5][:length], "counts": {}}
        write(tmp_path / f"k{length}" / "acceptance.json", {"config": {"export": "same/export"}, "results": [one]})
    page = report(tmp_path / "k1", tmp_path / "k2")
    assert row(page, "eagle", "0", "1")[3:] == ["1.600", "1.550", "–", "–"]
    assert row(page, "eagle", "0", "2", "1.900")[4:] == ["1.900", "–", "–"]


def test_the_page_is_whole_escaped_and_needs_nothing(tmp_path: Path) -> None:
    whole_run(tmp_path / "run", result(HOSTILE))
    piece = Piece(f"<b>{HOSTILE}", 1, True)
    page = report(
        tmp_path / "run", samples=[Sample(HOSTILE, "run/export", f"<i>{HOSTILE}", [piece], "1 token")], asked=True
    )
    read = Reader(page)
    tags = [tag for tag, _ in read.tags]
    assert not {"script", "b", "i", "img", "iframe"} & set(tags)
    assert read.text.count(HOSTILE) > 5 and f"<b>{HOSTILE}" in read.text and f"<i>{HOSTILE}" in read.text
    assert "url(" not in page and "@import" not in page and "//" not in page.replace("<!DOCTYPE html>", "")
    outside = [a for _, attributes in read.tags for a in (attributes.get("src"), attributes.get("href")) if a]
    assert all(address.startswith("#") or address == "data:," for address in outside)
    assert ("html", {"lang": "en"}) in read.tags and tags.count("title") >= 1 and tags.count("h1") == 1
    pictures = [attributes for tag, attributes in read.tags if tag == "svg"]
    assert len(pictures) > 8
    assert all(p.get("aria-hidden") == "true" or (p.get("role") == "img" and p.get("aria-label")) for p in pictures)
    names = [attributes["id"] for _, attributes in read.tags if attributes.get("id")]
    assert len(names) == len(set(names)) and {a[1:] for a in outside if a.startswith("#")} <= set(names)


def test_what_a_run_lacks_is_said(tmp_path: Path) -> None:
    bare = {key: result()[key] for key in ("drafter", "temperature", "num_speculative_tokens", "block_efficiency")}
    write(tmp_path / "bare/acceptance.json", {"results": [bare]})
    text = Reader(report(tmp_path / "bare")).text
    for sentence in (
        "no result tells acceptance by position", "no result tells of categories", "no result is of chains that tell",
        "no result has counts of its time", "No curves of bare", "none of these runs has a draft tree",
        "sample=true lets the exports answer", "bare does not tell its provenance",
    ):  # fmt: skip
        assert sentence in text
    write(tmp_path / "begun/metrics/version_0/metrics.csv", "step,train/loss\n9,2.5\n")
    text = Reader(report(tmp_path / "begun")).text
    assert "Not measured yet (no acceptance.json): begun." in text and "train/loss" in text
    Reader(report(tmp_path / "begun", tmp_path / "bare"))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "There is no folder"),
        ({"other.txt": "x"}, "neither acceptance.json"),
        ({"acceptance.json": "{"}, "Cannot read"),
        ({"acceptance.json": "[]"}, "no JSON object"),
        ({"acceptance.json": {"results": [{"drafter": "x"}]}}, "lacks temperature, num_speculative_tokens, block_eff"),
        ({"acceptance.json": {"results": {}}}, "no list of results"),
        ({"compare.json": {"drafters": []}}, "no list 'drafters'"),
        ({"compare.json": {"drafters": [{"name": "x"}]}}, "lacks its name, results or about"),
        ({"metrics/version_0/metrics.csv": "step,train/loss\n1,0.5\n2,much\n"}, "metrics.csv', line 3"),
        ({"acceptance.json": {"results": []}, "tree.json": {"parents": [-1, 1], "ranks": [0, 0]}}, "draft tree"),
    ],
)
def test_folders_that_tell_nothing_are_refused(files: dict[str, Any], said: str, tmp_path: Path) -> None:
    for name, value in files.items():
        write(tmp_path / "run" / name, value)
    with pytest.raises(UserError, match=said):
        read_folders([tmp_path / "run"])


def test_a_comparison_is_read_with_its_runs(tmp_path: Path) -> None:
    whole_run(tmp_path / "eagle", result())
    tree = result(block_efficiency=2.22, tree={"depth": 4, "top_k": 3, "num_nodes": 9}, num_nodes=9)
    tree.pop("by_category")
    about = {"parameters": 1234567, "memory_share": 0.125, "readiness": None,
             "training": {"tokens_per_s": 1234.5, "peak_memory_bytes": 5e8}}  # fmt: skip
    drafters = [{"name": "eagle", "results": [result(), tree], "about": about},
                {"name": "gone", "results": [result("gone", block_efficiency=1.11)], "about": about}]  # fmt: skip
    write(tmp_path / "compare.json", {"drafters": drafters, "provenance": {"command": "python train/compare.py"}})
    page = report(tmp_path)
    assert row(page, "eagle", "1,234,567")[2:7] == ["–", "1,234", "500", "1.90 [1.71, 2.13]", "2.22 [1.71, 2.13]"]
    assert row(page, "eagle", "1,234,567")[-2] == "2.000"  # 0.4 s for 200 drafted tokens
    assert "The run of gone is not in" in page and "a dynamic tree" in page and "top_k 3" in page
    assert row(page, "eagle", "0", "tree of 9", "2.22 [1.71, 2.13]")
    assert row(page, "code", "eagle", "0", "tree of 9")[4:] == ["1.90", "–", "0.562", "1"]  # by its counts
    assert "<code>python train/compare.py</code>" in page
    (tmp_path / "compare.json").unlink()
    assert "holds no compare.json (yet): the 1 runs" in report(tmp_path)


def test_runs_are_told_apart(tmp_path: Path) -> None:
    for name, batch in (("a", 8), ("b", 16)):
        folder = whole_run(tmp_path / name)
        config = {"run_name": name, "fit": {"batch_size": batch}, "seed": 0}
        write(folder / "acceptance.json", {"config": config, "results": [result()], "provenance": PROVENANCE})
    found = read_folders([tmp_path / "a", tmp_path / "b", tmp_path / "a"])
    assert [s.drafter for s in shown_results(found)] == ["eagle (a)", "eagle (b)"]
    assert row(html("x", found), "fit.batch_size") == ["fit.batch_size", "8", "16"]


def test_measurements_of_equal_names_are_told_apart(tmp_path: Path) -> None:
    """Two runs' measurements on the built-in prompts: folders of one name, drafters of one name, their own numbers."""
    for run, rates, tau in (("A", [0.6, 0.5], 1.9), ("B", [0.2, 0.1], 1.22)):
        told = result(conditional_acceptance=rates, block_efficiency=tau, counts={})
        config = {"export": str(tmp_path / run / "export"), "prompts": "builtin"}
        origin = {"command": f"python eval/acceptance.py export={run}/export"}
        report_of = {"config": config, "results": [told], "provenance": origin}
        write(tmp_path / run / "acceptance-builtin/acceptance.json", report_of)
    folders = [tmp_path / run / "acceptance-builtin" for run in "AB"]
    page = report(*folders)
    beside = page.partition("Prediction beside measurement")[2].partition("</table>")[0]
    assert row(beside, "eagle (A/acceptance-builtin)", "0", "2")[3:5] == ["1.900", "1.900"]
    assert row(beside, "eagle (B/acceptance-builtin)", "0", "2")[3:5] == ["1.220", "1.220"]  # 1 + 0.2 + 0.2 · 0.1
    assert row(page, "eagle (B/acceptance-builtin)", "0", "chain of 2", "1.22 [1.71, 2.13]")
    for run in "AB":
        assert f"<h3>{run}/acceptance-builtin</h3><p><code>python eval/acceptance.py export={run}/export</code>" in page


def test_measurements_of_one_export_are_told_apart(tmp_path: Path) -> None:
    """A run and what its export did on other prompts; then the same prompts once more."""
    whole_run(tmp_path / "A", result())
    config = {"export": str(tmp_path / "A" / "export"), "prompts": "builtin"}
    for name, tau in (("acceptance-builtin", 1.5), ("again", 1.6)):
        told = result(block_efficiency=tau, conditional_acceptance=[0.4, 0.25])
        write(tmp_path / "A" / name / "acceptance.json", {"config": config, "results": [told]})
    page = report(tmp_path / "A", tmp_path / "A" / "acceptance-builtin")
    assert row(page, "eagle (A)", "0", "chain of 2", "1.90 [1.71, 2.13]")
    assert row(page, "eagle (acceptance-builtin)", "0", "chain of 2", "1.50 [1.71, 2.13]")
    assert row(page, "eagle (A)", "0", "2")[3:5] == ["1.900", "1.900"]
    assert row(page, "eagle (acceptance-builtin)", "0", "2")[3:5] == ["1.500", "1.500"]
    names = [
        s.drafter for s in shown_results(read_folders([tmp_path / "A" / n for n in ("acceptance-builtin", "again")]))
    ]
    assert names == ["eagle (acceptance-builtin)", "eagle (again)"]


def test_comparisons_are_told_apart(tmp_path: Path) -> None:
    about = {"parameters": 10, "memory_share": 0.5, "readiness": None, "training": None}
    for name, tau in (("one", 1.5), ("two", 1.6)):
        whole_run(tmp_path / name / "eagle", result(block_efficiency=tau))
        drafters = [{"name": "eagle", "results": [result(block_efficiency=tau), result(tree={"depth": 2}, num_nodes=3)],
                     "about": about}]  # fmt: skip
        origin = {"command": f"python train/compare.py run_name={name}"}
        write(tmp_path / name / "compare.json", {"drafters": drafters, "provenance": origin})
    page = report(tmp_path / "one", tmp_path / "two", tmp_path / "two" / "eagle")
    assert row(page, "eagle (one/eagle)", "0", "chain of 2", "1.50 [1.71, 2.13]")
    assert row(page, "eagle (two/eagle)", "0", "chain of 2", "1.60 [1.71, 2.13]")
    for name, tau in (("one", "1.50"), ("two", "1.60")):
        budget = page.partition(f"<caption>{name}: Drafters under one budget")[2].partition("</table>")[0]
        assert row(budget, "eagle", "10")[5] == f"{tau} [1.71, 2.13]"
        assert f"<h3>train/compare.py, {name}</h3><p><code>python train/compare.py run_name={name}</code>" in page
    (run,) = read_folders([tmp_path / "two" / "eagle", tmp_path / "two"]).runs
    assert [r["tree"] for r in run.results] == [None, {"depth": 2}]  # what the comparison measured stays


def test_folders_have_the_shortest_names_that_differ() -> None:
    folders = [Path(path) for path in ("/x/a/run", "/y/a/run", "/y/b/run", "/y/c", "/y/c")]
    assert endings(folders) == ["x/a/run", "y/a/run", "b/run", "c", "c"]
    assert endings(folders[2:], least=2) == ["b/run", "y/c", "y/c"]


def test_samples_are_told_apart() -> None:
    made = [Sample("eagle", f"{run}/export", "p>", [Piece("x", 0, False)], "") for run in "AB"]
    page = html("here", Found([]), made, asked=True)
    assert "<h3>eagle (A/export)</h3>" in page and "<h3>eagle (B/export)</h3>" in page


def test_a_resumed_run_has_one_curve(tmp_path: Path) -> None:
    write(tmp_path / "metrics/version_2/metrics.csv", "step,a\n20,3\n10,2.5\n")
    write(tmp_path / "metrics/version_10/metrics.csv", "step,a,b\n20,4,\n30,5,nan\n")
    assert read_metrics(tmp_path) == {"a": [(10.0, 2.5), (20.0, 4.0), (30.0, 5.0)]}


def test_accepted_tokens_are_marked_with_their_drafter() -> None:
    words = {1: b"<a", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b" b", 5: b"!"}

    def decode(tokens: list[int]) -> str:
        return b"".join(words[token] for token in tokens).decode(errors="replace")

    pieces = pieces_of([([1], 0), ([2, 3, 4], 2), ([5], 1)], decode)
    assert pieces == [Piece("<a", 0, False), Piece("", 1, True), Piece("é", 1, True), Piece(" b", 1, False),
                      Piece("!", 2, True)]  # fmt: skip
    assert coloured(Sample("eagle", "run/export", "p>", pieces, "")) == (
        '<div class="sample" lang="und">p&gt;&lt;a<mark class="odd" title="round 1: eagle">é</mark> b'
        '<mark title="round 2: eagle">!</mark></div>'
    )


def test_folders_are_given_as_they_are(tmp_path: Path) -> None:
    odd = tmp_path / "lr=3e-3, 'x'"
    odd.mkdir()
    arguments = with_folders(["outputs/a", "output=x.html", str(odd), "--cfg", "job"])
    assert arguments[1:] == ["output=x.html", "--cfg", "job"]
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        assert plain(hydra.compose("report", overrides=arguments[:1]))["runs"] == ["outputs/a", str(odd)]
    assert with_folders(["runs=[a]"]) == ["runs=[a]"]


def test_the_job_writes_the_page_and_tells_of_exports_that_cannot_answer(tmp_path: Path) -> None:
    whole_run(tmp_path / "run")
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        job(hydra.compose("report", overrides=[f"runs='{tmp_path / 'run'}'", "sample=true"]))
    text = Reader((tmp_path / "run" / "report.html").read_text()).text
    assert "run/export: " in text.partition("Text sample")[2]
    assert "Left out: sample=true" not in text


def test_a_real_export_answers(tiny: Target, tmp_path: Path) -> None:
    """Two runs of one drafter on one target: its tokens are those of plain decoding, and some were its proposals."""
    model = {"_target_": "models.drafter.prompt_lookup.PromptLookupDrafter"}
    drafter = native.build(model, tiny, DraftVocab(tiny.vocab_size))
    place = {"name": tiny.name, "fingerprint": tiny.fingerprint, "load": {"source": "tiny"}}
    folder = tmp_path / "run" / "export"
    native.save(drafter, native.Export("lookup", model, place, 3, {}), drafter.vocab, folder, "card")
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        asked = ["runs=x", "prompt='a, b, a, b, a, b,'", "decode.max_new_tokens=24", "target.device=cpu"]
        options = plain(hydra.compose("report", overrides=asked))
    (made,), lacking = samples([folder, folder, tmp_path / "none" / "export"], options)
    assert lacking == ["There is no none/export (yet): nothing can answer for it."]
    context = encode(tiny, "a, b, a, b, a, b,", "auto")
    plainly = generate(tiny, [context], DecodeSettings(24)).token_ids[0]
    assert "".join(piece.text for piece in made.pieces) == tiny.decode(plainly)
    assert made.proposer == "lookup" and 0 < sum(piece.drafted for piece in made.pieces) < len(plainly)
    page = html("here", Found([]), [made], lacking, asked=True)
    assert f"of {len(plainly)} tokens proposed by lookup · {len(plainly)} tokens in" in page and "<mark" in page


def test_a_comparison_by_its_own_writer_is_on_the_page(tmp_path: Path) -> None:
    page = report(*compared_runs(tmp_path))
    assert row(page, "eagle", "1,234,567")[2:7] == ["1,756,578", "1,228", "1,130", *["1.90 [1.71, 2.13]"] * 2]
    assert row(page, "prompt_lookup", *["–"] * 4, "1.90 [1.71, 2.13]")[6] == "–"
    assert row(page, "eagle", "61.2%", "91.4%", "1.07", "0.83")[-1] == "12.5%"
    assert "Chains alone, for they draft no trees: prompt_lookup." in page
    assert row(page, LONG_NAME, "1", "tree of 8", "1.90 [1.71, 2.13]") and f"Configuration of {LONG_NAME}" in page
