"""Where prompts come from: files, hub data sets, the standard library, and the built-in set.

A source is an object with one method, `prompts(target, count, seed)`; the configuration picks it. Splitting,
deduplication and answering are the same for all of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from data.stdlib import documents
from models.errors import UserError
from models.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILTIN = Path(__file__).parent / "builtin.jsonl"
SPLITS = ("train", "validation", "test")
KINDS = ("code", "docs")  # of the standard library's documents
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user asks: chat `turns`, or, where `continuation` is set, plain text to be continued without a template.

    `answers` holds the data set's own answers to the turns, where it has them. `split` is set where the source
    decides it, as the standard library's documents do.
    """

    turns: tuple[str, ...]
    category: str = "all"
    continuation: bool = False
    system: str | None = None
    answers: tuple[str, ...] = ()
    split: str | None = None
    id: str = field(init=False, default="")

    def __post_init__(self) -> None:
        text = json.dumps([" ".join(turn.split()) for turn in self.turns] + [self.continuation, self.system])
        object.__setattr__(self, "id", hashlib.sha256(text.encode()).hexdigest()[:16])


class PromptSource(Protocol):
    """Anything that can hand over prompts."""

    def prompts(self, target: Target, count: int, seed: int) -> list[Prompt]:
        """At least `count` prompts where the source has that many; the same ones for the same seed."""


@dataclass(frozen=True, slots=True)
class StandardLibrary:
    """Openings of the standard library's files and topics, `min_tokens` to `max_tokens` long, to be continued.

    A document's split is that of `data.stdlib`, so that test prompts come from files that no model was trained on. With
    `kind` "code" or "docs" they are of source files or of topics alone. As its answer a prompt has how the document
    goes on, for some twice as long as a prompt can be; where it is over, an empty line. Raises UserError for any other
    kind.
    """

    min_tokens: int = 16
    max_tokens: int = 96
    per_document: int = 64
    kind: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in (None, *KINDS):
            raise UserError(f"data.source.kind is {self.kind!r}: choose {' or '.join(KINDS)}, or null for both.")

    def prompts(self, target: Target, count: int, seed: int) -> list[Prompt]:
        """Cut prompts at random places of random documents, in a fixed proportion of the splits."""
        return list(_openings(self, _Spelling(target.fingerprint, target.require_tokenizer()), seed))


@dataclass(frozen=True, slots=True)
class _Spelling:
    """A tokenizer, which equals all of targets with this fingerprint."""

    fingerprint: str
    tokenizer: PreTrainedTokenizerBase = field(compare=False)


@lru_cache(maxsize=4)  # the whole library is tokenised, and a process may want the same prompts several times
def _openings(source: StandardLibrary, spelling: _Spelling, seed: int) -> tuple[Prompt, ...]:
    rng, tokenizer = random.Random(seed), spelling.tokenizer
    found: list[Prompt] = []
    for document in documents():
        kind = "docs" if document.name.startswith("topics/") else "code"
        if source.kind not in (None, kind):
            continue
        lines = document.text.splitlines(keepends=True)
        places = [
            (rng.randrange(len(lines)), rng.randint(source.min_tokens, source.max_tokens))
            for _ in range(min(source.per_document, 1 + len(lines) // 20))
        ]
        texts = ["".join(lines[start : start + 40])[: 8 * source.max_tokens] for start, _ in places]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        whole = [place for place in zip(places, ids, strict=True) if len(place[1]) >= place[0][1]]
        cuts = tokenizer.batch_decode([ids[:length] for (_, length), ids in whole], skip_special_tokens=True)
        for ((start, _), _), cut in zip(whole, cuts, strict=True):
            rest = "".join(lines[start : start + 80])[len(cut.rstrip("\ufffd")) :][: 16 * source.max_tokens]
            found.append(Prompt((cut,), kind, continuation=True, answers=(rest or "\n",), split=document.split))
    rng.shuffle(found)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A JSONL file. A row holds one of: `prompt` (text), `turns` (list of user turns, as Spec-Bench has them),
    `messages` (role and content) or `conversations` (from and value, as ShareGPT has them); `category` is optional.
    """

    path: str

    def prompts(self, target: Target, count: int, seed: int) -> list[Prompt]:
        """All rows, in the file's order. Raises UserError naming file, line and what is missing."""
        return list(read_prompts(Path(self.path)))


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A data set of the Hugging Face hub, or a folder written by `datasets`, with rows as `PromptFile` reads them."""

    name: str
    split: str = "train"
    subset: str | None = None

    def prompts(self, target: Target, count: int, seed: int) -> list[Prompt]:
        """Rows in a shuffled order, `count` times four at most."""
        import datasets

        try:
            if Path(self.name).is_dir():
                rows = datasets.load_from_disk(self.name)
                rows = rows[self.split] if isinstance(rows, datasets.DatasetDict) else rows
            else:
                rows = datasets.load_dataset(self.name, self.subset, split=self.split)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"Cannot load the data set {self.name!r} (split {self.split!r}): {reason}") from error
        rows = rows.shuffle(seed=seed).select(range(min(len(rows), 4 * count)))
        return [parse_row(row, f"{self.name}, row {index}") for index, row in enumerate(rows)]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Prompts of several sources in turn, so that every split holds some of each.

    Where a source does not decide the split, its first prompt of every twenty goes to test and the next to validation.
    """

    sources: tuple[PromptSource, ...]

    def prompts(self, target: Target, count: int, seed: int) -> list[Prompt]:
        """An equal part of `count` from each source, and what else a source gave at the end."""
        if not self.sources:
            raise UserError("data.source.sources is empty: name at least one source.")
        part = math.ceil(count / len(self.sources))
        given = [_decided(source.prompts(target, part, seed)) for source in self.sources]
        return [prompt for turn in zip_longest(*given) for prompt in turn if prompt is not None]


def _decided(prompts: list[Prompt]) -> list[Prompt]:
    held_out = {0: "test", 1: "validation"}
    return [replace(p, split=p.split or held_out.get(index % 20, "train")) for index, p in enumerate(prompts)]


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Read a JSONL prompt file. Raises UserError naming file, line and what is missing."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read the prompt file {str(path)!r}: {error}") from error
    empty = True
    for number, line in enumerate(text.splitlines(), 1):
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
            return _conversation(row[key], key, role_key, text_key, category, where)
    raise UserError(
        f"{where}: no 'prompt', 'turns', 'messages' or 'conversations' (found: {', '.join(row) or 'nothing'})."
    )


def _texts(values: list[Any], key: str, where: str) -> tuple[str, ...]:
    if not values or not all(isinstance(value, str) and value.strip() for value in values):
        raise UserError(f"{where}: {key!r} must hold text, and not be empty.")
    return tuple(values)


def _conversation(messages: list[Any], key: str, role_key: str, text_key: str, category: str, where: str) -> Prompt:
    system: str | None = None
    said: dict[str, list[str]] = {"user": [], "assistant": []}
    for index, message in enumerate(messages):
        at = f"{where}: {key}[{index}]"
        if not isinstance(message, dict) or role_key not in message or text_key not in message:
            raise UserError(f"{at} needs {role_key!r} and {text_key!r}.")
        role = _ROLES.get(str(message[role_key]))
        if role is None:
            raise UserError(f"{at}: unknown role {message[role_key]!r}: expected {', '.join(sorted(_ROLES))}.")
        (text,) = _texts([message[text_key]], text_key, at)
        if role == "system":
            system = text
            continue
        if len(said["user"]) - len(said["assistant"]) != (role == "assistant"):
            raise UserError(f"{at}: user and assistant do not take turns.")
        said[role].append(text)
    if not said["user"]:
        raise UserError(f"{where}: {key!r} holds no user turn.")
    return Prompt(tuple(said["user"]), category, system=system, answers=tuple(said["assistant"]))


@dataclass(frozen=True, slots=True)
class SplitSizes:
    """How many prompts each split gets."""

    train: int
    validation: int
    test: int

    @property
    def total(self) -> int:
        """Prompts needed in all."""
        return self.train + self.validation + self.test


def split_prompts(prompts: Iterable[Prompt], sizes: SplitSizes) -> dict[str, list[Prompt]]:
    """Deduplicate prompts by their text and deal them out, keeping to the split that a source set.

    The splits are disjoint by prompt. Test and validation are filled first, and prompts are dealt in the order given.
    Raises UserError where there are too few for a split.
    """
    unique = {prompt.id: prompt for prompt in prompts}
    result: dict[str, list[Prompt]] = {split: [] for split in SPLITS}
    wanted = {"test": sizes.test, "validation": sizes.validation, "train": sizes.train}
    for prompt in unique.values():
        for split, size in wanted.items():
            if prompt.split in (None, split) and len(result[split]) < size:
                result[split].append(prompt)
                break
    for split, size in wanted.items():
        if len(result[split]) < size:
            raise UserError(
                f"The source gave {len(unique)} distinct prompts: {len(result[split])} are left for the split "
                f"{split!r}, which wants {size}. Lower data.sizes.{split} or add prompts."
            )
    return result
