"""Texts that exports write in the engine, token by token: which of them were drafted, and by whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

PROMPT = "def binary_search(items, wanted):\n"
_INCOMPLETE = "\ufffd"  # what a decoder puts where a character is not whole yet


@dataclass(frozen=True, slots=True)
class Piece:
    """One token's text. `round` counts target passes; `drafted` tells an accepted token from the target's own."""

    text: str
    round: int
    drafted: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer to `prompt`; `proposer` is the drafter's name, `export` that of its folder among those that answered,
    `summary` a line about speed and acceptance.
    """

    proposer: str
    export: str
    prompt: str
    pieces: list[Piece]
    summary: str


def samples(folders: Sequence[Path], options: dict[str, Any]) -> tuple[list[Sample], list[str]]:
    """Let every export answer the prompt; an export that cannot is told of in a sentence instead.

    A target is loaded once for all exports that name it in the same way.
    """
    from eval.run_folder import endings
    from models.errors import UserError

    made: list[Sample] = []
    lacking: list[str] = []
    targets: dict[str, Any] = {}
    each = list({folder.resolve(): folder for folder in folders}.values())
    for folder, name in zip(each, endings(each, least=2), strict=True):
        if not (folder / "config.json").exists():
            lacking.append(f"There is no {name} (yet): nothing can answer for it.")
            continue
        try:
            made.append(answer(folder, name, options, targets))
        except UserError as error:
            lacking.append(f"{name}: {error}")
    return made, lacking


def answer(folder: Path, name: str, options: dict[str, Any], targets: dict[str, Any]) -> Sample:
    """The answer of an export, here called `name`. `targets` keeps what is loaded, and is looked at first.

    Raises UserError as loading does.
    """
    from engine.__main__ import encode, summary
    from engine.loop import generate
    from engine.options import decode_settings
    from models.checkpoint import detect, target_options
    from models.drafter import accelerate_drafter
    from models.target import load_target

    module = detect(folder)
    export = module.read(folder)
    wanted = target_options(export, options["target"], folder)
    key = repr(sorted(wanted.items()))
    if key not in targets:
        targets[key] = load_target(**wanted)
    target = targets[key]
    drafter = module.load(folder, target)
    target.accelerate()
    accelerate_drafter(drafter)
    settings = decode_settings(
        options["decode"], float(options["temperature"]), options["seed"], export.num_speculative_tokens, export.tree
    )
    prompt = options["prompt"] or PROMPT
    rounds: list[tuple[list[int], int]] = []
    context = encode(target, prompt, "auto")
    made = generate(
        target, [context], settings, drafter, on_tokens=lambda _, tokens, drafted: rounds.append((tokens, drafted))
    )
    return Sample(export.name, name, prompt, pieces_of(rounds, target.decode), summary(made, settings.lossless))


def pieces_of(rounds: Sequence[tuple[list[int], int]], decode: Callable[[list[int]], str]) -> list[Piece]:
    """Each token's text, from rounds of (tokens, how many of them were drafted).

    A character of several tokens goes to the last of them: the others' text is empty.
    """
    tokens: list[int] = []
    written, found = "", []
    for number, (new, drafted) in enumerate(rounds):
        for place, token in enumerate(new):
            tokens.append(token)
            text = decode(tokens)
            text = written if text.endswith(_INCOMPLETE) else text
            found.append(Piece(text[len(written) :], number, place < drafted))
            written = text
    rest = decode(tokens)[len(written) :] if tokens else ""
    if rest:
        found[-1] = Piece(rest, found[-1].round, found[-1].drafted)
    return found


def coloured(sample: Sample) -> str:
    """The text as HTML: accepted tokens marked, rounds in turns of two colours, who proposed them on pointing there."""
    parts = [f'<div class="sample" lang="und">{escape(sample.prompt)}']
    for piece in sample.pieces:
        text = escape(piece.text)
        if piece.drafted and text:
            kind = ' class="odd"' if piece.round % 2 else ""
            parts.append(f'<mark{kind} title="round {piece.round}: {escape(sample.proposer)}">{text}</mark>')
        else:
            parts.append(text)
    return "".join(parts) + "</div>"
