"""Adapters against the weights that they stand for, and models that are the same before and after them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.errors import UserError
from models.lora import add_adapters, merge_adapters, merged
from tests.helpers.models import random_model

IDS = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(0))
SETTINGS = {"rank": 3, "alpha": 12, "dropout": 0.5, "target_modules": ["v_proj", "mlp.up_proj"]}
EXACT = {"atol": 1e-12, "rtol": 1e-12}


def states(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).last_hidden_state


def shake(model: nn.Module) -> None:
    """Random adapters."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()


@pytest.mark.parametrize(
    ("architecture", "settings", "expected"),
    [
        ("llama", SETTINGS, {f"layers.{j}.{n}" for j in range(3) for n in ("self_attn.v_proj", "mlp.up_proj")}),
        ("llama_biased", {"rank": 2}, None),
        ("gpt2", {"rank": 2, "alpha": 1, "target_modules": ["c_attn"]}, {f"h.{j}.attn.c_attn" for j in range(3)}),
    ],
)
def test_adapters_are_the_weights_that_they_add(architecture: str, settings: Any, expected: set[str] | None) -> None:
    model = random_model(architecture).base_model
    attributes, before = set(vars(model)), {name: t.clone() for name, t in model.state_dict().items()}
    start = states(model)
    add_adapters(model, settings, "here")
    assert torch.equal(states(model), start)
    shake(model)
    adapted = states(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    layers = {name.partition(".lora_")[0] for name in trained}
    if expected is None:
        expected = {f"layers.{j}.self_attn.{n}_proj" for j in range(3) for n in "qkvo"}
        expected |= {f"layers.{j}.mlp.{n}_proj" for j in range(3) for n in ("gate", "up", "down")}
    assert layers == expected and trained == {f"{name}.lora_{x}.default.weight" for name in layers for x in "AB"}
    held = {name: t.clone() for name, t in model.state_dict().items()}
    by_hand = dict(before)
    for name in layers:
        a, b = (held[f"{name}.lora_{x}.default.weight"] for x in "AB")
        added = b @ a * settings.get("alpha", settings["rank"]) / settings["rank"]
        by_hand[f"{name}.weight"] = before[f"{name}.weight"] + (added.t() if architecture == "gpt2" else added)
    other = random_model(architecture, seed=1).base_model
    other.load_state_dict(by_hand)
    torch.testing.assert_close(adapted, states(other), **EXACT)
    assert (adapted - start).abs().max() > 0.1

    with merged(model):
        inside = model.state_dict()
        assert inside.keys() == before.keys()
        for name in before:
            torch.testing.assert_close(inside[name], by_hand[name], **EXACT, msg=name)
        torch.testing.assert_close(states(model), adapted, **EXACT)
    now = model.state_dict()
    assert now.keys() == held.keys() and all(torch.equal(now[name], held[name]) for name in held)
    assert torch.equal(states(model), adapted)

    merge_adapters(model)
    assert set(vars(model)) == attributes and not any("peft" in type(m).__module__ for m in model.modules())
    assert model.state_dict().keys() == before.keys()
    torch.testing.assert_close(states(model), adapted, **EXACT)
    add_adapters(model, settings, "here")  # and once more
    assert any("lora_" in name for name, _ in model.named_parameters())


def test_dropout_is_in_front_of_the_adapter_only_while_it_is_trained() -> None:
    model = random_model().base_model
    add_adapters(model, SETTINGS, "here")
    shake(model)
    kept = states(model)
    torch.manual_seed(0)
    first = states(model.train())
    assert not torch.equal(first, kept) and not torch.equal(first, states(model))
    torch.manual_seed(0)
    assert torch.equal(states(model), first)
    assert torch.equal(states(model.eval()), kept)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "here.rank is None: it must be a whole number of at least 1"),
        ({"rank": 0}, "here.rank is 0"),
        ({"rank": 2.5}, "here.rank is 2.5"),
        ({"rank": 2, "alpha": 0}, "here.alpha is 0: it must be above 0"),
        ({"rank": 2, "dropout": 1.0}, "here.dropout is 1.0: it must be 0 or more, and below 1"),
        ({"rank": 2, "ranc": 1}, "here has 'ranc': choose from rank, alpha, .* Did you mean 'rank'"),
        ({"rank": 2, "target_modules": ["q_proj", "qq"]}, "target_modules has 'qq': choose from down_proj, gate_proj"),
        ({"rank": 2, "target_modules": []}, "target_modules is empty"),
        ({"rank": 2, "target_modules": "q_proj"}, "is 'q_proj': give a list"),
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        add_adapters(random_model().base_model, settings, "here")
    with pytest.raises(UserError, match="has no linear layers"):
        add_adapters(nn.Embedding(3, 4), {"rank": 1}, "here")
