"""Every experiment composes as it stands, and runs from prompts to the table on a tiny target of its architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from transformers import AutoModelForCausalLM

from conf.compose import ROOT, choices, explain_overrides, plain
from models.target import load_target
from tests.helpers.models import random_model
from tests.train.test_run import finish, start

EXPERIMENTS = choices("experiment")
ARCHITECTURES = {"Llama": "llama", "Qwen3-30B-A3B": "qwen3_moe", "Qwen3": "qwen3", "Mistral": "mistral_full"}


def composed(name: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        return plain(hydra.compose("train", overrides=[f"+experiment={name}"]))


def architecture(target: str) -> str:
    return next(found for word, found in ARCHITECTURES.items() if word in target)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_composes_and_says_what_it_takes(name: str) -> None:
    explain_overrides("train", [f"+experiment={name}"])
    options = composed(name)
    assert options["target"]["source"] == "hf" and options["target"]["dtype"] == "bfloat16"
    assert options["drafter"]["name"] in name and options["trainer"]["precision"] == "bf16-mixed"
    assert options["data"]["source"]["split"] == "train_sft" and options["data"]["sizes"]["train"] == 68000
    text = (ROOT / "experiment" / f"{name}.yaml").read_text()
    assert "GB of GPU memory" in text and "of disk" in text and "hour" in text
    assert EXPERIMENTS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_runs_on_a_tiny_target_of_the_same_architecture(name: str, tmp_path: Path) -> None:
    options = composed(name)
    tokenizer = load_target("tiny", device="cpu").tokenizer
    assert tokenizer is not None
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )

    def folder(called: str, model: AutoModelForCausalLM) -> str:
        model.save_pretrained(tmp_path / called)
        tokenizer.save_pretrained(tmp_path / called)
        return str(tmp_path / called)

    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256, "eos_token_id": None}
    made = random_model(architecture(options["target"]["name_or_path"]), dtype=torch.float32, **sizes)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {i} and {i * i}"}) + "\n" for i in range(40)))
    small = [
        f"target.name_or_path={folder('target', made)}", "target.dtype=float32", "trainer=cpu", "data=file",
        f"data.source.path={prompts}", "data.sizes={train: 8, validation: 4, test: 4}",
        "data.answers.max_new_tokens=12", "fit.max_steps=2", "fit.batch_size=2", "fit.evaluate_every=2",
        "fit.validation_prompts=2", "measure.num_prompts=2", "decode.max_new_tokens=12", f"output_root={tmp_path}",
        "run_name=run",
    ]  # fmt: skip
    if options["draft_vocab_size"] is not None:
        small.append("draft_vocab_size=64")
    if options["drafter"]["model"].get("name_or_path"):
        draft = random_model("llama", dtype=torch.float32, seed=1, num_hidden_layers=1, **sizes)
        small.append(f"drafter.model.name_or_path={folder('draft', draft)}")
    output = finish(start("train/run.py", f"+experiment={name}", *small))
    assert "greedy output identical to plain decoding on 2 of 2 prompts" in output
    told = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    for key, value in options["drafter"]["training"].items():
        assert told["drafter"]["training"][key] == value, key
