"""Instructions about real text, without a data set: summaries, questions, translations and edits of code.

The passages are paragraphs of the standard library's documentation, the functions are its source. What a chat target
writes by itself (`data.synthesis`) are short questions; long prompts whose answers quote them are another thing, and a
drafter that never met one drafts poorly there.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from data.prompts import Prompt
from data.stdlib import Document, documents
from models.target import Target

_SUMMARIES = (
    "{passage}\n\nSummarise this text in {number} sentences.",
    "Write a short summary of the following passage.\n\n{passage}",
    "What are the {number} main points of this text?\n\n{passage}",
)
_QUESTIONS = (
    "{passage}\n\nWhat does this text say about {term}?",
    "Use only the text below to explain {term}.\n\n{passage}",
    "{passage}\n\nRewrite this passage in simpler words.",
)
_RETRIEVALS = (
    "{sources}\n\nQuestion: What is said about {term}? Answer briefly and quote the sentence that supports you.",
    "{sources}\n\nWhich of these texts mentions {term}? Give its number and copy the sentence.",
)
_TRANSLATIONS = ('Translate into {language}: "{sentence}"', 'How do you say this in {language}? "{sentence}"')
_EDITS = (
    "Add type hints and a docstring to this function, and return the full code.\n\n```python\n{code}\n```",
    "Rename the variable `{name}` to `{name}_value` and return the full code.\n\n```python\n{code}\n```",
    "Explain what this function does, step by step.\n\n```python\n{code}\n```",
    "Write a unit test for this function.\n\n```python\n{code}\n```",
    "Add a comment above every statement of this code. Do not change anything else.\n\n```python\n{code}\n```",
)
_LANGUAGES = ("French", "German", "Spanish", "Italian", "Portuguese")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
_PER_DOCUMENT = 4  # prompts of a kind
_WORD = re.compile(r"[A-Za-z_]{5,}")


@dataclass(frozen=True, slots=True)
class Instructions:
    """Prompts of five kinds in turn, about passages of `min_words` to `max_words` words and functions of few lines.

    `max_lines` is the most that a function may have. A prompt's split is that of its document (`data.stdlib`).
    """

    min_words: int = 30
    max_words: int = 120
    max_lines: int = 25

    def prompts(self, target: Target, count: int, seed: int) -> list[Prompt]:
        """Every document gives some of each kind; the kinds alternate, in an order drawn by `seed`."""
        rng = random.Random(seed)
        kinds: dict[str, Callable[[_Text, random.Random], Iterator[str]]] = {
            "summary": self._summaries,
            "question_answering": self._questions,
            "retrieval": self._retrievals,
            "translation": self._translations,
            "code": self._edits,
        }
        made: dict[str, list[Prompt]] = {kind: [] for kind in kinds}
        for document in documents():
            text = self._cut(document)
            for kind, write in kinds.items():
                made[kind] += [Prompt((asked,), kind, split=document.split) for asked in write(text, rng)]
        for prompts in made.values():
            rng.shuffle(prompts)
        return [prompt for group in zip(*made.values(), strict=False) for prompt in group]

    def _summaries(self, text: _Text, rng: random.Random) -> Iterator[str]:
        for passage in text.passages(rng):
            yield rng.choice(_SUMMARIES).format(passage=passage, number=rng.choice(("two", "three")))

    def _questions(self, text: _Text, rng: random.Random) -> Iterator[str]:
        for passage in text.passages(rng):
            yield rng.choice(_QUESTIONS).format(passage=passage, term=_term(passage, rng))

    def _retrievals(self, text: _Text, rng: random.Random) -> Iterator[str]:
        for _ in range(_PER_DOCUMENT):
            passages = text.passages(rng, 3)
            if len(passages) == 3:
                sources = "\n".join(f"[{number}] {passage}" for number, passage in enumerate(passages, 1))
                yield rng.choice(_RETRIEVALS).format(sources=sources, term=_term(rng.choice(passages), rng))

    def _translations(self, text: _Text, rng: random.Random) -> Iterator[str]:
        for passage in text.passages(rng):
            sentence = passage.partition(". ")[0].rstrip(".") + "."
            yield rng.choice(_TRANSLATIONS).format(language=rng.choice(_LANGUAGES), sentence=sentence)

    def _edits(self, text: _Text, rng: random.Random) -> Iterator[str]:
        for code in rng.sample(text.functions, min(_PER_DOCUMENT, len(text.functions))):
            yield rng.choice(_EDITS).format(code=code, name=_term(code.partition("(")[2], rng))

    def _cut(self, document: Document) -> _Text:
        """The passages of a document that are neither too short nor too long."""
        code = ast.parse(document.text) if document.name.endswith(".py") else None
        if code is None:
            prose, functions = [document.text], []
        else:
            prose = [ast.get_docstring(node) or "" for node in ast.walk(code) if isinstance(node, _DOCUMENTED)]
            lines = document.text.encode().split(b"\n")
            top = [_source(lines, node) for node in code.body if isinstance(node, ast.FunctionDef)]
            functions = [text for text in top if 4 <= text.count("\n") < self.max_lines]
        paragraphs = [" ".join(part.split()) for text in prose for part in text.split("\n\n")]
        whole = [p for p in paragraphs if p.endswith(".") and ">>>" not in p and "::=" not in p]
        return _Text([p for p in whole if self.min_words <= len(p.split()) <= self.max_words], functions)


@dataclass(frozen=True, slots=True)
class _Text:
    """A document's paragraphs of prose, each on one line, and its top-level functions."""

    paragraphs: list[str]
    functions: list[str]

    def passages(self, rng: random.Random, count: int = _PER_DOCUMENT) -> list[str]:
        """At most `count` different paragraphs."""
        return rng.sample(self.paragraphs, min(count, len(self.paragraphs)))


def _source(lines: list[bytes], node: ast.FunctionDef) -> str:
    """As `ast.get_source_segment`, which divides the whole text into lines for every node."""
    assert node.end_lineno is not None
    of = lines[node.lineno - 1 : node.end_lineno]
    of[-1] = of[-1][: node.end_col_offset]
    return b"\n".join(of).decode()


def _term(text: str, rng: random.Random) -> str:
    """A word of the text of five letters or more; the first word of all where there is none."""
    return rng.choice(_WORD.findall(text) or text.split()[:1])
