import ast
from collections import Counter

import pytest

from data.instructions import Instructions
from data.prompts import Prompt
from data.stdlib import Document
from models.target import Target

_PROSE = "This paragraph number {} tells a reader of {} everything that there is to know about its subject. It ends."
_MODULE = '''"""{first}

{second}

{third}
"""


def short():
    return 1


def counted(values):
    """{fourth}"""
    total = 0
    for value in values:
        total += value
    return total
'''


def _documents() -> list[Document]:
    topic = "\n\n".join(_PROSE.format(i, "topics").replace(" tells", "\ntells") for i in range(4))
    parts = {name: _PROSE.format(name, "modules") for name in ("first", "second", "third", "fourth")}
    return [Document("topics/x", topic + "\n\n   a ::= b.", "train"), Document("m.py", _MODULE.format(**parts), "test")]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tiny: Target) -> list[Prompt]:
    monkeypatch.setattr("data.instructions.documents", _documents)
    return Instructions(min_words=5, max_words=40, max_lines=10).prompts(tiny, 1, seed=3)


def test_every_kind_comes_in_turn_and_keeps_the_split_of_its_document(made: list[Prompt]) -> None:
    assert [prompt.category for prompt in made[:5]] == [
        "summary",
        "question_answering",
        "retrieval",
        "translation",
        "code",
    ]
    assert {prompt.split for prompt in made if "of modules" in prompt.turns[0]} == {"test"}
    assert {prompt.split for prompt in made if "of topics" in prompt.turns[0]} == {"train"}
    assert not any(prompt.continuation for prompt in made)


def test_functions_are_quoted_whole_and_short_ones_are_left_out(made: list[Prompt]) -> None:
    (edit,) = [prompt.turns[0] for prompt in made if prompt.category == "code"]
    code = edit.split("```python\n")[1].split("\n```")[0]
    (function,) = ast.parse(code).body
    assert isinstance(function, ast.FunctionDef) and function.name == "counted"


def test_paragraphs_are_lines_and_grammar_is_none(made: list[Prompt]) -> None:
    summaries = [prompt.turns[0] for prompt in made if prompt.category == "summary" and prompt.split == "train"]
    for summary in summaries:
        assert any(_PROSE.format(i, "topics") in summary for i in range(4))
        assert "::=" not in summary


def test_retrieval_quotes_three_different_passages(made: list[Prompt]) -> None:
    for text in (prompt.turns[0] for prompt in made if prompt.category == "retrieval"):
        lines = [line[4:] for line in text.splitlines() if line[:4] in ("[1] ", "[2] ", "[3] ")]
        assert len(set(lines)) == 3


def test_the_seed_decides(monkeypatch: pytest.MonkeyPatch, tiny: Target, made: list[Prompt]) -> None:
    source = Instructions(min_words=5, max_words=40, max_lines=10)
    assert source.prompts(tiny, 1, seed=3) == made
    assert source.prompts(tiny, 1, seed=4) != made


def test_the_standard_library_has_enough_of_every_kind(tiny: Target) -> None:
    made = Instructions().prompts(tiny, 1000, seed=0)
    assert min(Counter((p.category, p.split) for p in made).values()) >= 10
    assert len({p.id for p in made}) >= 2000
