"""Prompts to the target's own answers, as a data set on disk.

A drafter learns what the target would say, so its training text is the target's own (regenerated) answers: of the
engine's plain decoding, or of a server. What is finished is on the disk and is never done again, and rows go from disk
to disk. The data set's folder is named by the fingerprint of everything that the answers depend on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import datasets
from datasets.arrow_writer import ArrowWriter

from data.asking import AnswerSettings, Row, context_ids, row_of
from data.engine_generator import EngineGenerator
from data.prompts import Prompt
from data.template import encode_conversation
from models.errors import UserError
from models.files import atomic_folder, damaged_files, write_hashes, write_text
from models.target import Target

FORMAT = 1  # of the rows; a change makes older folders unusable, and says so
_WRITTEN_AT_ONCE = 100  # rows
_COLUMNS = datasets.Features(
    {
        "prompt_id": datasets.Value("string"),
        "turn": datasets.Value("int64"),
        "category": datasets.Value("string"),
        "source": datasets.Value("string"),
        "token_ids": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("int8")),
    }
)


class Generator(Protocol):
    """Whoever lets the target answer."""

    def describe(self) -> dict[str, Any] | None:
        """What the answers depend on beside `AnswerSettings`; None for nothing."""

    def rows(self, target: Target, prompts: list[Prompt], settings: AnswerSettings, folder: Path) -> Iterable[Row]:
        """The answers, in the order of `prompts`. What is finished is kept in `folder`."""

    def report(self, folder: Path) -> dict[str, Any]:
        """What there is to tell of answers that are finished; empty for nothing."""


def build_answers(
    target: Target, prompts: list[Prompt], settings: AnswerSettings, root: Path, generator: Generator | None = None
) -> datasets.Dataset:
    """Return rows of `token_ids` and `loss_mask` (1 on answer tokens), made now or read from `root`.

    A folder under `root` is named by the fingerprint; it is reused when its manifest matches. Its rows stay on the
    disk. Without a `generator` the engine answers. Prompts of more than `max_prompt_tokens` are left out and counted.
    Raises UserError when nothing is left, or the disk refuses.
    """
    generator = generator or EngineGenerator()
    manifest = describe(target, prompts, settings, generator)
    folder = root / f"answers-{fingerprint(manifest)}"
    if (folder / "dataset").exists():
        if not (damaged := damaged_files(folder / "dataset")):
            return _opened(folder, manifest)
        print(f"{str(folder / 'dataset')!r} is damaged ({', '.join(damaged)}), and is made again from what was logged")
    write_text(folder / "manifest.json", json.dumps(manifest, indent=1))
    if settings.answers == "given":
        rows: Iterable[Row] = _given_rows(target, prompts, settings)
    else:
        rows = generator.rows(target, prompts, settings, folder)
    _write(folder / "dataset", rows)
    if settings.answers == "target" and (report := generator.report(folder)):
        write_text(folder / "manifest.json", json.dumps({**manifest, "report": report}, indent=1))
        print("answers: " + ", ".join(f"{name} {value}" for name, value in report.items()))
    return _opened(folder, manifest)


def _write(folder: Path, rows: Iterable[Row]) -> None:
    """Write rows as they come: no more than a few are in memory at a time."""
    datasets.disable_progress_bars()
    supervised = 0
    with atomic_folder(folder) as temporary:
        flat = temporary.with_suffix(".arrow")
        try:
            with ArrowWriter(features=_COLUMNS, path=str(flat), writer_batch_size=_WRITTEN_AT_ONCE) as writer:
                for row in rows:
                    supervised += sum(row["loss_mask"])
                    writer.write(row)
                if supervised:
                    writer.finalize()
            if not supervised:
                raise UserError("No answer has a single token to learn from: the loss mask is 0 everywhere.")
            datasets.Dataset.from_file(str(flat)).save_to_disk(temporary)
            write_hashes(temporary)
        finally:
            flat.unlink(missing_ok=True)


def open_answers(folder: Path, manifest: dict[str, Any] | None = None) -> datasets.Dataset:
    """Read a finished data set. Raises UserError where it is missing, damaged, or was made from something else."""
    if damaged := damaged_files(folder / "dataset"):
        raise UserError(f"The answers in {str(folder)!r} are damaged ({', '.join(damaged)}): make them again.")
    return _opened(folder, manifest)


def _opened(folder: Path, manifest: dict[str, Any] | None) -> datasets.Dataset:
    try:
        stored = json.loads((folder / "manifest.json").read_text())
        rows = datasets.load_from_disk(str(folder / "dataset"))
    except (OSError, ValueError) as error:
        raise UserError(f"{str(folder)!r} holds no finished answers: {str(error).splitlines()[0]}") from error
    if manifest is not None:
        different = [key for key in manifest if stored.get(key) != manifest[key]]
        if different:
            raise UserError(
                f"The answers in {str(folder)!r} were made with another {', '.join(different)}: "
                "they are not what this target would say. Leave data.reuse out to make new ones."
            )
    return rows


def describe(
    target: Target, prompts: list[Prompt], settings: AnswerSettings, generator: Generator | None = None
) -> dict[str, Any]:
    """Everything that the answers depend on. The engine has no part in it: its answers are what is meant by them."""
    template = getattr(target.tokenizer, "chat_template", None) or ""
    given = settings.answers == "given"
    asked = json.dumps([_asked(p, given) for p in prompts])
    return {
        "format": FORMAT,
        "target": target.fingerprint,
        "weights": target.weights_fingerprint,
        "dtype": str(target.dtype),
        "template": hashlib.sha256(str(template).encode()).hexdigest()[:16],
        "prompts": hashlib.sha256(asked.encode()).hexdigest()[:16],
        "num_prompts": len(prompts),
        "settings": asdict(settings),
        **({} if given or generator is None or generator.describe() is None else {"generator": generator.describe()}),
    }


def _asked(prompt: Prompt, given: bool) -> list[Any]:
    plain = [prompt.turns, prompt.system, prompt.continuation, prompt.answers if given else ()]
    return [*plain, *(text for text in (prompt.tools_json, prompt.conversation if given else None) if text)]


def fingerprint(manifest: dict[str, Any]) -> str:
    """Short hash of a manifest."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:12]


def _given_rows(target: Target, prompts: list[Prompt], settings: AnswerSettings) -> Iterator[Row]:
    """The data set's own answers: in one row as a rule, in several where the template rewrites earlier turns."""
    for prompt in prompts:
        if not prompt.answers and not prompt.conversation:
            raise UserError(f"data.answers.answers=given, but the prompt {prompt.turns[0][:60]!r} has no answer.")
        if prompt.continuation:
            context, said = context_ids(target, prompt), target.encode(prompt.answers[0])[: settings.max_new_tokens]
            texts = [(context + said, [0] * len(context) + [1] * len(said))]
        else:
            texts = encode_conversation(target, prompt.messages, prompt.tools)
        room = target.max_positions
        for turn, (ids, mask) in enumerate(texts):
            yield row_of(prompt, turn, ids[:room], mask[:room])
