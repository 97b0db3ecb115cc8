"""Loss masks of chat templates: with generation marks, without them, and those for which no mask is exact."""

import copy
import json
from typing import Any

import pytest

from data.prompts import parse_row
from data.template import encode_conversation, messages_of, render_prompt
from models.errors import UserError
from models.target import Target
from tests.helpers.chat_templates import DEEPSEEK_R1, ENDS, MISTRAL, SPECIAL, TEMPLATES, Template

_TURN = "{{ '<' + m['role'] + '>' + m['content'] }}"
_LINE = "{{ '\\n' }}"
_HEADER = "{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = (
    "{% for m in messages %}" + _TURN + "{% if m['role'] == 'assistant' %}<|endoftext|>{% endif %}"
    f"{_LINE}{{% endfor %}}{_HEADER}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant>{% generation %}{{ m['content'] }}<|endoftext|>"
    "{% endgeneration %}{% else %}" + _TURN + "{% endif %}" + f"{_LINE}{{% endfor %}}{_HEADER}"
)
FORGETFUL = (  # drops every answer but the last, as templates of reasoning models do with their thoughts
    "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}" + _TURN + "{% endif %}"
    f"{_LINE}{{% endfor %}}{_HEADER}"
)
MESSAGES = messages_of(("what is x?", "and y?"), ("x is 1.", "y = f(x)"), "be short")


def with_template(target: Target, template: str | None) -> Target:
    changed = copy.copy(target)
    changed.tokenizer = copy.deepcopy(target.tokenizer)
    changed.tokenizer.chat_template = template
    return changed


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["rendered", "marked"])
def test_the_mask_covers_answers_with_their_end_mark_and_nothing_else(tiny: Target, template: str) -> None:
    target = with_template(tiny, template)
    ((ids, mask),) = encode_conversation(target, MESSAGES)
    said = target.tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m])
    assert said == "x is 1.<|endoftext|>y = f(x)<|endoftext|>"
    assert target.tokenizer.decode(ids) == (
        "<system>be short\n<user>what is x?\n<assistant>x is 1.<|endoftext|>\n<user>and y?\n"
        "<assistant>y = f(x)<|endoftext|>\n"
    )


def test_both_ways_to_the_mask_agree(tiny: Target) -> None:
    assert encode_conversation(with_template(tiny, PLAIN), MESSAGES) == encode_conversation(
        with_template(tiny, MARKED), MESSAGES
    )


def test_text_that_repeats_the_answer_is_not_masked(tiny: Target) -> None:
    messages = messages_of(("say: x is 1.<assistant>x is 1.",), ("x is 1.",), None)
    ((ids, mask),) = encode_conversation(with_template(tiny, PLAIN), messages)
    assert tiny.tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m]) == "x is 1.<|endoftext|>"
    assert mask.index(1) > len(ids) // 2


def test_an_answer_that_later_turns_do_not_show_has_a_text_of_its_own(tiny: Target) -> None:
    target = with_template(tiny, FORGETFUL)
    texts = [target.tokenizer.decode(ids) for ids, _ in encode_conversation(target, MESSAGES)]
    assert texts == [
        "<system>be short\n<user>what is x?\n<assistant>x is 1.\n",
        "<system>be short\n<user>what is x?\n\n<user>and y?\n<assistant>y = f(x)\n",
    ]


def test_a_prompt_ends_with_the_header_of_the_answer(tiny: Target) -> None:
    target = with_template(tiny, PLAIN)
    ids = target.encode(render_prompt(target, messages_of(("hello",), (), None)))
    assert target.tokenizer.decode(ids) == "<user>hello\n<assistant>"


def test_a_target_without_a_template_is_refused_by_name(tiny: Target) -> None:
    with pytest.raises(UserError, match=r"Target 'tiny' has no chat template"):
        render_prompt(tiny, messages_of(("hello",), (), None))


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def call(**arguments: Any) -> list[dict[str, Any]]:
    return [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}]


TALKS: dict[str, list[dict[str, Any]]] = {
    "one turn": messages_of(("what is x?",), ("x is 1.",), None),
    "three turns": messages_of(("a?", "b?", "c?"), ("the a", "the b", "the c"), None),
    "system": MESSAGES,
    "the answer quotes the question": messages_of(("say: the a",), ("the a",), None),
    "a question behind the answers": [*messages_of(("a?", "b?"), ("the a",), None)],
    "thoughts in the text": [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "<think>\nit is a\n</think>\n\nthe a"},
        {"role": "user", "content": "b?"},
        {"role": "assistant", "content": "<think>\nit is b\n</think>\n\nthe b"},
    ],
    "thoughts beside the text": [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "the a", "reasoning_content": "it is a"},
        {"role": "user", "content": "b?"},
        {"role": "assistant", "content": "the b", "reasoning_content": "it is b"},
    ],
    "tools": [
        {"role": "system", "content": "look things up"},
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "", "tool_calls": call(what="a")},
        {"role": "tool", "content": "a is 1", "tool_call_id": "c1"},
        {"role": "assistant", "content": "the a is 1"},
    ],
    "thoughts and tools": [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "", "reasoning_content": "look a up", "tool_calls": call(what="a")},
        {"role": "tool", "content": "a is 1"},
        {"role": "assistant", "content": "", "reasoning_content": "and b", "tool_calls": call(what="b")},
        {"role": "tool", "content": "b is 2"},
        {"role": "assistant", "content": "1 and 2", "reasoning_content": "that is all"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ],
}
ROWS = {("qwen3", "three turns"): 3, ("qwen3", "system"): 2, ("qwen3", "tools"): 2, ("qwen3", "thoughts and tools"): 2}
ROWS |= {("qwen3", f"thoughts {where} the text"): 2 for where in ("in", "beside")}


def for_templates(target: Target, template: str) -> Target:
    """The same target with a template and the special tokens of all of them."""
    changed = with_template(target, template)
    changed.tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    changed.stop_token_ids = frozenset(changed.tokenizer.convert_tokens_to_ids(list(ENDS)))  # type: ignore[misc]
    return changed


def expected_rows(
    target: Target, template: Template, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> list[tuple[list[int], list[int]]]:
    """Character by character: each answer as it is written last, joined to the one before where that is unchanged."""
    rows: list[tuple[str, list[bool]]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        pieces = template.write(messages[: index + 1], tools, False)
        answer = max(i for i, (_, said) in enumerate(pieces) if said)
        text = "".join(piece for piece, _ in pieces)
        flags = [i == answer for i, (piece, _) in enumerate(pieces) for _ in piece]
        if rows:
            before, said = rows[-1]
            end = max(i for i, flag in enumerate(said) if flag) + 1
            if text[:end] == before[:end]:
                flags = [flag or (i < end and said[i]) for i, flag in enumerate(flags)]
                rows.pop()
        rows.append((text, flags))
    found = []
    for text, flags in rows:
        ids, mask, position = target.encode(text), [], 0
        for token in ids:
            end = position + len(target.tokenizer.decode([token]))
            mask.append(int(all(flags[position:end])))
            position = end
        assert position == len(text)
        found.append((ids, mask))
    return found


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_of_real_templates_are_those_of_a_plain_writer(tiny: Target, name: str, talk: str) -> None:
    messages = TALKS[talk]
    used = any("tool_calls" in m for m in messages)
    if used and name not in ("llama3", "qwen3"):
        pytest.skip("this template knows no tools")
    if name == "mistral" and messages[0]["role"] == "system":
        pytest.skip("refused: see below")
    target, tools = for_templates(tiny, TEMPLATES[name].text), TOOLS if used else None
    rows = encode_conversation(target, messages, tools)
    assert rows == expected_rows(target, TEMPLATES[name], messages, tools)
    assert len(rows) == ROWS.get((name, talk), 1)
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    assert rows[0][0][: rows[0][1].index(1)] == target.encode(render_prompt(target, messages[:first], tools))


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (MISTRAL, MESSAGES),  # the system's text is only there while a question is the last
        (DEEPSEEK_R1, TALKS["thoughts in the text"]),  # the header begins a thought that is not shown
    ],
    ids=["mistral", "deepseek"],
)
def test_an_answer_that_does_not_follow_its_header_is_refused(
    tiny: Target, template: str, messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(UserError, match=r"renders message \d otherwise than .*data\.answers\.answers=target"):
        encode_conversation(for_templates(tiny, template), messages)


def test_what_the_template_refuses_is_said(tiny: Target) -> None:
    twice = [{"role": "user", "content": "a?"}, {"role": "user", "content": "b?"}]
    with pytest.raises(UserError, match="'tiny' refuses a conversation: roles must alternate"):
        render_prompt(for_templates(tiny, MISTRAL), twice)


def test_a_row_with_tools_and_thoughts_is_kept_whole_and_asked_up_to_the_first_call(tiny: Target) -> None:
    messages = [*TALKS["three turns"][:4], *TALKS["thoughts and tools"]]
    with_nulls = [{"reasoning_content": None, "tool_calls": None, **m} for m in messages]
    prompt = parse_row({"messages": with_nulls, "tools": TOOLS}, "here")
    assert (prompt.messages, prompt.tools) == (messages, TOOLS)
    assert (prompt.turns, prompt.answers) == (("a?", "b?", "a?"), ("the a", "the b"))
    as_text = parse_row({"messages": messages, "tools": json.dumps(TOOLS)}, "here")
    assert as_text == prompt
    with pytest.raises(UserError, match="here: 'tools' is text that is not JSON"):
        parse_row({"messages": messages, "tools": "look"}, "here")
    thoughtful = parse_row({"messages": TALKS["thoughts beside the text"]}, "here")
    assert (thoughtful.turns, thoughtful.answers) == (("a?", "b?"), ("the a", "the b"))
    assert thoughtful.messages == TALKS["thoughts beside the text"]
    assert parse_row({"messages": messages}, "here").id != prompt.id
