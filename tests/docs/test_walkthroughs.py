"""Pages that walk through something, done as they say: files written and commands run word for word.

Only budgets are appended to the commands, so that they take seconds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from models.target.load import TINY
from tests.helpers.documents import Page

ROOT = Path(__file__).parents[2]
ROOMS = ("conf", "data", "docs", "engine", "eval", "models", "tests", "train")
SMALL = {
    "train/run.py": [
        "data.sizes.train=24",
        "data.sizes.validation=4",
        "data.sizes.test=4",
        "data.answers.max_new_tokens=16",
        "fit.max_steps=4",
        "fit.evaluate_every=4",
        "fit.batch_size=4",
        "fit.validation_prompts=2",
        "decode.max_new_tokens=12",
        "measure.num_prompts=2",
    ],
    "eval/acceptance.py": ["num_prompts=2", "decode.max_new_tokens=8"],
    "eval/draft_length.py": ["num_prompts=2", "lengths=[1,2]", "warm_up=1", "decode.max_new_tokens=8"],
    "train/quantize.py": ["num_prompts=2", "temperatures=[0]", "decode.max_new_tokens=8"],
    "-m": ["decode.max_new_tokens=8"],
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the project as it is checked out."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__", "outputs"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(command: list[str], tree: Path, *more: str) -> str:
    """Run a command of a page in the copy, and return what it prints."""
    assert command[0] == "python"
    done = subprocess.run(
        [sys.executable, *command[1:], *more],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}"
    return done.stdout


def runnable(page: Page) -> list[list[str]]:
    """The commands that name nothing a user has to fill in, in capitals."""
    return [c for c in page.commands if not any(re.search(r"\b(RUN|FOLDER|NAME|BIG|SMALL)\b", a) for a in c)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_drafter_is_added_in_three_files(tree: Path) -> None:
    page = Page(tree / "docs" / "add_a_drafter.md")
    assert sorted(Path(name).parent.as_posix() for name in page.files) == [
        "conf/drafter", "models/drafter", "tests/models/drafter",
    ]  # fmt: skip
    for name, text in page.files.items():
        assert not (tree / name).exists()
        (tree / name).write_text(text)
    sources = [name for name in page.files if name.endswith(".py")]
    run(["python", "-m", "ruff", "check", *sources], tree)
    run(["python", "-m", "ruff", "format", "--check", *sources], tree)

    own, contracts, train = runnable(page)
    assert " failed" not in run(own, tree, "-p", "no:cacheprovider")
    output = run(contracts, tree, "-p", "no:cacheprovider", "-v")
    assert re.search(r"\b[3-9]\d passed", output), output[-2000:]
    others = ["tests/conf/test_sweep.py", "tests/conf/test_compose.py"]
    assert " failed" not in run(["python", "-m", "pytest", *others], tree, "-p", "no:cacheprovider", "-q")
    output = run(train, tree, "run_name=bigram", *SMALL["train/run.py"])
    assert re.search(r"greedy output identical to plain decoding on \d of 2 prompts", output)
    results = json.loads((tree / "outputs" / "bigram" / "acceptance.json").read_text())["results"]
    assert [(r["drafter"], r["temperature"]) for r in results] == [("bigram", 0), ("bigram", 1)]
    assert results[0]["block_efficiency"] > 1


def make_model(folder: Path) -> None:
    """A small chat model with random weights."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_model_is_brought_along(tree: Path) -> None:
    page = Page(tree / "docs" / "bring_your_own_model.md")
    make_model(tree / "my-model")
    rows = re.findall(r"^```json\n(.*?)^```$", page.text, re.MULTILINE | re.DOTALL)[0].splitlines()
    rows += [json.dumps({"prompt": f"What is {n} plus {n}?", "category": "math"}) for n in range(32 - len(rows))]
    (tree / "prompts.jsonl").write_text("\n".join(rows) + "\n")

    printed = {}
    for command in runnable(page):
        printed[" ".join(command[1:])] = run(command, tree, *SMALL.get(command[1], []))
    assert len(printed) == 9

    outputs = tree / "outputs"
    for name, drafter in (("my-lookup", "prompt_lookup"), ("my-eagle", "eagle")):
        results = json.loads((outputs / name / "acceptance.json").read_text())["results"]
        assert {(r["drafter"], r["prompts"]) for r in results} == {(drafter, 2)}
    measured = json.loads((outputs / "my-lookup" / "acceptance-builtin" / "acceptance.json").read_text())["results"]
    assert [(r["drafter"], r["temperature"]) for r in measured] == [
        ("prompt_lookup", 0), ("prompt_lookup", 1), ("eagle", 0), ("eagle", 1),
    ]  # fmt: skip
    greedy = [r for r in measured if r["temperature"] == 0]
    assert all(r["identical_to_plain"] + len(r["near_ties"]) == 2 for r in greedy)
    assert json.loads((outputs / "my-eagle" / "export-int8" / "config.json").read_text())["weights"] == "int8"
    assert json.loads((outputs / "my-eagle" / "vllm" / "config.json").read_text())["architectures"]
    assert "my-eagle" in (outputs / "my-eagle" / "report.html").read_text()
    answers = [text for command, text in printed.items() if command.startswith("-m engine")]
    assert all("8 tokens in" in text for text in answers)
