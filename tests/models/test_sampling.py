"""Laws and adjusted logits against plain loops and transformers, draws against the inverse of the cumulative sum, and
random streams per request."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from models import sampling, tree
from models.errors import UserError
from models.sampling import (
    RequestRandom,
    SamplingParams,
    adjust,
    check_vocabulary,
    draw,
    probabilities,
    seen_at_nodes,
    seen_tokens,
)
from tests.helpers.laws import adjusted_by_loop, chi_square_p_value, invert_by_loop, law_by_loop
from tests.helpers.models import VOCAB_SIZE, random_model

ALMOST_ONE = 1 - 2.0**-53
LOG = [math.log(x) for x in (0.5, 0.3, 0.2)]


# ---- probabilities ----


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 2, 5, 8, 20])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.8, 0.999, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.4, 1.0])
def test_laws_are_those_of_a_plain_loop(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4, 3, 8, generator=g, dtype=torch.float64)
    logits[0] = logits[0].round()  # ties
    logits[1, 0, 2:5] = -math.inf
    law = probabilities(logits, SamplingParams(temperature, top_k, top_p, min_p))
    assert law.shape == logits.shape
    for row, found in zip(logits.reshape(-1, 8).tolist(), law.reshape(-1, 8).tolist(), strict=True):
        wanted = law_by_loop(row, temperature, top_k, top_p, min_p)
        assert found == pytest.approx(wanted, abs=1e-14)
        assert [x == 0 for x in found] == [x == 0 for x in wanted]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 0.7, 0.0), (0.6, 5, 1.0, 0.2), (1.7, 6, 0.8, 0.5), (0.8, 3, 0.5, 0.0), (1.2, 0, 1.0, 0.1)],
)
def test_laws_are_those_of_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = 2 * torch.randn(50, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    theirs = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    theirs = MinPLogitsWarper(min_p)(None, TopPLogitsWarper(top_p)(None, theirs)).softmax(-1)
    ours = probabilities(logits, SamplingParams(temperature, top_k, top_p, min_p))
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
    assert law_by_loop(LOG, min_p=0.5) == pytest.approx([5 / 8, 3 / 8, 0])
    assert law_by_loop(LOG, top_p=0.6, min_p=0.7) == pytest.approx([1, 0, 0])
    assert law_by_loop([1.0, 3.0, 3.0], temperature=0) == [0, 1, 0]
    assert adjusted_by_loop([1.0, -1.0, 2.0, 3.0], 2.0, [(0, -3.0), (3, 1.0)], {0, 1, 3}) == [-4.0, -2.0, 2.0, 2.0]
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
        # of what min-p 0.5 keeps, 5/8 and 3/8, top-p 0.6 would keep the first; on the whole law it keeps two
        (SamplingParams(1.0, top_p=0.6, min_p=0.5), [5 / 8, 3 / 8, 0]),
        # 3/5 of the likeliest; at temperature 1/2 only 9/25
        (SamplingParams(1.0, min_p=0.5), [5 / 8, 3 / 8, 0]),
        (SamplingParams(0.5, min_p=0.5), [1, 0, 0]),
    ],
)
def test_temperature_comes_before_top_k_then_top_p_then_min_p(params: SamplingParams, wanted: list[float]) -> None:
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
    for params in (SamplingParams(), SamplingParams(0.0, top_k=1, top_p=0.1, min_p=1.0)):
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
        {"min_p": -0.1},
        {"min_p": 1.01},
        {"min_p": math.nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": math.inf},
        {"repetition_penalty": math.nan},
    ],
)
def test_bad_settings_are_refused_by_name(wrong: dict[str, Any]) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(UserError, match=f"{name} is {value}: it must"):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    ("bias", "says"),
    [
        (((3, 1.0), (-1, 1.0)), "token -1: it must be a token id"),
        ((("the", 1.0),), "token 'the': it must be a token id"),
        (((3, 1.0), (4, 1.0), (3, 2.0)), "token 3 more than once"),
        (((3, math.inf),), "adds inf to token 3: it must be finite"),
        (((3, math.nan),), "adds nan to token 3: it must be finite"),
        (((3, 1e39),), r"adds 1e\+39 to token 3: it must be finite"),  # infinite in float32
    ],
)
def test_bad_biases_are_refused(bias: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        SamplingParams(logit_bias=bias)


def test_biases_are_checked_against_the_vocabulary() -> None:
    check_vocabulary(SamplingParams(logit_bias=((0, 1.0), (4, -math.inf))), 5)
    with pytest.raises(UserError, match="names the token 4, but the vocabulary ends at 3"):
        check_vocabulary(SamplingParams(logit_bias=((0, 1.0), (4, 1.0))), 4)
    with pytest.raises(UserError, match="forbids all 3 tokens"):
        check_vocabulary(SamplingParams(logit_bias=tuple((i, -math.inf) for i in range(3))), 3)


# ---- adjust ----

PENALISED = SamplingParams(repetition_penalty=1.7)
BIASED = SamplingParams(logit_bias=((2, 1.5), (7, -math.inf), (0, -2.25)))
BOTH = SamplingParams(repetition_penalty=0.6, logit_bias=((2, 1.5), (7, -math.inf), (0, -2.25)))


@pytest.mark.parametrize("params", [PENALISED, BIASED, BOTH])
def test_adjusted_logits_are_those_of_a_plain_loop_and_of_transformers(params: SamplingParams) -> None:
    g = torch.Generator().manual_seed(6)
    logits = 2 * torch.randn(40, 9, generator=g, dtype=torch.float64)
    logits[:, 5] = logits[:, 5].round()  # zeros
    logits[:5, 3] = -math.inf
    context = torch.randint(9, (40, 5), generator=g)  # with repetitions, which count once
    seen = seen_tokens(context.tolist(), 9)
    given = logits.clone()
    ours = adjust(logits, params, seen)
    assert torch.equal(logits, given)
    rows = zip(logits.tolist(), context.tolist(), strict=True)
    wanted = [adjusted_by_loop(row, params.repetition_penalty, params.logit_bias, text) for row, text in rows]
    assert ours.tolist() == wanted
    theirs = logits
    if params.logit_bias:
        theirs = SequenceBiasLogitsProcessor([[[t], b] for t, b in params.logit_bias])(context, theirs)
    theirs = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(context, theirs)
    assert torch.equal(ours, theirs)
    assert torch.equal(adjust(logits.view(5, 8, 9), params, seen.view(5, 8, 9)), ours.view(5, 8, 9))


def test_adjusting_costs_nothing_when_it_is_off_and_asks_for_what_it_needs() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(7)).bfloat16()
    off = SamplingParams(0.5, 3, 0.9, 0.1)
    assert not off.adjusts and adjust(logits, off) is logits
    assert BIASED.adjusts and not BIASED.needs_seen
    assert torch.equal(adjust(logits, BIASED), adjust(logits.float(), BIASED))
    assert adjust(logits, BIASED).dtype == torch.float32
    assert PENALISED.adjusts and PENALISED.needs_seen
    with pytest.raises(ValueError, match="tokens seen"):
        adjust(logits, PENALISED)
    assert len({PENALISED, BIASED, BOTH, SamplingParams(repetition_penalty=1.7)}) == 3


def penalty_first(logits: Tensor, params: SamplingParams, seen: Tensor) -> Tensor:
    penalised = adjust(logits, SamplingParams(repetition_penalty=params.repetition_penalty), seen)
    return adjust(penalised, SamplingParams(logit_bias=params.logit_bias))


def penalty_divides(logits: Tensor, params: SamplingParams, seen: Tensor) -> Tensor:
    biased = adjust(logits, SamplingParams(logit_bias=params.logit_bias))
    return torch.where(seen, biased / params.repetition_penalty, biased)


def bias_only(logits: Tensor, params: SamplingParams, seen: Tensor) -> Tensor:
    return adjust(logits, SamplingParams(logit_bias=params.logit_bias))


def penalty_only(logits: Tensor, params: SamplingParams, seen: Tensor) -> Tensor:
    return adjust(logits, SamplingParams(repetition_penalty=params.repetition_penalty), seen)


PROMPTS = [[3, 4, 5, 3], [10, 60, 12, 12], [30, 31, 30, 2], [7, 7, 7, 7]]
SPOKEN = SamplingParams(repetition_penalty=1.3, logit_bias=((5, -math.inf), (9, 4.0), (20, 3.0), (33, 2.0), (48, 2.5)))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model("llama", initializer_range=0.4)


def spoken_by_transformers(model: PreTrainedModel, params: SamplingParams, **options: Any) -> Any:
    return model.generate(
        torch.tensor(PROMPTS),
        attention_mask=torch.ones(4, 4, dtype=torch.int64),
        max_new_tokens=24,
        eos_token_id=None,
        repetition_penalty=params.repetition_penalty,
        sequence_bias=[[[token], bias] for token, bias in params.logit_bias],
        **options,
    )


@pytest.mark.parametrize("wrong", [None, penalty_first, bias_only, penalty_only])
def test_greedy_answers_are_those_of_transformers_and_the_well_known_mistakes_are_caught(
    model: PreTrainedModel, wrong: Any
) -> None:
    ids = torch.tensor(PROMPTS)
    with torch.inference_mode():
        for _ in range(24):
            logits = (wrong or adjust)(model(ids).logits[:, -1], SPOKEN, seen_tokens(ids.tolist(), VOCAB_SIZE))
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        theirs = spoken_by_transformers(model, SPOKEN, do_sample=False)
    assert torch.equal(ids, theirs) == (wrong is None)


@pytest.mark.parametrize("wrong", [None, penalty_first, penalty_divides, "temperature first", "min-p first"])
def test_sampled_laws_are_those_of_transformers_in_its_order(model: PreTrainedModel, wrong: Any) -> None:
    params = SamplingParams(2.2, 30, 0.9, 0.08, SPOKEN.repetition_penalty, SPOKEN.logit_bias)
    warps = {"temperature": 2.2, "top_k": 30, "top_p": 0.9, "min_p": 0.08}
    shown = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    torch.manual_seed(0)
    out = spoken_by_transformers(model, params, do_sample=True, **warps, **shown)
    same = []
    for step, (logits, scores) in enumerate(zip(out.logits, out.scores, strict=True)):
        seen = seen_tokens(out.sequences[:, : 4 + step].tolist(), VOCAB_SIZE)
        if wrong == "temperature first":
            ours = probabilities(adjust(logits / 2.2, params, seen), SamplingParams(1.0, 30, 0.9, 0.08))
        elif wrong == "min-p first":
            likely = probabilities(adjust(logits, params, seen), SamplingParams(2.2, min_p=0.08)).log()
            ours = probabilities(likely, SamplingParams(1.0, 30, 0.9))
        else:
            ours = probabilities((wrong or adjust)(logits, params, seen), params)
        same.append(torch.allclose(ours, scores.softmax(-1), atol=1e-6, rtol=0))
    assert all(same) == (wrong is None)


# ---- tokens seen ----


def test_tokens_of_prompts_are_seen_and_ids_beyond_the_vocabulary_left_out() -> None:
    seen = seen_tokens([[1, 4, 1], [0], [5, 7], [2, 9, 4]], 5)
    assert [row.nonzero().flatten().tolist() for row in seen] == [[1, 4], [0], [], [2, 4]]
    assert seen.dtype == torch.bool


@pytest.mark.parametrize("vocab", [3, 20])
def test_each_node_has_seen_its_own_path(vocab: int) -> None:
    """Random trees behind the pending token, with tokens that come again on the path and on other branches."""
    g = torch.Generator().manual_seed(8)
    batch_size, num_nodes = 6, 9
    parents = torch.tensor(
        [[-1, *(int(torch.randint(i, (), generator=g)) for i in range(1, num_nodes))] for _ in range(batch_size)]
    )
    parents[0] = torch.arange(num_nodes) - 1  # a chain
    tokens = torch.randint(vocab, (batch_size, num_nodes), generator=g)
    before = torch.rand(batch_size, vocab, generator=g) < 0.2
    kept = before.clone()
    found = seen_at_nodes(before, tokens, tree.ancestors(parents))
    assert torch.equal(before, kept) and found.shape == (batch_size, num_nodes, vocab)
    for row, node in itertools.product(range(batch_size), range(num_nodes)):
        wanted, at = set(before[row].nonzero().flatten().tolist()), node
        while at >= 0:
            wanted.add(int(tokens[row, at]))
            at = int(parents[row, at])
        assert set(found[row, node].nonzero().flatten().tolist()) == wanted


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


def test_resting_streams_stand_still() -> None:
    random, others = RequestRandom([1, 2, 3], 2), RequestRandom([1, 2, 3], 2)
    with random.resting([0, 2]):
        first = random.uniform(2)
    assert torch.equal(first, others.uniform(2))
    now, next_ones = random.uniform(2), others.uniform(2)
    assert torch.equal(now[[0, 2]], first[[0, 2]])
    assert torch.equal(now[1], next_ones[1])


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
