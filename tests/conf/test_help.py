"""--help of every script: its own words, every group with its options, and every setting with its comment."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
import yaml

from conf.compose import GROUPS_TO_ADD, ROOT, choices
from conf.help import text

SCRIPTS = {
    found[1]: path
    for room in ("train", "eval", "engine")
    for path in sorted((ROOT.parent / room).glob("*.py"))
    if (found := re.search(r'(?m)^    main\("(\w+)"', path.read_text()))
}


def test_every_configuration_has_its_script() -> None:
    assert sorted(SCRIPTS) == sorted(path.stem for path in ROOT.glob("*.yaml"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_names_every_setting_and_group(name: str) -> None:
    shown = text(ROOT, name, "Words.\n\n    python train/x.py a=b\n", [], GROUPS_TO_ADD.get(name, ()))
    assert shown.startswith("Words.") and "python train/x.py -sc install=bash" in shown
    content = yaml.safe_load((ROOT / f"{name}.yaml").read_text())
    for key in content.keys() - {"defaults", "hydra"}:
        assert re.search(rf"(?m)^  {key}:", shown), key
    assert "defaults:" not in shown and "hydra" not in shown.replace("hydra.", "")
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        chosen = hydra.compose(name, return_hydra_config=True, overrides=["hydra.job.num=0"]).hydra.runtime.choices
    for group in (g for g in chosen if not g.startswith("hydra") and "@" not in g):
        for option in choices(group):
            assert re.search(rf"(?ms)^  {group.replace('/', '.')}=.*\b{option}\b", shown), (group, option)


def test_an_option_beside_it_is_shown_with_its_settings() -> None:
    shown = text(ROOT, "train", "", ["+drafter=eagle3", "target=smollm2", "decode.draft_length=window"], ("drafter",))
    assert "Settings of +drafter=eagle3, each with drafter. in front:\n  # EAGLE-3" in shown
    assert "    num_steps: 5                # training-time test" in shown
    assert "Settings of target=smollm2:\n" in shown and "  draft_vocab_size: 8192" in shown
    assert "Settings of decode.draft_length=window, each with decode.draft_length. in front:" in shown
    assert "@package" not in shown


def completed(script: str, *words: str) -> list[str]:
    """What the Tab key offers behind `words` in a bash where the command that --help names was run."""
    line = " ".join(["python", script, *words])
    steps = f"""
        eval "$(python {script} -sc install=bash)" && complete -p python >&2
        export COMP_LINE="{line}" COMP_POINT={len(line)}; COMP_WORDS=($COMP_LINE) COMP_CWORD={len(words) + 1}
        hydra_bash_completion && printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", steps],
        cwd=ROOT.parent,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "-F hydra_bash_completion python" in done.stderr, done.stderr
    return done.stdout.split()


def test_the_tab_key_completes_groups_options_and_settings() -> None:
    assert completed("train/run.py", "+drafter=mtp_") == [
        f"+drafter=mtp_{rest}" for rest in ("cascaded", "hierarchical", "parallel")
    ]
    assert completed("train/run.py", "+drafter=mtp", "fit.max_") == ["fit.max_steps="]
    assert completed("eval/acceptance.py", "decode=dyn") == ["decode=dynamic_tree"]


def test_completion_is_told_of_scripts_that_bash_can_complete() -> None:
    for name, path in SCRIPTS.items():
        command = f'eval "$(python {path.relative_to(ROOT.parent)} -sc install=bash)"'
        document = ast.get_docstring(ast.parse(path.read_text()))
        assert document is not None
        shown = text(ROOT, name, document, [], ())
        assert (command in shown) if path.name != "__main__.py" else ("-sc" not in shown), name


def test_a_script_prints_it_and_does_nothing_else() -> None:
    command = [sys.executable, "train/run.py", "+drafter=mtp", "--help"]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.startswith(Path(ROOT.parent / "train" / "run.py").read_text()[3:60])
    assert "Settings of +drafter=mtp" in done.stdout


def test_cfg_prints_the_configuration() -> None:
    command = [sys.executable, "train/run.py", "+drafter=eagle", "drafter.training.lr=0.5", "--cfg", "job"]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr
    assert yaml.safe_load(done.stdout)["drafter"]["training"]["lr"] == 0.5
