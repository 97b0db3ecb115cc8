"""What every drafter's tests need: tiny targets, drafters with nothing left at zero, and a look into each proposal.

B batch, S rows, N drafted tokens, D hidden size, V target and Vd draft vocabulary.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from engine.loop import Generation, generate
from engine.settings import DecodeSettings
from models.checkpoint import native
from models.sampling import RequestRandom, SamplingParams, probabilities
from models.target import Target
from models.tree import DynamicTree, StaticTree
from models.types import Draft, TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.laws import chi_square_p_value, law_by_loop
from tests.helpers.models import random_model

EXACT = {"atol": 1e-9, "rtol": 1e-9}  # float64; a shift by one is some ten orders of magnitude larger
LEAST_P_VALUE = 1e-3  # below it, a law counts as another one


def tiny_target(dtype: torch.dtype = torch.float32, *, sharpness: float = 4.0, **overrides: Any) -> Target:
    """A random Llama of 64 tokens whose logits are scaled by `sharpness`, with room for 32 tokens."""
    options = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "initializer_range": 0.15,
        "max_position_embeddings": 32,
        "eos_token_id": None,
    }
    model = random_model("llama", dtype=dtype, **(options | overrides))
    model.lm_head.weight.data *= sharpness
    return Target(model, name="tiny-random")


def five_token_target() -> Target:
    """In float64, of five tokens: short texts can be counted, and random drafts get accepted."""
    sizes = {"vocab_size": 5, "hidden_size": 16, "intermediate_size": 32, "initializer_range": 0.3}
    return tiny_target(torch.float64, sharpness=1.5, **sizes)


def as_float64(target: Target) -> Target:
    """The same target in double precision; its weights are those of `target`, rounded to float32 as they are."""
    return Target(copy.deepcopy(target.model).double(), target.tokenizer, target.name)


def shaken(drafter: Any, seed: int = 0, amount: float = 0.1) -> Any:
    """Add noise to every parameter, in place: parts that start at zero or one must not hide a fault.

    A confidence head's temperatures, which are 1 until they are calibrated, become others too.
    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(drafter, torch.nn.Module):
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter += amount * torch.randn(parameter.shape, generator=generator).to(parameter)
            if (head := getattr(drafter, "confidence_head", None)) is not None:
                head.temperatures.mul_(torch.linspace(0.7, 1.5, len(head.temperatures)))
        drafter.eval()
    return drafter


def build_shaken(model: dict[str, Any], target: Target, vocab: DraftVocab, seed: int = 0) -> Any:
    """The drafter that a yaml's `model` section describes, with random weights throughout."""
    torch.manual_seed(seed)
    return shaken(native.build(model, target, vocab), seed)


def prompts(lengths: list[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random token ids of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


class RecordedRandom:
    """Hands on a request's random numbers and keeps them, to draft once more with the same."""

    def __init__(self, inner: RequestRandom) -> None:
        self.inner, self.calls, self.device = inner, [], inner.device

    def uniform(self, columns: int) -> Tensor:
        self.calls.append(self.inner.uniform(columns))
        return self.calls[-1]


class ReplayedRandom:
    """Gives recorded numbers again, in the same order."""

    def __init__(self, calls: list[Tensor]) -> None:
        self._calls, self.device = iter(calls), "cpu"

    def uniform(self, columns: int) -> Tensor:
        return next(self._calls)[:, :columns]


@contextmanager
def recorded_logits(drafter: Any) -> Iterator[list[Tensor]]:
    """Collect what `drafter.logits` returns meanwhile; nothing where the drafter computes none.

    Of a drafter that leaves drafting to a neural one, that one's are collected.
    """
    found: list[Tensor] = []
    if not hasattr(drafter, "logits"):
        drafter = getattr(drafter, "neural", drafter)
    if not hasattr(drafter, "logits"):
        yield found
        return
    original = drafter.logits

    def record(*given: Any) -> Tensor:
        found.append(original(*given))
        return found[-1]

    with mock.patch.object(drafter, "logits", record):
        yield found


@dataclass
class History:
    """All rows that a drafter was given for each request since the start."""

    token_ids: list[list[int]]
    pending: list[int]  # what followed the last row
    hidden: list[Tensor] | None  # each (S, L·D)

    @classmethod
    def empty(cls, batch_size: int) -> History:
        return cls([[] for _ in range(batch_size)], [0] * batch_size, None)

    def add(self, committed: TargetFeatures) -> None:
        for row, length in enumerate(committed.lengths.tolist()):
            if self.token_ids[row]:  # the alignment that the contract promises
                assert committed.token_ids[row, 0] == self.pending[row]
            self.token_ids[row] += committed.token_ids[row, :length].tolist()
            self.pending[row] = int(committed.next_token_ids[row, length - 1])
        if committed.hidden is not None:
            new = [h[:n].clone() for h, n in zip(committed.hidden, committed.lengths.tolist(), strict=True)]
            self.hidden = new if self.hidden is None else [torch.cat(p) for p in zip(self.hidden, new, strict=True)]

    def select(self, rows: list[int]) -> None:
        self.token_ids = [list(self.token_ids[row]) for row in rows]
        self.pending = [self.pending[row] for row in rows]
        self.hidden = None if self.hidden is None else [self.hidden[row] for row in rows]

    def features(self, drafted: Tensor | None = None) -> tuple[TargetFeatures, Tensor]:
        """The whole text as one batch, continued by `drafted` (B, N), and the last committed row of each request.

        What no drafter may read is noise: the states from there on, and all padding.
        """
        generator = torch.Generator().manual_seed(0)
        batch_size = len(self.token_ids)
        more = [[] for _ in range(batch_size)] if drafted is None else drafted.tolist()
        texts = [[*ids, p, *d] for ids, p, d in zip(self.token_ids, self.pending, more, strict=True)]
        lengths = torch.tensor([len(text) - 1 for text in texts])
        width = int(lengths.max()) + 3
        ids = torch.randint(2, (batch_size, width + 1), generator=generator)
        hidden = None
        if self.hidden is not None:
            hidden = torch.randn(batch_size, width, self.hidden[0].shape[-1], generator=generator).to(self.hidden[0])
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            if hidden is not None and self.hidden is not None:
                hidden[row, : len(self.hidden[row])] = self.hidden[row]
        last = torch.tensor([len(ids) - 1 for ids in self.token_ids])
        return TargetFeatures(ids[:, :-1], ids[:, 1:], hidden, lengths), last


@dataclass(frozen=True)
class Proposal:
    """One call of `propose`: what the drafter knew, what it drafted, and the logits it drafted from."""

    history: History
    draft: Draft
    logits: Tensor  # (B, N, Vd)
    sampling: SamplingParams
    uniforms: list[Tensor]


def stacked(logits: list[Tensor], draft: Draft) -> Tensor:
    """Recorded logits as (B, N, Vd), whether they were computed step by step or at once; Vd is 0 where none were.

    Where all drafts are shorter than was asked for, N may be as short as the longest.
    """
    batch_size, num_tokens = draft.token_ids.shape
    least = num_tokens if draft.lengths is None else int(draft.lengths.max())
    if not logits:
        return torch.zeros(batch_size, num_tokens, 0)
    result = torch.cat([part.reshape(batch_size, -1, part.shape[-1]) for part in logits], dim=1)
    assert least <= result.shape[1] <= num_tokens, f"{result.shape[1]} rows of logits for {num_tokens} drafted tokens"
    return result


def check_draft(drafter: Any, proposal: Proposal) -> None:
    """The drafted tokens and their laws are those of the recorded logits."""
    draft, vocab, drawn = proposal.draft, drafter.vocab, proposal.logits.shape[1]
    assert (draft.parents == torch.arange(draft.token_ids.shape[1]) - 1).all()
    if proposal.sampling.greedy:
        assert draft.probs is None
        assert torch.equal(draft.token_ids[:, :drawn], vocab.to_target(proposal.logits.argmax(-1)))
    elif draft.probs is not None:
        law = vocab.widen(probabilities(proposal.logits, proposal.sampling))
        torch.testing.assert_close(draft.probs[:, :drawn], law, **EXACT)
        assert (law.gather(2, draft.token_ids[:, :drawn, None]) > 0).all()


def check_unroll(drafter: Any, proposal: Proposal) -> None:
    """Training's `unroll` over the context and the drafted tokens gives the logits that `propose` drafted from."""
    features, last = proposal.history.features(proposal.draft.token_ids)
    lengths, num_steps = proposal.draft.lengths, proposal.logits.shape[1]
    steps = list(drafter.unroll(features, num_steps))
    assert len(steps) == num_steps
    for step, hidden in enumerate(steps):
        rows = torch.arange(len(last)) if lengths is None else (lengths > step).nonzero()[:, 0]
        torch.testing.assert_close(
            drafter.logits(hidden[rows, last[rows]], step),
            proposal.logits[rows, step],
            **EXACT,
            msg=lambda m, s=step: f"step {s}: {m}",
        )


def check_fresh(drafter: Any, proposal: Proposal) -> None:
    """A new state that is given the whole context at once proposes the same as the running one."""
    features, _ = proposal.history.features()
    batch_size, num_tokens = proposal.draft.token_ids.shape
    state = drafter.new_state(batch_size, features.token_ids.shape[1] + num_tokens + 1)
    with recorded_logits(drafter) as logits:
        again = drafter.propose(
            state,
            features,
            num_speculative_tokens=num_tokens,
            sampling=proposal.sampling,
            random=ReplayedRandom(proposal.uniforms),
        )
    assert torch.equal(again.token_ids, proposal.draft.token_ids)
    assert torch.equal(again.parents, proposal.draft.parents)
    torch.testing.assert_close(stacked(logits, again), proposal.logits, **EXACT)
    lengths = [draft.lengths.tolist() if draft.lengths is not None else None for draft in (again, proposal.draft)]
    assert lengths[0] == lengths[1]
    assert (again.probs is None) == (proposal.draft.probs is None)
    if again.probs is not None:
        torch.testing.assert_close(again.probs, proposal.draft.probs, **EXACT)


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the root of a tree to `node`."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def check_tree_fresh(
    drafter: Any, history: History, draft: Draft, uniforms: list[Tensor], options: dict[str, Any]
) -> None:
    """A new state that is given the whole context at once drafts the same tree as the running one."""
    features, _ = history.features()
    state = drafter.new_state(len(draft.token_ids), features.token_ids.shape[1] + 64)
    again = drafter.propose_tree(state, features, random=ReplayedRandom(uniforms), **options)
    assert draft.branches and again.branches
    assert torch.equal(again.parents, draft.parents)
    assert torch.equal(again.token_ids, draft.token_ids)
    assert (again.probs is None) == (draft.probs is None)
    if again.probs is not None:
        torch.testing.assert_close(again.probs, draft.probs, **EXACT)


def check_tree_unroll(drafter: Any, history: History, draft: Draft, logits: list[Tensor], shape: StaticTree) -> None:
    """The logits behind every node that has children are those of `unroll` along the node's own path."""
    parents = list(shape.parents)
    asked = [[-1]] + [[node for node in level if node in parents] for level in shape.levels]
    for depth, (nodes, found) in enumerate(zip(asked, logits, strict=False)):
        assert found.shape[1] in (1, len(nodes))  # one row: the same behind all nodes
        for place, node in enumerate(nodes):
            features, last = history.features(draft.token_ids[:, path_to(parents, node)])
            hidden = list(drafter.unroll(features, depth + 1))[depth]
            expected = drafter.logits(hidden[torch.arange(len(last)), last], depth)
            torch.testing.assert_close(found[:, min(place, found.shape[1] - 1)], expected, **EXACT)


@dataclass
class _ObservedState:
    inner: Any
    history: History
    requests: list[int]
    rounds: int = 0

    def select(self, rows: list[int]) -> None:
        self.inner.select(rows)
        self.history.select(rows)
        self.requests = [self.requests[row] for row in rows]


Check = Callable[[Any, Proposal], None]


@dataclass
class Observed:
    """A drafter whose every proposal is checked on its way to the engine.

    `script` maps a request to its prompt and true answer: the engine then gets, in place of the draft's first tokens,
    a varying number of true ones, so that any drafter has drafts accepted in part, whole and not at all.
    """

    drafter: Any
    checks: list[Check] = field(default_factory=list)
    script: dict[int, tuple[list[int], list[int]]] | None = None
    proposals: int = 0
    committed_counts: set[int] = field(default_factory=set)
    always_full: bool = True  # no draft was shorter than it was asked to be
    chains: bool = True  # no draft was a tree

    def __post_init__(self) -> None:
        self.capture_layers, self.vocab = self.drafter.capture_layers, self.drafter.vocab
        self.num_rows = getattr(self.drafter, "num_rows", 0)

    def new_state(self, batch_size: int, max_len: int) -> _ObservedState:
        inner = self.drafter.new_state(batch_size, max_len)
        return _ObservedState(inner, History.empty(batch_size), list(range(batch_size)))

    def propose(
        self,
        state: _ObservedState,
        committed: TargetFeatures,
        *,
        num_speculative_tokens: int,
        sampling: SamplingParams,
        random: RequestRandom,
    ) -> Draft:
        self._take_in(state, committed)
        recorded = RecordedRandom(random)
        with recorded_logits(self.drafter) as logits:
            draft = self.drafter.propose(
                state.inner,
                committed,
                num_speculative_tokens=num_speculative_tokens,
                sampling=sampling,
                random=recorded,
            )
        self.always_full &= draft.lengths is None
        self.chains &= not draft.branches
        for check in self.checks:
            check(self.drafter, Proposal(state.history, draft, stacked(logits, draft), sampling, recorded.calls))
        self.proposals += 1
        return draft if self.script is None else self._scripted(state, draft)

    def propose_tree(
        self,
        state: _ObservedState,
        committed: TargetFeatures,
        *,
        shape: StaticTree | DynamicTree,
        children: str,
        sampling: SamplingParams,
        random: RequestRandom,
    ) -> Draft:
        self._take_in(state, committed)
        recorded = RecordedRandom(random)
        options = {"shape": shape, "children": children, "sampling": sampling}
        with recorded_logits(self.drafter) as logits:
            draft = self.drafter.propose_tree(state.inner, committed, random=recorded, **options)
        check_tree_fresh(self.drafter, state.history, draft, recorded.calls, options)
        if isinstance(shape, StaticTree) and hasattr(self.drafter, "unroll"):
            check_tree_unroll(self.drafter, state.history, draft, logits, shape)
        self.proposals += 1
        return draft if self.script is None else self._scripted(state, draft)

    def observe(self, state: _ObservedState, choices: Tensor) -> None:
        self.drafter.observe(state.inner, choices)

    def _take_in(self, state: _ObservedState, committed: TargetFeatures) -> None:
        state.history.add(committed)
        state.rounds += 1
        if state.rounds > 1:
            self.committed_counts |= set(committed.lengths.tolist())

    def _scripted(self, state: _ObservedState, draft: Draft) -> Draft:
        """Put true tokens at the beginning of a chain, or of some path of a tree."""
        assert self.script is not None
        tokens = draft.token_ids.clone()
        for row, request in enumerate(state.requests):
            prompt, answer = self.script[request]
            start = len(state.history.token_ids[row]) + 1 - len(prompt)
            chance = random.Random(f"{request} {state.rounds}")
            path = list(range(tokens.shape[1]))
            if draft.branches:
                path = path_to(draft.parents[row].tolist(), chance.randrange(len(path)))
            right = chance.choice([0, len(path), *range(len(path) + 1)])
            for node, known in zip(path[:right], answer[start:], strict=False):
                tokens[row, node] = known
        return replace(draft, token_ids=tokens, probs=None, lengths=None)


def generate_observed(
    target: Target, drafter: Any, prompt_ids: list[list[int]], settings: DecodeSettings, checks: list[Check]
) -> tuple[Generation, Observed]:
    """Decode with every proposal checked; greedy drafts are partly replaced by the target's own answer."""
    script = None
    if settings.sampling.greedy:
        plain = generate(target, prompt_ids, settings).token_ids
        script = dict(enumerate(zip(prompt_ids, plain, strict=True)))
    observed = Observed(drafter, checks, script)
    return generate(target, prompt_ids, settings, observed), observed


@torch.no_grad()
def propose_at_every_length(
    target: Target, drafter: Any, token_ids: list[int], num_tokens: int, sampling: SamplingParams, checks: list[Check]
) -> None:
    """Propose behind every prefix of a text, of one row to all, as one ragged batch, and check the proposals."""
    batch_size = len(token_ids) - 1
    ids = torch.tensor(token_ids)[None].expand(batch_size, -1)
    hidden = target(ids, capture_layers=drafter.capture_layers).hidden
    committed = TargetFeatures(
        ids[:, :-1], ids[:, 1:], hidden[:, :-1] if hidden is not None else None, torch.arange(batch_size) + 1
    )
    observed = Observed(drafter, checks)
    observed.propose(
        observed.new_state(batch_size, len(token_ids) + num_tokens),
        committed,
        num_speculative_tokens=num_tokens,
        sampling=sampling,
        random=RequestRandom(list(range(batch_size)), num_tokens, purpose=1),
    )


def joint_law(target: Target, prompt: list[int], length: int, sampling: SamplingParams) -> np.ndarray:
    """The exact law of the next `length` tokens: (V,) * length, by running the target over all texts."""
    size = target.vocab_size
    texts = list(itertools.product(range(size), repeat=length))
    with torch.no_grad():
        logits = target.head(target(torch.tensor([[*prompt, *text] for text in texts])).last)
    law = np.ones([size] * length)
    for text, rows in zip(texts, logits[:, len(prompt) - 1 : -1].tolist(), strict=True):
        for token, row in zip(text, rows, strict=True):
            law[text] *= law_by_loop(row, sampling.temperature, sampling.top_k, sampling.top_p)[token]
    return law


def sampled_p_value(
    target: Target,
    drafter: Any,
    sampling: SamplingParams,
    requests: int = 4000,
    observer: Any = None,
    **changes: Any,
) -> float:
    """How well what the engine samples, four tokens at a time, agrees with the target's joint law.

    The least chi-square p-value of the joint histogram and of four marginals, times five: the joint alone, with its
    hundreds of cells, misses faults that a marginal shows. With targets of sharpness 1.5 this was measured to find a
    q reported at temperature 1 / 1.5 for all of six drafters (p at most 3e-10, by the joint alone 2e-5), but at
    1 / 1.2 for some three of them only: smaller errors are left to the exact tests of the verifier.
    """
    prompt, length = [3, 0, 4, 1], 4
    decode = DecodeSettings(length, 3, sampling, frozenset(), **changes)
    made = generate(target, [prompt] * requests, decode, drafter, observer=observer)
    assert 0.1 < made.stats.acceptance_rate < 0.9, "both ways out of a test must be taken often"
    return answers_p_value(target, prompt, made.token_ids, sampling)


def answers_p_value(target: Target, prompt: list[int], answers: list[list[int]], sampling: SamplingParams) -> float:
    """How well answers of four tokens to one prompt agree with the target's joint law; see `sampled_p_value`."""
    length = 4
    counts = np.zeros([target.vocab_size] * length)
    for answer in answers:
        counts[tuple(answer)] += 1
    law = joint_law(target, prompt, length, sampling)
    p_values = []
    for kept in [(0, 1, 2, 3), (1,), (2,), (1, 2), (2, 3)]:
        others = tuple(axis for axis in range(length) if axis not in kept)
        p_values.append(chi_square_p_value(counts.sum(others), law.sum(others)))
    return min(1.0, len(p_values) * min(p_values))
