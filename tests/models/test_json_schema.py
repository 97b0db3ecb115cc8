"""Schemas that are malformed are refused at their place, and what the standard allows is let through and read."""

from __future__ import annotations

from typing import Any

import pytest

from models.errors import UserError
from models.json_schema import check_schema
from models.structured_text import JsonText


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"minItems": "1"}, "^here: minItems is '1', but it must be a whole number from 0 on"),
        ({"minItems": None}, "minItems is None"),
        ({"maxItems": -1}, "maxItems is -1"),
        ({"maxItems": True}, "maxItems is True"),
        ({"maxItems": 1.5}, "maxItems is 1.5"),
        ({"enum": None}, "enum is None, but it must be a list of values"),
        ({"type": 3}, "type is 3, but it must be a name"),
        ({"required": "name"}, "required is 'name', but it must be a list of names"),
        ({"properties": ["a"]}, r"properties is \['a'\], but it must be a mapping"),
        ({"properties": {3: {}}}, "properties is {3: {}}"),
        ({"properties": {"a": {"properties": {"b": {"enum": 1}}}}}, r"^here\.properties\.a\.properties\.b: enum is 1"),
        ({"properties": {"a": "string"}}, r"^here\.properties\.a is 'string': a JSON schema is a mapping"),
        ({"items": {"items": {"minItems": "x"}}}, r"^here\.items\.items: minItems is 'x'"),
        ({"items": [{}, {"type": None}]}, r"^here\.items\[1\]: type is None"),
        ({"items": None}, r"^here\.items is None"),
    ],
)
def test_a_malformed_schema_is_refused_at_its_place(schema: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_schema(schema, "here")


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": ["integer", "null"]},
        {"type": "array", "items": {"type": ["integer", "null"]}, "minItems": 2.0, "maxItems": 3},
        {"type": "array", "items": [{"type": "integer"}, True], "minItems": 1},
        {"properties": {"a": True, "b": {"const": None}, "c": {"enum": []}}, "required": [], "additionalProperties": 7},
        {"enum": [None, {"a": 1}]},
    ],
)
def test_what_the_standard_allows_is_read_without_an_error(schema: dict[str, Any]) -> None:
    check_schema(schema, "here")
    for text in ('{"a": [1, {"b": null, "c": "x"}]}', '[1, [2, {"a": true}], "b"]'):
        for end in range(len(text) + 1):
            grammar = JsonText(schema)
            grammar.feed(text[:end])
            grammar.forced()
