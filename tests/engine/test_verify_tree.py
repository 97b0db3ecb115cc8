"""Trees leave the target's law as it is: shown exactly, from outside, and shown to fail for each known mistake."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from engine import verify_tree as room
from engine.verify import Verdict, verify_chain, verify_greedy
from engine.verify_tree import verify_tree, verify_tree_greedy, verify_typical
from models.rejection import try_child
from models.tree import chain_parents
from tests.helpers.laws import Laws, invert_by_loop, one_hot_laws, random_laws, warped
from tests.helpers.verdicts import (
    ALMOST_ONE,
    Drafts,
    Parents,
    children,
    emitted_by,
    enumerate_drafts,
    off_by,
    outcomes,
    path_to,
    tree_depth,
)

EXACT = 1e-12
SEEN = 1e-4
KINDS = ("independent", "without replacement", "deterministic")
TREES: list[tuple[int, Parents]] = [
    (2, [-1]),
    (2, [-1, -1, 0, 0, 1]),
    (2, [-1, 0, -1, 1, 1]),  # depth first: a sibling behind its sibling's children
    (2, [-1, -1, 0, 1, 2, 2]),
    (3, [-1, 0, 1]),
    (3, [-1, -1, -1]),
    (3, [-1, -1, 1, 1]),
    (3, [-1, 0, 0, 1, -1]),
    (4, [-1, -1, 0]),
    (4, [-1, 0, 0, 0]),
]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def laws_for(vocab: int, parents: Parents, seed: int, zeros: float = 0.0) -> tuple[Laws, Laws]:
    g, depth = generator(seed), tree_depth(parents)
    return random_laws(vocab, depth + 1, g, zeros=zeros), random_laws(vocab, depth, g, zeros=zeros)


# ---- the law of what comes out, by enumeration ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "parents"), TREES, ids=str)
def test_trees_leave_the_targets_joint_law(vocab: int, parents: Parents, kind: str) -> None:
    for zeros in (0.0, 0.4):
        target, draft = laws_for(vocab, parents, 10 * vocab + len(parents), zeros)
        drafts = enumerate_drafts(target, draft, parents, kind)
        assert drafts.weight.sum().item() == pytest.approx(1.0, abs=EXACT)
        assert off_by(emitted_by(target, drafts, verify_tree), target) < EXACT
        if kind == "deterministic":
            assert off_by(emitted_by(target, drafts, verify_tree, told=None), target) < EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parents", [[-1, -1, 0, 0, 1], [-1, 0, -1, 1, 1]], ids=str)
def test_trees_cut_at_limits_leave_the_targets_joint_law(parents: Parents, kind: str) -> None:
    target, draft = laws_for(2, parents, 3)
    drafts = enumerate_drafts(target, draft, parents, kind)
    told = None if kind == "deterministic" else drafts.probs
    for limit in range(tree_depth(parents) + 1):
        assert off_by(emitted_by(target, drafts, verify_tree, told=told, limits=limit), target) < EXACT
        cut = torch.full((len(drafts.tokens),), limit)
        stop = outcomes(drafts, verify_tree, cut, told=told, parents=parents).stop
        deeper = [row for row in range(1 + len(parents)) if len(path_to(parents, row - 1)) > limit]
        assert stop[:, deeper].sum() == 0


def test_a_sampled_tree_whose_laws_are_not_told_still_leaves_the_targets_law() -> None:
    # Each tree by itself is then a deterministic one. It costs acceptance, but no bias: not among the mistakes below.
    target, draft = laws_for(3, [-1, -1, 1, 1], 4)
    drafts = enumerate_drafts(target, draft, [-1, -1, 1, 1], "independent")
    assert off_by(emitted_by(target, drafts, verify_tree, told=None), target) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_expected_is_the_probability_that_a_child_is_accepted(kind: str) -> None:
    """Summed over all drafts and outcomes: the expected number of accepted tokens."""
    parents = [-1, 0, -1, 1, 1]
    target, draft = laws_for(3, parents, 5)
    drafts = enumerate_drafts(target, draft, parents, kind)
    told = None if kind == "deterministic" else drafts.probs
    full = torch.full((len(drafts.tokens),), tree_depth(parents))
    found = outcomes(drafts, verify_tree, full, told=told, parents=parents)
    above = torch.tensor(parents).expand(len(full), -1)
    accepted, expected, chance_given_tokens = 0.0, 0.0, 0.0
    for row in range(1 + len(parents)):
        uniforms = found.forced[row].expand(len(full), -1)
        verdict = verify_tree(drafts.target_probs, drafts.tokens, told, above, full, uniforms)
        weight = drafts.weight * found.stop[:, row]
        accepted += len(path_to(parents, row - 1)) * weight.sum().item()
        expected += (weight * verdict.expected.sum(1)).sum().item()
        for node in [-1, *path_to(parents, row - 1)]:
            missed = (1 - found.chance[:, children(parents, node)]).prod(1)
            chance_given_tokens += (weight * (1 - missed)).sum().item()
    assert chance_given_tokens == pytest.approx(accepted, abs=EXACT)
    assert expected == pytest.approx(accepted, abs=EXACT)


def test_a_tree_with_the_targets_law_is_accepted_to_its_end() -> None:
    target, _ = laws_for(3, [-1, -1, 0, 0], 6)
    drafts = enumerate_drafts(target, target[:2], [-1, -1, 0, 0], "independent")
    full = torch.full((len(drafts.tokens),), 2)
    found = outcomes(drafts, verify_tree, full, told=drafts.probs, parents=drafts.parents)
    assert torch.equal(found.stop[:, 3], torch.ones(len(full), dtype=torch.float64))  # node 2, under node 0
    assert off_by(emitted_by(target, drafts, verify_tree), target) < EXACT


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float64, torch.float32)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_holds_up_to_rounding_in_narrower_and_mixed_dtypes(
    kind: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    parents = [-1, -1, 0, 0]
    target, draft = laws_for(3, parents, 7)
    for drafter in (draft, [law + 1e-7 * (law < 0.3) for law in target[:2]]):  # the second nearly the target itself
        drafts = enumerate_drafts(target, [law / law.sum(-1, keepdim=True) for law in drafter], parents, kind)
        narrow = Drafts(
            drafts.weight, drafts.tokens, drafts.probs.to(dtypes[1]), drafts.target_probs.to(dtypes[0]), parents
        )
        assert off_by(emitted_by(target, narrow, verify_tree), target) < 2e-6


# ---- every known mistake is seen by the enumeration ----


def not_renormalised(probs: Tensor, drafts: Drafts, draft: Laws) -> Tensor:
    """q with the earlier siblings removed, but nothing done about what they leave."""
    first = enumerate_by_prefix(drafts, draft)
    return torch.where(probs > 0, first, 0.0)


def enumerate_by_prefix(drafts: Drafts, draft: Laws) -> Tensor:
    """q as it was before any sibling was removed: (R, N, V)."""
    rows = []
    for parent in drafts.parents:
        prefix = [drafts.tokens[:, n] for n in path_to(drafts.parents, parent)]
        rows.append(draft[len(prefix)][tuple(prefix)] if prefix else draft[0].expand(len(drafts.tokens), -1))
    return torch.stack(rows, dim=1)


def correction_from_the_target(law: Tensor, tokens: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    chance, _, overlap = try_child(law, tokens, q)
    return chance, law, overlap


def residual_without_a_norm(law: Tensor, tokens: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    chance, left, overlap = try_child(law, tokens, q)
    return chance, left * (1 - overlap)[:, None], overlap


def accepted_with_q_over_p(law: Tensor, tokens: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    chance, left, overlap = try_child(law, tokens, q)
    return 1 / chance, left, overlap


def point_mass_for_a_law(law: Tensor, tokens: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted by q, but only the token itself removed on rejection."""
    chance, _, overlap = try_child(law, tokens, q)
    return chance, try_child(law, tokens, None)[1], overlap


@pytest.mark.parametrize("kind", ["independent", "without replacement"])
def test_the_enumeration_rejects_every_wrong_law(kind: str) -> None:
    parents = [-1, -1, 0, 0]
    target, draft = laws_for(3, parents, 8)
    drafts = enumerate_drafts(target, draft, parents, kind)
    mistakes: dict[str, Tensor] = {
        "q at another temperature": enumerate_drafts(target, warped(draft, 1 / 0.8), parents, kind).probs,
        "q is 1 / V": torch.full_like(drafts.probs, 1 / 3),
        "q of the node before": drafts.probs.roll(1, dims=1),
    }
    if kind == "without replacement":
        mistakes["siblings left in q"] = enumerate_by_prefix(drafts, draft)
        mistakes["q not renormalised"] = not_renormalised(drafts.probs, drafts, draft)
    else:
        mistakes["siblings taken out of q"] = taken_out(drafts, draft)
    found = {
        name: off_by(emitted_by(target, drafts, verify_tree, told=told), target) for name, told in mistakes.items()
    }
    assert off_by(emitted_by(target, drafts, verify_tree), target) < EXACT
    assert {name for name, off in found.items() if off < SEEN} == set()


def taken_out(drafts: Drafts, draft: Laws) -> Tensor:
    """What would be told of siblings drawn without replacement."""
    probs = enumerate_by_prefix(drafts, draft)
    for node, parent in enumerate(drafts.parents):
        for elder in [n for n in children(drafts.parents, parent) if n < node]:
            probs[:, node] = probs[:, node].scatter(1, drafts.tokens[:, elder : elder + 1], 0.0)
    return probs / probs.sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_enumeration_rejects_every_wrong_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parents = [-1, -1, 0, 0]
    target, draft = laws_for(3, parents, 9)
    drafts = enumerate_drafts(target, draft, parents, kind)
    mistakes = [correction_from_the_target, residual_without_a_norm, accepted_with_q_over_p]
    if kind != "deterministic":
        mistakes.append(point_mass_for_a_law)
    for mistake in mistakes:
        monkeypatch.setattr(room, "try_child", mistake)
        assert off_by(emitted_by(target, drafts, verify_tree), target) > SEEN, mistake.__name__


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("told", [[-1, -1, 1, 1], [-1, -1, 0, 1], [-1, 0, 0, 0]], ids=str)
def test_the_enumeration_rejects_a_mix_up_of_parents(kind: str, told: Parents) -> None:
    target, draft = laws_for(3, [-1, -1, 0, 0], 11)
    target = random_laws(3, 4, generator(11))
    drafts = enumerate_drafts(target, draft, [-1, -1, 0, 0], kind)
    assert off_by(emitted_by(target, drafts, verify_tree, parents=told), target) > SEEN


def test_the_order_of_siblings_matters_without_replacement_only() -> None:
    target, draft = laws_for(4, [-1, -1], 12)
    found = {}
    for kind in KINDS:
        d = enumerate_drafts(target, draft, [-1, -1], kind)
        last_first = Drafts(d.weight, d.tokens.flip(1), d.probs.flip(1), d.target_probs[:, [0, 2, 1]], d.parents)
        found[kind] = off_by(emitted_by(target, last_first, verify_tree), target)
    assert found["without replacement"] > SEEN
    assert max(found["independent"], found["deterministic"]) < EXACT


# ---- decisions, against a walk in plain Python ----


def walk_by_loop(
    p: list[list[float]],
    tokens: list[int],
    q: list[list[float]] | None,
    parents: Parents,
    limit: int,
    uniforms: list[float],
    mistake: str = "",
) -> tuple[list[int], int, list[float]]:
    """The accepted path, the extra token, and at each depth reached the chance that some child is accepted."""
    path: list[int] = []
    expected = []
    while True:
        node = path[-1] if path else -1
        law, missed, rejected, chosen = p[node + 1], 1.0, 1.0, None
        tested = law
        for child in children(parents, node) if len(path) < limit else []:
            own = [float(x == tokens[child]) for x in range(len(law))] if q is None else q[child]
            missed = rejected * (1 - sum(min(a, b) for a, b in zip(law, own, strict=True)))
            against = tested if mistake == "siblings tested against p" else law
            chance = min(1.0, against[tokens[child]] / own[tokens[child]])
            rejected *= 1 - chance
            if chosen is None and uniforms[1 + child] < chance:
                chosen = child
            residual = [max(a - b, 0.0) for a, b in zip(law, own, strict=True)]
            law = [x / sum(residual) for x in residual] if sum(residual) > 0 else law
        if children(parents, node) and len(path) < limit:
            expected.append(1 - missed)
        if chosen is None:
            return path, invert_by_loop(tested if mistake == "correction from p" else law, uniforms[0]), expected
        path.append(chosen)


def random_trees(rng: random.Random, batch_size: int, num_nodes: int) -> Tensor:
    """Parents of any earlier node; a different shape in every row."""
    return torch.tensor([[rng.randint(max(-1, n - 4), n - 1) for n in range(num_nodes)] for _ in range(batch_size)])


def all_paths(verdict: Verdict) -> list[list[int]]:
    assert verdict.path is not None
    return [path[:count] for path, count in zip(verdict.path.tolist(), verdict.accepted.tolist(), strict=True)]


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("num_nodes", "vocab"), [(1, 3), (4, 2), (9, 4), (16, 8)])
def test_a_ragged_batch_of_trees_is_decided_row_by_row(
    num_nodes: int, vocab: int, deterministic: bool, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_gpu:  # nothing is skipped there
        monkeypatch.setattr(room, "_may_ask", lambda x: False)
    g, rng = generator(num_nodes), random.Random(num_nodes)
    size = 200
    p = torch.randn(size, num_nodes + 1, vocab, generator=g, dtype=torch.float64).softmax(-1)
    q = torch.randn(size, num_nodes, vocab, generator=g, dtype=torch.float64).softmax(-1)
    tokens = torch.randint(vocab, (size, num_nodes), generator=g)
    parents = random_trees(rng, size, num_nodes)
    limits = torch.tensor([rng.randint(0, num_nodes) for _ in range(size)])
    uniforms = torch.rand(size, num_nodes + 1, generator=g, dtype=torch.float64)
    verdict = verify_tree(p, tokens, None if deterministic else q, parents, limits, uniforms)
    paths = all_paths(verdict)
    for b in range(size):
        path, extra, expected = walk_by_loop(
            p[b].tolist(),
            tokens[b].tolist(),
            None if deterministic else q[b].tolist(),
            parents[b].tolist(),
            int(limits[b]),
            uniforms[b].tolist(),
        )
        assert (paths[b], int(verdict.extra_token[b])) == (path, extra)
        expected += [0.0] * (verdict.expected.shape[1] - len(expected))
        assert verdict.expected[b].tolist() == pytest.approx(expected, abs=1e-12)
    most = max(tree_depth(row) for row in parents.tolist())
    assert verdict.path is not None and verdict.path.shape == verdict.expected.shape == (size, most)
    assert ((verdict.path >= 0) & (verdict.path < num_nodes)).all()
    assert {len(path) for path in paths} >= set(range(min(num_nodes, 3) + 1))


@pytest.mark.parametrize("mistake", ["", "siblings tested against p", "correction from p"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_enumeration_rejects_a_residual_that_is_used_by_half(kind: str, mistake: str) -> None:
    def by_loop(p: Tensor, tokens: Tensor, q: Tensor | None, parents: Tensor, limits: Tensor, u: Tensor) -> Verdict:
        assert q is not None
        rows = zip(p.tolist(), tokens.tolist(), q.tolist(), parents.tolist(), limits.tolist(), u.tolist(), strict=True)
        found = [walk_by_loop(*row, mistake=mistake) for row in rows]
        path = torch.tensor([row[0] or [0] for row in found])
        return Verdict(
            torch.tensor([len(row[0]) for row in found]), torch.tensor([row[1] for row in found]), path, path
        )

    target, draft = laws_for(3, [-1, -1], 13)
    drafts = enumerate_drafts(target, draft, [-1, -1], kind)
    off = off_by(emitted_by(target, drafts, by_loop), target)
    assert off > SEEN if mistake else off < EXACT


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_tree_of_one_branch_is_decided_as_a_chain(deterministic: bool) -> None:
    g = generator(14)
    size, num_tokens, vocab = 400, 4, 3
    p = torch.randn(size, num_tokens + 1, vocab, generator=g, dtype=torch.float64).softmax(-1)
    q = None if deterministic else torch.randn(size, num_tokens, vocab, generator=g, dtype=torch.float64).softmax(-1)
    tokens = torch.randint(vocab, (size, num_tokens), generator=g)
    limits = torch.randint(num_tokens + 1, (size,), generator=g)
    uniforms = torch.rand(size, num_tokens + 1, generator=g, dtype=torch.float64)
    chain = verify_chain(p, tokens, q, limits, uniforms)
    tree = verify_tree(p, tokens, q, chain_parents(size, num_tokens), limits, uniforms)
    assert torch.equal(chain.accepted, tree.accepted) and torch.equal(chain.extra_token, tree.extra_token)
    assert all(path == list(range(len(path))) for path in all_paths(tree))
    tested = torch.arange(num_tokens) < torch.minimum(chain.accepted + 1, limits)[:, None]
    torch.testing.assert_close(tree.expected[tested], chain.expected[tested], rtol=0, atol=1e-15)
    greedy = verify_greedy(p.argmax(-1), tokens, limits)
    by_tree = verify_tree_greedy(p.argmax(-1), tokens, chain_parents(size, num_tokens), limits)
    assert torch.equal(greedy.accepted, by_tree.accepted) and torch.equal(greedy.extra_token, by_tree.extra_token)


def test_what_rounding_leaves_of_nothing_is_never_divided_by() -> None:
    law = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.25, 0.75]], dtype=torch.float32)
    chance, left, overlap = try_child(law, torch.tensor([1, 0, 0]), torch.cat([law[:2], torch.zeros(1, 2)]))
    assert chance.tolist() == [1.0, 1.0, 0.0]  # the last is padding
    assert torch.equal(left, law)
    assert overlap.tolist() == [1.0, 1.0, 0.0]
    chance, left, _ = try_child(law[:2], torch.tensor([1, 0]), None)
    assert (chance.tolist(), left.tolist()) == ([1.0, 0.5], [[0.0, 1.0], [0.0, 1.0]])


@pytest.mark.parametrize("probs", [None, torch.zeros(4, 0, 3, dtype=torch.float64)])
def test_without_nodes_the_extra_token_is_drawn_from_the_target(probs: Tensor | None) -> None:
    p = torch.tensor([[[0.25, 0.0, 0.75]]], dtype=torch.float64).expand(4, -1, -1)
    uniforms = torch.tensor([[0.0], [0.2499], [0.25], [ALMOST_ONE]], dtype=torch.float64)
    nothing, limits = torch.zeros(4, 0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    verdicts = [verify_tree(p, nothing, probs, nothing, limits, uniforms)]
    verdicts.append(verify_typical(p, nothing, nothing, limits, uniforms))
    for verdict in verdicts:
        assert verdict.extra_token.tolist() == [0, 0, 2, 2]
        assert verdict.accepted.tolist() == [0] * 4
        assert verdict.path is not None and verdict.path.shape == verdict.expected.shape == (4, 0)
    greedy = verify_tree_greedy(p.argmax(-1), nothing, nothing, limits)
    assert (greedy.accepted.tolist(), greedy.extra_token.tolist()) == ([0] * 4, [2] * 4)


# ---- greedy decoding is the same algorithm ----


def follow_by_loop(choices: list[int], tokens: list[int], parents: Parents, limit: int) -> tuple[list[int], int]:
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        matching = [child for child in children(parents, node) if tokens[child] == choices[node + 1]]
        if not matching or len(path) == limit:
            return path, choices[node + 1]
        path.append(matching[0])


@pytest.mark.parametrize(("num_nodes", "vocab"), [(1, 2), (5, 2), (12, 3), (64, 2)])
def test_greedy_trees_are_followed_as_by_a_loop(num_nodes: int, vocab: int) -> None:
    g, rng, size = generator(num_nodes), random.Random(num_nodes), 200
    choices = torch.randint(vocab, (size, num_nodes + 1), generator=g)
    tokens = torch.randint(vocab, (size, num_nodes), generator=g)  # many siblings share a token
    parents = random_trees(rng, size, num_nodes)
    limits = torch.tensor([rng.randint(0, 5) for _ in range(size)])
    verdict = verify_tree_greedy(choices, tokens, parents, limits)
    paths = all_paths(verdict)
    for b in range(size):
        wanted = follow_by_loop(choices[b].tolist(), tokens[b].tolist(), parents[b].tolist(), int(limits[b]))
        assert (paths[b], int(verdict.extra_token[b])) == wanted
    depth = torch.arange(verdict.expected.shape[1])
    assert torch.equal(verdict.expected, (depth < verdict.accepted[:, None]).double())
    p = one_hot(choices, vocab).double()
    uniforms = torch.rand(size, num_nodes + 1, generator=g, dtype=torch.float64)
    for q in (None, one_hot(tokens, vocab).double()):
        sampled = verify_tree(p, tokens, q, parents, limits, uniforms)
        assert all_paths(sampled) == paths
        assert torch.equal(sampled.extra_token, verdict.extra_token)
        assert torch.equal(sampled.expected, verdict.expected)


def test_a_greedy_tree_by_hand() -> None:
    parents = torch.tensor([[-1, -1, 0, 1, 1, 4]]).expand(4, -1)
    tokens = torch.tensor([[5, 6, 7, 7, 8, 9]]).expand(4, -1)
    choices = torch.tensor([[6, 0, 8, 0, 0, 9, 4], [5, 8, 8, 0, 0, 9, 4], [1] * 7, [6, 0, 8, 0, 0, 9, 4]])
    verdict = verify_tree_greedy(choices, tokens, parents, torch.tensor([3, 3, 3, 2]))
    assert all_paths(verdict) == [[1, 4, 5], [0], [], [1, 4]]
    assert verdict.extra_token.tolist() == [4, 8, 1, 9]


# ---- typical acceptance, which is not lossless ----


def typical_by_loop(
    p: list[list[float]], tokens: list[int], parents: Parents, limit: int, epsilon: float, delta: float
) -> list[int]:
    best: list[int] = []
    for node in range(len(tokens)):
        path = path_to(parents, node)
        fine = len(path) <= limit
        for n in path:
            law = p[parents[n] + 1]
            entropy = -sum(x * math.log(x) for x in law if x > 0)
            fine = fine and law[tokens[n]] > min(epsilon, delta * math.exp(-entropy))
        if fine and len(path) > len(best):
            best = path
    return best


@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.4, 0.9), (0.2, 0.05)])
def test_typical_acceptance_equals_a_loop(epsilon: float, delta: float) -> None:
    g, rng, size, num_nodes, vocab = generator(15), random.Random(15), 200, 8, 6
    p = (3 * torch.randn(size, num_nodes + 1, vocab, generator=g, dtype=torch.float64)).softmax(-1)
    tokens = torch.randint(vocab, (size, num_nodes), generator=g)
    limits = torch.tensor([rng.randint(0, 4) for _ in range(size)])
    uniforms = torch.rand(size, 1, generator=g, dtype=torch.float64)
    for parents in (random_trees(rng, size, num_nodes), None):
        verdict = verify_typical(p, tokens, parents, limits, uniforms, epsilon=epsilon, delta=delta)
        shape = chain_parents(size, num_nodes) if parents is None else parents
        for b in range(size):
            path = typical_by_loop(p[b].tolist(), tokens[b].tolist(), shape[b].tolist(), int(limits[b]), epsilon, delta)
            behind = p[b, path[-1] + 1 if path else 0].tolist()
            assert int(verdict.accepted[b]) == len(path)
            assert int(verdict.extra_token[b]) == invert_by_loop(behind, float(uniforms[b, 0]))
            if verdict.path is not None:
                assert verdict.path[b, : len(path)].tolist() == path
        assert (verdict.path is None) == (parents is None)
        assert len(set(verdict.accepted.tolist())) >= 3


def typically(p: Tensor, tokens: Tensor, q: Tensor | None, parents: Tensor, limits: Tensor, u: Tensor) -> Verdict:
    return verify_typical(p, tokens, parents, limits, u)


@pytest.mark.parametrize("kind", KINDS)
def test_typical_acceptance_changes_the_law(kind: str) -> None:
    target, draft = laws_for(3, [-1, -1, 0], 16)
    drafts = enumerate_drafts(target, draft, [-1, -1, 0], kind)
    emitted = emitted_by(target, drafts, typically)
    assert emitted.sum().item() == pytest.approx(1.0, abs=EXACT)
    assert off_by(emitted, target) > SEEN


def test_typical_acceptance_is_greedy_where_the_target_is() -> None:
    g = generator(17)
    target = one_hot_laws(3, 3, g)
    drafts = enumerate_drafts(target, random_laws(3, 2, g), [-1, -1, 0, 1], "independent")
    assert off_by(emitted_by(target, drafts, typically), target) < EXACT
