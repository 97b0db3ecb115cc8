"""Answers of the target: what a row holds, that a kill loses nothing finished, and that stale ones are refused."""

import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data import answers, engine_generator
from data.answers import AnswerSettings, build_answers, context_ids, describe, open_answers
from data.prompts import Prompt, parse_row
from engine.loop import generate
from engine.settings import DecodeSettings
from models.errors import UserError
from models.target import Target
from tests.data.test_template import FORGETFUL, PLAIN, TALKS, TOOLS, with_template

PROMPTS = [
    Prompt((text,), continuation=True)
    for text in ("import os\n", "def main(", "class A:\n    def", "for i in", "return self.", "try:\n    x")
]
SETTINGS = AnswerSettings(max_new_tokens=12, chunk_size=2, seed=3)


def test_a_row_is_the_prompt_and_the_targets_own_answer(tiny: Target, tmp_path: Path) -> None:
    rows = build_answers(tiny, PROMPTS, SETTINGS, tmp_path)
    assert rows["prompt_id"] == [p.id for p in PROMPTS]
    for row, prompt in zip(rows, PROMPTS, strict=True):
        context = context_ids(tiny, prompt)
        (alone,) = generate(tiny, [context], DecodeSettings(max_new_tokens=12)).token_ids
        assert row["token_ids"] == context + alone
        assert row["loss_mask"] == [0] * len(context) + [1] * len(alone)


def test_finished_answers_are_reused_and_a_kill_between_chunks_changes_nothing(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = replace(SETTINGS, temperature=1.0)
    whole = build_answers(tiny, PROMPTS, sampled, tmp_path / "whole").to_list()
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    monkeypatch.setattr(engine_generator, "generate", counted)
    with pytest.raises(KeyboardInterrupt):
        build_answers(tiny, PROMPTS, sampled, tmp_path / "killed")
    assert build_answers(tiny, PROMPTS, sampled, tmp_path / "killed").to_list() == whole
    assert len(calls) == 4  # three chunks, one of them twice
    assert build_answers(tiny, PROMPTS, sampled, tmp_path / "killed").to_list() == whole
    assert len(calls) == 4


def test_other_settings_prompts_or_weights_make_another_data_set(tiny: Target, tmp_path: Path) -> None:
    build_answers(tiny, PROMPTS, SETTINGS, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert len(open_answers(folder, describe(tiny, PROMPTS, SETTINGS))) == len(PROMPTS)
    for prompts, settings, what in [
        (PROMPTS[:-1], SETTINGS, "prompts, num_prompts"),
        (PROMPTS, replace(SETTINGS, temperature=0.5), "settings"),
    ]:
        with pytest.raises(UserError, match=f"made with another {what}"):
            open_answers(folder, describe(tiny, prompts, settings))
    with pytest.raises(UserError, match="made with another weights"):
        open_answers(folder, describe(tiny, PROMPTS, SETTINGS) | {"weights": "other"})
    with pytest.raises(UserError, match="holds no finished answers"):
        open_answers(tmp_path / "nowhere")


def test_every_turn_is_answered_in_the_context_of_the_answers_before(tiny: Target, tmp_path: Path) -> None:
    target = with_template(tiny, PLAIN)
    prompt = Prompt(("import what?", "and then?"), system="code")
    rows = build_answers(target, [prompt], SETTINGS, tmp_path).to_list()
    assert [row["turn"] for row in rows] == [0, 1]
    said = [t for t, m in zip(rows[0]["token_ids"], rows[0]["loss_mask"], strict=True) if m]
    text = target.tokenizer.decode(said, skip_special_tokens=True)
    context = target.tokenizer.decode(context_ids(target, prompt, (text,)))
    assert context == f"<system>code\n<user>import what?\n<assistant>{text}<|endoftext|>\n<user>and then?\n<assistant>"
    second = [t for t, m in zip(rows[1]["token_ids"], rows[1]["loss_mask"], strict=True) if not m]
    assert target.tokenizer.decode(second) == context


def test_given_answers_are_masked_by_the_template(tiny: Target, tmp_path: Path) -> None:
    target = with_template(tiny, PLAIN)
    settings = replace(SETTINGS, answers="given")
    rows = build_answers(target, [Prompt(("a?",), answers=("b.",))], settings, tmp_path).to_list()
    said = [t for t, m in zip(rows[0]["token_ids"], rows[0]["loss_mask"], strict=True) if m]
    assert target.tokenizer.decode(said) == "b.<|endoftext|>"
    with pytest.raises(UserError, match="has no answer"):
        build_answers(target, [Prompt(("a?",))], settings, tmp_path)
    with pytest.raises(UserError, match="choose target or given"):
        AnswerSettings(answers="mine")


def test_text_goes_on_as_given_without_a_template_and_as_long_as_an_answer(tiny: Target, tmp_path: Path) -> None:
    settings = replace(SETTINGS, answers="given")
    short, long = (
        Prompt(("import os\n",), continuation=True, answers=(f"import sys{more}",)) for more in ("", "\n" * 50)
    )
    rows = build_answers(tiny, [short], settings, tmp_path / "a").to_list()
    context, said = tiny.encode("import os\n", special_tokens=True), tiny.encode("import sys")
    assert rows[0]["token_ids"] == context + said and rows[0]["loss_mask"] == [0] * len(context) + [1] * len(said)
    assert len(said) < 12
    (row,) = build_answers(tiny, [long], settings, tmp_path / "b").to_list()
    assert sum(row["loss_mask"]) == 12 and row["token_ids"][: len(context)] == context


def test_prompts_that_are_too_long_are_left_out_and_counted(
    tiny: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = Prompt(("x = 1\n" * 50,), continuation=True)
    settings = replace(SETTINGS, max_prompt_tokens=30)
    rows = build_answers(tiny, [*PROMPTS, long], settings, tmp_path)
    assert rows["prompt_id"] == [p.id for p in PROMPTS]
    assert "1 of 7 prompts are longer" in capsys.readouterr().out
    with pytest.raises(UserError, match="Every prompt is longer"):
        build_answers(tiny, [long], settings, tmp_path)


def test_given_answers_that_a_template_forgets_make_a_row_each(tiny: Target, tmp_path: Path) -> None:
    target, settings = with_template(tiny, FORGETFUL), replace(SETTINGS, answers="given")
    prompt = Prompt(("a?", "b?"), answers=("x.", "y."))
    rows = build_answers(target, [prompt], settings, tmp_path).to_list()
    assert [(row["prompt_id"], row["turn"]) for row in rows] == [(prompt.id, 0), (prompt.id, 1)]
    said = [[t for t, m in zip(row["token_ids"], row["loss_mask"], strict=True) if m] for row in rows]
    assert [target.decode(ids) for ids in said] == ["x.\n", "y.\n"]
    assert target.decode(rows[1]["token_ids"]) == "<user>a?\n\n<user>b?\n<assistant>y.\n"


def test_tools_are_told_and_calls_are_given(tiny: Target, tmp_path: Path) -> None:
    shown = "{% if tools %}{{ tools | tojson }}{% endif %}"
    calls = PLAIN.replace("m['content']", "(m['tool_calls'] | tojson if m['tool_calls'] else m['content'])")
    target = with_template(tiny, shown + calls)
    row = {"messages": TALKS["tools"], "tools": TOOLS}
    prompt = parse_row(row, "here")
    (asked,) = build_answers(target, [prompt], SETTINGS, tmp_path / "target").to_list()
    context = [t for t, m in zip(asked["token_ids"], asked["loss_mask"], strict=True) if not m]
    system = "<system>look things up\n"
    assert target.tokenizer.decode(context) == f"{json.dumps(TOOLS)}{system}<user>a?\n<assistant>"
    settings = replace(SETTINGS, answers="given")
    (given,) = build_answers(target, [prompt], settings, tmp_path / "given").to_list()
    said = [t for t, m in zip(given["token_ids"], given["loss_mask"], strict=True) if m]
    called = json.dumps(TALKS["tools"][2]["tool_calls"])
    assert target.tokenizer.decode(said) == f"{called}<|endoftext|>the a is 1<|endoftext|>"
    for changed in ({**row, "tools": []}, {**row, "messages": [*TALKS["tools"][:4], TALKS["one turn"][1]]}):
        assert describe(target, [parse_row(changed, "here")], settings) != describe(target, [prompt], settings)


def test_rows_go_from_disk_to_disk(tmp_path: Path) -> None:
    """Two thousand rows are written with the memory of a hundred."""
    length = 1000

    def rows() -> Iterator[dict[str, Any]]:
        for index in range(2000):
            ids = [index] * length
            yield answers.row_of(PROMPTS[0], index, ids, [0] * (length - 1) + [1])

    tracemalloc.start()
    answers._write(tmp_path / "dataset", rows())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * length * 400  # a row's two lists hold 16 bytes for each token
    found = answers.datasets.load_from_disk(str(tmp_path / "dataset"))
    assert len(found) == 2000 and found[1234]["token_ids"] == [1234] * length
    assert [path.name for path in tmp_path.iterdir()] == ["dataset"]
