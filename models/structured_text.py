"""What must follow in a text whose grammar is known: JSON, by a schema if there is one, and code indented as Python is.

Both grammars read a text character by character, and say of its end which characters are forced, or as good as forced:
white space is taken to go on as the text has done it so far.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

LONGEST = 400  # characters that are said to be forced at most
_WORDS = ["true", "false", "null"]
_LETTERS = "aT1"  # how a string may go on, as far as tokens differ


class Forced(NamedTuple):
    """Characters that must follow, and the characters any of which may come then ("" for the text's end)."""

    text: str
    then: tuple[str, ...]


class Grammar(Protocol):
    """Reads a text, and says how it must go on."""

    def feed(self, text: str) -> None:
        """Take in more of the text."""

    def forced(self) -> Forced:
        """What must follow the text so far."""


@dataclass(slots=True)
class _Container:
    """An object or array that is still open."""

    closer: str
    schema: dict[str, Any]
    gap: str | None = None  # white space before its first item, once that has come
    keys: list[str] = field(default_factory=list)
    items: int = 0


class JsonText:
    """A text in which JSON documents begin at a brace or bracket, amid other text.

    What turns out not to be JSON is taken for other text. Of a `schema` these keywords are read: type, properties (in
    order), required, items, minItems, maxItems, const and enum. An object without properties may hold any keys.
    """

    def __init__(self, schema: dict[str, Any] | None = None) -> None:
        self._schema = schema or {}
        self._after_colon, self._after_comma = " ", " "
        self._leave()

    def _leave(self) -> None:
        self._open: list[_Container] = []
        self._expect = "nothing"
        self._part, self._escaped = "", False  # of a string or a word
        self._space, self._last = "", ""  # white space since the last other character, and that

    def __deepcopy__(self, memo: dict[int, Any]) -> JsonText:
        twin = copy.copy(self)  # the schema stays as it is
        twin._open = [replace(container, keys=list(container.keys)) for container in self._open]
        return twin

    def feed(self, text: str) -> None:
        """Take in more of the text."""
        for character in text:
            self._take(character)

    def forced(self) -> Forced:
        """What must follow: what one state forces, and then the next, as long as there is something."""
        ahead = copy.deepcopy(self)
        text = ""
        while len(text) < LONGEST and (more := ahead._next()):
            ahead.feed(more)
            text += more
        return Forced(text, ahead._then())

    def _take(self, c: str) -> None:
        if self._expect in ("string", "key string"):
            self._take_in_string(c)
        elif self._expect == "word" and (c.isalnum() or c in "+-."):
            self._part += c
        elif c in " \t\r\n":
            self._end_word()
            self._space += c
        else:
            self._end_word()
            self._notice_space(c)
            if not self._take_symbol(c):
                self._leave()  # this is no JSON, but a document may begin here
                self._take_symbol(c)
            self._space, self._last = "", c

    def _take_in_string(self, c: str) -> None:
        if c == '"' and not self._escaped:
            if self._expect == "string":
                self._end_value()
            else:
                self._open[-1].keys.append(_unescaped(self._part))
                self._expect = "colon"
            self._part = ""
        elif c == "\n":
            self._leave()
        else:
            self._escaped = c == "\\" and not self._escaped
            self._part += c

    def _end_word(self) -> None:
        if self._expect == "word":
            self._part = ""
            self._end_value()

    def _end_value(self) -> None:
        if self._open:
            self._open[-1].items += 1
            self._expect = "comma or end"
        else:
            self._leave()

    def _notice_space(self, c: str) -> None:
        if not self._open or c in "}]":
            return
        if self._last == ":":
            self._after_colon = self._space
        elif self._last == ",":
            if "\n" not in self._space:
                self._after_comma = self._space
        elif self._last in ("{", "["):
            self._open[-1].gap = self._space

    def _take_symbol(self, c: str) -> bool:
        """Take a character outside strings and words; False where it cannot stand there."""
        expect = self._expect
        start = {"object": "{", "array": "["}.get(str(self._schema.get("type")), "{[")
        value = expect in ("value", "value or end") or (expect == "nothing" and c in start)
        if c in "{[" and value:
            self._open.append(_Container("}" if c == "{" else "]", self._value_schema()))
            self._expect = "key or end" if c == "{" else "value or end"
        elif c == '"' and value:
            self._expect = "string"
        elif c == '"' and expect in ("key", "key or end"):
            self._expect = "key string"
        elif value and (c.isalnum() or c == "-"):
            self._expect, self._part = "word", c
        elif c == ":" and expect == "colon":
            self._expect = "value"
        elif c == "," and expect == "comma or end":
            self._expect = "key" if self._open[-1].closer == "}" else "value"
        elif self._open and c == self._open[-1].closer and expect in ("comma or end", "key or end", "value or end"):
            self._open.pop()
            self._end_value()
        else:
            return expect == "nothing"
        return True

    def _value_schema(self) -> dict[str, Any]:
        """The schema of the value that comes next, {} where nothing is known of it."""
        if not self._open:
            return self._schema
        top = self._open[-1]
        found = top.schema.get("items") if top.closer == "]" else self._properties(top).get(top.keys[-1])
        return found if isinstance(found, dict) else {}

    def _next(self) -> str:
        """What the present state forces, "" for nothing; a word that is complete is ended."""
        top = self._open[-1] if self._open else None
        if top is None:
            return ""
        if self._expect == "key string":
            fitting = [key for key in _escaped(self._next_keys(top)) if key.startswith(self._part)]
            return _rest(fitting[:1], self._part, '"')
        if self._expect == "string":
            strings = [v for v in _values(self._value_schema()) if isinstance(v, str)]
            return _rest(_escaped(strings), self._part, '"')
        if self._expect == "word":
            if self._part not in _WORDS:
                return _rest(_WORDS, self._part, "") if self._part.isalpha() else ""
            self._end_word()
        if self._expect == "colon":
            return ":" if not self._space else ""
        if self._expect == "value":
            gap = self._after_colon if top.closer == "}" else self._gap(top)
            return _remaining(gap, self._space) + self._value_start()
        if self._expect == "key" or (self._expect == "key or end" and self._next_keys(top)):
            return _remaining(self._gap(top), self._space) + '"'
        if self._expect == "value or end":
            start = self._value_start() if top.schema.get("minItems", 0) > 0 else ""
            return _remaining(self._gap(top), self._space) + start if start else ""
        return self._comma_or_end(top) if self._expect == "comma or end" else ""

    def _comma_or_end(self, top: _Container) -> str:
        goes_on: bool | None = None  # not known
        if top.closer == "}" and self._properties(top):
            goes_on = bool(self._next_keys(top))
        elif top.closer == "]" and top.items < top.schema.get("minItems", 0):
            goes_on = True
        elif top.closer == "]" and top.items >= top.schema.get("maxItems", top.items + 1):
            goes_on = False
        if goes_on is None:
            return ""
        return ("" if self._space else ",") if goes_on else _remaining(self._closing_gap(), self._space) + top.closer

    def _value_start(self) -> str:
        schema = self._value_schema()
        if values := _values(schema):
            return common_start([json.dumps(v, ensure_ascii=False) for v in values])
        kind = schema.get("type")
        starts = {"object": "{", "array": "[", "string": '"', "null": "null"}
        return starts.get(kind, "") if isinstance(kind, str) else ""

    @staticmethod
    def _properties(top: _Container) -> dict[str, Any]:
        found = top.schema.get("properties")
        return found if isinstance(found, dict) else {}

    def _next_keys(self, top: _Container) -> list[str]:
        """The keys that may come, in the schema's order: those behind the last one, else those still required."""
        order = list(self._properties(top))
        last = max((order.index(key) for key in top.keys if key in order), default=-1)
        behind = [key for key in order[last + 1 :] if key not in top.keys]
        return behind or [key for key in order if key in top.schema.get("required", []) and key not in top.keys]

    def _gap(self, top: _Container) -> str:
        """White space before the next item of `top`."""
        if top.gap is not None and "\n" in top.gap:
            return top.gap
        if top.gap is None and top.items == 0:
            outer = self._open[-2].gap if len(self._open) > 1 else None
            return outer + (self._open[0].gap or "").lstrip("\n") if outer and "\n" in outer else ""
        return self._after_comma

    def _closing_gap(self) -> str:
        gap = self._open[-1].gap
        if gap is None or "\n" not in gap:
            return ""
        return (self._open[-2].gap or "") if len(self._open) > 1 else "\n"

    def _then(self) -> tuple[str, ...]:
        if self._expect in ("string", "key string"):
            return tuple(_LETTERS)
        kind = self._value_schema().get("type") if self._expect == "value" else None
        starts = {"integer": ("1", "-"), "number": ("1", "-"), "boolean": ("t", "f")}
        if isinstance(kind, str) and kind in starts:  # it may be a list of several
            return starts[kind]
        if self._expect in ("value", "value or end"):
            return ('"', "1", "[", "{", "t")
        return (",", "\n", "") if self._open else ("", "\n")


def common_start(ways: list[Any]) -> Any:
    """The beginning that all of several strings, or lists, have in common; "" of none."""
    same = 0
    for column in zip(*ways, strict=False):
        if any(part != column[0] for part in column):
            break
        same += 1
    return ways[0][:same] if ways else ""


def _values(schema: dict[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema.get("enum", []))


def _escaped(strings: list[str]) -> list[str]:
    return [json.dumps(string, ensure_ascii=False)[1:-1] for string in strings]


def _unescaped(part: str) -> str:
    try:
        return str(json.loads(f'"{part}"'))
    except ValueError:
        return part


def _rest(words: list[str], part: str, end: str) -> str:
    """What all `words` that begin with `part`, and the `end` behind them, have in common there."""
    return common_start([word + end for word in words if word.startswith(part)])[len(part) :]


def _remaining(gap: str, space: str) -> str:
    """What is still to come of the white space `gap`, of which `space` is there; nothing where that is another."""
    return gap[len(space) :] if gap.startswith(space) else ""


_BLOCK = re.compile(r"(async )?(def|class|if|elif|else|for|while|with|try|except|finally|match|case)\b")
_LEAVES = re.compile(r"(return|raise|break|continue|pass)\b")
_LONE = ("else", "try", "finally")
_IMPORT = re.compile(r"from [\w.]+ ")
_FOR = re.compile(r"(?!.*\bin\b)(async )?for [\w, ()]*\w\)? ")


class PythonText:
    """A text that is indented as Python is: blocks behind a colon, and lines inside brackets.

    The next line has the indentation of the one before, and one step more behind a colon or an opening bracket; a step
    is what the text has shown last.
    """

    def __init__(self) -> None:
        self._step = "    "
        self._quote, self._comment, self._escaped = "", False, False
        self._brackets = 0
        self._line, self._before = (
            "",
            "",
        )  # this line so far, and the last one that was not blank: both without comments
        self._newline = True  # nothing but white space has come since the last line's end

    def feed(self, text: str) -> None:
        """Take in more of the text."""
        for character in text:
            self._take(character)

    def forced(self) -> Forced:
        """What must follow: what one state forces, and then the next, as long as there is something."""
        ahead = copy.copy(self)  # of values that cannot be changed
        text = ""
        while len(text) < LONGEST and (more := ahead._next()):
            ahead.feed(more)
            text += more
        return Forced(text, ("a", "i", "r", "_"))

    def _take(self, c: str) -> None:
        if self._comment and c != "\n":
            return
        if self._quote:
            self._take_in_string(c)
        elif c == "#":
            self._comment = True
            return
        elif c in "\"'":
            self._quote = c * 3 if self._line.endswith(c * 2) else c
        elif c in "([{":
            self._brackets += 1
        elif c in ")]}":
            self._brackets = max(0, self._brackets - 1)
        if c == "\n":
            self._end_line()
        else:
            self._line += c
            self._newline &= c in " \t"

    def _take_in_string(self, c: str) -> None:
        opened = self._line + c
        if self._escaped:
            self._escaped = False
        elif c == "\\":
            self._escaped = True
        elif opened.endswith(self._quote):
            self._quote = ""
        elif c == "\n" and len(self._quote) == 1:
            self._quote = ""  # it was none: an apostrophe in other text

    def _end_line(self) -> None:
        line, self._comment = self._line, False
        self._line, self._newline = "", True
        if self._quote or not line.strip():
            return
        grown = _indent(line).removeprefix(_indent(self._before))
        if grown and _indent(line).startswith(_indent(self._before)) and self._before.rstrip().endswith(":"):
            self._step = grown
        self._before = line

    def _next(self) -> str:
        """What the present state forces, "" for nothing."""
        if self._quote or self._comment:
            return ""
        if self._newline and self._before:
            if _LEAVES.match(self._before.lstrip()):
                return ""  # the block ends here, and nobody knows how many others
            opens = self._before.rstrip().endswith((":", "(", "[", "{"))
            return _remaining(_indent(self._before) + (self._step if opens else ""), self._line)
        words = self._line.strip(" \t")
        if not self._brackets and words in _LONE:
            return ":"
        if not self._brackets and words.endswith(":") and (_BLOCK.match(words) or words[0] == ")"):
            return "\n"
        if _IMPORT.fullmatch(self._line.lstrip()):
            return "import "
        return "in " if _FOR.fullmatch(self._line.lstrip()) else ""


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]
