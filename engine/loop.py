"""propose → verify → commit, for a batch of requests that accept different numbers of tokens.

Plain decoding is the same loop with no drafter, and the baseline for everything. Each round costs one target pass over
the pending token (emitted, but not yet seen by the target) and the draft behind it. Finished requests leave the batch.

B batch (requests still running), N drafted tokens, L captured layers, D hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.stats import DecodingStats
from engine.verify import Verdict, verify_chain, verify_greedy
from models.cache import KVCache
from models.errors import UserError
from models.sampling import RequestRandom, SamplingParams, draw, probabilities
from models.target import Target, TargetOutput
from models.types import Draft, Drafter, DraftState, TargetFeatures


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """What to generate: `stop_token_ids` None means the target's own; `seed` starts each request's stream."""

    max_new_tokens: int = 128
    num_speculative_tokens: int = 4
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}: it must be at least 1.")
        if self.num_speculative_tokens < 1:
            raise UserError(f"num_speculative_tokens is {self.num_speculative_tokens}: it must be at least 1.")


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
) -> Generation:
    """Answer `prompts` (token ids) as one batch, with or without a drafter; the law of the answers is the same.

    `seeds` gives each request a stream of its own; without it request i takes settings.seed + i. Raises UserError for
    an empty prompt, and for one that leaves no room for a single token in the model's context; ValueError where there
    are not as many seeds as prompts.
    """
    check_prompts(target, prompts)
    seeds = [settings.seed + i for i in range(len(prompts))] if seeds is None else seeds
    if len(seeds) != len(prompts):  # one seed would be broadcast: the same numbers for every request
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts")
    started = time.perf_counter()
    with torch.inference_mode():
        batch = _Batch(target, prompts, settings, drafter, seeds, on_tokens)
        if prompts:
            batch.prefill()
        batch.seconds.prefill = time.perf_counter() - started
        while batch.requests:
            batch.round()
    batch.seconds.total = time.perf_counter() - started
    return Generation(batch.answers, batch.stopped, batch.stats, batch.seconds)


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
    ) -> None:
        self.target, self.prompts, self.settings, self.drafter = target, prompts, settings, drafter
        self.on_tokens = on_tokens
        self.capture = drafter.capture_layers if drafter is not None else ()
        self.width = settings.num_speculative_tokens if drafter is not None else 0
        self.random = RequestRandom(seeds, self.width + 1, purpose=0, device=target.device)
        self.draft_random = RequestRandom(seeds, self.width + 1, purpose=1, device=target.device)
        stop = settings.stop_token_ids
        self.stop = target.stop_token_ids if stop is None else stop
        self.room = [min(settings.max_new_tokens, target.max_positions - len(p)) for p in prompts]
        self.answers: list[list[int]] = [[] for _ in prompts]
        self.stopped = [False] * len(prompts)
        self.requests = list(range(len(prompts)))
        self.stats = DecodingStats.empty(len(prompts), self.width)
        self.seconds = Seconds()
        self.cache: KVCache
        self.state: DraftState | None = None
        self.pending: Tensor  # (B,) emitted tokens that the target has not read yet
        self.committed: TargetFeatures

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
        logits = self.target.head(out.last[rows, last])
        self.pending = self._choose(logits[:, None])[:, 0]
        following = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
        following[rows, last] = self.pending
        self.committed = TargetFeatures(ids, following, out.hidden, lengths)
        if self.drafter is not None:
            self.state = self.drafter.new_state(len(self.prompts), self.cache.capacity + self.width + 1)
        self._emit([[token] for token in self.pending.tolist()], accepted=[0] * len(self.prompts))

    def round(self) -> None:
        """Draft for every running request, check the drafts in one target pass, and commit what was accepted."""
        limits = [min(self.width, self.room[r] - len(self.answers[r]) - 1) for r in self.requests]
        started = time.perf_counter()
        draft = self._draft(max(limits))
        drafted = time.perf_counter()
        nodes = torch.cat([self.pending[:, None], draft.token_ids], dim=1)  # (B, 1 + N)
        out = self.target.step(nodes, self.cache, capture_layers=self.capture)
        verdict = self._verify(self.target.head(out.last), draft, torch.tensor(limits, device=nodes.device))
        accepted = verdict.accepted.tolist()
        checked = time.perf_counter()
        self.seconds.draft += drafted - started
        self.seconds.verify += checked - drafted
        self._commit(nodes, out, verdict)
        expected = verdict.expected.cpu().numpy()
        following = self.committed.next_token_ids.tolist()
        emitted = [self._until_stop(row[: count + 1]) for row, count in zip(following, accepted, strict=True)]
        for row, (request, limit, count) in enumerate(zip(self.requests, limits, accepted, strict=True)):
            self.stats.add_round(request, limit, count, len(emitted[row]), expected[row])
        self._emit(emitted, accepted)

    def _until_stop(self, tokens: list[int]) -> list[int]:
        """The tokens up to and including the first stop token."""
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.stop), None)
        return tokens[:end]

    def _draft(self, num_tokens: int) -> Draft:
        if self.drafter is None or self.state is None or num_tokens == 0:
            nothing = self.pending.new_zeros(len(self.pending), 0)
            return Draft(nothing, nothing, None)
        return self.drafter.propose(
            self.state,
            self.committed,
            num_speculative_tokens=num_tokens,
            sampling=self.settings.sampling,
            random=self.draft_random,
        )

    def _verify(self, logits: Tensor, draft: Draft, limits: Tensor) -> Verdict:
        if self.settings.sampling.greedy:
            return verify_greedy(logits.argmax(-1), draft.token_ids, limits)
        target_probs = probabilities(logits, self.settings.sampling)
        uniforms = self.random.uniform(logits.shape[1])
        return verify_chain(target_probs, draft.token_ids, draft.probs, limits, uniforms)

    def _choose(self, logits: Tensor) -> Tensor:
        if self.settings.sampling.greedy:
            return logits.argmax(-1)
        return draw(probabilities(logits, self.settings.sampling), self.random.uniform(logits.shape[1]))

    def _commit(self, nodes: Tensor, out: TargetOutput, verdict: Verdict) -> None:
        """Keep the pending token and the accepted ones; the extra token becomes pending."""
        counts = verdict.accepted + 1
        following = torch.cat([nodes[:, 1:], nodes[:, :1]], dim=1)
        following.scatter_(1, verdict.accepted[:, None], verdict.extra_token[:, None])
        self.pending = verdict.extra_token
        self.cache.commit(counts)
        self.committed = TargetFeatures(nodes, following, out.hidden, counts.to("cpu"))

    def _emit(self, tokens: list[list[int]], accepted: list[int]) -> None:
        """Append each running request's new tokens, and let finished requests leave."""
        running = []
        for row, (request, new, drafted) in enumerate(zip(self.requests, tokens, accepted, strict=True)):
            self.stopped[request] = new[-1] in self.stop
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
        if self.state is not None:
            self.state.select(rows)
        c = self.committed
        self.committed = replace(
            c,
            token_ids=c.token_ids[rows],
            next_token_ids=c.next_token_ids[rows],
            hidden=None if c.hidden is None else c.hidden[rows],
            lengths=c.lengths[rows],
        )
