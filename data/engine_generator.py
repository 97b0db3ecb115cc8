"""Answers by the engine's plain decoding, in this process, in fixed chunks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.asking import AnswerSettings, Row, answerable, context_ids, row_of
from data.progress import Progress
from data.prompts import Prompt
from data.resumable import run_chunks
from engine.loop import generate
from engine.settings import DecodeSettings
from models.sampling import SamplingParams
from models.target import Target


@dataclass(frozen=True, slots=True)
class EngineGenerator:
    """Lets the loaded target answer. A chunk that is finished is on the disk, and is never done again."""

    def describe(self) -> None:
        """Nothing that the answers' settings do not say."""

    def rows(self, target: Target, prompts: list[Prompt], settings: AnswerSettings, folder: Path) -> Iterable[Row]:
        """Answers to every turn, in the order of `prompts`; a later turn's context holds the earlier turns' answers."""
        ordered = answerable(target, prompts, settings)
        chunks = [ordered[i : i + settings.chunk_size] for i in range(0, len(ordered), settings.chunk_size)]

        def answer(chunk: int) -> list[Row]:
            return _answer_chunk(target, chunks[chunk], settings)

        with Progress("answers of the target", len(ordered)) as progress:

            def more(chunk: int, made: list[Row]) -> bool:
                progress.advance(len(chunks[chunk]))
                return chunk + 1 < len(chunks)

            rows = run_chunks(folder / "answers.jsonl", answer, more)
        position = {p.id: i for i, p in enumerate(prompts)}
        return sorted(rows, key=lambda row: (position[row["prompt_id"]], row["turn"]))

    def report(self, folder: Path) -> dict[str, Any]:
        """Nothing can differ: the tokens read and written are the target's own."""
        return {}


def _answer_chunk(target: Target, prompts: list[Prompt], settings: AnswerSettings) -> list[Row]:
    sampling = SamplingParams(settings.temperature, top_p=settings.top_p)
    decode = DecodeSettings(max_new_tokens=settings.max_new_tokens, sampling=sampling)
    answers: dict[str, tuple[str, ...]] = {p.id: () for p in prompts}
    rows = []
    for turn in range(max(len(p.turns) for p in prompts)):
        asking = [p for p in prompts if turn < len(p.turns)]
        contexts = {p.id: context_ids(target, p, answers[p.id]) for p in asking}
        asking = [p for p in asking if len(contexts[p.id]) <= settings.longest_context(target)]
        if not asking:
            break
        seeds = [settings.seed_of(p, turn) for p in asking]
        made = generate(target, [contexts[p.id] for p in asking], decode, seeds=seeds)
        for prompt, ids in zip(asking, made.token_ids, strict=True):
            context = contexts[prompt.id]
            rows.append(row_of(prompt, turn, context + ids, [0] * len(context) + [1] * len(ids)))
            answers[prompt.id] += (target.decode(ids),)
    return rows
