"""propose → verify → commit, for a batch of requests that accept different numbers of tokens.

Plain decoding is the same loop with no drafter, and the baseline for everything. Each round costs one target pass over
the pending token (emitted, but not yet seen by the target) and the draft behind it. Finished requests leave the batch.

B batch (requests still running), N drafted tokens, P depth of a draft tree, L captured layers, D hidden size,
V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.choose import verify
from engine.draft_length import Lengths, Round, policy_for
from engine.observer import Checked, Observer
from engine.settings import DecodeSettings
from engine.stats import DecodingStats
from engine.stopping import StopStrings
from engine.verify import Verdict
from models import tree
from models.cache import KVCache
from models.chain_drafting import StopRule, draft_chain
from models.errors import UserError
from models.law_drafting import check_depth
from models.sampling import RequestRandom, adjust, check_vocabulary, draw, probabilities, seen_at_nodes, seen_tokens
from models.target import Target
from models.types import Draft, Drafter, DraftState, Probes, TargetFeatures, max_depth, probes
from models.unread import Unread


@dataclass(slots=True)
class Seconds:
    """Where the time of a run went."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Generation:
    """Answers per request (stop token included), whether each ended at a stop token, the counters and the time."""

    token_ids: list[list[int]]
    stopped: list[bool]
    stats: DecodingStats
    seconds: Seconds


TokenCallback = Callable[[int, list[int], int], None]  # request, new tokens, how many of them were drafted


def generate(
    target: Target,
    prompts: list[list[int]],
    settings: DecodeSettings,
    drafter: Drafter | None = None,
    *,
    seeds: list[int] | None = None,
    on_tokens: TokenCallback | None = None,
    remember: bool = False,
    observer: Observer | None = None,
) -> Generation:
    """Answer `prompts` (token ids) as one batch, with or without a drafter; the law of the answers is the same.

    `seeds` gives each request a stream of its own; without it request i takes settings.seed + i. With `remember` the
    drafter is taught all texts at the end, in the order of `prompts`: drafts of this call do not depend on it, and what
    is learnt not on which request finished first. `observer` sees all rounds. Raises UserError for an empty prompt, for
    one that leaves no room for a single token in the model's context, and for a drafter that cannot `remember`;
    ValueError where there are not as many seeds as prompts.
    """
    if remember and not hasattr(drafter, "remember"):
        name = "Plain decoding" if drafter is None else type(drafter).__name__
        raise UserError(f"{name} does not learn from what is answered: use remember=false.")
    check_prompts(target, prompts)
    check_settings(target, drafter, settings)
    seeds = [settings.seed + i for i in range(len(prompts))] if seeds is None else seeds
    if len(seeds) != len(prompts):  # one seed would be broadcast: the same numbers for every request
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts")
    started = time.perf_counter()
    with torch.inference_mode():
        batch = _Batch(target, prompts, settings, drafter, seeds, on_tokens, observer)
        if prompts:
            batch.prefill()
        batch.seconds.prefill = time.perf_counter() - started
        while batch.requests:
            if observer is not None:
                observer.before_round()
            batch.round()
    batch.seconds.total = time.perf_counter() - started
    if remember:
        learner: Any = drafter
        for prompt, answer in zip(prompts, batch.answers, strict=True):
            learner.remember([*prompt, *answer])
    return Generation(batch.answers, batch.stopped, batch.stats, batch.seconds)


def check_settings(target: Target, drafter: Drafter | None, settings: DecodeSettings) -> None:
    """Refuse settings that do not go with the target or the drafter, before any work starts."""
    check_vocabulary(settings.sampling, target.vocab_size)
    StopStrings(settings.stop_strings, target.decode)
    if settings.stop_strings and target.tokenizer is None:
        raise UserError(f"Stop strings need text, but target {target.name!r} has no tokenizer.")
    if settings.verification == "block" and probes(drafter):
        raise UserError(f"Block verification is for chains, but {type(drafter).__name__} drafts trees.")
    if settings.tree is not None and drafter is not None and not hasattr(drafter, "propose_tree"):
        raise UserError(f"{type(drafter).__name__} drafts chains only: leave decode.tree out.")
    if settings.tree is not None:
        check_depth(drafter, settings.tree)
    if drafter is not None:
        policy_for(settings.draft_length, drafter).check(drafter)


def check_prompts(target: Target, prompts: Iterable[list[int]]) -> None:
    """Refuse prompts that cannot be answered, before any work starts."""
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"Prompt {index} is empty.")
        if len(prompt) >= target.max_positions:
            raise UserError(
                f"Prompt {index} has {len(prompt)} tokens, but the context of {target.name!r} holds "
                f"{target.max_positions}, the answer included. Shorten it or drop it."
            )


class _Batch:
    """The requests in flight. `requests` maps the batch's rows to the caller's request numbers."""

    def __init__(
        self,
        target: Target,
        prompts: list[list[int]],
        settings: DecodeSettings,
        drafter: Drafter | None,
        seeds: list[int],
        on_tokens: TokenCallback | None,
        observer: Observer | None,
    ) -> None:
        self.target, self.prompts, self.settings, self.drafter = target, prompts, settings, drafter
        self.on_tokens, self.observer = on_tokens, observer
        self.capture = drafter.capture_layers if drafter is not None else ()
        self.width, self.depth = (settings.num_nodes, settings.depth) if drafter is not None else (0, 0)
        self.width = max(self.width, getattr(drafter, "num_rows", 0))
        self.random = RequestRandom(seeds, self.width + 1, purpose=0, device=target.device)
        self.draft_random = RequestRandom(seeds, self.width + 1, purpose=1, device=target.device)
        stop = settings.stop_token_ids
        self.stop = target.stop_token_ids if stop is None else stop
        self.stop_strings = StopStrings(settings.stop_strings, target.decode)
        self.room = [min(settings.max_new_tokens, target.max_positions - len(p)) for p in prompts]
        self.answers: list[list[int]] = [[] for _ in prompts]
        self.stopped = [False] * len(prompts)
        self.requests = list(range(len(prompts)))
        self.stats = DecodingStats.empty(len(prompts), self.depth)
        self.seconds = Seconds()
        self.cache: KVCache
        self.state: DraftState | None = None
        self.lengths = Lengths()
        deepest = max_depth(drafter)
        self.most = self.depth if deepest is None else min(self.depth, deepest)  # tokens of a path that can be drafted
        if drafter is not None and settings.tree is None:
            policy = policy_for(settings.draft_length, drafter)
            self.lengths = policy.start(len(prompts), self.most, drafter)
        self.pending: Tensor  # (B,) emitted tokens that the target has not read yet
        self.unread = Unread()  # of the drafter
        self.seen: Tensor | None = None  # (B, V) tokens of the committed text, where a penalty needs them
        if settings.sampling.needs_seen:
            self.seen = seen_tokens(prompts, target.vocab_size, target.device)

    def prefill(self) -> None:
        """Read the prompts, padded on the right, and emit each request's first token."""
        lengths = torch.tensor([len(p) for p in self.prompts])
        longest = int(lengths.max())
        capacity = max(len(p) + room for p, room in zip(self.prompts, self.room, strict=True)) + self.width + 1
        self.cache = self.target.new_cache(len(self.prompts), max(capacity, longest))
        ids = torch.zeros(len(self.prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(self.prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        ids = ids.to(self.target.device)
        out = self.target.step(ids, self.cache, capture_layers=self.capture)
        self.cache.commit(lengths)
        rows, last = torch.arange(len(ids), device=ids.device), (lengths - 1).to(ids.device)
        logits = adjust(self.target.head(out.last[rows, last]), self.settings.sampling, self.seen)
        if self.settings.sampling.greedy:
            self.pending = logits.argmax(-1)
        else:
            self.pending = draw(probabilities(logits, self.settings.sampling), self.random.uniform(1)[:, 0])
        following = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
        following[rows, last] = self.pending
        if self.drafter is not None:
            self.unread.add(TargetFeatures(ids, following, out.hidden, lengths))
            self.state = self.drafter.new_state(len(self.prompts), self.cache.capacity + self.settings.draft_rows + 1)
        first = [self._until_stop(r, [token]) for r, token in enumerate(self.pending.tolist())]
        self._emit(first, accepted=[0] * len(self.prompts))

    def round(self) -> None:
        """Draft for every running request, check the drafts in one target pass, and commit what was accepted."""
        room = [min(self.most, self.room[r] - len(self.answers[r]) - 1) for r in self.requests]
        started = time.perf_counter()
        limits = self.lengths.ask(self.requests, room)
        draft = self._draft(limits, resting=[row for row, most in enumerate(room) if most > limits[row] == 0])
        drawn = draft.token_ids.shape[1]
        if draft.lengths is not None:  # what is not meant is neither checked nor counted
            limits = [min(pair) for pair in zip(limits, draft.lengths.tolist(), strict=True)]
            draft = _meant(draft, max(limits))
        drafted = time.perf_counter()
        nodes = torch.cat([self.pending[:, None], draft.token_ids], dim=1)  # (B, 1 + N)
        parents = nn.functional.pad(draft.parents + 1, (1, 0), value=-1) if draft.branches else None
        logits, hidden, choices = self._read(nodes, parents, draft.probes)
        limit = torch.tensor(limits, device=nodes.device)
        verdict = self._verify(logits, nodes, parents, draft, limit)
        if self.observer is not None:
            self.observer.checked(Checked(self.requests, draft, limits, logits, verdict))
        path = None if verdict.path is None else nn.functional.pad(verdict.path + 1, (1, 0))  # (B, 1 + P) rows to keep
        tokens = nodes if path is None else nodes.gather(1, path)
        following = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1)
        following.scatter_(1, verdict.accepted[:, None], verdict.extra_token[:, None])
        counted = _counted(draft, verdict, limit, self.depth)
        read = torch.cat([counted, following.double()], dim=1).tolist()  # waits for the device
        checked = time.perf_counter()
        self.seconds.draft += drafted - started
        self.seconds.verify += checked - drafted
        accepted = [int(row[0]) for row in read]
        self.lengths.after(Round(self.requests, limits, accepted, drawn, checked - started))
        counts = torch.tensor(accepted) + 1
        self.cache.commit(counts, path)
        if choices is not None:
            prober: Any = self.drafter
            prober.observe(self.state, choices)
        if path is not None and hidden is not None:
            hidden = hidden.gather(1, path[..., None].expand(-1, -1, hidden.shape[-1]))
        if self.drafter is not None:
            self.unread.add(TargetFeatures(tokens, following, hidden, counts))
        self.pending = verdict.extra_token
        self._emit([self._count(row, request) for row, request in zip(read, self.requests, strict=True)], accepted)

    def _read(
        self, nodes: Tensor, parents: Tensor | None, probes: Probes | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The target's pass over the nodes (B, 1 + N), and probes: logits (B, 1 + N, V) and captured states there.

        The third is what the target would choose behind the probes that are asked about, None without any.
        """
        if probes is None:
            out = self.target.step(nodes, self.cache, capture_layers=self.capture, parents=parents)
            return self.target.head(out.last), out.hidden, None
        count = nodes.shape[1]
        related = tree.chain_parents(len(nodes), count, nodes.device) if parents is None else parents
        above = torch.where(probes.parents < 0, 0, probes.parents + count)
        out = self.target.step(
            torch.cat([nodes, probes.token_ids], dim=1),
            self.cache,
            capture_layers=self.capture,
            parents=torch.cat([related, above], dim=1),
        )
        asked = out.last[:, out.last.shape[1] - probes.num_asked :]
        logits = self.target.head(torch.cat([out.last[:, :count], asked], dim=1))
        hidden = None if out.hidden is None else out.hidden[:, :count]
        return logits[:, :count], hidden, logits[:, count:].argmax(-1)

    def _count(self, read: list[float], request: int) -> list[int]:
        """Count a request's round, as `_counted` and the tokens behind it tell; returns the tokens to give out."""
        accepted, reached = int(read[0]), int(read[1])
        drafted, expected = np.array(read[2 : 2 + self.depth]), np.array(read[2 + self.depth : 2 + 2 * self.depth])
        first = 2 + 2 * self.depth
        tokens = self._until_stop(request, [int(token) for token in read[first : first + accepted + 1]])
        self.stats.add_round(request, drafted, reached, accepted, len(tokens), expected)
        return tokens

    def _until_stop(self, request: int, tokens: list[int]) -> list[int]:
        """The tokens up to and including the first that ends the answer, which is noted."""
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.stop), None)
        found = self.stop_strings.find(self.answers[request], tokens[:end])
        self.stopped[request] = end is not None or found is not None
        return tokens[: end if found is None else found]

    def _draft(self, limits: list[int], resting: list[int]) -> Draft:
        """Draft up to `limits` tokens; the random streams of rows that are `resting` stand still, as they would alone.

        Where no request drafts the drafter is left alone, and reads what it has missed before the next draft.
        """
        num_tokens = max(limits)
        if self.drafter is None or self.state is None or num_tokens == 0:
            nothing = self.pending.new_zeros(len(self.pending), 0)
            return Draft(nothing, nothing, None)
        settings, drafter = self.settings, self.drafter
        drafting: Any = drafter  # `generate` has seen to it that it can do what the settings ask for
        with self.draft_random.resting(resting) if resting else nullcontext():
            if settings.tree is not None:
                tree_draft: Draft = drafting.propose_tree(
                    self.state,
                    self.unread.take(),
                    shape=settings.tree,
                    children=settings.children,
                    sampling=settings.sampling,
                    random=self.draft_random,
                )
                return tree_draft
            rule: StopRule | None = self.lengths.rule(self.requests, limits)
            if rule is not None:
                expander = drafting.expander(self.state, self.unread.take())
                options: Any = {"sampling": settings.sampling, "random": self.draft_random}
                return draft_chain(expander, drafting.vocab, num_tokens, **options, stop=rule)
            return drafter.propose(
                self.state,
                self.unread.take(),
                num_speculative_tokens=num_tokens,
                sampling=settings.sampling,
                random=self.draft_random,
            )

    def _verify(self, logits: Tensor, nodes: Tensor, parents: Tensor | None, draft: Draft, limits: Tensor) -> Verdict:
        """Check a draft by the target's logits (B, 1 + N, V) at the pending token and the draft's."""
        sampling, seen = self.settings.sampling, None
        if self.seen is not None:
            everything = torch.ones(nodes.shape[1], nodes.shape[1], dtype=torch.bool, device=nodes.device)
            related = everything.tril().expand(len(nodes), -1, -1) if parents is None else tree.ancestors(parents)
            seen = seen_at_nodes(self.seen, nodes, related)
        logits = adjust(logits, sampling, seen)
        uniforms = None if sampling.greedy else self.random.uniform(logits.shape[1])
        verdict = verify(logits, draft, limits, sampling, self.settings.verification, uniforms)
        if seen is not None:
            self.seen = seen[torch.arange(len(nodes), device=nodes.device), verdict.last_node() + 1]
        return verdict

    def _emit(self, tokens: list[list[int]], accepted: list[int]) -> None:
        """Append each running request's new tokens, and let finished requests leave."""
        running = []
        for row, (request, new, drafted) in enumerate(zip(self.requests, tokens, accepted, strict=True)):
            self.answers[request] += new
            if self.on_tokens is not None:
                self.on_tokens(request, new, min(drafted, len(new)))
            if not self.stopped[request] and len(self.answers[request]) < self.room[request]:
                running.append(row)
        if len(running) < len(self.requests):
            self._keep(running)

    def _keep(self, rows: list[int]) -> None:
        self.requests = [self.requests[row] for row in rows]
        if not rows:
            return
        self.pending = self.pending[rows]
        self.cache.select(rows)
        self.random.select(rows)
        self.draft_random.select(rows)
        if self.seen is not None:
            self.seen = self.seen[rows]
        if self.state is not None:
            self.state.select(rows)
        self.unread.select(rows)


def _meant(draft: Draft, num_tokens: int) -> Draft:
    """The first tokens of a chain; none makes the round a plain step. A tree stays: its padding is too deep."""
    if draft.branches and num_tokens > 0:
        return replace(draft, lengths=None)
    return replace(
        draft,
        token_ids=draft.token_ids[:, :num_tokens],
        parents=draft.parents[:, :num_tokens],
        probs=None if draft.probs is None else draft.probs[:, :num_tokens],
        lengths=None,
        branches=False,
    )


def _counted(draft: Draft, verdict: Verdict, limits: Tensor, depth: int) -> Tensor:
    """What the statistics count: (B, 2 + 2·depth) float64.

    Accepted tokens; depths at which something was tested; drafted tokens at each depth; chances of acceptance there.
    """
    position = torch.arange(depth, device=limits.device)
    if draft.branches:
        level = tree.ancestors(draft.parents).sum(-1) - 1  # (B, N)
        drafted = ((level[..., None] == position) & (position < limits[:, None, None])).sum(1)
        goes_on = (draft.parents == verdict.last_node()[:, None]).any(1)  # a leaf has nothing below it to test
        reached = torch.minimum(verdict.accepted + goes_on, limits)
    else:
        drafted = position < limits[:, None]
        reached = torch.minimum(verdict.accepted + 1, limits)
    expected = nn.functional.pad(verdict.expected, (0, depth - verdict.expected.shape[1]))
    return torch.cat([torch.stack([verdict.accepted, reached], dim=1), drafted, expected], dim=1).double()
