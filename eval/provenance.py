"""What a result was made with: enough to make it again."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("draftsmith", "torch", "transformers", "lightning", "datasets", "tokenizers", "safetensors", "peft")
ROOT = Path(__file__).resolve().parent.parent


def provenance() -> dict[str, Any]:
    """Command, versions, git revision and machine, without any path outside the project."""
    return {
        "command": " ".join(["python", _short(sys.argv[0]), *sys.argv[1:]]),
        "git_revision": _git_revision(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def _short(path: str) -> str:
    try:
        return Path(path).resolve().relative_to(ROOT).as_posix()
    except ValueError:
        return Path(path).name


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
