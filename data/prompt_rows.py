"""What a user asks, and the layouts of rows in which files and data sets hold it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.template import Message, Tools, messages_of
from models.errors import UserError

_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ("user", "assistant", "system", "tool")}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_EXTRAS = ("tool_calls", "tool_call_id", "name", *_REASONING)  # of messages, beside role and content


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user asks: chat `turns`, or, where `continuation` is set, plain text to be continued without a template.

    `answers` holds the data set's own answers to the turns, where it has them. `split` is set where the source
    decides it, as the standard library's documents do; `source` where there are several.

    `conversation` is the data set's own conversation as JSON, where it has more than turns and answers: calls of tools
    and what they gave, or thoughts. Then `turns` end before the first call, behind which nobody knows what a tool would
    say to the target. `tools_json` lists the tools that a template tells of.
    """

    turns: tuple[str, ...]
    category: str = "all"
    continuation: bool = False
    system: str | None = None
    answers: tuple[str, ...] = ()
    split: str | None = None
    source: str = ""
    conversation: str | None = None
    tools_json: str | None = None
    id: str = field(init=False, default="")

    def __post_init__(self) -> None:
        parts = [" ".join(turn.split()) for turn in self.turns] + [self.continuation, self.system]
        text = json.dumps(parts + ([self.tools_json] if self.tools_json else []))
        object.__setattr__(self, "id", hashlib.sha256(text.encode()).hexdigest()[:16])

    @property
    def messages(self) -> list[Message]:
        """The conversation with the data set's own answers."""
        if self.conversation is not None:
            return list(json.loads(self.conversation))
        return messages_of(self.turns[: len(self.answers)], self.answers, self.system)

    @property
    def tools(self) -> Tools | None:
        """The tools that a template is told of."""
        return None if self.tools_json is None else json.loads(self.tools_json)


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Read a JSONL prompt file. Raises UserError naming file, line and what is missing."""
    empty = True
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not valid JSON ({error.msg} at column {error.colno}).") from error
        empty = False
        yield parse_row(row, where)
    if empty:
        raise UserError(f"The prompt file {str(path)!r} holds no prompts.")


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read the prompt file {str(path)!r}: {error}") from error


def parse_row(row: Any, where: str) -> Prompt:
    """Understand one row of any of the known layouts. Raises UserError saying `where` and what is missing."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, found {type(row).__name__}.")
    category = str(row.get("category") or "all")
    if isinstance(row.get("turns"), list):
        return Prompt(_texts(row["turns"], "turns", where), category)
    if "prompt" in row:
        return Prompt(_texts([row["prompt"]], "prompt", where), category)
    for key, role_key, text_key in (("messages", "role", "content"), ("conversations", "from", "value")):
        if isinstance(row.get(key), list):
            return _conversation(row, key, role_key, text_key, category, where)
    raise UserError(
        f"{where}: no 'prompt', 'turns', 'messages' or 'conversations' (found: {', '.join(row) or 'nothing'})."
    )


def _texts(values: list[Any], key: str, where: str) -> tuple[str, ...]:
    if not values or not all(isinstance(value, str) and value.strip() for value in values):
        raise UserError(f"{where}: {key!r} must hold text, and not be empty.")
    return tuple(values)


def _conversation(row: dict[str, Any], key: str, role_key: str, text_key: str, category: str, where: str) -> Prompt:
    """A prompt of a row's conversation, in which user and assistant take turns, and tools answer to calls."""
    messages: list[Message] = []
    for index, given in enumerate(row[key]):
        at = f"{where}: {key}[{index}]"
        message = _message(given, role_key, text_key, at)
        before = [m["role"] for m in messages if m["role"] != "system"][-1:]
        allowed = {"user": ([], ["assistant"]), "assistant": (["user"], ["tool"]), "tool": (["assistant"], ["tool"])}
        if message["role"] != "system" and before not in allowed[message["role"]]:
            raise UserError(f"{at}: user and assistant do not take turns.")
        messages.append(message)
    calls = [i for i, m in enumerate(messages) if m["role"] == "tool" or "tool_calls" in m]
    plain = messages[: calls[0] if calls else None]
    said = {role: tuple(m["content"] for m in plain if m["role"] == role) for role in ("system", "user", "assistant")}
    if not said["user"]:
        raise UserError(f"{where}: {key!r} holds no user turn.")
    return Prompt(
        said["user"],
        category,
        system=said["system"][-1] if said["system"] else None,
        answers=said["assistant"],
        conversation=json.dumps(messages) if calls or any(set(m) & set(_REASONING) for m in messages) else None,
        tools_json=_tools(row.get("tools"), where),
    )


def _tools(given: Any, where: str) -> str | None:
    """A row's tools as JSON: it may hold them as that, or as they are."""
    try:
        tools = json.loads(given) if isinstance(given, str) else _given(given)
    except ValueError as error:
        raise UserError(f"{where}: 'tools' is text that is not JSON ({error}).") from error
    return json.dumps(tools) if tools else None


def _message(given: Any, role_key: str, text_key: str, at: str) -> Message:
    """A message as templates read it. Raises UserError where role or text is missing or unknown."""
    message = _given(given) if isinstance(given, dict) else {}
    calls = bool(message.get("tool_calls"))
    if role_key not in message or not (calls or text_key in message):
        raise UserError(f"{at} needs {role_key!r} and {text_key!r}.")
    role = _ROLES.get(str(message[role_key]))
    if role is None:
        raise UserError(f"{at}: unknown role {message[role_key]!r}: expected {', '.join(sorted(_ROLES))}.")
    if not calls:
        _texts([message[text_key]], text_key, at)
    extras = {key: message[key] for key in _EXTRAS if message.get(key)}
    return {"role": role, "content": message.get(text_key) or "", **extras}


def _given(value: Any) -> Any:
    """The same without keys whose value is None: tables have every key in every row."""
    if isinstance(value, dict):
        return {key: _given(item) for key, item in value.items() if item is not None}
    return [_given(item) for item in value] if isinstance(value, list) else value
