"""What README and docs hold that can be checked: links, commands, files to write, tables of settings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_LINE = re.compile(r"^ {4}((?:PYTHONPATH=\S+ )?python (?:\\\n|[^\n])*)", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """A Markdown file."""

    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def links(self) -> list[str]:
        """Targets of all links outside blocks of code."""
        return _LINK.findall(_FENCE.sub("", self.text))

    @property
    def anchors(self) -> set[str]:
        """What links to its headings end with, as GitHub makes them."""
        headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", self.text), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    @property
    def commands(self) -> list[list[str]]:
        """All commands that start Python, as a shell would split them."""
        lines = _LINE.findall(_FENCE.sub("", self.text))
        return [shlex.split(line.replace("\\\n", " "), comments=True) for line in lines]

    @property
    def files(self) -> dict[str, str]:
        """Blocks of code below a line that holds nothing but a path: what is to be written there."""
        return dict(_FILE.findall(self.text))

    def settings(self) -> Iterator[tuple[str, str, str]]:
        """Rows of tables of settings: the setting, the column's name (`default` or a drafter's), and the cell."""
        columns: list[str] = []
        for line in self.text.splitlines():
            cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")] if line.startswith("|") else []
            if cells and cells[0] == "setting":
                columns = cells[1:]
            elif not cells:
                columns = []
            elif columns and not set(cells[0]) <= {"-"}:
                for column, cell in zip(columns, cells[1:], strict=True):
                    if column:
                        yield cells[0], column, cell


def pages(root: Path) -> list[Page]:
    """README and all of docs, but for the log."""
    return [Page(root / "README.md"), *(Page(p) for p in sorted((root / "docs").rglob("*.md")) if p.name != "log.md")]


def shipped_drafters(root: Path) -> list[str]:
    """The drafters that come with the project, which are those in the index of their pages: none of a user's own."""
    rows = re.findall(
        r"^\| \[[^\]]*\]\(\w+\.md\) \|([^|]*)\|", (root / "docs/drafters/README.md").read_text(), re.MULTILINE
    )
    return sorted(name for cell in rows for name in re.findall(r"`(\w+)`", cell))
