"""What README and docs say of files, commands and settings holds."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from omegaconf import OmegaConf

from conf.compose import ROOT as CONF
from conf.compose import _with_choices, choices, plain
from models.checkpoint import formats
from tests.helpers.documents import Page, pages

ROOT = Path(__file__).parents[2]
PAGES = pages(ROOT)
NAMED = {page.path.relative_to(ROOT).as_posix(): page for page in PAGES}
# A choice of a group anywhere in the text, `decode=dynamic_tree`; a name in capitals stands for a user's own.
_CHOICE = re.compile(
    r"(?<![\w.+/])\+?(drafter|decode|target|data|trainer|logger|parity|sweep|experiment)=([a-z]\w*)(?![\w/.])"
)
_FORMAT = re.compile(r"(?<![\w.])(?:source_)?format=(\w+)")
_CODE = re.compile(r"`([^`\n]+)`")
_SETTING = re.compile(r"((?:drafter|decode|fit|data|target|trainer|measure|export|compare|logger)(?:\.\w+)+)(?:=.*)?")


@pytest.fixture(scope="module", params=NAMED)
def page(request: pytest.FixtureRequest) -> Page:
    return NAMED[request.param]


def test_links_lead_somewhere(page: Page) -> None:
    for link in page.links:
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        path = (page.path.parent / name).resolve() if name else page.path
        assert path.exists(), link
        assert not anchor or anchor in Page(path).anchors, link


def test_every_page_is_in_the_index() -> None:
    docs = ROOT / "docs"
    linked = {(docs / link).resolve() for link in Page(docs / "README.md").links}
    linked |= {(docs / "drafters" / link).resolve() for link in Page(docs / "drafters" / "README.md").links}
    assert {page.path for page in PAGES if docs in page.path.parents} <= linked | {docs / "README.md"}


def test_groups_have_what_is_chosen_from_them(page: Page) -> None:
    for group, name in _CHOICE.findall(page.text):
        assert name in choices(group) or is_written(page, group, name), f"{group}={name}"
    for name in _FORMAT.findall(page.text):
        assert name in {"native", "NAME", *formats()}, f"format={name}"


def config_of(command: list[str]) -> str | None:
    """The configuration that the script of a command composes; None for one that composes none."""
    script = Path("engine/__main__.py" if command[1:3] == ["-m", "engine"] else command[1])
    found = re.search(r'main\("(\w+)"', (ROOT / script).read_text())
    return {"run": "train"}.get(script.stem, found[1]) if found else None


def overrides_of(command: list[str]) -> list[str]:
    """The settings of a command, without what the scripts read before Hydra does."""
    start = 3 if command[1] == "-m" else 2
    given = [a for a in command[start:] if re.match(r"[+~]?[\w./]+=", a)]
    if command[1] == "-m":
        given = [re.sub(r"^drafter=", "export=", re.sub(r"^target=", "target.source=", a)) for a in given]
    return given


def test_commands_name_scripts_and_settings_that_exist(page: Page) -> None:
    for command in page.commands:
        if command[1:3] == ["-m", "pytest"] or command[0].startswith("PYTHONPATH"):
            continue
        assert command[1:3] == ["-m", "engine"] or (ROOT / command[1]).is_file(), command
        name = config_of(command)
        if name is None:
            continue
        known = [a for a in overrides_of(command) if not is_written(page, *a.lstrip("+").split("=", 1))]
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            hydra.compose(name, overrides=_with_choices(known))


def is_written(page: Page, group: str, name: str) -> bool:
    """Whether the page itself tells to write this choice of a group."""
    return f"conf/{group}/{name}.yaml" in page.files


@cache
def options(drafter: str | None) -> dict[str, Any]:
    """The settings of train/run.py, of what makes several such runs, and of logger=wandb."""
    chosen = ["logger=wandb"] if drafter is None else [f"+drafter={drafter}", "logger=wandb"]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        composed = hydra.compose("sweep", overrides=chosen)
        compared = hydra.compose("compare")
    return plain(OmegaConf.merge({"compare": compared.compare}, composed))  # type: ignore[arg-type]


def value_of(setting: str, drafter: str | None) -> Any:
    value: Any = options(drafter)
    for key in setting.split("."):
        assert key in value, f"{setting}: there is no {key}"
        value = value[key]
    return value


def test_defaults_in_tables_are_those_of_the_files(page: Page) -> None:
    """A cell that is a value; one that is a sentence is not compared, but its setting must exist."""
    drafters = choices("drafter")
    for settings, column, cell in page.settings():
        if column != "default" and column not in drafters:
            continue
        names, cells = re.split(r"`?, `?", settings), [cell]
        if len(names) > 1:
            cells = cell.split(", ")
        for name, told in zip(names, cells, strict=True):
            value = value_of(name, None if column == "default" else column)
            if not isinstance(value, dict) and name != "compare.drafters":
                assert yaml.safe_load(told) == value, f"{name} of {column}: {told}, not {value}"


@cache
def known_settings() -> frozenset[str]:
    """Every setting that a file in conf has, under the names of its groups."""
    found: set[str] = set()
    for path in CONF.rglob("*.yaml"):
        config, group = yaml.safe_load(path.read_text()), path.relative_to(CONF).parent.parts
        inside = () if "@package _global_" in path.read_text().splitlines()[0] else group
        found |= {".".join((*inside, *keys)) for keys in [(), *keys_of(config)]}
    return frozenset(found)


def keys_of(config: Any, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(config, dict):
        return []
    return [k for key, value in config.items() for k in [(*above, key), *keys_of(value, (*above, key))]]


def test_settings_in_the_text_exist(page: Page) -> None:
    for code in _CODE.findall(page.text):
        if (setting := _SETTING.fullmatch(code)) and not setting[1].endswith(".py"):
            assert setting[1] in known_settings(), code


def test_lines_are_not_too_long(page: Page) -> None:
    """But for tables, which cannot be broken."""
    assert [line for line in page.text.splitlines() if len(line) > 120 and not line.startswith("|")] == []


def test_extras_are_installed_from_the_checkout() -> None:
    extras = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    known = set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE))
    rooms = ("conf", "data", "docs", "engine", "eval", "models", "train")
    paths = [path for room in rooms for kind in ("py", "yaml", "md") for path in (ROOT / room).rglob(f"*.{kind}")]
    advice = [found for path in paths for found in re.findall(r'pip install [^\n`]*\[\w+\]"', path.read_text())]
    named = [re.fullmatch(r'pip install -e "\.\[(\w+)\]"', found) for found in advice]
    assert all(named), advice
    assert {found[1] for found in named if found} == {"smollm2", "wandb", "deepspeed", "sweep"} <= known
