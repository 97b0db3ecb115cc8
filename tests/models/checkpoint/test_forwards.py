"""What an engine would compute from a file, written out plainly, is what our drafter computes: logits and proposals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eval import reference
from tests.helpers import formats
from tests.helpers.drafters import EXACT
from tests.helpers.formats import CASES, IDS, TOKENS, Case, drafted

KNOWN = [case for case in CASES if not case.save]


def by_engine(case: Case, folder: Path) -> tuple[Tensor, list[int]]:
    target = formats.target_of(case.target)
    with torch.no_grad():
        states, _ = reference.read(target, IDS[:-1])
        tokens, logits = reference.drafter(folder, case.format, target, TOKENS)(IDS, states)
    return logits, tokens


@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_the_file_says_what_the_drafter_computes(case: Case, tmp_path: Path) -> None:
    drafter = formats.save(case, tmp_path / "made")
    ours, tokens = drafted(drafter, formats.target_of(case.target))
    theirs, expected = by_engine(case, tmp_path / "made")
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)  # RoPE's angles are float32 on both sides
    assert tokens == expected
    known = ours[0].isfinite()
    assert (ours[1:, known] - ours[:-1, known]).abs().max() > 0.01  # steps that feed back are not the first one again


@pytest.mark.parametrize("case", [case for case in KNOWN if case.drafter == formats.EAGLE3], ids=str)
def test_a_layer_off_by_one_is_seen(case: Case, tmp_path: Path) -> None:
    """The engines must be able to tell: reading the next layer's states gives other logits."""
    drafter = formats.save(case, tmp_path / "made")
    target = formats.target_of(case.target)

    def shift(config: dict[str, Any]) -> None:
        inner = config if "eagle_aux_hidden_state_layer_ids" in config else config.setdefault("eagle_config", {})
        before = drafter.capture_layers if case.format != "sglang_eagle3" else [i - 1 for i in drafter.capture_layers]
        assert inner.get("eagle_aux_hidden_state_layer_ids", list(before)) == list(before)
        inner["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in before]

    formats.edited_config(tmp_path / "made", shift)
    theirs, _ = by_engine(case, tmp_path / "made")
    ours, _ = drafted(drafter, target)
    known = ours.isfinite()
    assert (ours - theirs)[known].abs().max() > 0.01


def test_assisted_generation_reads_the_folder(tmp_path: Path) -> None:
    """transformers itself drafts with it: the same text as without, and as many tokens as the folder says."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    case = next(case for case in CASES if case.format == "hf_causal_lm" and case.drafter == formats.DRAFT_LM)
    drafter = formats.save(case, tmp_path / "made")
    target = formats.target_of(case.target)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float64)
    assert loaded.generation_config.num_assistant_tokens == 3
    assert loaded.generation_config.num_assistant_tokens_schedule == "constant"
    assert loaded.generation_config.assistant_confidence_threshold == 0.0
    text = torch.tensor([IDS])
    torch.testing.assert_close(loaded(text).logits, drafter.lm.model(text).logits, **EXACT)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    assert AutoTokenizer.from_pretrained(tmp_path / "made").get_vocab() == target.tokenizer.get_vocab()  # type: ignore[union-attr]
    plain = target.model.generate(text, **options)
    assert torch.equal(target.model.generate(text, assistant_model=loaded, **options), plain)
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
