"""Self-synthesised prompts: where the target starts to write, what is kept, and that a kill loses nothing."""

from pathlib import Path

import pytest

from data import synthesis
from data.synthesis import SelfSynthesis, user_frame
from engine.loop import generate
from models.errors import UserError
from models.target import Target
from tests.data.test_template import PLAIN, with_template

DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<system>be kind<|endoftext|>{% endif %}"
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<|endoftext|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_the_frame_is_all_that_stands_before_and_right_behind_the_users_text(tiny: Target) -> None:
    target = with_template(tiny, DEFAULT_SYSTEM)
    header, ending = user_frame(target)
    assert target.tokenizer.decode(header) == "<system>be kind<|endoftext|><user>"
    assert target.tokenizer.decode([ending]) == "<|endoftext|>"
    header, ending = user_frame(with_template(tiny, PLAIN))
    assert (target.tokenizer.decode(header), target.tokenizer.decode([ending])) == ("<user>", "\n")


def test_a_target_without_a_template_cannot_write_its_own_prompts(tiny: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no chat template"):
        SelfSynthesis(str(tmp_path)).prompts(tiny, 4, 0)
    with pytest.raises(UserError, match="does not frame a user's text"):
        user_frame(with_template(tiny, "{{ messages | length }}"))


def test_only_turns_that_ended_by_themselves_become_prompts(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = with_template(tiny, PLAIN)
    source = SelfSynthesis(str(tmp_path), max_tokens=16, min_characters=3, chunk_size=4)
    made = []

    def recorded(*args, **kwargs):
        made.append(generate(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(synthesis, "generate", recorded)
    prompts = source.prompts(target, 6, seed=5)
    texts = [
        target.decode(ids).strip()
        for chunk in made
        for ids, stopped in zip(chunk.token_ids, chunk.stopped, strict=True)
        if stopped
    ]
    kept = list(dict.fromkeys(text for text in texts if len(text) >= 3))
    assert [p.turns for p in prompts] == [(text,) for text in kept]
    assert len(kept) >= 6
    assert len(texts) < 4 * len(made)  # some did not end by themselves
    chunks = len(made)
    assert source.prompts(target, 6, seed=5) == prompts
    assert len(made) == chunks  # read from the log
    assert source.prompts(target, 6, seed=6) != prompts


def test_a_target_that_repeats_itself_is_given_up_on(tiny: Target, tmp_path: Path) -> None:
    target = with_template(tiny, PLAIN)
    source = SelfSynthesis(str(tmp_path), temperature=0.0, max_tokens=24, chunk_size=4, patience=2.0)
    with pytest.raises(UserError, match=r"16 turns that 'tiny' wrote as the user gave [01] distinct prompts, and 8"):
        source.prompts(target, 8, seed=0)
