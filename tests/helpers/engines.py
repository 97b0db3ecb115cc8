"""vLLM's own environment, for tests that run it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conf.compose import ROOT

VLLM_PYTHON = os.environ.get("DRAFTSMITH_VLLM_PYTHON", str(ROOT.parent / ".venv-vllm" / "bin" / "python"))
needs_vllm = pytest.mark.skipif(
    not Path(VLLM_PYTHON).is_file(), reason=f"no {VLLM_PYTHON}: run make vllm-env, or set DRAFTSMITH_VLLM_PYTHON"
)
