"""Answer a prompt and stream the text: python -m engine "PROMPT" drafter=outputs/RUN/export

Tokens that the drafter had right are coloured. Settings as in conf/engine.yaml: temperature=0.7 decode.top_p=0.9. With
remember=true a look-up cache learns the prompt and the answer, and is saved to its export. With beams=4 the four
best answers of beam search, and how many target passes the drafter saved it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from rich.console import Console

from conf.compose import main, plain
from models.errors import UserError

_SHORT = {"drafter": "export", "target": "target.source"}

if TYPE_CHECKING:
    from engine.beam import BeamSearch
    from engine.loop import Generation
    from engine.stopping import StopStrings
    from models.target import Target


class Stream:
    """Writes an answer as its tokens come, whole characters only, and those that were drafted in green.

    What could be the beginning of a stop string waits until it is known not to be.
    """

    def __init__(self, console: Console, target: Target, stop: StopStrings) -> None:
        self._console, self._target, self._stop = console, target, stop
        self._tokens: list[int] = []
        self._written = ""

    def __call__(self, request: int, tokens: list[int], drafted: int) -> None:
        for index, token in enumerate(tokens):
            self._tokens.append(token)
            text = self._stop.trim(self._target.decode(self._tokens))
            begun = (n for s in self._stop.strings for n in range(1, len(s)) if text.endswith(s[:n]))
            shown = text[: len(text) - max(begun, default=0)]
            if not shown.endswith("\ufffd"):  # the rest of a character is still to come
                self.write(shown, "green" if index < drafted else None)

    def write(self, text: str, style: str | None = None) -> None:
        """Write what `text`, the answer so far, adds to what is there."""
        self._console.print(text[len(self._written) :], style=style, end="", markup=False, highlight=False)
        self._written = max(text, self._written, key=len)


def job(config: DictConfig, prompt: str | None = None) -> None:
    """Load the target and the drafter, answer, and print what the drafter was worth."""
    options = plain(config)
    prompt = options["prompt"] if prompt is None else prompt
    if prompt is None:
        raise UserError('Say what to answer: python -m engine "PROMPT" drafter=outputs/RUN/export')
    if options["beams"] is not None and options["remember"]:
        raise UserError("remember=true learns from an answer, and beams give several: leave one of them out.")
    from engine.beam import beam_search
    from engine.beam_step import BeamSettings
    from engine.loop import generate
    from engine.options import decode_settings
    from engine.stopping import StopStrings
    from models.checkpoint import native
    from models.drafter import accelerate_drafter
    from models.target import load_target

    folder = None if options["export"] is None else Path(options["export"])
    export = None if folder is None else native.read(folder)
    default = {"source": "tiny"} if export is None else export.target["load"]
    tokens, tree = (1, None) if export is None else (export.num_speculative_tokens, export.tree)
    settings = decode_settings(options["decode"], float(options["temperature"]), options["seed"], tokens, tree)
    target = load_target(**{**default, **{k: v for k, v in options["target"].items() if v is not None}})
    target.accelerate()
    drafter = None if folder is None else native.load(folder, target)
    accelerate_drafter(drafter)
    console = Console(highlight=False, soft_wrap=True)
    context = encode(target, str(prompt), options["chat"])
    if options["beams"] is not None:
        beams = BeamSettings(options["beams"], float(options["length_penalty"]), options["early_stopping"])
        print_beams(target, beam_search(target, [context], settings, beams, drafter), console)
        return
    stop = StopStrings(settings.stop_strings, target.decode)
    stream = Stream(console, target, stop)
    made = generate(target, [context], settings, drafter, on_tokens=stream, remember=options["remember"])
    if options["remember"] and folder is not None:
        native.update(drafter, folder)
    stream.write(stop.trim(target.decode(made.token_ids[0])))
    console.print(f"\n{summary(made, settings.lossless)}", style="dim", markup=False)


def print_beams(target: Target, found: BeamSearch, console: Console) -> None:
    """The answers to one prompt, best first, each with its score; then how many target passes they took."""
    for tokens, score in zip(found.token_ids[0], found.scores[0], strict=True):
        console.print(f"{score:.4f}  ", style="green", end="")
        console.print(target.decode(tokens), markup=False)
    console.print(
        f"{len(found.scores[0])} beams in {found.seconds:.1f} s · {found.passes} target passes, and plain beam "
        f"search takes {found.plain_passes}",
        style="dim",
    )


def encode(target: Target, prompt: str, chat: Any) -> list[int]:
    """The prompt's token ids, as a user's turn where the target has a chat template. Raises UserError where not."""
    template = target.tokenizer is not None and target.tokenizer.chat_template
    if chat is True and not template:
        raise UserError(f"chat=true, but target {target.name!r} has no chat template: use chat=false.")
    if chat is False or not template:
        return target.encode(prompt, special_tokens=True)
    messages = [{"role": "user", "content": prompt}]
    rendered = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)  # type: ignore[union-attr]
    return target.encode(str(rendered))


def summary(made: Generation, lossless: bool) -> str:
    """One line: how many tokens, how fast, and what the drafter was worth."""
    count, seconds = len(made.token_ids[0]), made.seconds
    speed = count / seconds.total
    line = f"{count} tokens in {seconds.total:.1f} s ({speed:.1f}/s)"
    if made.stats.drafted.size:
        line += (
            f" · τ {made.stats.block_efficiency:.2f} tokens per target pass · α {made.stats.acceptance_rate:.2f} · "
            f"draft {seconds.draft:.1f} s, target {seconds.verify + seconds.prefill:.1f} s"
        )
    return line if lossless else f"{line} · typical acceptance: not the target's own law"


def split_prompt(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The first argument, where it is no setting, and the settings, short names written out.

    Hydra would take drafter=X and target=X for choices of the groups that configure training.
    """
    parts = [argument.partition("=") for argument in arguments]
    arguments = [f"{_SHORT.get(name, name)}{equals}{value}" for name, equals, value in parts]
    if not arguments or arguments[0].startswith("-") or re.match(r"[+~]{0,2}[A-Za-z_][\w.@/]*=", arguments[0]):
        return None, arguments
    return arguments[0], arguments[1:]


if __name__ == "__main__":
    given, sys.argv[1:] = split_prompt(sys.argv[1:])
    main("engine", lambda config: job(config, given))
