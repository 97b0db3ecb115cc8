"""Loss masks of chat templates: with generation marks, without them, and those for which no mask is exact."""

import copy

import pytest

from data.template import encode_conversation, encode_prompt, messages_of
from models.errors import UserError
from models.target import Target

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
    ids, mask = encode_conversation(target, MESSAGES)
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
    ids, mask = encode_conversation(with_template(tiny, PLAIN), messages)
    assert tiny.tokenizer.decode([t for t, m in zip(ids, mask, strict=True) if m]) == "x is 1.<|endoftext|>"
    assert mask.index(1) > len(ids) // 2


def test_a_template_that_rewrites_earlier_turns_is_refused(tiny: Target) -> None:
    with pytest.raises(UserError, match=r"renders earlier turns differently once message 2 is there"):
        encode_conversation(with_template(tiny, FORGETFUL), MESSAGES)


def test_a_prompt_ends_with_the_header_of_the_answer(tiny: Target) -> None:
    target = with_template(tiny, PLAIN)
    ids = encode_prompt(target, messages_of(("hello",), (), None))
    assert target.tokenizer.decode(ids) == "<user>hello\n<assistant>"


def test_a_target_without_a_template_is_refused_by_name(tiny: Target) -> None:
    with pytest.raises(UserError, match=r"Target 'tiny' has no chat template"):
        encode_prompt(tiny, messages_of(("hello",), (), None))
