"""Speculative sampling leaves the target's law as it is: shown exactly, and shown to fail for each known mistake."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.verify import Verdict, acceptance_probabilities, extra_law, verify_chain, verify_greedy
from tests.helpers.laws import (
    Laws,
    behind,
    emitted_law,
    invert_by_loop,
    joint_law,
    one_hot_laws,
    random_laws,
    warped,
)

EXACT = 1e-12
SIZES = [(vocab, num_tokens) for vocab in (2, 3, 4, 5) for num_tokens in (1, 2, 3, 4)]
ALMOST_ONE = 1 - 2.0**-53


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(s * 100**i for i, s in enumerate(seed)))


def distance(emitted: Tensor, target: Laws) -> float:
    return (emitted - joint_law(target)).abs().max().item()


# ---- the law of what comes out, by enumeration ----


@pytest.mark.parametrize(("vocab", "num_tokens"), SIZES)
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_sampled_drafts_leave_the_targets_joint_law(vocab: int, num_tokens: int, zeros: float) -> None:
    for seed in range(3):
        g = generator(vocab, num_tokens, seed)
        target = random_laws(vocab, num_tokens + 1, g, zeros=zeros)
        draft = random_laws(vocab, num_tokens, g, zeros=zeros)
        assert distance(emitted_law(target, draft), target) < EXACT


@pytest.mark.parametrize(("vocab", "num_tokens"), SIZES)
def test_deterministic_drafts_leave_the_targets_joint_law(vocab: int, num_tokens: int) -> None:
    for seed in range(3):
        g = generator(vocab, num_tokens, seed)
        target = random_laws(vocab, num_tokens + 1, g, zeros=0.3)
        draft = one_hot_laws(vocab, num_tokens, g)
        told_nothing = emitted_law(target, draft, deterministic=True)
        told_the_point_masses = emitted_law(target, draft)
        assert distance(told_nothing, target) < EXACT
        assert torch.equal(told_nothing, told_the_point_masses)


@pytest.mark.parametrize(("vocab", "num_tokens"), SIZES)
def test_drafts_cut_at_limits_leave_the_targets_joint_law(vocab: int, num_tokens: int) -> None:
    g = generator(vocab, num_tokens)
    target, draft = random_laws(vocab, num_tokens + 1, g), random_laws(vocab, num_tokens, g)
    point_masses = one_hot_laws(vocab, num_tokens, g)
    for limit in range(num_tokens + 1):

        def constant(drafts: Tensor, drawn_with: Tensor, limit: int = limit) -> Tensor:
            return torch.full((len(drafts),), limit)

        assert distance(emitted_law(target, draft, limits=constant), target) < EXACT
        assert distance(emitted_law(target, point_masses, deterministic=True, limits=constant), target) < EXACT


def test_a_sampled_draft_whose_law_is_not_told_still_leaves_the_targets_law() -> None:
    # Each draft by itself is then a deterministic one. It costs acceptance, but no bias: not among the mistakes below.
    g = generator(2)
    target, draft = random_laws(4, 4, g), random_laws(4, 3, g)
    assert distance(emitted_law(target, draft, deterministic=True), target) < EXACT


def first_doubtful(drafts: Tensor, drawn_with: Tensor) -> Tensor:
    """The position of each draft's first token that was drawn with a probability below 0.4."""
    doubtful = torch.cat([drawn_with < 0.4, torch.ones(len(drafts), 1, dtype=torch.bool)], dim=1)
    return doubtful.int().argmax(1)


def stop_behind_doubtful(drafts: Tensor, drawn_with: Tensor) -> Tensor:
    return (first_doubtful(drafts, drawn_with) + 1).clamp(max=drafts.shape[1])


@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_stopping_behind_a_doubtful_token_leaves_the_targets_joint_law(vocab: int) -> None:
    g = generator(vocab)
    target, draft = random_laws(vocab, 4, g), random_laws(vocab, 3, g)
    assert distance(emitted_law(target, draft, limits=stop_behind_doubtful), target) < EXACT


def test_a_draft_with_the_targets_law_is_accepted_whole() -> None:
    target = random_laws(4, 4, generator(0), zeros=0.3)
    drafts = torch.tensor(list(itertools.product(range(4), repeat=3)))
    possible = drafts[joint_law(target[:3]).flatten() > 0]
    p, q = behind(target, possible), behind(target[:3], possible)
    assert (acceptance_probabilities(p, possible, q) == 1).all()
    assert distance(emitted_law(target, target[:3]), target) < EXACT


def test_a_draft_of_impossible_tokens_is_rejected_and_corrected_from_the_targets_law() -> None:
    g = generator(1)
    halves = [torch.tensor([1.0, 1.0, 0.0, 0.0]).double(), torch.tensor([0.0, 0.0, 1.0, 1.0]).double()]
    target = [law * halves[0] / (law * halves[0]).sum(-1, keepdim=True) for law in random_laws(4, 4, g)]
    draft = [law * halves[1] / (law * halves[1]).sum(-1, keepdim=True) for law in random_laws(4, 3, g)]
    drafts = torch.tensor([[2, 3, 2]])
    assert (acceptance_probabilities(behind(target, drafts), drafts, behind(draft, drafts)) == 0).all()
    assert distance(emitted_law(target, draft), target) < EXACT


@pytest.mark.parametrize("draft_of", [random_laws, one_hot_laws])
def test_a_target_at_temperature_zero_emits_its_own_path(draft_of: Callable[..., Laws]) -> None:
    for seed in range(5):
        g = generator(seed)
        target = one_hot_laws(4, 4, g)
        emitted = emitted_law(target, draft_of(4, 3, g))
        assert distance(emitted, target) < EXACT
        assert emitted.count_nonzero() == 1


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float64, torch.float32)])
def test_the_law_holds_up_to_rounding_in_narrower_and_mixed_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    g = generator(3)
    target = [law.to(dtypes[0]) for law in random_laws(4, 4, g)]
    draft = [law.to(dtypes[1]) for law in random_laws(4, 3, g)]
    nearly_the_target = [(law * (1 + 1e-7)).to(dtypes[1]) for law in target[:3]]
    assert distance(emitted_law(target, draft), target) < 2e-6
    assert distance(emitted_law(target, nearly_the_target), target) < 2e-6


# ---- the algorithm itself, in rational arithmetic and without torch ----

Table = dict[tuple[int, ...], list[Fraction]]


def rational_laws(vocab: int, length: int, rng: random.Random) -> Table:
    table = {}
    for n in range(length):
        for prefix in itertools.product(range(vocab), repeat=n):
            weights = [rng.randint(0, 6) for _ in range(vocab)]
            weights[rng.randrange(vocab)] += 1
            table[prefix] = [Fraction(w, sum(weights)) for w in weights]
    return table


def emitted_by_fractions(p: Table, q: Table, num_tokens: int) -> dict[tuple[int, ...], Fraction]:
    emitted: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)

    def continued(prefix: tuple[int, ...], weight: Fraction) -> None:
        if len(prefix) == num_tokens + 1:
            emitted[prefix] += weight
            return
        for token, chance in enumerate(p[prefix]):
            continued((*prefix, token), weight * chance)

    def drafted(prefix: tuple[int, ...], weight: Fraction) -> None:
        if len(prefix) == num_tokens:
            continued(prefix, weight)
            return
        residual = [max(a - b, Fraction(0)) for a, b in zip(p[prefix], q[prefix], strict=True)]
        for token, chance in enumerate(q[prefix]):
            if chance == 0:
                continue
            accept = min(Fraction(1), p[prefix][token] / chance)
            drafted((*prefix, token), weight * chance * accept)
            if accept < 1:
                for other, mass in enumerate(residual):
                    continued((*prefix, other), weight * chance * (1 - accept) * mass / sum(residual))

    drafted((), Fraction(1))
    return emitted


def as_laws(table: Table, vocab: int, length: int) -> Laws:
    laws = [torch.zeros((vocab,) * (n + 1), dtype=torch.float64) for n in range(length)]
    for prefix, law in table.items():
        laws[len(prefix)][prefix] = torch.tensor([float(x) for x in law], dtype=torch.float64)
    return laws


@pytest.mark.parametrize(("vocab", "num_tokens"), [(2, 1), (2, 2), (2, 4), (3, 2), (4, 2), (6, 1)])
def test_the_algorithm_is_exact_in_fractions_and_the_functions_agree_with_it(vocab: int, num_tokens: int) -> None:
    rng = random.Random(100 * vocab + num_tokens)
    p, q = rational_laws(vocab, num_tokens + 1, rng), rational_laws(vocab, num_tokens, rng)
    exact = emitted_by_fractions(p, q, num_tokens)
    ours = emitted_law(as_laws(p, vocab, num_tokens + 1), as_laws(q, vocab, num_tokens))
    for tokens in itertools.product(range(vocab), repeat=num_tokens + 1):
        wanted = Fraction(1)
        for n, token in enumerate(tokens):
            wanted *= p[tokens[:n]][token]
        assert exact[tokens] == wanted
        assert abs(ours[tokens].item() - float(wanted)) < EXACT


# ---- every known mistake is seen by the enumeration ----


def correction_from_the_target(p: Tensor, tokens: Tensor, q: Tensor | None, accepted: Tensor, limits: Tensor) -> Tensor:
    return p[torch.arange(len(p)), accepted]


def bonus_for_a_correction(p: Tensor, tokens: Tensor, q: Tensor | None, accepted: Tensor, limits: Tensor) -> Tensor:
    return p[torch.arange(len(p)), (accepted + 1).clamp(max=tokens.shape[1])]


def correction_for_a_bonus(p: Tensor, tokens: Tensor, q: Tensor | None, accepted: Tensor, limits: Tensor) -> Tensor:
    return extra_law(p, tokens, q, accepted.clamp(max=tokens.shape[1] - 1), limits + 1)


def limits_unknown(p: Tensor, tokens: Tensor, q: Tensor | None, accepted: Tensor, limits: Tensor) -> Tensor:
    return extra_law(p, tokens, q, accepted, torch.full_like(limits, tokens.shape[1]))


def accept_at_the_next_position(p: Tensor, tokens: Tensor, q: Tensor | None) -> Tensor:
    return acceptance_probabilities(p.roll(-1, dims=1), tokens, q)


def accept_at_the_position_before(p: Tensor, tokens: Tensor, q: Tensor | None) -> Tensor:
    return acceptance_probabilities(torch.cat([p[:, :1], p[:, :-1]], dim=1), tokens, q)


def accept_by_the_inverse_ratio(p: Tensor, tokens: Tensor, q: Tensor | None) -> Tensor:
    return (1 / acceptance_probabilities(p, tokens, q)).clamp(max=1.0)


def always_two(drafts: Tensor, drawn_with: Tensor) -> Tensor:
    return torch.full((len(drafts),), 2)


def test_the_enumeration_rejects_every_known_mistake() -> None:
    g = generator(5)
    target, draft = random_laws(3, 4, g), random_laws(3, 3, g)
    flat = [torch.full_like(law, 1 / 3) for law in draft]
    mistakes: dict[str, dict[str, Any]] = {
        "q at another temperature": {"reported": warped(draft, 1 / 0.8)},
        "q is 1 / V": {"reported": flat},
        "q of other weights than those that drafted": {
            "reported": [0.9 * a + 0.1 * b for a, b in zip(draft, random_laws(3, 3, g), strict=True)]
        },
        "a doubtful token discarded": {"limits": first_doubtful},
        "correction from p": {"extra": correction_from_the_target},
        "bonus for a correction": {"extra": bonus_for_a_correction},
        "correction for a bonus": {"extra": correction_for_a_bonus},
        "correction at a limit": {"limits": always_two, "extra": limits_unknown},
        "accepted one position too late": {"accept": accept_at_the_next_position},
        "accepted one position too early": {"accept": accept_at_the_position_before},
        "accepted with q / p": {"accept": accept_by_the_inverse_ratio},
    }
    found = {name: distance(emitted_law(target, draft, **mistake), target) for name, mistake in mistakes.items()}
    assert distance(emitted_law(target, draft), target) < EXACT
    assert {name for name, off in found.items() if off < 1e-3} == set()


def test_the_enumeration_rejects_mistakes_with_deterministic_drafts() -> None:
    g = generator(4)
    target, draft = random_laws(3, 4, g), one_hot_laws(3, 3, g)
    told = {"deterministic": True}
    assert distance(emitted_law(target, draft, **told), target) < EXACT
    assert distance(emitted_law(target, draft, extra=correction_from_the_target, **told), target) > 1e-3
    assert distance(emitted_law(target, draft, accept=accept_at_the_next_position, **told), target) > 1e-3


# ---- verify_chain decides by these numbers ----


def decide_by_loop(
    p: list[Any], tokens: list[int], q: list[Any] | None, limit: int, uniforms: Sequence[float]
) -> tuple[int, int]:
    for i in range(limit):
        here = [float(x == tokens[i]) for x in range(len(p[i]))] if q is None else q[i]
        if not uniforms[1 + i] < min(1.0, p[i][tokens[i]] / here[tokens[i]]):
            residual = [max(a - b, 0.0) for a, b in zip(p[i], here, strict=True)]
            return i, invert_by_loop(residual if sum(residual) > 0 else p[i], uniforms[0])
    return limit, invert_by_loop(p[limit], uniforms[0])


def around(value: float) -> list[float]:
    """`value` and its two neighbours, as far as they are uniforms."""
    at = torch.tensor(value, dtype=torch.float64)
    near = [at.nextafter(torch.zeros_like(at)), at, at.nextafter(torch.ones_like(at))]
    return sorted({min(max(x.item(), 0.0), ALMOST_ONE) for x in near})


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_decisions_around_every_threshold_are_those_of_a_loop(deterministic: bool, limit: int) -> None:
    g = generator(6, limit)
    target, draft = random_laws(4, 4, g), random_laws(4, 3, g)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    for i in range(3):  # tokens that may be accepted or rejected
        ratios = behind(target, tokens)[0, i] / (1.0 if deterministic else behind(draft, tokens)[0, i])
        tokens[0, i] = (ratios - 0.5).abs().argmin()
    p, q = behind(target, tokens), None if deterministic else behind(draft, tokens)
    edges = [around(a) for a in acceptance_probabilities(p, tokens, q)[0].tolist()]
    firsts = {0.0, 0.5, ALMOST_ONE}
    for accepted in range(limit + 1):
        law = extra_law(p, tokens, q, torch.tensor([accepted]), torch.tensor([limit]))[0]
        firsts |= {u for edge in (law.cumsum(0) / law.sum()).tolist() for u in around(edge)}
    uniforms = torch.tensor(list(itertools.product(sorted(firsts), *edges)), dtype=torch.float64)
    assert len(uniforms) > 100

    count = len(uniforms)
    verdict = verify_chain(
        p.expand(count, -1, -1),
        tokens.expand(count, -1),
        None if q is None else q.expand(count, -1, -1),
        torch.full((count,), limit),
        uniforms,
    )
    told = None if q is None else q[0].tolist()
    wanted = [decide_by_loop(p[0].tolist(), tokens[0].tolist(), told, limit, u) for u in uniforms.tolist()]
    assert list(zip(verdict.accepted.tolist(), verdict.extra_token.tolist(), strict=True)) == wanted
    assert {accepted for accepted, _ in wanted} == set(range(limit + 1))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_ragged_batch_is_decided_row_by_row(deterministic: bool) -> None:
    g = generator(7)
    batch_size, num_tokens, vocab = 400, 3, 3
    p = torch.randn(batch_size, num_tokens + 1, vocab, generator=g, dtype=torch.float64).softmax(-1)
    q = torch.randn(batch_size, num_tokens, vocab, generator=g, dtype=torch.float64).softmax(-1)
    tokens = torch.randint(vocab, (batch_size, num_tokens), generator=g)
    limits = torch.randint(num_tokens + 1, (batch_size,), generator=g)
    uniforms = torch.rand(batch_size, num_tokens + 1, generator=g, dtype=torch.float64)
    verdict = verify_chain(p, tokens, None if deterministic else q, limits, uniforms)
    for b in range(batch_size):
        told = None if deterministic else q[b].tolist()
        row = decide_by_loop(p[b].tolist(), tokens[b].tolist(), told, int(limits[b]), uniforms[b].tolist())
        assert (verdict.accepted[b].item(), verdict.extra_token[b].item()) == row
        for i in range(num_tokens):
            pairs = zip(p[b, i].tolist(), q[b, i].tolist(), strict=True)
            wanted = p[b, i, tokens[b, i]].item() if deterministic else sum(min(pair) for pair in pairs)
            assert verdict.expected[b, i].item() == pytest.approx(wanted, abs=1e-14)
    assert len(set(verdict.accepted.tolist())) == num_tokens + 1


def test_without_a_draft_the_extra_token_is_drawn_from_the_target() -> None:
    p = torch.tensor([[[0.25, 0.0, 0.75]]], dtype=torch.float64).expand(4, -1, -1)
    uniforms = torch.tensor([[0.0], [0.2499], [0.25], [ALMOST_ONE]], dtype=torch.float64)
    nothing = torch.zeros(4, 0, dtype=torch.int64)
    for probs in (None, torch.zeros(4, 0, 3, dtype=torch.float64)):
        verdict = verify_chain(p, nothing, probs, torch.zeros(4, dtype=torch.int64), uniforms)
        assert verdict.extra_token.tolist() == [0, 0, 2, 2]
        assert verdict.accepted.tolist() == [0] * 4
        assert verdict.expected.shape == (4, 0)
    greedy = verify_greedy(p.argmax(-1), nothing, torch.zeros(4, dtype=torch.int64))
    assert (greedy.accepted.tolist(), greedy.extra_token.tolist()) == ([0] * 4, [2] * 4)


# ---- greedy decoding is the same algorithm ----


def same_decisions(a: Verdict, b: Verdict) -> bool:
    return torch.equal(a.accepted, b.accepted) and torch.equal(a.extra_token, b.extra_token)


def test_greedy_verification_is_chain_verification_with_one_hot_laws() -> None:
    g = generator(8)
    batch_size, num_tokens, vocab = 600, 3, 3
    choices = torch.randint(vocab, (batch_size, num_tokens + 1), generator=g)
    tokens = torch.randint(vocab, (batch_size, num_tokens), generator=g)
    limits = torch.randint(num_tokens + 1, (batch_size,), generator=g)
    uniforms = torch.rand(batch_size, num_tokens + 1, generator=g, dtype=torch.float64)
    p = torch.nn.functional.one_hot(choices, vocab).double()
    greedy = verify_greedy(choices, tokens, limits)
    assert set(greedy.accepted.tolist()) == {0, 1, 2, 3}
    point_masses = torch.nn.functional.one_hot(tokens, vocab).double()
    for probs in (None, point_masses):
        chain = verify_chain(p, tokens, probs, limits, uniforms)
        assert same_decisions(chain, greedy)
        assert torch.equal(chain.expected, greedy.expected)
    sampled = torch.randn(batch_size, num_tokens, vocab, generator=g, dtype=torch.float64).softmax(-1)
    assert same_decisions(verify_chain(p, tokens, sampled, limits, uniforms), greedy)


def test_greedy_verification_by_hand() -> None:
    choices = torch.tensor([[5, 6, 7, 8]]).expand(4, -1)
    tokens = torch.tensor([[5, 6, 7], [5, 9, 7], [9, 6, 7], [5, 6, 7]])
    verdict = verify_greedy(choices, tokens, torch.tensor([3, 3, 3, 1]))
    assert verdict.accepted.tolist() == [3, 1, 0, 1]
    assert verdict.extra_token.tolist() == [8, 6, 5, 6]
    assert verdict.expected.tolist() == [[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 1]]
