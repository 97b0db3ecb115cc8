"""What engines are told of drafters whose drafts are blocks of one length."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.checkpoint import native
from train.model_card import engine_card


@pytest.mark.parametrize(("name", "tokens"), [("vllm_dflash", 5), ("vllm_dspark", 6)])
def test_engines_are_told_to_ask_for_whole_blocks(name: str, tokens: int) -> None:
    target = {"name": "t", "fingerprint": "f", "load": {}}
    model = {"_target_": "models.drafter.dflash.DFlashDrafter", "block_size": 6}
    card = engine_card(native.Export("x", model, target, 4, {}), name, "", Path("folder"))
    assert f'"num_speculative_tokens": {tokens}}}' in card
