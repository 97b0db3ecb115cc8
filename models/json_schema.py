"""Whether a JSON schema is well formed, as far as it is read here (`models.structured_text.JsonText`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from models.errors import UserError


def check_schema(schema: Any, place: str) -> None:
    """Raise UserError, naming the place, where a keyword that is read holds what it cannot hold.

    Keywords that are not read may hold anything.
    """
    if isinstance(schema, bool):
        return  # anything, or nothing at all
    if not isinstance(schema, dict):
        raise UserError(f"{place} is {schema!r}: a JSON schema is a mapping.")
    for key, (fits, what) in _KEYWORDS.items():
        if key in schema and not fits(schema[key]):
            raise UserError(f"{place}: {key} is {schema[key]!r}, but it must be {what}.")
    for key, found in schema.get("properties", {}).items():
        check_schema(found, f"{place}.properties.{key}")
    if isinstance(items := schema.get("items", []), list):  # one for each item, in older drafts of the standard
        for index, found in enumerate(items):
            check_schema(found, f"{place}.items[{index}]")
    else:
        check_schema(items, f"{place}.items")


def _is_count(value: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return (whole or (isinstance(value, float) and value.is_integer())) and value >= 0


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_properties(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


_KEYWORDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (lambda value: isinstance(value, str) or _is_names(value), "a name, or a list of names"),
    "properties": (_is_properties, "a mapping of names to schemas"),
    "required": (_is_names, "a list of names"),
    "minItems": (_is_count, "a whole number from 0 on"),
    "maxItems": (_is_count, "a whole number from 0 on"),
    "enum": (lambda value: isinstance(value, list), "a list of values"),
}
