"""`python -m engine`: the prompt on the command line, the stream, and the line at the end."""

from __future__ import annotations

import io
import random

import hydra
import pytest
from rich.console import Console

from conf.compose import ROOT
from engine.__main__ import Stream, encode, print_beams, split_prompt, summary
from engine.beam import beam_search
from engine.beam_step import BeamSettings
from engine.loop import generate
from engine.settings import DecodeSettings
from engine.stopping import StopStrings
from models.errors import UserError
from models.target import Target


@pytest.mark.parametrize(
    "prompt", ["Why?", 'it\'s "here", {a: [1]}', "${seed} costs $5", "é 🙂 = 3", " a, b ", "2=1+1"]
)
def test_the_first_argument_is_the_prompt_as_it_stands(prompt: str) -> None:
    assert split_prompt([prompt, "temperature=0.5"]) == (prompt, ["temperature=0.5"])


def test_short_names_are_written_out_and_understood() -> None:
    prompt, settings = split_prompt(["Why?", "drafter=outputs/a/export", "target=smollm2", "target.device=cpu"])
    assert (prompt, settings) == ("Why?", ["export=outputs/a/export", "target.source=smollm2", "target.device=cpu"])
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        config = hydra.compose("engine", overrides=settings)
    assert (config.export, config.target.source) == ("outputs/a/export", "smollm2")


def test_settings_are_no_prompt() -> None:
    for first in ("prompt=x", "decode.top_k=3", "+a=b", "--help"):
        assert split_prompt([first, "seed=1"]) == (None, [first, "seed=1"])
    assert split_prompt([]) == (None, [])


def streamed(target: Target, tokens: list[int], stop: tuple[str, ...] = (), seed: int = 0) -> str:
    """What the stream shows of tokens that come in random pieces."""
    shown = io.StringIO()
    stream = Stream(Console(file=shown, width=10**6, soft_wrap=True), target, StopStrings(stop, target.decode))
    chance = random.Random(seed)
    while tokens:
        count = chance.randint(1, 4)
        stream(0, tokens[:count], chance.randint(0, count))
        tokens = tokens[count:]
    return shown.getvalue()


def test_the_stream_is_the_text(tiny: Target) -> None:
    text = "def f(x):\n    return x + 1  # [bold] naïve 🙂 :smile: text\n\n"
    for seed in range(5):
        assert streamed(tiny, tiny.encode(text), seed=seed) == text


def test_the_stream_shows_nothing_of_a_stop_string(tiny: Target) -> None:
    assert streamed(tiny, tiny.encode("one two three"), stop=("wo t",)) == "one t"
    assert streamed(tiny, tiny.encode("one two three"), stop=("threes",)) == "one two "  # may still come


def test_the_line_at_the_end(tiny: Target) -> None:
    made = generate(tiny, [tiny.encode("import os")], DecodeSettings(8, stop_token_ids=frozenset()))
    assert summary(made, lossless=True).startswith("8 tokens in ")
    assert "not the target's own law" in summary(made, lossless=False)


def test_a_target_without_a_template_continues_a_text(tiny: Target) -> None:
    assert (
        encode(tiny, "import os", "auto")
        == encode(tiny, "import os", False)
        == tiny.encode("import os", special_tokens=True)
    )
    with pytest.raises(UserError, match="chat=true, but target 'tiny' has no chat template: use chat=false"):
        encode(tiny, "import os", True)


def test_beams_are_shown_best_first_and_passes_counted(tiny: Target) -> None:
    prompt, shown = tiny.encode("import os"), io.StringIO()
    found = beam_search(tiny, [prompt], DecodeSettings(8, stop_token_ids=frozenset()), BeamSettings(2))
    print_beams(tiny, found, Console(file=shown, width=10**6))
    first, second = (tiny.decode(tokens) for tokens in found.token_ids[0])
    scores = [f"{score:.4f}" for score in found.scores[0]]
    assert found.scores[0] == sorted(found.scores[0], reverse=True)
    text = shown.getvalue()
    assert text.startswith(f"{scores[0]}  {first}\n{scores[1]}  {second}\n")
    assert text.endswith("8 target passes, and plain beam search takes 8\n")
