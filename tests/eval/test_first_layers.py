"""The draft model for benchmarks is the target's own beginning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.loop import generate
from engine.settings import DecodeSettings
from eval.first_layers import main
from models.drafter.draft_lm import DraftLM
from models.target import Target
from models.vocab import DraftVocab


def test_first_layers_make_a_drafter(tiny: Target, tmp_path: Path) -> None:
    assert main(["tiny", "2", str(tmp_path / "short")]) == 0
    drafter = DraftLM(tiny, DraftVocab(tiny.vocab_size), name_or_path=str(tmp_path / "short"))
    ids = torch.tensor([tiny.encode("def main(")])
    state = tiny(ids, capture_layers=(2,)).hidden
    decoder = tiny.model.get_decoder()
    torch.testing.assert_close(drafter.lm(ids).last, decoder.norm(state), atol=1e-5, rtol=1e-4)
    settings = DecodeSettings(12, stop_token_ids=frozenset())
    assert generate(tiny, ids.tolist(), settings, drafter).token_ids == generate(tiny, ids.tolist(), settings).token_ids


def test_mistakes_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny"]) == 2 and "give a target" in capsys.readouterr().err
    assert main(["tiny", "99", str(tmp_path)]) == 2 and "the target has" in capsys.readouterr().err
