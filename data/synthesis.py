"""Self-synthesised prompts: an instruct target writes the user's turn itself (Magpie, 2406.08464).

The chat template is cut just where the user's text would start; what the target samples from there, until it ends the
turn, is a prompt of the kind that it was trained to answer. So no data set is needed.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.progress import Progress
from data.prompts import Prompt
from data.resumable import run_chunks
from data.template import require_template
from engine.loop import generate
from engine.settings import DecodeSettings
from models.errors import UserError
from models.sampling import SamplingParams
from models.target import Target

_MARK = "\u241fuser text\u241f"


@dataclass(frozen=True, slots=True)
class SelfSynthesis:
    """Sample user turns of up to `max_tokens`; those that did not end by themselves or are too short are dropped.

    Sampling goes on until there are enough distinct ones, up to `patience` times as many turns. `folder` keeps what was
    sampled, so that a killed run goes on.
    """

    folder: str
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 96
    min_characters: int = 12
    patience: float = 8.0
    chunk_size: int = 128

    def prompts(self, target: Target, count: int, seed: int) -> list[Prompt]:
        """Sample in chunks. Raises UserError for a target without a chat template, and for one that repeats itself."""
        most = max(1, math.ceil(self.patience * count / self.chunk_size))
        header, ending = user_frame(target)
        settings = DecodeSettings(
            max_new_tokens=self.max_tokens,
            sampling=SamplingParams(self.temperature, top_p=self.top_p),
            stop_token_ids=target.stop_token_ids | {ending},
        )
        made_from = (target.fingerprint, target.weights_fingerprint, str(target.dtype), header, ending, self, seed)
        name = hashlib.sha256(repr(made_from).encode()).hexdigest()[:12]
        log = Path(self.folder) / f"self_synthesis-{name}.jsonl"

        def sample(chunk: int) -> list[dict[str, Any]]:
            seeds = [seed * 1_000_003 + chunk * self.chunk_size + i for i in range(self.chunk_size)]
            made = generate(target, [header] * self.chunk_size, settings, seeds=seeds)
            texts = [
                target.decode(ids).strip() for ids, ended in zip(made.token_ids, made.stopped, strict=True) if ended
            ]
            return [{"text": text} for text in texts if len(text) >= self.min_characters]

        found: dict[str, Prompt] = {}
        with Progress("self-synthesised prompts", count) as progress:

            def keep(chunk: int, rows: list[dict[str, Any]]) -> bool:
                found.update((p.id, p) for p in (Prompt((row["text"],), "self_synthesis") for row in rows))
                progress.advance(min(len(found), count) - progress.done)
                return len(found) < count and chunk + 1 < most

            run_chunks(log, sample, keep)
        if len(found) < count:
            raise UserError(
                f"{most * self.chunk_size} turns that {target.name!r} wrote as the user gave {len(found)} distinct "
                f"prompts, and {count} are wanted: raise data.source.max_tokens, or lower data.sizes."
            )
        return list(found.values())


def user_frame(target: Target) -> tuple[list[int], int]:
    """What the template puts before a user's text, as token ids, and the token that ends the text."""
    tokenizer = require_template(target)
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    before, found, after = text.partition(_MARK)
    ending = target.encode(after)
    if not found or not before or not ending:
        raise UserError(
            f"The chat template of {target.name!r} does not frame a user's text, so the target cannot write it."
        )
    return target.encode(before), ending[0]
