"""What a user reads after a mistake on the command line: one sentence, the nearest name, an exit code, no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from conf.compose import choices

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["+drafter=eagel"], "drafter 'eagel' does not exist. Did you mean 'eagle'?"),
        (["+drafter=eagle", "target=tinny"], "target 'tinny' does not exist. Did you mean 'tiny'?"),
        (["+drafter=eagle", "fit.max_step=3"], "There is no setting 'fit.max_step'. Did you mean 'fit.max_steps'?"),
        (["+drafter=eagle", "drafter.training.lrr=3"], "Did you mean 'drafter.training.lr'?"),
        (["+drafter=eagle", "max_steps=3"], "There is no setting 'max_steps'. Did you mean 'fit.max_steps'?"),
        (["+drafter=eagle", "target=hf"], "The configuration lacks a value: "),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(arguments: list[str], sentence: str) -> None:
    done = run("train/run.py", *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr + done.stdout


def test_without_a_drafter_the_drafters_are_listed() -> None:
    done = run("train/run.py")
    assert done.returncode == 2
    for name, what in choices("drafter").items():
        assert f"+drafter={name}" in done.stderr
        assert what in done.stderr


def test_every_option_of_every_group_says_what_it_is() -> None:
    for group in ("drafter", "target", "data", "logger", "trainer"):
        assert choices(group)
        assert all(choices(group).values()), group


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["export=nowhere"], "error: 'nowhere' is not an export: No such file or directory (config.json)."),
        ([], "error: The configuration lacks a value: "),
    ],
)
def test_acceptance_refuses_what_is_no_export(arguments: list[str], sentence: str) -> None:
    done = run("eval/acceptance.py", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(sentence)
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback() -> None:
    done = run("eval/acceptance.py", "export=nowhere", "debug=true")
    assert done.returncode != 0
    assert "not an export" in done.stderr
    assert "eval/acceptance.py" in done.stderr
