"""Chat messages to token ids and a loss mask, by the target's own chat template.

The mask marks the tokens that the assistant said. It is taken from the template: from its generation marks where it
has them, else from how the rendering grows from one message to the next.
"""

from __future__ import annotations

from typing import Any

from models.errors import UserError
from models.target import Target

Message = dict[str, str]


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


def encode_prompt(target: Target, messages: list[Message]) -> list[int]:
    """Token ids of a conversation up to and including the header of the assistant's next answer."""
    return target.encode(_render(require_template(target), messages, add_generation_prompt=True))


def encode_conversation(target: Target, messages: list[Message]) -> tuple[list[int], list[int]]:
    """Token ids of a whole conversation, and 1 for each token that the assistant said (its end mark included).

    Raises UserError where the template rewrites earlier turns as the conversation grows, so that no mask is exact.
    """
    tokenizer = require_template(target)
    if "{% generation" in tokenizer.chat_template or "{%- generation" in tokenizer.chat_template:
        encoded = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(encoded["input_ids"]), list(encoded["assistant_masks"])
    whole = _render(tokenizer, messages)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        header = _render(tokenizer, messages[:index], add_generation_prompt=True)
        turn = _render(tokenizer, messages[: index + 1])
        if not (turn.startswith(header) and whole.startswith(turn)):
            raise UserError(
                f"The chat template of {target.name!r} renders earlier turns differently once message {index} is "
                "there: no loss mask would be exact. Let the target answer instead (data.answers=target)."
            )
        spans.append((len(header), len(turn)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    mask = [0] * len(ids)
    for start, end in spans:
        for position, (left, right) in enumerate(encoded["offset_mapping"]):
            if start <= left and right <= end:
                mask[position] = 1
                if ids[position] in target.stop_token_ids:
                    break  # what the template puts behind the end mark was not said by the assistant
    return ids, mask


def _render(tokenizer: Any, messages: list[Message], add_generation_prompt: bool = False) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt))
