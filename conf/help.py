"""What --help prints: the script's own words, what can be chosen, and every setting with the comment beside it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import yaml

_END = "Every setting with its value, as a command would have it: the same command with --cfg job.\n"
_COMPLETION = 'Completion of names by the Tab key: eval "$(python {script} -sc install=bash)"\n'


def text(root: Path, config_name: str, document: str, overrides: list[str], added: tuple[str, ...]) -> str:
    """Help for the script whose docstring is `document` and whose configuration is root/config_name.yaml.

    `overrides` are those beside --help: a group's option that they choose is shown with its settings. `added` are
    groups that the script takes without having a default.
    """
    files = list(_files(root, config_name))
    groups = dict(_groups(root, files))
    groups = {**{f"+{group}": "" for group in added}, **groups}
    chosen = dict(override.partition("=")[::2] for override in overrides)
    parts = [document.strip()]
    if groups:
        listed = "\n".join(_choice(root, *entry) for entry in groups.items())
        parts.append(f"What can be chosen, NAME=OPTION (with --help beside it, its settings are shown):\n{listed}")
    for path in files:
        parts.append(f"Settings, NAME=VALUE, and what they are by default ({path.name}):\n{_settings(path)}")
    for group in groups:
        option = _folder(root, group) / f"{chosen.get(group, '')}.yaml"
        if option.exists():
            within = "" if "@package _global_" in option.read_text() else f", each with {group.lstrip('+')}. in front"
            parts.append(f"Settings of {group}={option.stem}{within}:\n{_settings(option)}")
    script = re.search(r"python (\S+\.py)", document)  # Hydra completes no `python -m engine`
    return "\n\n".join([*parts, _END + (_COMPLETION.format(script=script[1]) if script else "")])


def _files(root: Path, name: str) -> Iterator[Path]:
    """The configuration's file, and those that its settings are added to."""
    path = root / f"{name}.yaml"
    yield path
    for entry in yaml.safe_load(path.read_text())["defaults"]:
        if isinstance(entry, str) and entry != "_self_":
            yield from _files(root, entry)


def _groups(root: Path, files: list[Path], within: str = "") -> Iterator[tuple[str, str]]:
    """The groups that options are chosen from, and those within their options, each with what is chosen by default."""
    for path in files:
        for entry in yaml.safe_load(path.read_text()).get("defaults", []):
            if isinstance(entry, dict):
                ((group, option),) = entry.items()
                if not group.startswith("override ") and "@" not in group:
                    yield within + group, option or ""
                    if option:
                        yield from _groups(
                            root, [root / within.replace(".", "/") / group / f"{option}.yaml"], f"{group}."
                        )


def _choice(root: Path, group: str, default: str) -> str:
    options = ", ".join(sorted(path.stem for path in _folder(root, group).glob("*.yaml")))
    told = f" (default: {default})" if default else ""
    return textwrap.fill(f"{group}={told} {options}", 110, initial_indent="  ", subsequent_indent="      ")


def _folder(root: Path, group: str) -> Path:
    return root / group.lstrip("+").replace(".", "/")


def _settings(path: Path) -> str:
    """A file without its list of defaults, its placements and what concerns Hydra alone."""
    content = re.sub(r"(?m)^(?:defaults|hydra):.*\n(?:[ \t]+.*\n|\n(?=[ \t]))*", "", path.read_text())
    lines = [line for line in content.strip().splitlines() if "@package" not in line]
    return textwrap.indent("\n".join(lines), "  ")
