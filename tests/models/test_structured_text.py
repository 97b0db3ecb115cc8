"""What must follow in JSON and in indented code, for many beginnings written out by hand."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from models.structured_text import Forced, Grammar, JsonText, PythonText

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["person", "pet", "place"]},
        "age": {"type": "integer"},
        "alive": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
            "required": ["street", "number"],
        },
        "none": {"type": "null"},
        "version": {"const": "v1"},
    },
    "required": ["name", "kind", "home"],
}


def forced(text: str, schema: dict[str, Any] | None = None) -> str:
    """What follows, wherever the text is cut into pieces."""
    answers = set()
    for cut in {0, 1, len(text) // 2, len(text)}:
        grammar = JsonText(schema)
        grammar.feed(text[:cut])
        grammar.forced()  # asking changes nothing
        grammar.feed(text[cut:])
        answers.add(grammar.forced().text)
    (answer,) = answers
    return answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no document", ""),
        ("{", '"name": "'),
        ("Here it is:\n{", '"name": "'),
        ('see [1] and {x}: {"n', 'ame": "'),
        ('{"name', '": "'),
        ('{"name"', ': "'),
        ('{"name":', ' "'),
        ('{"name": ', '"'),
        ('{"name": "', ""),
        ('{"name": "A \\" b', ""),
        ('{"name": "A \\\\"', ', "kind": "p'),
        ('{"name": "A"', ', "kind": "p'),
        ('{"name": "A",', ' "kind": "p'),
        ('{"name": "A", "', 'kind": "p'),
        ('{"name": "A", "kind": "pl', 'ace", "age": '),
        ('{"name": "A", "kind": "pet"', ', "age": '),
        ('{"kind": "pet", "age": 12', ""),  # more digits may come
        ('{"kind": "pet", "age": 12,', ' "alive": '),
        ('{"alive": t', 'rue, "tags": ["'),
        ('{"alive": false', ', "tags": ["'),
        ('{"tags": ["a"', ""),
        ('{"tags": ["a", ', '"'),
        ('{"tags": ["a", "b", "c"', '], "home": {"street": "'),
        ('{"home": {"street": "x", "number": 3 ', '}, "none": null, "version": "v1", "name": "'),
        ('{"name": "A", "kind": "pet", "home": {"street": "x", "number": 3}', ', "none": null, "version": "v1"}'),
        ('{"name": "A", "kind": "pet", "home": {"street": "x", "number": 3}, "version": "v1"', "}"),
        ('{"name":"A","kind":"pet"', ',"age":'),
        ('{\n  "name": "A"', ',\n  "kind": "p'),
        ('{\n  "name": "A",\n', '  "kind": "p'),
        ('{\n  "tags": [', '\n    "'),
        ('{\n  "tags": [\n    "a",\n    "b",\n    "c"', '\n  ],\n  "home": {\n    "street": "'),
        ('{\n  "name": "A",\n  "kind": "pet",\n  "home": {\n    "street": "x",\n    "number": 3\n',
         '  },\n  "none": null,\n  "version": "v1"\n}'),
        ('{"name": A', ""),  # this was none after all
        ('{"name": "A" "', ""),
        ('{"name": "A"]', ""),
    ],
)  # fmt: skip
def test_a_schema_forces(text: str, expected: str) -> None:
    assert forced(text, SCHEMA) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", ""),
        ('{"a"', ": "),
        ('{"a":', " "),
        ('{"a": 1, "b":2, "c"', ":"),
        ('{"a": n', "ull"),
        ('{"a": fal', "se"),
        ('{"a": "n', ""),
        ('{"a": 1,', ' "'),
        ('{"a": 1,"b": 2,', '"'),
        ('{"a": [1, 2', ""),
        ('{"a": {"b": "{[', ""),
        ('{\n    "a": {', ""),
        ('{\n    "a": {\n        "b": 1\n    },', '\n    "'),
        ("[tr", "ue"),
        ("[[true], n", "ull"),
        ('{"a": 1} {"b"', ": "),
        ('{"a": 1}', ""),
    ],
)
def test_without_a_schema_the_grammar_alone_forces(text: str, expected: str) -> None:
    assert forced(text) == expected


def documents(seed: int) -> str:
    chance = random.Random(seed)
    document = {
        "name": 'é " \\ {' * chance.randint(0, 2),
        "kind": chance.choice(["person", "pet", "place"]),
        "age": chance.randint(-9, 99),
        "alive": chance.random() < 0.5,
        "tags": ["x"] * chance.randint(1, 3),
        "home": {"street": "b", "number": 4},
        "none": None,
        "version": "v1",
    }
    indent, separators = chance.choice([(None, None), (None, (",", ":")), (2, None), (4, None), (1, None)])
    return json.dumps(document, indent=indent, separators=separators, ensure_ascii=chance.random() < 0.5)


@pytest.mark.parametrize("seed", range(20))
def test_all_that_is_forced_in_a_document_is_what_it_holds(seed: int) -> None:
    """Once the document has shown its white space; and a good part of it is forced."""
    text = documents(seed)
    shown = text.index('"kind"')
    grammar, known = JsonText(SCHEMA), 0
    for position, character in enumerate(text):
        if position > shown:
            follows = grammar.forced().text
            assert text[position:].startswith(follows), (text[:position], follows)
            known += follows != ""
        grammar.feed(character)
    assert known > 0.5 * (len(text) - shown)
    assert grammar.forced() == Forced("", ("", "\n"))


def code(text: str) -> str:
    grammar = PythonText()
    grammar.feed(text)
    return grammar.forced().text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(x):", "\n    "),
        ("def f(x):\n", "    "),
        ("def f(x):\n  ", "  "),
        ("def f(x):\n    ", ""),
        ("def f(x):  # why: not\n", "    "),
        ("class A:\n  x = 1\n\n  def f(self):\n", "    "),
        ("if x:\n\ty = 1\nif z:\n", "\t"),
        ("    if x:\n        y()\n", "        "),
        ("    if x:\n        return y\n", ""),
        ("    if x:\n        y()\n    else", ":\n        "),
        ("try", ":\n    "),
        ("x = a if b else", ""),
        ("x = {'a':", ""),
        ("x = d[1:", ""),
        ("f(a,\n", ""),
        ("x = f(\n", "    "),
        ("x = f(\n    a,\n", "    "),
        ("def f(\n    a,\n):", "\n    "),
        ("from os.path ", "import "),
        ("from os.path import ", ""),
        ("yield from x ", ""),
        ("for i ", "in "),
        ("for a, (b, c) ", "in "),
        ("for i in ", ""),
        ("# for i ", ""),
        ('x = "if a:', ""),
        ('"""if a:', ""),
        ('def f():\n    """One: two.\n\n  if x:\n', ""),
        ('def f():\n    """One: two."""\n', "    "),
        ("x = 'it\\'s'\nif y:", "\n    "),
        ("while True:\n    pass", ""),
        ("lambda x:", ""),
    ],
)
def test_code_is_indented(text: str, expected: str) -> None:
    assert code(text) == expected


@pytest.mark.parametrize("make", [lambda: JsonText(SCHEMA), PythonText])
def test_a_copy_goes_on_by_itself(make: Any) -> None:
    grammar: Grammar = make()
    grammar.feed('{"name": "A", "home": {"street')
    before = grammar.forced()
    twin = copy.deepcopy(grammar)
    twin.feed('": "x", "number": 3}, "q": [1\nif x:\n')
    assert grammar.forced() == before != twin.forced()
