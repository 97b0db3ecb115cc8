"""The training bench: what it counts and replays, and what it makes of times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conf.compose import composed
from models.errors import UserError
from train import bench
from train.products import Products


def test_products_of_forward_and_backward_are_counted_and_are_those_that_are_replayed() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))
    x = torch.randn(11, 5)
    with Products() as noted:
        model(x).square().sum().backward()
    forward, second = 2 * 11 * 5 * 7, 2 * 11 * 7 * 3
    assert noted.flops == forward + second + (forward + 2 * second)  # x itself has no gradient
    assert len(noted) == 5
    before = [p.grad.clone() for p in model.parameters()]
    with Products() as again:
        noted.run()
    assert (again.flops, len(again)) == (noted.flops, len(noted))
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_counted_as_its_five_and_two_products(masked: bool) -> None:
    query, key, value = (torch.randn(2, 3, rows, 8, requires_grad=True) for rows in (5, 7, 7))
    mask = torch.ones(5, 7, dtype=torch.bool).tril() if masked else None
    with Products() as noted:
        nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).sum().backward()
    one = 2 * 2 * 3 * 5 * 7 * 8
    assert noted.flops in (7 * one, 6 * one)  # fused, the scores are computed once more; by products, they are kept
    noted.run()


def times(step: float, products: float, peak: float) -> dict[str, list[float]]:
    parts = {"data": 0.5, "target": 1.0, "products": products, "peak": peak}
    parts |= dict.fromkeys(("forward", "loss", "backward", "optimizer"), step / 4)
    return {key: [value] * 3 for key, value in parts.items()} | {"evaluation": [9.0]}


def test_shares_are_of_what_they_say() -> None:
    flops = {"target": 30, "step": 70}
    found = bench.summary(times(step=4.0, products=3.0, peak=0.1), tokens=110, flops=flops, peak_flops=10)
    assert found["tokens_per_s"] == pytest.approx(110 / 5.5) and found["peak_flops_per_s"] == pytest.approx(100)
    assert found["share_of_peak"] == pytest.approx(100 / 5 / 100) and found["share_of_bound"] == pytest.approx(0.75)
    assert found["share_of_bound_interval"] == pytest.approx((0.75, 0.75))
    uneven = times(4.0, 3.0, 0.1)
    uneven["products"] = [2.0, 3.0, 4.0]
    uneven["peak"] = [0.2, 0.1, 0.3]  # the fastest counts
    found = bench.summary(uneven, tokens=110, flops=flops, peak_flops=10)
    assert found["peak_flops_per_s"] == pytest.approx(100)
    low, high = found["share_of_bound_interval"]
    assert low < found["share_of_bound"] == pytest.approx(0.75) and high > 0.8


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["drafters=[eagel]"], "drafters has 'eagel': choose of"), (["targets=[big]"], "targets has 'big'"),
        (["hidden_states=disk"], "hidden_states is 'disk'"), (["repeats=1"], "repeats is 1"),
        (["drafters=[prompt_lookup]"], "drafters has 'prompt_lookup', which is not trained"),
        (["drafters=[lookup_cache]"], "'lookup_cache', which does not learn by steps"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(settings: list[str], said: str, tmp_path: Path) -> None:
    options = composed("bench", ["targets=[tiny]", "tokens=16", "repeats=2", *settings, f"output={tmp_path}"])
    with pytest.raises(UserError) as error:
        run(options)
    assert said in str(error.value)


def run(options: dict[str, Any]) -> None:
    from omegaconf import OmegaConf

    bench.job(OmegaConf.create(options))


def test_a_bench_says_what_every_part_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["drafters=[eagle,medusa]", "targets=[tiny]", "hidden_states=[cached,online]", "tokens=24", "repeats=2"]
    small = "settings=['fit.batch_size=2','fit.validation_prompts=1','decode.max_new_tokens=4','trainer=cpu']"
    run(composed("bench", [*settings, small, "trainer_steps=2", f"output={tmp_path}"]))
    steps = json.loads((tmp_path / "bench.json").read_text())["steps"]
    assert [(s["drafter"], s["hidden_states"]) for s in steps] == [
        (drafter, states) for states in ("cached", "online") for drafter in ("eagle", "medusa")
    ]
    for step in steps:
        assert step["tokens"] == 48 and len(step["seconds"]["loss"]) == 2 and len(step["trainer_s"]) == 2
        assert all(min(step["seconds"][part]) > 0 for part in ("data", "forward", "loss", "optimizer", "products"))
        assert (step["flops"]["target"] > 0) == (step["hidden_states"] == "online")
        assert step["flops"]["step"] > 3 * 30 * step["parameters"]  # of supervised rows
    out = capsys.readouterr().out
    assert "A training step for tiny" in out and "of bound" in out and out.count("of its bound") == 4
