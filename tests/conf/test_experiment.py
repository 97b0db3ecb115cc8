"""Every experiment composes as it stands, and runs from prompts to the table on a tiny target of its architecture."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conf.compose import ROOT, choices, explain_overrides, plain
from data.prompts import PromptFile, SplitSizes, split_prompts
from models.target import load_target
from tests.helpers import estimates
from tests.helpers.documents import Page
from tests.helpers.drafters import five_token_target
from tests.helpers.models import random_model
from tests.train.test_run import finish, start
from train.settings import check

NEAR = 0.1  # what the recipes say is rounded
EXPERIMENTS = choices("experiment")
ARCHITECTURES = {"Llama": "llama", "Qwen3-30B-A3B": "qwen3_moe", "Qwen3": "qwen3", "Mistral": "mistral_full"}


def composed(name: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        return plain(hydra.compose("train", overrides=[f"+experiment={name}"]))


def said(name: str) -> dict[str, float]:
    """The numbers in a recipe's comments."""
    text = (ROOT / "experiment" / f"{name}.yaml").read_text()
    needs = re.search(r"([\d.]+) GB of GPU memory, ([\d.]+) GB of disk;", text)
    time = re.search(r"# ([\d.]+) hours of H[12]00 for (?:the epoch|each of the (\w+) epochs)", text)
    states = re.search(r"cached ones would be (\d+) kB a token, ([\d.]+) TB", text)
    assert needs and time and states
    memory, disk, hours, state, terabytes = map(float, (*needs.groups(), time[1], *states.groups()))
    epochs = {None: 1, "two": 2, "six": 6}[time[2]]
    return {
        "memory": memory, "disk": disk, "hours": hours, "epochs": epochs, "state": state, "states": terabytes,
    }  # fmt: skip


def architecture(target: str) -> str:
    return next(found for word, found in ARCHITECTURES.items() if word in target)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_composes_and_says_what_it_takes(name: str) -> None:
    explain_overrides("train", [f"+experiment={name}"])
    options = composed(name)
    assert options["target"]["source"] == "hf" and options["target"]["dtype"] == "bfloat16"
    assert options["drafter"]["name"] in name and options["trainer"]["precision"] == "bf16-mixed"
    assert options["data"]["source"]["split"] == "train_sft" and options["data"]["sizes"]["train"] == 68000
    assert EXPERIMENTS[name]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_epochs_are_those_that_it_says(name: str) -> None:
    options, told = composed(name), said(name)
    assert estimates.epochs(options) == told["epochs"]
    fit, rows = options["fit"], options["fit"]["batch_size"] * options["trainer"]["accumulate_grad_batches"]
    assert rows == 16 and fit["max_steps"] == told["epochs"] * 68000 / 16
    assert fit["max_steps"] % fit["evaluate_every"] == fit["max_steps"] % fit["checkpoint_every"] == 0
    regime = estimates.regime_of(options)
    share = options["drafter"]["training"]["warmup_fraction"]
    assert regime.warmup_steps == pytest.approx(share * fit["max_steps"], abs=1)
    assert regime._lr_scale(regime.warmup_steps) == 1 and regime._lr_scale(fit["max_steps"]) == 0


@pytest.mark.parametrize(("name", "epochs"), [("qwen3_8b_dflash", 6), ("mistral_7b_medusa", 2)])
def test_epochs_are_the_published_ones(name: str, epochs: int) -> None:
    assert said(name)["epochs"] == epochs


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_says_what_the_reckoning_gives(name: str) -> None:
    options, told = composed(name), said(name)
    assert told["memory"] == pytest.approx(estimates.memory_bytes(options) / 1e9, rel=NEAR)
    assert told["disk"] == pytest.approx(estimates.disk_bytes(options) / 1e9, rel=NEAR)
    assert told["hours"] == pytest.approx(estimates.hours_per_epoch(options), rel=NEAR)
    each = estimates.state_bytes(options)
    assert told["state"] == pytest.approx(each / 1e3, rel=NEAR)
    texts = options["data"]["sizes"]["train"]
    assert told["states"] == pytest.approx(each * estimates.TOKENS * texts / 1e12, rel=NEAR)


def test_parameters_are_those_of_the_published_sizes() -> None:
    def count(name: str) -> tuple[int, int]:
        regime = estimates.regime_of(composed(name))
        return sum(p.numel() for p in regime.target.model.parameters()), estimates.trained(regime)

    assert count("llama31_8b_distilled_lm") == (8_030_261_248, 1_235_814_400)
    fused = 4 * 4096 * 4096 + (2 * 4096) * (4096 + 2 * 1024)  # fc, o; q, k and v of two inputs side by side
    assert count("qwen3_8b_eagle3")[1] == fused + 3 * 4096 * 12288 + 32000 * 4096 + 4 * 4096
    assert count("mistral_7b_medusa")[1] == 5 * (4096 * 4096 + 4096 + 32768 * 4096)


def test_a_run_on_a_file_of_ones_own_composes_as_the_page_has_it(tmp_path: Path) -> None:
    as_it_is, own = (c[2:] for c in Page(ROOT.parent / "docs" / "experiments.md").commands)
    assert as_it_is == ["+experiment=llama31_8b_eagle3"]
    explain_overrides("train", own)
    with hydra.initialize_config_dir(str(ROOT), version_base="1.3"):
        options = plain(hydra.compose("train", overrides=own))
    check(options)
    sizes = SplitSizes(**options["data"]["sizes"])
    assert estimates.epochs(options) == 2
    prompts = tmp_path / options["data"]["source"]["path"]
    prompts.write_text("".join(json.dumps({"prompt": f"Count to {i}"}) + "\n" for i in range(sizes.total)))
    dealt = split_prompts(PromptFile(str(prompts)).prompts(five_token_target(), sizes.total, 0), sizes)
    assert {split: len(found) for split, found in dealt.items()} == {"train": 16000, "validation": 64, "test": 128}


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
    run = tmp_path / "run"
    trained = sum(t.numel() for t in load_file(run / "checkpoints" / "best.safetensors").values())
    places = [*(run / "checkpoints").iterdir(), run / "export" / "model.safetensors"]
    on_disk = sum(path.stat().st_size for path in places)
    assert {path.name for path in places[:-1]} == {"best.safetensors", "last.ckpt"}  # one more behind further steps
    assert on_disk == pytest.approx((12 + 4 + 4) * trained, rel=NEAR, abs=50_000)
    told = json.loads((run / "config.json").read_text())["config"]
    for key, value in options["drafter"]["training"].items():
        assert told["drafter"]["training"][key] == value, key
