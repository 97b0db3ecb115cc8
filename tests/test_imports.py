"""The arrows between the rooms: models ← engine ← data ← eval ← train."""

import ast
from pathlib import Path

import pytest

ALLOWED = {
    "models": set(),
    "engine": {"models"},
    "data": {"models", "engine"},
    "eval": {"models", "engine", "data"},
    "train": {"models", "engine", "data", "eval"},
}
ROOT = Path(__file__).parent.parent
FILES = [path for room in ALLOWED for path in sorted((ROOT / room).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} imports relatively"
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_rooms_import_only_along_the_arrows(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    assert imported(path) & ALLOWED.keys() <= ALLOWED[room] | {room}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_only_scripts_see_a_hydra_configuration(path: Path) -> None:
    is_script = "__main__" in path.read_text()
    assert is_script or "omegaconf" not in imported(path)
