"""Chat messages to token ids and loss masks, by the target's own chat template.

A mask marks the tokens that the assistant says. What it says to a message is what the template puts behind the header
of its answer; where the template has generation marks, what lies within them too. Nothing is guessed from the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from models.errors import UserError
from models.target import Target

Message = dict[str, Any]
Tools = list[dict[str, Any]]
Span = tuple[int, int]  # of characters
_rendered: Any = render_jinja_template  # texts and marks, though it is annotated to return a string
_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def messages_of(turns: tuple[str, ...], answers: tuple[str, ...], system: str | None) -> list[Message]:
    """Interleave user turns with the answers given so far, behind the system message if there is one."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for index, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        if index < len(answers):
            messages.append({"role": "assistant", "content": answers[index]})
    return messages


def require_template(target: Target) -> Any:
    """The target's tokenizer, if it has a chat template; else raise UserError saying what to do."""
    if target.tokenizer is None or not target.tokenizer.chat_template:
        raise UserError(
            f"Target {target.name!r} has no chat template, so it cannot answer chat prompts: "
            "use continuations (data=stdlib, prompts=stdlib), or an instruct model as the target."
        )
    return target.tokenizer


def render_prompt(target: Target, messages: list[Message], tools: Tools | None = None) -> str:
    """The text of a conversation up to and including the header of the assistant's next answer."""
    return _render(target, messages, tools, add_generation_prompt=True)[0]


@dataclass(slots=True)
class _Text:
    """A conversation as rendered, and what of it the assistant said."""

    text: str
    said: list[Span]


def encode_conversation(
    target: Target, messages: list[Message], tools: Tools | None = None
) -> list[tuple[list[int], list[int]]]:
    """Texts in which each answer stands once as it was said: token ids, and 1 for each token that the assistant said.

    One text holds the whole conversation where the template renders earlier turns the same as it grows. Templates of
    reasoning models drop earlier thoughts, others move the system message: then an answer that is rendered differently
    later on is the end of a text of its own, behind just what the target would have read. An end mark is said, what a
    template puts behind it is not, nor are tokens that reach over an answer's start or end.

    Raises UserError where an answer does not start with the header that the template gives for it, so that no mask is
    exact, and where the template refuses the conversation.
    """
    marked = bool(_MARKS.search(require_template(target).get_chat_template(tools=tools)))
    texts: list[_Text] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        header = render_prompt(target, messages[:index], tools)
        text, marks = _render(target, messages[: index + 1], tools, find_marks=marked)
        if not text.startswith(header):
            raise UserError(
                f"The chat template of {target.name!r} renders message {index} otherwise than behind the header of an "
                "answer: no loss mask would be exact. Let the target answer instead (data.answers.answers=target)."
            )
        here = (len(header), len(text))
        said = [span for mark in marks if (span := _common(mark, here))] if marked else [here]
        if texts and texts[-1].said and text.startswith(texts[-1].text[: texts[-1].said[-1][1]]):
            said = texts.pop().said + said
        texts.append(_Text(text, said))
    return [_tokenised(target, text, cut_at_stops=not marked) for text in texts]


def _tokenised(target: Target, text: _Text, *, cut_at_stops: bool) -> tuple[list[int], list[int]]:
    encoded = require_template(target)(text.text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    mask = [0] * len(ids)
    position = 0
    for start, end in text.said:
        while position < len(ids) and offsets[position][0] < start:
            position += 1
        while position < len(ids) and offsets[position][1] <= end:
            mask[position] = 1
            position += 1
            if cut_at_stops and ids[position - 1] in target.stop_token_ids:
                break  # what the template puts behind the end mark was not said by the assistant
    return ids, mask


def _common(one: Span, other: Span) -> Span | None:
    start, end = max(one[0], other[0]), min(one[1], other[1])
    return (start, end) if start < end else None


def _render(
    target: Target,
    messages: list[Message],
    tools: Tools | None,
    *,
    add_generation_prompt: bool = False,
    find_marks: bool = False,
) -> tuple[str, list[Span]]:
    """The template's text of messages, and the spans of its generation marks if they are to be found."""
    tokenizer = require_template(target)
    given = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        (text,), marks = _rendered(
            [given],
            tools=tools,
            chat_template=tokenizer.get_chat_template(tools=tools),
            add_generation_prompt=add_generation_prompt,
            return_assistant_tokens_mask=find_marks,
            **tokenizer.special_tokens_map,
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise UserError(f"The chat template of {target.name!r} refuses a conversation: {error}.") from error
    return text, [(start, end) for start, end in marks[0]] if find_marks else []
