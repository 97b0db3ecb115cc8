"""Block verification leaves the target's law as it is, and accepts at least as much as token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine import verify as room
from engine.verify import Verdict, acceptance_probabilities, block_acceptance, extra_law, verify_block, verify_chain
from tests.helpers.laws import Laws, invert_by_loop, one_hot_laws, random_laws, warped
from tests.helpers.verdicts import Drafts, emitted_by, enumerate_drafts, off_by, outcomes

EXACT = 1e-12
SEEN = 1e-4
SIZES = [(2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (3, 3), (3, 4), (4, 1), (4, 2), (4, 3), (4, 4)]


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(s * 100**i for i, s in enumerate(seed)))


def by_block(p: Tensor, tokens: Tensor, q: Tensor | None, parents: Tensor, limits: Tensor, u: Tensor) -> Verdict:
    return verify_block(p, tokens, q, limits, u)


def by_token(p: Tensor, tokens: Tensor, q: Tensor | None, parents: Tensor, limits: Tensor, u: Tensor) -> Verdict:
    return verify_chain(p, tokens, q, limits, u)


def chain_drafts(target: Laws, draft: Laws) -> Drafts:
    return enumerate_drafts(target, draft, list(range(-1, len(draft) - 1)), "independent")


def block_law(target: Laws, drafts: Drafts, **options: object) -> Tensor:
    return emitted_by(target, drafts, by_block, block=True, **options)  # type: ignore[arg-type]


def accepted_length(drafts: Drafts, verify: Callable[..., Verdict], told: Tensor | None, block: bool) -> float:
    full = torch.full((len(drafts.tokens),), drafts.tokens.shape[1])
    stop = outcomes(drafts, verify, full, told=told, parents=drafts.parents, block=block).stop
    return (drafts.weight @ stop @ torch.arange(stop.shape[1], dtype=torch.float64)).item()


@pytest.mark.parametrize(("vocab", "num_tokens"), SIZES)
def test_blocks_leave_the_targets_joint_law_and_are_never_worse(vocab: int, num_tokens: int) -> None:
    for zeros in (0.0, 0.4):
        g = generator(vocab, num_tokens)
        target = random_laws(vocab, num_tokens + 1, g, zeros=zeros)
        drafts = chain_drafts(target, random_laws(vocab, num_tokens, g, zeros=zeros))
        assert off_by(block_law(target, drafts), target) < EXACT
        block = accepted_length(drafts, by_block, drafts.probs, True)
        chain = accepted_length(drafts, by_token, drafts.probs, False)
        strictly = num_tokens > 1 and zeros == 0  # one token is tested as before
        assert block > chain + (SEEN if strictly else -EXACT)
        # The mean length is Σ_i E[P_i], the most that any verifier can accept (2403.10444, Theorem 1).
        reached, most = torch.ones_like(drafts.weight), 0.0
        for n in range(num_tokens):
            token = drafts.tokens[:, n : n + 1]
            ratio = drafts.target_probs[:, n].gather(1, token) / drafts.probs[:, n].gather(1, token)
            reached = (reached * ratio.squeeze(1)).clamp(max=1.0)
            most += (drafts.weight @ reached).item()
        assert block == pytest.approx(most, abs=EXACT)


@pytest.mark.parametrize(("vocab", "num_tokens"), SIZES)
def test_deterministic_blocks_leave_the_targets_joint_law(vocab: int, num_tokens: int) -> None:
    g = generator(vocab, num_tokens)
    target = random_laws(vocab, num_tokens + 1, g, zeros=0.3)
    drafts = chain_drafts(target, one_hot_laws(vocab, num_tokens, g))
    assert off_by(block_law(target, drafts, told=None), target) < EXACT
    assert off_by(block_law(target, drafts), target) < EXACT


def stop_behind_doubtful(tokens: Tensor, drawn_with: Tensor) -> Tensor:
    doubtful = torch.cat([drawn_with < 0.4, torch.ones(len(tokens), 1, dtype=torch.bool)], dim=1)
    return (doubtful.int().argmax(1) + 1).clamp(max=tokens.shape[1])


@pytest.mark.parametrize("vocab", [2, 3])
@pytest.mark.parametrize("limits", [0, 1, 2, 3, stop_behind_doubtful])
def test_blocks_cut_at_limits_leave_the_targets_joint_law(vocab: int, limits: int | Callable[..., Tensor]) -> None:
    g = generator(vocab)
    target = random_laws(vocab, 4, g)
    for draft in (random_laws(vocab, 3, g), one_hot_laws(vocab, 3, g)):
        drafts = chain_drafts(target, draft)
        assert off_by(block_law(target, drafts, limits=limits), target) < EXACT
        if isinstance(limits, int):
            cut = torch.full((len(drafts.tokens),), limits)
            found = outcomes(drafts, by_block, cut, told=drafts.probs, parents=drafts.parents, block=True)
            assert found.chance[:, limits:].sum() == 0


def test_a_block_with_the_targets_law_is_accepted_whole() -> None:
    target = random_laws(3, 4, generator(1), zeros=0.3)
    drafts = chain_drafts(target, target[:3])
    full = torch.full((len(drafts.tokens),), 3)
    found = outcomes(drafts, by_block, full, told=drafts.probs, parents=drafts.parents, block=True)
    assert torch.equal(found.stop[:, 3], torch.ones_like(drafts.weight))
    assert off_by(block_law(target, drafts), target) < EXACT


def test_the_outside_that_integrates_agrees_about_chains() -> None:
    g = generator(2)
    target = random_laws(3, 4, g)
    drafts = chain_drafts(target, random_laws(3, 3, g))
    assert off_by(emitted_by(target, drafts, by_token), target) < EXACT
    full = torch.full((len(drafts.tokens),), 3)
    chance = outcomes(drafts, by_token, full, told=drafts.probs, parents=drafts.parents).chance
    wanted = acceptance_probabilities(drafts.target_probs, drafts.tokens, drafts.probs)
    torch.testing.assert_close(chance, wanted, rtol=0, atol=1e-15)


# ---- every known mistake is seen by the enumeration ----


def unscaled(p: Tensor, tokens: Tensor, q: Tensor | None, accepted: Tensor, limits: Tensor) -> Tensor:
    return extra_law(p / p.sum(-1, keepdim=True), tokens, q, accepted, limits)


def from_the_target(p: Tensor, tokens: Tensor, q: Tensor | None, accepted: Tensor, limits: Tensor) -> Tensor:
    return p[torch.arange(len(p)), accepted]


Kept = tuple[Tensor, Tensor]


def kept_by_reach(p: Tensor, tokens: Tensor, q: Tensor | None, limits: Tensor) -> Kept:
    """h_i = P_i at every i."""
    scaled = block_acceptance(p, tokens, q, limits)[1]
    return scaled.sum(-1)[:, 1:], scaled


def kept_without_memory(p: Tensor, tokens: Tensor, q: Tensor | None, limits: Tensor) -> Kept:
    """h_i = min(1, p/q) of the i-th token alone."""
    return acceptance_probabilities(p, tokens, q), block_acceptance(p, tokens, q, limits)[1]


def kept_behind_limits(p: Tensor, tokens: Tensor, q: Tensor | None, limits: Tensor) -> Kept:
    return block_acceptance(p, tokens, q, torch.full_like(limits, tokens.shape[1]))


def test_the_enumeration_rejects_every_known_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    g = generator(3)
    target, draft = random_laws(3, 4, g), random_laws(3, 3, g)
    drafts = chain_drafts(target, draft)
    assert off_by(block_law(target, drafts), target) < EXACT
    told = {
        "q at another temperature": chain_drafts(target, warped(draft, 1 / 0.8)).probs,
        "q is 1 / V": torch.full_like(drafts.probs, 1 / 3),
        "q of the position before": drafts.probs.roll(1, dims=1),
    }
    found = {name: off_by(block_law(target, drafts, told=probs), target) for name, probs in told.items()}
    found["a doubtful token discarded"] = off_by(
        block_law(target, drafts, limits=lambda t, d: stop_behind_doubtful(t, d) - 1), target
    )
    for name, mistake in (("residual of p", unscaled), ("correction from p", from_the_target)):
        with monkeypatch.context() as m:
            m.setattr(room, "extra_law", mistake)
            found[name] = off_by(block_law(target, drafts), target)
    for wrong in (kept_by_reach, kept_without_memory, kept_behind_limits):
        with monkeypatch.context() as m:
            m.setattr(room, "block_acceptance", wrong)
            found[wrong.__name__] = off_by(block_law(target, drafts, limits=2), target)
    assert {name for name, off in found.items() if off < SEEN} == set()


# ---- decisions, against plain Python ----


def decide_by_loop(
    p: list[list[float]], tokens: list[int], q: list[list[float]] | None, limit: int, uniforms: list[float]
) -> tuple[int, int]:
    """2403.10444, Algorithm 2, position by position."""
    own = [[float(x == t) for x in range(len(p[0]))] for t in tokens] if q is None else q
    accepted, reached, at = 0, 1.0, 1.0
    for i in range(1, limit + 1):
        token = tokens[i - 1]
        reached = min(1.0, reached * p[i - 1][token] / own[i - 1][token])
        if i < limit:
            left = sum(max(reached * a - b, 0.0) for a, b in zip(p[i], own[i], strict=True))
            keep = left / (left + 1 - reached) if left + 1 - reached > 0 else 1.0
        else:
            keep = reached
        if uniforms[i] < keep:
            accepted, at = i, reached
    if accepted == limit:
        return accepted, invert_by_loop(p[limit], uniforms[0])
    law = [max(at * a - b, 0.0) for a, b in zip(p[accepted], own[accepted], strict=True)]
    return accepted, invert_by_loop(law if sum(law) > 0 else p[accepted], uniforms[0])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_ragged_batch_is_decided_row_by_row(deterministic: bool) -> None:
    g = generator(4)
    size, num_tokens, vocab = 600, 4, 3
    p = torch.randn(size, num_tokens + 1, vocab, generator=g, dtype=torch.float64).softmax(-1)
    q = None if deterministic else torch.randn(size, num_tokens, vocab, generator=g, dtype=torch.float64).softmax(-1)
    tokens = torch.randint(vocab, (size, num_tokens), generator=g)
    limits = torch.randint(num_tokens + 1, (size,), generator=g)
    uniforms = torch.rand(size, num_tokens + 1, generator=g, dtype=torch.float64)
    verdict = verify_block(p, tokens, q, limits, uniforms)
    for b in range(size):
        told = None if q is None else q[b].tolist()
        wanted = decide_by_loop(p[b].tolist(), tokens[b].tolist(), told, int(limits[b]), uniforms[b].tolist())
        assert (int(verdict.accepted[b]), int(verdict.extra_token[b])) == wanted
    assert len(set(verdict.accepted.tolist())) == num_tokens + 1
    assert torch.equal(verdict.expected, verify_chain(p, tokens, q, limits, uniforms).expected)


@pytest.mark.parametrize("probs", [None, torch.zeros(2, 0, 3, dtype=torch.float64)])
def test_without_a_draft_the_extra_token_is_drawn_from_the_target(probs: Tensor | None) -> None:
    p = torch.tensor([[[0.25, 0.0, 0.75]]], dtype=torch.float64).expand(2, -1, -1)
    uniforms = torch.tensor([[0.2499], [0.25]], dtype=torch.float64)
    nothing, limits = torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    verdict = verify_block(p, nothing, probs, limits, uniforms)
    assert (verdict.accepted.tolist(), verdict.extra_token.tolist()) == ([0, 0], [0, 2])
    assert verdict.expected.shape == (2, 0)
