"""What a card says of licences, and to engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.checkpoint import native
from models.checkpoint.native import Export
from train.model_card import engine_card, model_card

ADAPTED = {"by": "lora", "rank": 4, "export": "merged", "original": {"name": "base", "fingerprint": "b"},
           "kl": 0.1, "top1_agreement": 0.9, "positions": 10}  # fmt: skip


def of_a_target(load: dict[str, Any], config: dict[str, Any], **more: Any) -> Export:
    provenance = {"versions": {}, "data": None, "command": "python", "git_revision": "none", "config": config}
    target = {"name": "named", "fingerprint": "a", "load": load, **more}
    return Export("mine", {"_target_": "models.drafter.medusa.MedusaDrafter"}, target, 3, provenance)


def both(export: Export) -> list[str]:
    return [model_card(export, []), engine_card(export, "vllm_medusa", "", Path("folder"))]


@pytest.mark.parametrize("known", [True, False])
def test_an_adapted_target_has_the_licence_of_the_original(known: bool, tmp_path: Path) -> None:
    """Its own folder holds none."""
    base, own = tmp_path / "base", tmp_path / "export" / "target"
    for folder in (base, own):
        folder.mkdir(parents=True)
    if known:
        (base / "README.md").write_text("---\nlicense: mit\n---\n")
    config = {"target": {"source": "hf", "name_or_path": str(base)}}
    export = of_a_target({"source": "hf", "name_or_path": str(own)}, config, adapted=ADAPTED)
    told = "mit" if known else "unknown here; see where the target comes from"
    for card in both(export):
        assert f": that of the original, `base`, from which it was trained: {told}." in card
    tiny = replace(export, provenance={**export.provenance, "config": {"target": {"source": "tiny"}}})
    assert all("from which it was trained: Apache-2.0." in card for card in both(tiny))


def test_a_target_that_was_not_trained_has_its_own_licence(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    export = of_a_target({"source": "hf", "name_or_path": str(tmp_path)}, {"target": {"source": "tiny"}})
    assert all(": mit." in card and "original" not in card for card in both(export))


@pytest.mark.parametrize(("name", "tokens"), [("vllm_dflash", 5), ("vllm_dspark", 6)])
def test_engines_are_told_to_ask_for_whole_blocks(name: str, tokens: int) -> None:
    target = {"name": "t", "fingerprint": "f", "load": {}}
    model = {"_target_": "models.drafter.dflash.DFlashDrafter", "block_size": 6}
    card = engine_card(native.Export("x", model, target, 4, {}), name, "", Path("folder"))
    assert f'"num_speculative_tokens": {tokens}}}' in card
