"""Laws against a plain loop, draws against the inverse of the cumulative sum, and random streams per request."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from models import sampling
from models.errors import UserError
from models.sampling import RequestRandom, SamplingParams, draw, probabilities
from tests.helpers.laws import chi_square_p_value, invert_by_loop, law_by_loop

ALMOST_ONE = 1 - 2.0**-53
LOG = [math.log(x) for x in (0.5, 0.3, 0.2)]


# ---- probabilities ----


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 2, 5, 8, 20])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.8, 0.999, 1.0])
def test_laws_are_those_of_a_plain_loop(temperature: float, top_k: int, top_p: float) -> None:
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4, 3, 8, generator=g, dtype=torch.float64)
    logits[0] = logits[0].round()  # ties
    logits[1, 0, 2:5] = -math.inf
    law = probabilities(logits, SamplingParams(temperature, top_k, top_p))
    assert law.shape == logits.shape
    for row, found in zip(logits.reshape(-1, 8).tolist(), law.reshape(-1, 8).tolist(), strict=True):
        wanted = law_by_loop(row, temperature, top_k, top_p)
        assert found == pytest.approx(wanted, abs=1e-14)
        assert [x == 0 for x in found] == [x == 0 for x in wanted]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 0.7), (0.6, 5, 1.0), (1.7, 6, 0.8), (0.8, 3, 0.5)]
)
def test_laws_are_those_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = 2 * torch.randn(50, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    theirs = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    theirs = TopPLogitsWarper(top_p)(None, theirs).softmax(-1)
    ours = probabilities(logits, SamplingParams(temperature, top_k, top_p))
    torch.testing.assert_close(ours, theirs, atol=1e-14, rtol=0)


@pytest.mark.parametrize("likeliest", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("top_p", [1e-9, 0.2, 0.5, 0.8, 0.999])
def test_finding_the_likeliest_tokens_first_changes_no_nucleus(
    likeliest: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peaked laws, flat ones that many tokens are needed for, and ties across the last token found."""
    monkeypatch.setattr(sampling, "_LIKELIEST", likeliest)
    g = torch.Generator().manual_seed(0)
    peaked = 3 * torch.randn(6, 5, 8, generator=g, dtype=torch.float64)
    tied = torch.randint(0, 3, (6, 5, 8), generator=g).double()
    logits = torch.cat([peaked, tied, torch.zeros(1, 5, 8, dtype=torch.float64)])
    law = probabilities(logits, SamplingParams(1.0, top_p=top_p))
    wanted = [law_by_loop(row, top_p=top_p) for row in logits.reshape(-1, 8).tolist()]
    torch.testing.assert_close(law.reshape(-1, 8), torch.tensor(wanted, dtype=torch.float64), atol=1e-14, rtol=0)


def test_the_oracle_itself_by_hand() -> None:
    assert law_by_loop(LOG) == pytest.approx([0.5, 0.3, 0.2])
    assert law_by_loop(LOG, 0.5) == pytest.approx([25 / 38, 9 / 38, 4 / 38])
    assert law_by_loop(LOG, top_k=2) == pytest.approx([5 / 8, 3 / 8, 0])
    assert law_by_loop(LOG, top_p=0.6) == pytest.approx([5 / 8, 3 / 8, 0])
    assert law_by_loop(LOG, top_p=0.81) == pytest.approx([0.5, 0.3, 0.2])
    assert law_by_loop([1.0, 3.0, 3.0], temperature=0) == [0, 1, 0]
    assert invert_by_loop([0.0, 0.5, 0.0, 0.5], 0.0) == 1
    assert invert_by_loop([0.0, 0.5, 0.0, 0.5], 0.5) == 3


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        # top-p on the whole law would keep two tokens; behind top-k 2 the first has 5/8 and is enough
        (SamplingParams(1.0, top_k=2, top_p=0.6), [1, 0, 0]),
        # at temperature 1 two tokens are needed for 0.6; at 1/2 the first has 25/38
        (SamplingParams(0.5, top_p=0.6), [1, 0, 0]),
        (SamplingParams(1.0, top_p=0.6), [5 / 8, 3 / 8, 0]),
        # hotter: laws proportional to the square roots, then two tokens, then both needed for 0.56
        (SamplingParams(2.0, top_k=2, top_p=0.57), [5**0.5 / (5**0.5 + 3**0.5), 3**0.5 / (5**0.5 + 3**0.5), 0]),
    ],
)
def test_temperature_comes_before_top_k_and_top_k_before_top_p(params: SamplingParams, wanted: list[float]) -> None:
    law = probabilities(torch.tensor(LOG, dtype=torch.float64), params)
    assert law.tolist() == pytest.approx(wanted, abs=1e-14)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.25, 1), (0.2500001, 2), (0.5, 2), (0.5000001, 3), (0.75, 3), (0.76, 4), (1.0, 4)]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it_and_lower_ids_first(top_p: float, kept: int) -> None:
    law = probabilities(torch.zeros(4), SamplingParams(1.0, top_p=top_p))
    assert law.tolist() == pytest.approx([1 / kept] * kept + [0.0] * (4 - kept))


def test_top_k_keeps_all_tokens_tied_at_the_last_place() -> None:
    law = probabilities(torch.tensor([1.0, 3.0, 1.0, 1.0, 0.0]), SamplingParams(1.0, top_k=2))
    e = math.e**2
    assert law.tolist() == pytest.approx([1 / (3 + e), e / (3 + e), 1 / (3 + e), 1 / (3 + e), 0.0])


def test_greedy_is_one_hot_on_the_first_largest_logit_whatever_the_filters() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [-1.0, -5.0, -math.inf]])
    for params in (SamplingParams(), SamplingParams(0.0, top_k=1, top_p=0.1)):
        assert params.greedy
        assert probabilities(logits, params).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert not SamplingParams(0.01).greedy


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0), SamplingParams(0.7, 3, 0.9)])
def test_half_precision_logits_give_a_law_in_float32(params: SamplingParams) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    law = probabilities(logits, params)
    assert law.dtype == torch.float32
    assert torch.equal(law, probabilities(logits.float(), params))
    assert probabilities(logits.double(), params).dtype == torch.float64
    assert (law.sum(-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": math.nan},
    ],
)
def test_bad_settings_are_refused_by_name(wrong: dict[str, Any]) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(UserError, match=f"{name} is {value}: it must"):
        SamplingParams(**wrong)


# ---- draw ----

LAWS = [
    [0.25, 0.125, 0.5, 0.125],
    [0.0, 0.5, 0.0, 0.5, 0.0],
    [0.0, 0.0, 1.0, 0.0],
    [3.0, 0.0, 1.0, 4.0],  # need not sum to one
    [0.1, 0.2, 0.3, 0.4],
    [1e-30, 0.0, 1e-30],
]


@pytest.mark.parametrize("values", LAWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_invert_the_cumulative_sum_on_a_grid_and_at_its_edges(values: list[float], dtype: torch.dtype) -> None:
    law = torch.tensor(values, dtype=dtype)
    edges = (law.double().cumsum(0) / law.double().sum()).clamp(max=ALMOST_ONE)
    grid = torch.arange(1000, dtype=torch.float64) / 1000
    uniforms = torch.cat(
        [
            grid,
            edges,
            edges.nextafter(torch.zeros(())),
            edges.nextafter(torch.ones(())).clamp(max=ALMOST_ONE),
            torch.tensor([0.0, 2.0**-53, ALMOST_ONE], dtype=torch.float64),
        ]
    )
    tokens = draw(law.expand(len(uniforms), -1), uniforms)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [invert_by_loop(law.tolist(), u) for u in uniforms.tolist()]
    assert (law[tokens] > 0).all()


def test_every_token_takes_exactly_its_share_of_a_uniform_grid() -> None:
    law = torch.tensor([0.25, 0.0, 0.125, 0.5, 0.125], dtype=torch.float64)
    tokens = draw(law.expand(64, -1), torch.arange(64, dtype=torch.float64) / 64)
    assert tokens.bincount(minlength=5).tolist() == [16, 0, 8, 32, 8]


@pytest.mark.parametrize("uniform", [0.0, ALMOST_ONE])
def test_an_impossible_token_is_never_drawn(uniform: float) -> None:
    g = torch.Generator().manual_seed(2)
    for dtype in (torch.float32, torch.float64):
        law = torch.randint(5, (2000, 300), generator=g).to(dtype)
        law[:, [0, 1, 298, 299]] = 0
        law[:, 150] = 1
        law = law / law.sum(-1, keepdim=True)
        tokens = draw(law, torch.full((2000,), uniform, dtype=torch.float64))
        possible = law > 0
        wanted = possible.int().argmax(-1) if uniform == 0 else 299 - possible.flip(-1).int().argmax(-1)
        assert torch.equal(tokens, wanted)


def test_leading_dimensions_are_free() -> None:
    law = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(3))
    uniforms = torch.rand(2, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    tokens = draw(law, uniforms)
    assert tokens.shape == (2, 3)
    for i, j in itertools.product(range(2), range(3)):
        assert tokens[i, j] == invert_by_loop(law[i, j].tolist(), uniforms[i, j].item())


# ---- RequestRandom ----


def test_a_stream_does_not_depend_on_its_neighbours() -> None:
    together, alone = RequestRandom([5, 9, 7], 3), RequestRandom([9], 3)
    for columns in (3, 1, 2):
        assert torch.equal(together.uniform(columns)[1:2], alone.uniform(columns))


def test_select_keeps_streams_in_the_given_order_and_where_they_were() -> None:
    random = RequestRandom([1, 2, 3, 4], 2)
    random.uniform(2)
    random.select([3, 1])
    others = RequestRandom([4, 2], 2)
    others.uniform(2)
    assert torch.equal(random.uniform(2), others.uniform(2))
    random.select([])
    with pytest.raises(RuntimeError):
        random.uniform(2)


def test_every_call_takes_a_whole_block() -> None:
    few, many = RequestRandom([0, 1], 4), RequestRandom([0, 1], 4)
    for columns in (1, 0, 4, 2):
        first = few.uniform(columns)
        assert first.shape == (2, columns)
        assert torch.equal(first, many.uniform(4)[:, :columns])
    assert not torch.equal(many.uniform(4), many.uniform(4))
    with pytest.raises(ValueError, match="5 numbers"):
        few.uniform(5)


def test_streams_of_other_seeds_and_purposes_share_nothing() -> None:
    numbers = [RequestRandom(list(range(200)), 4, purpose=purpose).uniform(4) for purpose in (0, 1)]
    assert len(set(torch.cat(numbers).flatten().tolist())) == 2 * 200 * 4


def test_numbers_of_successive_seeds_are_uniform_and_independent() -> None:
    seeds = list(range(5000))
    drafts, checks = RequestRandom(seeds, 2, purpose=1), RequestRandom(seeds, 2, purpose=0)
    columns = torch.cat([drafts.uniform(2), checks.uniform(2)], dim=1)
    assert columns.dtype == torch.float64
    assert columns.min() >= 0 and columns.max() < 1
    cells = (columns * 5).long().numpy()
    for a, b in itertools.combinations(range(4), 2):
        counts = np.histogram2d(cells[:, a], cells[:, b], bins=[np.arange(6), np.arange(6)])[0]
        assert chi_square_p_value(counts, np.full((5, 5), 1 / 25)) > 1e-3
    neighbours = np.histogram2d(cells[:-1, 0], cells[1:, 0], bins=[np.arange(6), np.arange(6)])[0]
    assert chi_square_p_value(neighbours, np.full((5, 5), 1 / 25)) > 1e-3
