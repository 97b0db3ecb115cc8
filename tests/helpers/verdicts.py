"""The exact law of what a verifier emits, found from outside: every draft is enumerated, every threshold bisected.

A verifier compares one uniform with each node's chance, and inverts a law with the first. Which chances and laws those
are is found by calling it with uniforms that force its way to the node in question and bisecting the one that decides.

R drafts, N draft nodes, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.verify import Verdict
from tests.helpers.laws import Laws, joint_law

ALMOST_ONE = 1 - 2.0**-53
Parents = list[int]
Verify = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor], Verdict]  # as verify_tree


def path_to(parents: Parents, node: int) -> list[int]:
    """The nodes from a root down to `node`, itself included; none for −1."""
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


def children(parents: Parents, node: int) -> list[int]:
    """The children of a node, or of the last committed token (−1), in order."""
    return [n for n, parent in enumerate(parents) if parent == node]


def tree_depth(parents: Parents) -> int:
    """The most tokens that can be accepted."""
    return max(len(path_to(parents, n)) for n in range(len(parents)))


@dataclass(frozen=True)
class Drafts:
    """All drafts that a drafter may make, what verification is told of each, and how likely it is."""

    weight: Tensor  # (R,)
    tokens: Tensor  # (R, N)
    probs: Tensor  # (R, N, V), the law each token was drawn from
    target_probs: Tensor  # (R, N + 1, V)
    parents: Parents

    @property
    def drawn_with(self) -> Tensor:
        """The probability each token was drawn with: (R, N)."""
        return self.probs.gather(2, self.tokens[..., None]).squeeze(2)


def enumerate_drafts(target: Laws, draft: Laws, parents: Parents, kind: str) -> Drafts:
    """Every tree of that shape whose children are drawn from `draft`, whose laws are given for every prefix.

    `kind` says how: "independent"; "without replacement", where a child that no token is left for is padding, a token 0
    with a law of zeros; or "deterministic", the likeliest tokens in order.
    """
    vocab, weights, trees, laws, targets = len(target[0]), [], [], [], []
    for tokens in itertools.product(range(vocab), repeat=len(parents)):
        weight, told = 1.0, []
        for node, parent in enumerate(parents):
            prefix = tuple(tokens[n] for n in path_to(parents, parent))
            elder = [tokens[n] for n in children(parents, parent) if n < node]
            q = draft[len(prefix)][prefix].clone()
            if kind == "without replacement":
                q[elder] = 0.0
                q = q / q.sum() if q.sum() > 0 else q
            if kind == "deterministic":
                q = torch.eye(vocab, dtype=q.dtype)[q.argsort(descending=True)[len(elder)]]
            weight *= float(q[tokens[node]]) if q.sum() > 0 else float(tokens[node] == 0)
            told.append(q)
        if weight > 0:
            prefixes = [tuple(tokens[n] for n in path_to(parents, node)) for node in range(-1, len(parents))]
            targets.append(torch.stack([target[len(prefix)][prefix] for prefix in prefixes]))
            weights.append(weight)
            trees.append(tokens)
            laws.append(torch.stack(told))
    return Drafts(
        torch.tensor(weights, dtype=torch.float64),
        torch.tensor(trees),
        torch.stack(laws),
        torch.stack(targets),
        parents,
    )


def bisect(holds: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The u below which `holds` is true, 1 where it is for every uniform; it must not become true again."""
    low, high = torch.zeros_like(like), torch.full_like(like, ALMOST_ONE)
    never, always = ~holds(low), holds(high)
    for _ in range(53):
        middle = (low + high) / 2
        inside = holds(middle)
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    return torch.where(always, 1.0, torch.where(never, 0.0, low))


@dataclass(frozen=True)
class Outcomes:
    """How likely a verifier stops behind each node of each draft, and the law of the extra token there.

    Column 0 is the last committed token, column n + 1 node n. Where a verifier never stops the law means nothing.
    """

    stop: Tensor  # (R, 1 + N)
    extra: Tensor  # (R, 1 + N, V)
    forced: Tensor  # (1 + N, 1 + N) uniforms that lead to each stop
    chance: Tensor  # (R, N)


def outcomes(
    drafts: Drafts, verify: Verify, limits: Tensor, *, told: Tensor | None, parents: Parents, block: bool = False
) -> Outcomes:
    """Integrate a verifier over its uniforms. `block` is for verifiers that keep the longest prefix that passes."""
    count, num_nodes = drafts.tokens.shape
    vocab = drafts.target_probs.shape[2]
    paths = [path_to(parents, node) for node in range(-1, num_nodes)]
    forced = torch.full((1 + num_nodes, 1 + num_nodes), ALMOST_ONE, dtype=torch.float64)
    for row, path in enumerate(paths):
        forced[row, [1 + n for n in path]] = 0.0
    # One question per node: is it accepted? And per stop and token: is the extra token a lower one?
    rows = torch.tensor([*range(1, 1 + num_nodes), *(r for r in range(1 + num_nodes) for _ in range(vocab - 1))])
    columns = torch.tensor([*range(1, 1 + num_nodes)] + [0] * (len(rows) - num_nodes))
    below = torch.tensor([*range(1, vocab)] * (1 + num_nodes))
    deep = torch.tensor([len(path) for path in paths[1:]])

    def repeated(x: Tensor) -> Tensor:
        return x.repeat(len(rows), *[1] * (x.dim() - 1))

    p, tokens, q, cut = (None if x is None else repeated(x) for x in (drafts.target_probs, drafts.tokens, told, limits))
    above = torch.tensor(parents).expand(len(rows) * count, -1)

    def answers(values: Tensor) -> Tensor:
        uniforms = forced[rows][:, None].repeat(1, count, 1)
        uniforms.scatter_(2, columns[:, None, None].expand(-1, count, 1), values[..., None])
        verdict = verify(p, tokens, q, above, cut, uniforms.flatten(0, 1))
        path = torch.arange(num_nodes).expand(len(above), -1) if verdict.path is None else verdict.path
        path = path.view(len(rows), count, -1)[torch.arange(num_nodes), :, deep - 1]
        accepted, extra = (x.view(len(rows), count) for x in (verdict.accepted, verdict.extra_token))
        passed = (accepted[:num_nodes] >= deep[:, None]) & (path == torch.arange(num_nodes)[:, None])
        return torch.cat([passed, extra[num_nodes:] < below[:, None]])

    found = bisect(answers, torch.zeros(len(rows), count, dtype=torch.float64))
    chance = found[:num_nodes].T
    edges = found[num_nodes:].T.view(count, 1 + num_nodes, vocab - 1)
    extra = torch.nn.functional.pad(torch.nn.functional.pad(edges, (1, 0)), (0, 1), value=1.0).diff(dim=2)
    stop = [_stops(chance, parents, node, block) for node in range(-1, num_nodes)]
    return Outcomes(torch.stack(stop, dim=1), extra, forced, chance)


def _stops(chance: Tensor, parents: Parents, node: int, block: bool) -> Tensor:
    result = torch.ones_like(chance[:, 0])
    if block:
        passes = chance[:, node] if node >= 0 else result
        return passes * (1 - chance[:, node + 1 :]).prod(1)
    for n in path_to(parents, node):
        for elder in children(parents, parents[n]):
            result = result * (1 - chance[:, elder] if elder < n else 1.0)
        result = result * chance[:, n]
    for child in children(parents, node):
        result = result * (1 - chance[:, child])
    return result


def emitted_by(
    target: Laws,
    drafts: Drafts,
    verify: Verify,
    *,
    told: Tensor | str | None = "truth",
    parents: Parents | None = None,
    limits: Callable[[Tensor, Tensor], Tensor] | int | None = None,
    block: bool = False,
) -> Tensor:
    """The exact joint law of the next depth + 1 tokens: those emitted, and then the target's own.

    `told` is what the verifier hears of the draft's laws and `parents` of its shape (the truth unless given); `limits`
    cuts drafts, given tokens and the probabilities they were drawn with.
    """
    q = drafts.probs if isinstance(told, str) else told
    shape = drafts.parents if parents is None else parents
    vocab, most = len(target[0]), tree_depth(shape)
    if callable(limits):
        cut = limits(drafts.tokens, drafts.drawn_with)
    else:
        cut = torch.full((len(drafts.tokens),), most if limits is None else limits)
    found = outcomes(drafts, verify, cut, told=q, parents=shape, block=block)
    ended = [torch.zeros((vocab,) * (n + 1), dtype=torch.float64) for n in range(most + 1)]
    for row in range(1 + len(shape)):
        path = path_to(shape, row - 1)
        ends = (drafts.weight * found.stop[:, row])[:, None] * found.extra[:, row]
        place = tuple(drafts.tokens[:, n] for n in path)
        ended[len(path)] += (
            ends.sum(0) if not path else torch.zeros_like(ended[len(path)]).index_put(place, ends, accumulate=True)
        )
    flow = ended[0]
    for n in range(1, most + 1):
        flow = flow[..., None] * target[n] + ended[n]
    return flow


def off_by(emitted: Tensor, target: Laws) -> float:
    """The largest difference between what came out and the target's joint law."""
    return (emitted - joint_law(target[: emitted.dim()])).abs().max().item()
