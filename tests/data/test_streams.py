"""Streams: what is served is not held out, and the domain changes where it is said to."""

import json
from pathlib import Path

import pytest

from data import prompts
from data.stdlib import Document
from data.streams import PRESETS, Stream, open_stream
from models.errors import UserError
from models.target import Target, load_target
from tests.helpers.adaptation import few_documents


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("tiny")


@pytest.fixture(autouse=True)
def _a_few_documents(monkeypatch: pytest.MonkeyPatch, few: list[Document]) -> None:
    monkeypatch.setattr(prompts, "documents", lambda: few)


@pytest.fixture(scope="module")
def few() -> list[Document]:
    return few_documents()


@pytest.mark.parametrize(("name", "new"), [("shift", "prose"), ("hostile", "noise")])
def test_a_preset_shifts_half_way(name: str, new: str, target: Target) -> None:
    stream = open_stream(name, target, 60, 8, seed=0)
    assert [r.domain for r in stream.requests] == ["code"] * 30 + [new] * 30
    assert stream.old == "code" and len(stream.of("code")) == 8 and len(stream.of(new)) == 8
    served, held = ({tuple(r.token_ids) for r in part} for part in (stream.requests, stream.held_out))
    assert len(served) == 60 and len(held) == 16 and not served & held
    again, other = (open_stream(name, target, 60, 8, seed=seed) for seed in (0, 1))
    assert again == stream and other != stream
    if name == "shift":
        words = [sum(target.decode(r.token_ids).count("self") for r in stream.requests[i : i + 30]) for i in (0, 30)]
        assert words[0] > 3 * words[1]


def test_a_file_is_served_in_its_order(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    rows = [{"prompt": f"text number {i}", "category": "x" if i < 4 else "y"} for i in range(8)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    target = _with_template(target)
    stream = open_stream(str(path), target, 100, 2, seed=0)
    assert [r.domain for r in stream.requests] == ["x", "x", "y", "y", "y"]
    assert isinstance(stream, Stream) and [r.domain for r in stream.held_out] == ["x", "x", "y"]
    assert "text number 4" in target.decode(stream.of("y")[0])
    assert "text number 2" in target.decode(stream.requests[0].token_ids)
    with pytest.raises(UserError, match="too few"):
        open_stream(str(path), target, 100, 4, seed=0)


def _with_template(target: Target) -> Target:
    import copy

    tokenizer = copy.deepcopy(target.tokenizer)
    assert tokenizer is not None
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return Target(target.model, tokenizer, target.name)


def test_what_there_is_not_is_refused(target: Target) -> None:
    with pytest.raises(UserError, match="choose shift, instructions, hostile or a JSONL file"):
        open_stream("nowhere", target, 10, 2, seed=0)
    with pytest.raises(UserError, match=r"lower adaptation\.requests"):
        open_stream("shift", target, 1_000_000, 2, seed=0)
    assert set(PRESETS) == {"shift", "instructions", "hostile"}
