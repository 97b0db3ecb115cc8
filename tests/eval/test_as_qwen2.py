"""The bundled target under Qwen2's names is the same function."""

from __future__ import annotations

from pathlib import Path

import torch

from eval.as_qwen2 import write_as_qwen2
from models.target import Target, load_target


def test_the_target_says_the_same_under_qwen2s_names(tiny: Target, tmp_path: Path) -> None:
    write_as_qwen2(tmp_path / "qwen2")
    written = load_target("hf", name_or_path=str(tmp_path / "qwen2"), device="cpu")
    ids = torch.tensor([tiny.encode("def main(argv):\n    return 0\n")])
    assert written.config.model_type == "qwen2" and written.stop_token_ids == tiny.stop_token_ids
    torch.testing.assert_close(written.model(ids).logits, tiny.model(ids).logits, atol=1e-5, rtol=1e-5)
