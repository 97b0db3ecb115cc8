"""What a user reads after a mistake on the command line: one sentence, the nearest name, an exit code, no traceback."""

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from conf.compose import choices

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)


Answer = tuple[Any, str, str]


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """A script with arguments in this process, where imports are done: its exit code, and what it prints."""

    def answer(script: str, *arguments: str) -> Answer:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        GlobalHydra.instance().clear()
        try:
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(script, run_name="__main__")
        finally:
            GlobalHydra.instance().clear()
        return ended.value.code, *capsys.readouterr()

    return answer


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["+drafter=eagel"], "drafter 'eagel' does not exist. Did you mean 'eagle'?"),
        (["+drafter=eagle", "target=tinny"], "target 'tinny' does not exist. Did you mean 'tiny'?"),
        (["+drafter=eagle", "fit.max_step=3"], "There is no setting 'fit.max_step'. Did you mean 'fit.max_steps'?"),
        (["+drafter=eagle", "drafter.training.lrr=3"], "Did you mean 'drafter.training.lr'?"),
        (["+drafter=eagle", "max_steps=3"], "There is no setting 'max_steps'. Did you mean 'fit.max_steps'?"),
        (["+drafter=eagle", "target=hf"], "The configuration lacks a value: "),
        (["drafter=eagle"], "Write +drafter=eagle: 'drafter' is added, not overridden."),
        (["+drafter=eagle", "fast"], "'fast' is no setting: write NAME=VALUE."),
        (["+drafter=eagle", "fit.max_steps=0"], "fit.max_steps is 0: it must be a whole number of at least 1."),
        (["+drafter=eagle", "measure.temperatures=-1"], "temperature is -1.0: it must be 0 (greedy) or more."),
        (["+drafter=eagle", "data.answers.answers=mine"], "data.answers.answers is 'mine': choose target or given."),
        (["+drafter=eagle", "+data.answers.heat=1"], "unexpected keyword argument 'heat'"),
        (["+drafter=eagle", "decode.max_new_tokens=1"], "decode.max_new_tokens must be at least 2"),
        (["+drafter=eagle", "trainer=gpu"], "trainer=gpu, but torch finds no CUDA device: use trainer=cpu."),
        (
            ["+drafter=eagle", "trainer=fsdp"],
            "trainer.accelerator=gpu, but torch finds no CUDA device: use trainer=ddp trainer.accelerator=cpu, or",
        ),
        (["+drafter=eagle", "trainer=deepspeed", "trainer.devices=8"], "but torch finds no CUDA device: use trainer="),
        (
            ["+drafter=eagle", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=3"],
            "fit.batch_size is 16, of which 3 processes cannot have equal parts: choose a multiple of 3.",
        ),
        (
            ["+drafter=eagle", "trainer=fsdp", "trainer.accelerator=cpu", "trainer.strategy.shard_targt=true"],
            "There is no setting 'trainer.strategy.shard_targt'. Did you mean 'trainer.strategy.shard_target'?",
        ),
        (["+drafter=eagle", "drafter.training.regression=l1"], "choose mse or smooth_l1"),
        (["+drafter=eagle", "+drafter.model.layers=2"], "takes no argument 'layers'. Did you mean 'num_layers'?"),
        (
            ["+drafter=eagle", "decode.draft_length=windw"],
            "decode/draft_length 'windw' does not exist. Did you mean 'window'? Choose one of: auto, confidence,",
        ),
        (
            ["+drafter=eagle", "decode.draft_length.hig=1", "decode.draft_length=window"],
            "There is no setting 'decode.draft_length.hig'. Did you mean 'decode.draft_length.high'?",
        ),
        (
            ["+drafter=eagle", "decode.draft_length=window", "decode.draft_length.high=1.5"],
            "decode.draft_length.high is 1.5: it must be a number from 0 to 1.",
        ),
        (
            ["+drafter=suffix", "decode.draft_length=entropy"],
            "but SuffixDrafter draws no chain from laws: choose fixed",
        ),
        (["+drafter=eagle", "adaptation=replay"], "Write +adaptation=replay: 'adaptation' is added, not overridden."),
        (["+drafter=eagle", "+adaptation=repla"], "adaptation 'repla' does not exist. Did you mean 'replay'?"),
        (
            ["+drafter=eagle", "+adaptation=replay", "adaptation.guard.max_los=1"],
            "There is no setting 'adaptation.guard.max_los'. Did you mean 'adaptation.guard.max_loss'?",
        ),
        (["+drafter=eagle", "+adaptation=replay", "adaptation.stream=shft"], "choose shift, instructions, hostile or"),
        (["+drafter=eagle", "+adaptation=replay", "adaptation.guard.every=0"], "adaptation.guard.every is 0"),
        (["+drafter=eagle", "data.generator=opnai"], "data/generator 'opnai' does not exist. Did you mean 'openai'?"),
        (
            ["+drafter=eagle", "data.generator=openai", "data.generator.base_url=here"],
            "'here' is no address of a server: write http://HOST:PORT/v1.",
        ),
        (["+drafter=eagle", "data.packing=yes"], "data.packing is 'yes': it must be true or false."),
        (
            ["+drafter=dflash", "data.packing=true"],
            "data.packing=true: DFlashDrafter, as it is set, reads across the texts of a row.",
        ),
        (
            ["+drafter=eagle_window", "data.packing=true"],
            "data.packing=true: EagleDrafter, as it is set, reads across the texts of a row.",
        ),
        (["+drafter=eagle", "data=self_synthesis"], "Target 'tiny' has no chat template"),
        (["+drafter=eagle", "data=file", "data.source.path=no.jsonl"], "Cannot read the prompt file 'no.jsonl'"),
    ],
)
def test_a_mistake_is_answered_with_one_sentence_before_the_long_work(
    arguments: list[str], sentence: str, tmp_path: Path, run_here: Callable[..., Answer]
) -> None:
    code, out, error = run_here("train/run.py", *arguments, f"output_root={tmp_path}")
    assert code == 2
    assert sentence in error
    assert error.count("error: ") == 1
    assert not list(tmp_path.rglob("answers.jsonl"))
    assert "Traceback" not in error + out


def test_a_process_of_its_own_ends_so_too(tmp_path: Path) -> None:
    done = run("train/run.py", "+drafter=eagle", "fit.max_steps=0", f"output_root={tmp_path}")
    assert done.returncode == 2
    assert done.stderr == "error: fit.max_steps is 0: it must be a whole number of at least 1.\n" and not done.stdout


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
