"""What an engine would compute from a file, written out plainly, is what our drafter computes: logits and proposals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.target import Target
from tests.helpers import formats
from tests.helpers.drafters import EXACT
from tests.helpers.formats import CASES, IDS, TOKENS, Case, MTPNames, PlainEngine, drafted


def vllm_layers(config: dict[str, Any], target: Target) -> list[int]:
    return config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]


def sglang_layers(config: dict[str, Any], target: Target) -> list[int]:
    return [index + 1 for index in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]


def safeailab_layers(config: dict[str, Any], target: Target) -> list[int]:
    return [2, target.num_layers // 2, target.num_layers - 3]


def speculators_layers(config: dict[str, Any], target: Target) -> list[int]:
    return config["eagle_aux_hidden_state_layer_ids"]


LAYERS: dict[str, Callable[[dict[str, Any], Target], list[int]]] = {
    "vllm_eagle3": vllm_layers,
    "sglang_eagle3": sglang_layers,
    "safeailab_eagle3": safeailab_layers,
    "speculators_eagle3": speculators_layers,
}
ENGINES = {
    "vllm_eagle": formats.eagle,
    "safeailab_eagle": formats.eagle,
    "sglang_eagle": formats.eagle,
    "vllm_medusa": formats.medusa,
    "fasterdecoding_medusa": formats.medusa,
}
# The target of four layers has its module as layer 4.
MODULES = {
    "deepseek_mtp": MTPNames("model.layers.4.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mimo_mtp": MTPNames(
        "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm",
        state_first=True, before_norm=True,
    ),
    "qwen3_next_mtp": MTPNames(
        "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.",
        hides_first=False, centred=True,
    ),
}  # fmt: skip
KNOWN = [case for case in CASES if case.format in {*LAYERS, *ENGINES, *MODULES} and not case.save]


def by_engine(case: Case, folder: Path) -> tuple[Tensor, list[int]]:
    target = formats.target_of(case.target)
    engine = PlainEngine(folder, target)
    if case.format in LAYERS:
        return formats.eagle3(engine, IDS, TOKENS, LAYERS[case.format](engine.config, target))
    if case.format in MODULES:
        return formats.mtp(engine, IDS, TOKENS, MODULES[case.format])
    return ENGINES[case.format](engine, IDS, TOKENS)


@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_the_file_says_what_the_drafter_computes(case: Case, tmp_path: Path) -> None:
    drafter = formats.save(case, tmp_path / "made")
    ours, tokens = drafted(drafter, formats.target_of(case.target))
    theirs, expected = by_engine(case, tmp_path / "made")
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)  # RoPE's angles are float32 on both sides
    assert tokens == expected
    known = ours[0].isfinite()
    assert (ours[1:, known] - ours[:-1, known]).abs().max() > 0.01  # steps that feed back are not the first one again


@pytest.mark.parametrize("case", [case for case in KNOWN if case.format in LAYERS], ids=str)
def test_a_layer_off_by_one_is_seen(case: Case, tmp_path: Path) -> None:
    """The engines must be able to tell: reading the next layer's states gives other logits."""
    drafter = formats.save(case, tmp_path / "made")
    target = formats.target_of(case.target)
    engine = PlainEngine(tmp_path / "made", target)
    shifted = [layer + 1 for layer in LAYERS[case.format](engine.config, target)]
    theirs, _ = formats.eagle3(engine, IDS, TOKENS, shifted)
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
