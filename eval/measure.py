"""Run a drafter and plain decoding on the same prompts in turns, and reduce what happened to rates and intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.answers import context_ids
from data.progress import Progress
from data.prompts import Prompt
from engine.draft_length import policy_for
from engine.loop import Generation, check_prompts, generate
from engine.options import describe_tree
from engine.settings import DecodeSettings
from engine.stats import DecodingStats
from eval.theory import predict
from models.sampling import SamplingParams, adjust, probabilities, seen_at_nodes, seen_tokens
from models.target import Target
from models.types import Drafter
from models.vocab import DraftVocab

_RESAMPLES = 2000
_PER_PROMPT = (
    "plain_s",
    "plain_tokens",
    "speculative_s",
    "speculative_tokens",
    "plain_prefill_s",
    "speculative_prefill_s",
    "draft_s",
    "verify_s",
)  # the fields behind `stats`, in order


@dataclass(slots=True)
class Measurement:
    """A drafter on P prompts under one setting. Times are seconds of whole answers, the prompt's pass included."""

    settings: DecodeSettings
    categories: list[str]  # (P,)
    stats: DecodingStats  # of P requests; a prompt's turns are added up
    plain_s: np.ndarray  # (P,)
    plain_tokens: np.ndarray  # (P,)
    speculative_s: np.ndarray  # (P,)
    speculative_tokens: np.ndarray  # (P,)
    plain_prefill_s: np.ndarray  # (P,) the prompt's pass, which gives an answer's first token
    speculative_prefill_s: np.ndarray  # (P,)
    draft_s: np.ndarray  # (P,)
    verify_s: np.ndarray  # (P,) the target's passes over the drafts, and the verdicts
    ceiling: float = 1.0  # mean mass that the target gives to what the drafter can propose: no α can be above it
    identical: int = 0  # prompts whose greedy answer is plain decoding's, token for token
    near_ties: list[float] = field(default_factory=list)  # gap of the two largest logits where an answer parted

    @classmethod
    def empty(cls, settings: DecodeSettings, categories: list[str]) -> Measurement:
        """Nothing counted yet, for prompts of these categories."""
        count = len(categories)
        stats = DecodingStats.empty(count, settings.depth)
        zeros: list[Any] = [np.zeros(count) for _ in _PER_PROMPT]
        return cls(settings, categories, stats, *zeros)

    @property
    def speedup(self) -> float:
        """Seconds per token of plain decoding over seconds per token with the drafter."""
        plain = self.plain_s.sum() / self.plain_tokens.sum()
        return float(plain / (self.speculative_s.sum() / self.speculative_tokens.sum()))

    @property
    def predicted_speedup(self) -> float:
        """The speed-up that theory expects of the conditional acceptance and of what drafting and checking cost.

        See `predicted_speedup`; nan where nothing was drafted or timed.
        """
        if not self.verify_s.any():
            return float("nan")
        return predicted_speedup(
            self.stats,
            plain_s_per_token=self.plain_s.sum() / self.plain_tokens.sum(),
            tokens=self.speculative_tokens.sum(),
            total_s=self.speculative_s.sum(),
            prefill_s=self.speculative_prefill_s.sum(),
            draft_s=self.draft_s.sum(),
            verify_s=self.verify_s.sum(),
        )

    def select(self, prompts: Any) -> Measurement:
        """The measurement of some prompts, by index or mask."""
        chosen = np.arange(len(self.categories))[prompts]
        return Measurement(
            self.settings,
            [self.categories[i] for i in chosen],
            self.stats.select(chosen),
            *(getattr(self, name)[chosen] for name in _PER_PROMPT),
        )

    def by_category(self) -> dict[str, dict[str, Any]]:
        """Block efficiency and speed-up with their intervals, and the acceptance rate, per category."""
        result = {}
        for category in sorted(set(self.categories)):
            part = self.select([i for i, c in enumerate(self.categories) if c == category])
            result[category] = {
                "prompts": len(part.categories),
                "acceptance_rate": part.stats.acceptance_rate,
                "block_efficiency": part.stats.block_efficiency,
                "block_efficiency_interval": part.interval(lambda m: m.stats.block_efficiency),
                "speedup": part.speedup,
                "speedup_interval": part.interval(lambda m: m.speedup),
            }
        return result

    def counts(self) -> dict[str, Any]:
        """Numerators and denominators of every rate, per prompt."""
        columns = {f.name: getattr(self.stats, f.name).tolist() for f in fields(self.stats)}
        return {"category": self.categories, **columns, **{name: getattr(self, name).tolist() for name in _PER_PROMPT}}

    def interval(self, statistic: Callable[[Measurement], float], level: float = 0.95) -> tuple[float, float]:
        """Bootstrap interval of a statistic over prompts (percentiles of resampled prompts, fixed seed)."""
        rng = np.random.default_rng(0)
        count = len(self.categories)
        values = [statistic(self.select(rng.integers(count, size=count))) for _ in range(_RESAMPLES)]
        low, high = np.nanpercentile(values, [50 * (1 - level), 50 * (1 + level)])
        return float(low), float(high)

    def summary(self) -> dict[str, Any]:
        """All rates, with intervals for those that are compared, as plain numbers."""
        s = self.stats
        result: dict[str, Any] = {
            "prompts": len(self.categories),
            "tokens": int(self.speculative_tokens.sum()),
            "temperature": self.settings.sampling.temperature,
            "num_speculative_tokens": self.settings.depth,
            "num_nodes": self.settings.num_nodes,
            "tree": describe_tree(self.settings.tree),
            "draft_length": "auto" if self.settings.draft_length is None else self.settings.draft_length.describe(),
            "verification": self.settings.verification,
            "lossless": self.settings.lossless,
            "acceptance_rate": s.acceptance_rate,
            "expected_acceptance_rate": s.expected_acceptance_rate,
            "acceptance_rate_interval": self.interval(lambda m: m.stats.acceptance_rate),
            "block_efficiency": s.block_efficiency,
            "block_efficiency_interval": self.interval(lambda m: m.stats.block_efficiency),
            "speedup": self.speedup,
            "speedup_interval": self.interval(lambda m: m.speedup),
            "predicted_speedup": self.predicted_speedup,
            "draft_utilization": s.draft_utilization,
            "ceiling": self.ceiling,
            "acceptance_per_position": s.acceptance_per_position,
            "conditional_acceptance": s.conditional_acceptance,
        }
        if self.settings.sampling.greedy:
            result |= {"identical_to_plain": self.identical, "near_ties": self.near_ties}
        return result


def predicted_speedup(
    stats: DecodingStats,
    *,
    plain_s_per_token: float,
    tokens: float,
    total_s: float,
    prefill_s: float,
    draft_s: float,
    verify_s: float,
    acceptance: Sequence[float] | None = None,
) -> float:
    """The speed-up that theory expects of the conditional acceptance and of what drafting and checking cost.

    How many tokens a round gives is predicted; what a drafted token, a check and the rest of a round take is given,
    and so are the prompts' own passes. Where all of these are of the same run, what the measured speed-up lacks of it
    are the small biases of `eval.theory.predict` alone: it then says that the parts add up. `acceptance` by position
    may be that of another run. nan where nothing was drafted.
    """
    rounds, reached = stats.rounds.sum(), stats.drafts.sum(0)
    if not reached.any():
        return float("nan")
    rounds_only = predict(
        stats.conditional_acceptance if acceptance is None else acceptance,
        draft_s_per_token=draft_s / reached.sum(),
        verify_s_per_round=verify_s / rounds,
        plain_s_per_token=plain_s_per_token,
        other_s_per_round=(total_s - prefill_s - draft_s - verify_s) / rounds,
        reach=reached / rounds,
    )
    predicted_s = prefill_s + stats.emitted.sum() * plain_s_per_token / rounds_only
    return float(plain_s_per_token / (predicted_s / tokens))


def measure(
    target: Target, drafter: Drafter, prompts: Sequence[Prompt], settings: DecodeSettings, *, repeats: int = 1
) -> Measurement:
    """Answer each prompt alone, plainly and with the drafter in turns, `repeats` times; the fastest times count.

    Later turns of a prompt continue the answers of plain decoding, so that both read the same contexts.
    """
    contexts = [context_ids(target, prompt) for prompt in prompts]
    check_prompts(target, contexts)
    if settings.tree is None:
        settings = replace(settings, draft_length=policy_for(settings.draft_length, drafter))
    result = Measurement.empty(settings, [p.category for p in prompts])
    for warm in (None, drafter):  # first calls allocate and choose kernels
        generate(target, contexts[:1], replace(settings, max_new_tokens=8), warm)
    with Progress(f"measuring at temperature {settings.sampling.temperature:g}", len(prompts)) as progress:
        for index, prompt in enumerate(prompts):
            same = True
            answers: tuple[str, ...] = ()
            for _ in prompt.turns:
                context = context_ids(target, prompt, answers)
                if len(context) >= target.max_positions:
                    break  # the conversation has filled the context
                plain, speculative = _in_turns(target, drafter, context, settings, repeats, index)
                _add(result, index, plain, speculative)
                if settings.sampling.greedy and plain.token_ids != speculative.token_ids:
                    same = False
                    result.near_ties.append(
                        _gap(target, context, plain.token_ids[0], speculative.token_ids[0], settings)
                    )
                if not prompt.continuation:
                    answers += (target.decode(plain.token_ids[0]),)
            result.identical += same
            progress.advance(1)
    if drafter.vocab.reduced:
        result.ceiling = ceiling(target, drafter.vocab, contexts, settings)
    return result


@torch.inference_mode()
def ceiling(target: Target, vocab: DraftVocab, contexts: list[list[int]], settings: DecodeSettings) -> float:
    """Mean mass of the target's law inside the draft vocabulary, over the tokens of its own answers to `contexts`."""
    answers = generate(target, contexts, settings).token_ids
    inside = torch.zeros(target.vocab_size, dtype=torch.float64, device=target.device)
    inside[vocab.to_target(torch.arange(vocab.size, device=target.device))] = 1.0
    mass, count = 0.0, 0
    for context, answer in zip(contexts, answers, strict=True):
        logits = answer_logits(target, context, answer, settings.sampling)
        law = probabilities(logits, settings.sampling)
        mass += float((law.double() @ inside).sum())
        count += len(answer)
    return mass / count


def answer_logits(target: Target, context: list[int], answer: list[int], sampling: SamplingParams) -> Tensor:
    """The adjusted logits (S, V) that each of the answer's S tokens was chosen from."""
    ids = torch.tensor([context + answer[:-1]], device=target.device)
    logits, seen = target.head(target(ids).last[0, len(context) - 1 :]), None
    if sampling.needs_seen:
        said = torch.tensor([answer], device=target.device)
        path = torch.ones(1, len(answer), len(answer), dtype=torch.bool, device=target.device).tril()
        prompt = seen_tokens([context], target.vocab_size, target.device)
        seen = torch.cat([prompt, seen_at_nodes(prompt, said, path)[0, :-1]])
    return adjust(logits, sampling, seen)


def _in_turns(
    target: Target, drafter: Drafter, context: list[int], settings: DecodeSettings, repeats: int, index: int
) -> tuple[Generation, Generation]:
    """The fastest of `repeats` runs each. Which goes first alternates, so that neither always finds a warmer cache."""
    seeds = [settings.seed + index]
    best: dict[bool, Generation] = {}
    for repeat in range(repeats):
        for speculative in (False, True) if (index + repeat) % 2 == 0 else (True, False):
            made = generate(target, [context], settings, drafter if speculative else None, seeds=seeds)
            if speculative not in best or made.seconds.total < best[speculative].seconds.total:
                best[speculative] = made
    return best[False], best[True]


def _add(result: Measurement, index: int, plain: Generation, speculative: Generation) -> None:
    result.plain_s[index] += plain.seconds.total
    result.plain_prefill_s[index] += plain.seconds.prefill
    result.plain_tokens[index] += len(plain.token_ids[0])
    result.speculative_s[index] += speculative.seconds.total
    result.speculative_prefill_s[index] += speculative.seconds.prefill
    result.draft_s[index] += speculative.seconds.draft
    result.verify_s[index] += speculative.seconds.verify
    result.speculative_tokens[index] += len(speculative.token_ids[0])
    result.stats.accumulate(index, speculative.stats)


@torch.inference_mode()
def _gap(
    target: Target, context: list[int], plain: list[int], speculative: list[int], settings: DecodeSettings
) -> float:
    """Difference of the two largest logits at the first token where the answers part."""
    parted = next(i for i, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b)
    logits = answer_logits(target, context, plain[: parted + 1], settings.sampling)[-1]
    first, second = logits.topk(2).values.tolist()
    return first - second
