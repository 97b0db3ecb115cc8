"""Chat templates as real models have them, and beside each a plain Python function that says the same.

A writer returns the pieces of a rendered conversation, each with whether the assistant said it: the slow oracle of
loss masks. With `header` the header of the next answer follows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Pieces = list[tuple[str, bool]]
Messages = list[dict[str, Any]]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' %}{%- generation -%}{{- m.content + '<|im_end|>' }}{%- endgeneration -%}"
    "{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA3 = (
    "{{- '<|begin|>' }}"
    "{%- if tools %}{{- '<|head|>ipython<|/head|>\\n\\n' }}{%- for t in tools %}{{- t | tojson }}{{- '\\n' }}"
    "{%- endfor %}{{- '<|eot|>' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}{{- '<|head|>ipython<|/head|>\\n\\n' + m.content | trim + '<|eot|>' }}"
    "{%- elif m.tool_calls %}{{- '<|head|>assistant<|/head|>\\n\\n' }}"
    "{{- m.tool_calls[0].function | tojson }}{{- '<|eom|>' }}"
    "{%- else %}{{- '<|head|>' + m.role + '<|/head|>\\n\\n' + m.content | trim + '<|eot|>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}"
)
QWEN3 = (
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for t in tools %}{{- t | tojson + '\\n' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- set ns = namespace(last=messages | length) %}"
    "{%- for m in messages[::-1] %}{%- if ns.last == messages | length and m.role == 'user' %}"
    "{%- set ns.last = messages | length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set content = m.content %}{%- set thought = '' %}"
    "{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content }}"
    "{%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>' + (call.function | tojson) + '</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>' }}{{- m.content }}"
    "{{- '</tool_response><|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
MISTRAL = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set rest = messages %}{%- endif %}"
    "{{- '<s>' }}"
    "{%- for m in rest %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- if m.role == 'user' %}{%- if loop.last and system is defined %}"
    "{{- '[INST] ' + system + '\\n\\n' + m.content + '[/INST]' }}{%- else %}{{- '[INST] ' + m.content + '[/INST]' }}"
    "{%- endif %}{%- else %}{{- ' ' + m.content | trim + '<|im_end|>' }}{%- endif %}"
    "{%- endfor %}"
)
DEEPSEEK_R1 = (  # the header begins a thought, which the rendered answer does not have
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{{- '<|assistant|>' + m.content.split('</think>')[-1] + '<|im_end|>' }}"
    "{%- else %}{{- '<|' + m.role + '|>' + m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|><think>\\n' }}{%- endif %}"
)


def chatml(messages: Messages, tools: Messages | None, header: bool) -> Pieces:
    pieces: Pieces = []
    for m in messages:
        said = m["role"] == "assistant"
        pieces += [(f"<|im_start|>{m['role']}\n", False), (m["content"] + "<|im_end|>", said), ("\n", False)]
    return pieces + [("<|im_start|>assistant\n", False)] * header


def llama3(messages: Messages, tools: Messages | None, header: bool) -> Pieces:
    pieces: Pieces = [("<|begin|>", False)]
    if tools:
        listed = "".join(json.dumps(tool) + "\n" for tool in tools)
        pieces.append((f"<|head|>ipython<|/head|>\n\n{listed}<|eot|>", False))
    for m in messages:
        role = "ipython" if m["role"] == "tool" else m["role"]
        pieces.append((f"<|head|>{role}<|/head|>\n\n", False))
        if m.get("tool_calls"):
            pieces.append((json.dumps(m["tool_calls"][0]["function"]) + "<|eom|>", True))
        else:
            pieces.append((m["content"].strip() + "<|eot|>", role == "assistant"))
    return pieces + [("<|head|>assistant<|/head|>\n\n", False)] * header


def qwen3(messages: Messages, tools: Messages | None, header: bool) -> Pieces:
    pieces: Pieces = []
    if tools:
        listed = "".join(json.dumps(tool) + "\n" for tool in tools)
        pieces.append((f"<|im_start|>system\n# Tools\n{listed}<|im_end|>\n", False))
    last_question = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=len(messages))
    for index, m in enumerate(messages):
        if m["role"] == "tool":
            pieces.append((f"<|im_start|>user\n<tool_response>{m['content']}</tool_response><|im_end|>\n", False))
        elif m["role"] != "assistant":
            pieces.append((f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n", False))
        else:
            thought, content = m.get("reasoning_content", ""), m["content"]
            if not thought and "</think>" in content:
                thought, content = content.removeprefix("<think>").split("</think>")
                thought, content = thought.strip("\n"), content.lstrip("\n")
            shown = index > last_question and (index == len(messages) - 1 or thought)
            text = f"<think>\n{thought}\n</think>\n\n" * bool(shown) + content
            for call in m.get("tool_calls", []):
                text += f"\n<tool_call>{json.dumps(call['function'])}</tool_call>"
            pieces += [("<|im_start|>assistant\n", False), (text + "<|im_end|>", True), ("\n", False)]
    return pieces + [("<|im_start|>assistant\n", False)] * header


def mistral(messages: Messages, tools: Messages | None, header: bool) -> Pieces:
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    rest = messages[system is not None :]
    pieces: Pieces = [("<s>", False)]
    for index, m in enumerate(rest):
        if m["role"] == "assistant":
            pieces.append((f" {m['content'].strip()}<|im_end|>", True))
        else:
            told = f"{system}\n\n" if system is not None and index == len(rest) - 1 else ""
            pieces.append((f"[INST] {told}{m['content']}[/INST]", False))
    return pieces


@dataclass(frozen=True)
class Template:
    text: str
    write: Callable[[Messages, Messages | None, bool], Pieces]


TEMPLATES = {
    "chatml": Template(CHATML, chatml),
    "chatml_marked": Template(CHATML_MARKED, chatml),
    "llama3": Template(LLAMA3, llama3),
    "qwen3": Template(QWEN3, qwen3),
    "mistral": Template(MISTRAL, mistral),
}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<|eom|>", "<|begin|>", "<s>")
ENDS = ("<|im_end|>", "<|eot|>", "<|eom|>")
