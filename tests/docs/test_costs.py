"""What pages say of parameters, of memory and of passes is what the drafters have and do."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conf.compose import composed
from models.block_attention import BlockStack
from models.checkpoint import native
from models.drafter.conv import ConvDrafter
from models.sampling import SamplingParams
from models.target import Target
from models.target.load import TINY
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import tiny_target

PAGES = Path(__file__).parents[2] / "docs" / "drafters"
SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip


def built(name: str, smollm2: bool) -> Any:
    """A drafter as its yaml has it, without numbers, for SmolLM2 with 8192 draft tokens or for the bundled target."""
    config = AutoConfig.for_model("llama", **SMOLLM2) if smollm2 else AutoConfig.from_pretrained(TINY)
    with torch.device("meta"):
        target = Target(AutoModelForCausalLM.from_config(config))
        kept = torch.arange(8192, device="cpu") if smollm2 else None
        return native.build(
            composed("train", [f"+drafter={name}"])["drafter"]["model"], target, DraftVocab(target.vocab_size, kept)
        )


def parameters(name: str) -> list[int]:
    return [sum(p.numel() for p in built(name, smollm2).parameters()) for smollm2 in (False, True)]


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_block_parallel_drafters_are_as_large_as_the_page_says(name: str) -> None:
    text = " ".join((PAGES / "dflash.md").read_text().split())
    small, large = parameters(name)
    assert f"{small:,} and {large:,} (`{name}`)" in text
    for found, (d, f, e, h, k, v, vd) in (
        (small, (192, 432, 32, 6, 2, 2048, 2048)),
        (large, (576, 1536, 64, 9, 3, 49152, 8192)),
    ):
        formula = 5 * d * d + 3 * (2 * d * e * (h + k) + 3 * d * f)
        norms = 2 * d + 3 * (2 * d + 2 * e)
        assert found == formula + norms + (256 * (v + vd) + d + 256 + 1 if name == "dspark" else 0)


@pytest.mark.parametrize("name", ["conv", "linear_attention", "experts"])
def test_light_drafters_are_as_large_as_the_page_says(name: str) -> None:
    row = re.search(
        rf"(?m)^\| `{name}` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|", (PAGES / "light.md").read_text()
    )
    assert row is not None
    told = [int(cell.replace(",", "")) for cell in row.groups()]
    assert told[:2] == parameters(name)
    assert told[2:] == [sum(math.prod(layer.state_shape) for layer in built(name, s).layers) for s in (False, True)]
    for found, (d, f, h, e) in zip(told, ((192, 432, 6, 32), (576, 1536, 9, 64)), strict=False):
        layers = {
            "conv": 2 * (d * d + 3 * d * f + (4 + 2) * d),
            "linear_attention": 4 * d * h * e + 3 * d * f + 2 * d,
            "experts": 4 * (3 * d * f // 4 + d) + d,
        }
        assert found == 2 * d * d + layers[name]


@pytest.mark.parametrize(("name", "passes"), [("dflash", 1), ("conv", 5)])
def test_a_draft_takes_as_many_passes_as_the_page_says(name: str, passes: int) -> None:
    target = tiny_target(num_hidden_layers=8)
    model = composed("train", [f"+drafter={name}"])["drafter"]["model"]
    drafter = native.build(model, target, DraftVocab(target.vocab_size)).eval()
    ids = torch.arange(6)[None]
    with torch.no_grad():
        hidden = target.states(ids, drafter.capture_layers)
    committed = TargetFeatures(ids, ids + 1, hidden, torch.tensor([6]))
    owner, method = (BlockStack, "blocks") if name == "dflash" else (ConvDrafter, "scan")
    with torch.no_grad(), mock.patch.object(owner, method, autospec=True, side_effect=getattr(owner, method)) as called:
        draft = drafter.propose(
            drafter.new_state(1, 32), committed, num_speculative_tokens=5, sampling=SamplingParams(), random=None
        )
    assert draft.token_ids.shape == (1, 5) and called.call_count == passes
