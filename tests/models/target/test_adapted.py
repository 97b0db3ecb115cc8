"""Targets that are trained with a drafter: where they start, what is written of them, and what reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models import linear
from models.errors import UserError
from models.target import Target, load_target
from models.target.adapted import AdaptedTarget, Lora, save_target
from tests.helpers.characters import character_tokenizer
from tests.helpers.models import random_model, random_target

LORA = Lora(rank=3, alpha=6.0, dropout=0.0, target_modules="all-linear")
CLOSE = {"atol": 1e-9, "rtol": 1e-9}
SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
IDS = torch.randint(40, (2, 11), generator=torch.Generator().manual_seed(1))


def small(architecture: str = "llama", dtype: torch.dtype = torch.float64) -> Target:
    model = random_model(architecture, dtype=dtype, **(SMALL if architecture == "llama" else {"vocab_size": 40}))
    return Target(model, character_tokenizer(40), "the-original")


def logits(target: Target) -> Tensor:
    with torch.no_grad():
        return target.head(target(IDS).last)


def learnt(target: Target, lora: Lora | None = LORA, seed: int = 5) -> AdaptedTarget:
    """An adapted target that has moved away from the original."""
    adapted, generator = AdaptedTarget(target, lora, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.trained:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return adapted


@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "llama_biased", "gpt2", "gemma2", "phi"])
def test_nothing_is_changed_at_first(architecture: str) -> None:
    original = random_target(architecture, vocab_size=40)
    before = logits(original)
    for lora in (LORA, None):
        adapted = AdaptedTarget(original, lora, seed=3)
        assert torch.equal(logits(adapted), before)
        assert adapted.original is original and len(adapted.trained) > 0
        assert not any(p.requires_grad for p in adapted.parameters())
        adapted.check()


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_the_original_stays_what_it_is(lora: Lora | None) -> None:
    original = small()
    before = logits(original)
    adapted = learnt(original, lora)
    assert (logits(adapted) - before).abs().max() > 0.01 and torch.equal(logits(original), before)
    ours, theirs = ({p.data_ptr() for p in t.model.parameters()} for t in (adapted, original))
    assert theirs <= ours if lora else not theirs & ours  # LoRA holds nothing twice


def test_the_adapter_adds_its_product_to_every_linear_layer() -> None:
    """W + alpha/rank · B·A, written out on a copy of the original."""
    original = small()
    adapted, expected, count = learnt(original), random_model("llama", **SMALL), 0
    weights = dict(adapted.model.named_parameters())
    for name, module in expected.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            a, b = (weights[f"{name}.lora_{x}.default.weight"] for x in "AB")
            module.weight.data += 6.0 / 3 * b @ a
            count += 1
    assert count == 2 * 7 and len(adapted.trained) == 2 * count
    torch.testing.assert_close(logits(adapted), expected(input_ids=IDS).logits.detach(), **CLOSE)
    named = AdaptedTarget(original, Lora(3, 6.0, 0.0, ("q_proj",)))
    assert len(named.trained) == 4


@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "gpt2"])
def test_merged_and_separate_are_one_target(architecture: str, tmp_path: Path) -> None:
    original = small(architecture)
    adapted = learnt(original)
    finished = adapted.finished()
    torch.testing.assert_close(logits(finished), logits(adapted), **CLOSE)
    assert finished.original is finished and not finished.trained
    for target, name in ((original, "base"), (finished, "merged")):
        save_target(target, tmp_path / name)
    adapted.save_adapter(tmp_path / "adapter")
    options: dict[str, Any] = {"source": "hf", "dtype": "float64", "device": "cpu"}
    merged = load_target(name_or_path=str(tmp_path / "merged"), **options)
    base = {"name_or_path": str(tmp_path / "base"), "adapter": str(tmp_path / "adapter")}
    separate = load_target(**base, **options)
    for other in (merged, separate):
        for name, parameter in finished.model.named_parameters():
            assert torch.equal(other.model.get_parameter(name), parameter), name
        torch.testing.assert_close(logits(other), logits(finished), atol=1e-13, rtol=1e-13)
    assert merged.fingerprint == separate.fingerprint == finished.fingerprint != original.fingerprint
    assert merged.encode('{"a": 1}') == original.encode('{"a": 1}')
    other = load_target(**base, **(options | {"dtype": "float32"}))
    assert other.fingerprint == merged.fingerprint and other.dtype == torch.float32


def test_peft_reads_what_was_written(tmp_path: Path) -> None:
    from peft import PeftModel

    adapted = learnt(small())
    adapted.save_adapter(tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(
        random_model("llama", **SMALL), tmp_path / "adapter", autocast_adapter_dtype=False
    )
    torch.testing.assert_close(logits(adapted), theirs(input_ids=IDS).logits.detach(), atol=1e-6, rtol=1e-6)


def test_fingerprints_tell_what_was_learnt_apart() -> None:
    original = small()
    found = [learnt(original), learnt(original), learnt(original, seed=6), learnt(original, None)]
    a, b, c, d = (adapted.finished().fingerprint for adapted in found)
    assert a == b and len({a, c, d, original.fingerprint}) == 4
    twice = Lora(3, 12.0, 0.0, "all-linear")  # the same matrices count double
    assert learnt(original, twice).finished().fingerprint not in (a, c)


def test_a_whole_target_is_written_as_it_was_trained(tmp_path: Path) -> None:
    adapted = learnt(small(), None)
    save_target(adapted.finished(), tmp_path / "target")
    loaded = load_target("hf", name_or_path=str(tmp_path / "target"), dtype="float64", device="cpu")
    assert torch.equal(logits(loaded), logits(adapted)) and loaded.fingerprint == adapted.finished().fingerprint
    with pytest.raises(UserError, match="export=separate: a target that is trained whole has no adapter"):
        adapted.save_adapter(tmp_path / "adapter")


def test_dropout_is_of_learning_alone_and_follows_from_its_seed() -> None:
    adapted = learnt(small(), Lora(3, 6.0, 0.5, "all-linear"))
    adapted.train()
    plain, state = logits(adapted), torch.get_rng_state()
    drawn = []
    for seed in (1, 1, 2):
        with adapted.learning(seed):
            drawn.append(logits(adapted))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], plain) and torch.equal(logits(adapted), plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_target_with_fast_routes_is_adapted_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what is learnt of the head would not reach its products."""
    monkeypatch.setattr(linear, "fastest_routes", lambda *shape: ("plain",) * len(linear._BUCKETS))
    original = small(dtype=torch.float32)
    original.accelerate()
    assert original._lean is not None and "forward" in vars(original.head.linear)
    before = logits(original)
    for lora in (LORA, None):
        adapted = learnt(original, lora)
        adapted.accelerate()
        assert "forward" not in vars(adapted.head.linear) and adapted._lean is None
        assert (logits(adapted) - before).abs().max() > 0.01 and torch.equal(logits(original), before)
    adapted.head.linear.weight.data.zero_()
    assert not logits(adapted).any()


@pytest.mark.parametrize(
    ("modules", "said"),
    [(("lm_head",), "neither the embedding nor the head"), (("embed_tokens",), "neither the embedding nor the head"),
     (("q_prj",), "target_modules=.'q_prj'.: Target modules")],
)  # fmt: skip
def test_layers_that_cannot_have_an_adapter_are_refused(modules: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        AdaptedTarget(small(), Lora(3, 6.0, 0.0, modules))


def test_a_target_in_bfloat16_has_an_adapter_in_float32_and_is_not_trained_whole() -> None:
    original = small(dtype=torch.bfloat16)
    assert {p.dtype for p in AdaptedTarget(original, LORA).trained} == {torch.float32}
    with pytest.raises(UserError, match=r"not trained whole in torch\.bfloat16: use target\.dtype=float32"):
        AdaptedTarget(original, None)


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    original = small()
    save_target(original, tmp_path / "base")
    folder = tmp_path / "adapter"
    learnt(original).save_adapter(folder)
    path = folder / "adapter_model.safetensors"
    content, tensors = path.read_bytes(), load_file(path)
    name = next(iter(tensors))

    def check(said: str) -> None:
        with pytest.raises(UserError, match=said):
            load_target("hf", name_or_path=str(tmp_path / "base"), adapter=str(folder), device="cpu")

    for broken in (
        {k: t for k, t in tensors.items() if k != name}, tensors | {f"{name}.more": torch.ones(2)},
        tensors | {name: torch.ones(2, 2)},
    ):  # fmt: skip
        save_file(broken, path)
        check(f"does not fit the target: {name}")
    path.write_bytes(content[:200])
    check("Cannot load the adapter")
    path.write_bytes(content)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "NOTHING"}))
    check("Cannot load the adapter")
    path.unlink()
    check("Cannot load the adapter")
