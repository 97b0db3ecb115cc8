"""Where prompts come from: files, hub data sets, the standard library, and the built-in set.

A source is an object with one method, `prompts(target, count, seed)`; the configuration picks it. Splitting,
deduplication and answering are the same for all of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from data.prompt_rows import Prompt, parse_row, read_prompts
from data.stdlib import documents
from models.errors import UserError
from models.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILTIN = Path(__file__).parent / "builtin.jsonl"
SPLITS = ("train", "validation", "test")
KINDS = ("code", "docs")  # of the standard library's documents


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
    """A data set of the Hugging Face hub, or a folder, with rows as `PromptFile` reads them.

    A folder is one written by `datasets`, or holds JSONL or Parquet files. With `streaming`, rows are read only as far
    as they are needed and none is kept on the disk; they are shuffled within a buffer of `shuffle_buffer` rows.
    """

    name: str
    split: str = "train"
    subset: str | None = None
    streaming: bool = False
    shuffle_buffer: int = 10_000

    def __post_init__(self) -> None:
        if self.shuffle_buffer < 1:
            raise UserError(f"data.source.shuffle_buffer is {self.shuffle_buffer}: it must be at least 1.")

    def prompts(self, target: Target, count: int, seed: int) -> list[Prompt]:
        """Rows in a shuffled order, `count` times four at most; of a stream no more than give `count` prompts."""
        try:
            rows = self._rows()
            if self.streaming:
                rows = rows.shuffle(seed=seed, buffer_size=self.shuffle_buffer)
                return list(_distinct(islice(rows, 4 * count), self.name, count))
            rows = rows.shuffle(seed=seed).select(range(min(len(rows), 4 * count)))
            return [parse_row(row, f"{self.name}, row {index}") for index, row in enumerate(rows)]
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"Cannot load the data set {self.name!r} (split {self.split!r}): {reason}") from error

    def _rows(self) -> Any:
        import datasets

        if any((Path(self.name) / left).exists() for left in ("state.json", "dataset_dict.json")):  # by datasets
            rows: Any = datasets.load_from_disk(self.name)
            rows = rows[self.split] if isinstance(rows, datasets.DatasetDict) else rows
            return rows.to_iterable_dataset() if self.streaming else rows
        return datasets.load_dataset(self.name, self.subset, split=self.split, streaming=self.streaming)


def _distinct(rows: Iterable[Any], name: str, count: int) -> Iterator[Prompt]:
    """Prompts of rows until `count` are distinct."""
    seen: set[str] = set()
    for index, row in enumerate(rows):
        prompt = parse_row(row, f"{name}, row {index} of the stream")
        seen.add(prompt.id)
        yield prompt
        if len(seen) == count:
            return


@dataclass(frozen=True, slots=True)
class Mixture:
    """Prompts of several sources, so that every split holds some of each.

    With `weights`, every split holds them in just these proportions, to a whole prompt, and so does each part of its
    order; a source that has too few is an error. Without, sources take turns, and where one has no more the others go
    on; where a source does not decide the split, its first prompt of every twenty goes to test and the next to
    validation.
    """

    sources: tuple[PromptSource, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("data.source.sources is empty: name at least one source.")
        if self.weights is not None:
            if len(self.weights) != len(self.sources):
                raise UserError(f"data.source.weights has {len(self.weights)} numbers for {len(self.sources)} sources.")
            if not all(0 < weight < math.inf for weight in self.weights):
                raise UserError(f"data.source.weights is {list(self.weights)}: each must be above 0.")

    def prompts(self, target: Target, count: int, seed: int) -> list[Prompt]:
        """A part of `count` from each source, an equal one without weights, and what else a source gave at the end."""
        if self.weights is not None:
            dealt = self.deal(target, SplitSizes(count, 0, 0), seed)
            return dealt["train"]
        part = math.ceil(count / len(self.sources))
        given = [_decided(self._of(index, target, part, seed)) for index in range(len(self.sources))]
        return [prompt for turn in zip_longest(*given) for prompt in turn if prompt is not None]

    def deal(self, target: Target, sizes: SplitSizes, seed: int) -> dict[str, list[Prompt]]:
        """The splits by weight. Raises UserError that names the source of which there are too few prompts for one."""
        assert self.weights is not None
        parts = {split: apportion(getattr(sizes, split), self.weights) for split in SPLITS}
        dealt: list[dict[str, list[Prompt]]] = []
        taken: set[str] = set()
        for index in range(len(self.sources)):
            own = SplitSizes(**{split: counts[index] for split, counts in parts.items()})
            found = self._of(index, target, own.total, seed)
            try:
                dealt.append(split_prompts((p for p in found if p.id not in taken), own))
            except UserError as error:
                raise UserError(f"data.source.sources[{index}] ({self._name(index)}): {error}") from error
            taken |= {p.id for prompts in dealt[-1].values() for p in prompts}
        return {split: _in_proportion([part[split] for part in dealt], self.weights) for split in SPLITS}

    def _of(self, index: int, target: Target, count: int, seed: int) -> list[Prompt]:
        name = f"{index} ({self._name(index)})"
        return [replace(p, source=name) for p in self.sources[index].prompts(target, count, seed)]

    def _name(self, index: int) -> str:
        source: Any = self.sources[index]
        return str(getattr(source, "name", None) or getattr(source, "path", None) or type(source).__name__)


def apportion(count: int, weights: tuple[float, ...]) -> list[int]:
    """`count` in whole parts that are proportional to `weights`, by largest remainders; ties go to the first."""
    exact = [count * weight / sum(weights) for weight in weights]
    parts = [math.floor(share) for share in exact]
    order = sorted(range(len(weights)), key=lambda i: (parts[i] - exact[i], i))
    for index in order[: count - sum(parts)]:
        parts[index] += 1
    return parts


def _in_proportion(parts: list[list[Prompt]], weights: tuple[float, ...]) -> list[Prompt]:
    """All prompts of the parts, the next always of the part that is the furthest behind its share so far."""
    mixed: list[Prompt] = []
    given = [0] * len(parts)
    for _ in range(sum(map(len, parts))):
        left = [i for i, part in enumerate(parts) if given[i] < len(part)]
        index = max(left, key=lambda i: (weights[i] / sum(weights) * (len(mixed) + 1) - given[i], -i))
        mixed.append(parts[index][given[index]])
        given[index] += 1
    return mixed


def deal(
    source: PromptSource, target: Target, sizes: SplitSizes, seed: int, wanted: SplitSizes | None = None
) -> dict[str, list[Prompt]]:
    """The splits of a source's prompts, as they are for `sizes`, and of those the first that are `wanted`.

    Raises UserError where there are too few for one.
    """
    wanted = wanted or sizes
    if isinstance(source, Mixture) and source.weights is not None:
        dealt = source.deal(target, sizes, seed)
        return {split: prompts[: getattr(wanted, split)] for split, prompts in dealt.items()}
    return split_prompts(source.prompts(target, sizes.total, seed), wanted)


def _decided(prompts: list[Prompt]) -> list[Prompt]:
    held_out = {0: "test", 1: "validation"}
    return [replace(p, split=p.split or held_out.get(index % 20, "train")) for index, p in enumerate(prompts)]


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
