"""Training of a predictor of draft lengths, on rounds that the engine logged on the training prompts.

The drafter answers the prompts with whole drafts. Of each drafted token the log keeps what the predictor reads and, if
it was tested, whether it was accepted; what a round costs is timed by length. The network learns the acceptance of
tested tokens; then, on prompts that it has not seen, the thresholds are chosen that would have given the most tokens
per second.

B batch, R rounds, N drafted tokens, F features, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from data.loader import StepBatches
from data.progress import Progress
from engine.draft_length import DraftLength, Lengths, Round
from engine.draft_length.costs import RoundCosts
from engine.draft_length.learnt import RecentAcceptance
from engine.loop import generate
from engine.settings import DecodeSettings
from models.chain_drafting import StopRule
from models.errors import UserError
from models.length_predictor import MOST_POSITIONS, NUM_FEATURES, ChainFeatures, LengthPredictor
from models.sampling import SamplingParams
from models.target import Target

_HELD_OUT = 5  # every fifth prompt chooses the thresholds
_CANDIDATES, _SWEEPS = 64, 3
_BATCH_ROUNDS = 512
_TIMED_PROMPTS, _TIMED_TOKENS, _TIMED_ROUNDS = 4, 32, 4  # so many tokens at least, and rounds if all are accepted


@dataclass(frozen=True, slots=True)
class LoggedRounds:
    """What became of R drafts of at most N tokens."""

    features: Tensor  # (R, N, F), zeros behind a draft
    drafted: Tensor  # (R,)
    accepted: Tensor  # (R,)
    prompt: Tensor  # (R,) which it was drafted for

    def select(self, rows: Tensor) -> LoggedRounds:
        """Some rounds, by index or mask."""
        return LoggedRounds(self.features[rows], self.drafted[rows], self.accepted[rows], self.prompt[rows])

    @property
    def tested(self) -> Tensor:
        """Which tokens (R, N) bool were tested."""
        reached = torch.minimum(self.accepted + 1, self.drafted)
        return torch.arange(self.features.shape[1]) < reached[:, None]


class DraftLengthTraining:
    """Teaches the `length_predictor` of a drafter.

    `num_prompts` training prompts are answered at each of `temperatures` with drafts of `num_speculative_tokens`,
    `batch_size` at a time. `cost`, a draft step over a target step, takes the place of timed rounds. Raises UserError
    for a drafter without a predictor, and for numbers that are too small.
    """

    timed = True  # no two trainings find the same

    def __init__(
        self,
        drafter: Any,
        target: Target,
        *,
        num_speculative_tokens: int,
        max_steps: int,
        seed: int,
        num_prompts: int = 200,
        max_new_tokens: int = 128,
        temperatures: tuple[float, ...] = (0.0, 1.0),
        batch_size: int = 8,
        lr: float = 1e-2,
        cost: float | None = None,
    ) -> None:
        if not hasattr(drafter, "length_predictor"):
            raise UserError(
                f"drafter.training is {type(self).__module__}.{type(self).__name__}, but {type(drafter).__name__} has "
                "no predictor of lengths: use +drafter=draft_length."
            )
        if num_prompts < _HELD_OUT or batch_size < 1:
            raise UserError(
                f"drafter.training.num_prompts is {num_prompts} and batch_size {batch_size}: they must be at least "
                f"{_HELD_OUT} and 1."
            )
        self._drafter, self._target = drafter, target
        self._settings = DecodeSettings(max_new_tokens, num_speculative_tokens, seed=seed)
        self._sampling = [SamplingParams(float(temperature)) for temperature in temperatures]
        self._num_prompts, self._batch_size = num_prompts, batch_size
        self._max_steps, self._seed, self._lr, self._cost = max_steps, seed, lr, cost

    def learn(self, batches: StepBatches) -> None:
        """Log rounds on the prompts of the answers, and fit the predictor to them."""
        self._drafter.eval()
        prompts = [
            ids[: mask.index(1)] for ids, mask in zip(batches.token_ids, batches.loss_mask, strict=True) if mask[0] == 0
        ][: self._num_prompts]
        if len(prompts) < _HELD_OUT:
            raise UserError(f"There are {len(prompts)} training prompts: a predictor of lengths needs {_HELD_OUT}.")
        logged = log_rounds(self._target, self._drafter, prompts, self._settings, self._sampling, self._batch_size)
        costs = (
            time_rounds(self._target, self._drafter, prompts[:_TIMED_PROMPTS], self._settings)
            if self._cost is None
            else RoundCosts(self._settings.num_speculative_tokens, self._cost)
        )
        report = fit(self._drafter.length_predictor, logged, costs.table(), self._max_steps, self._lr, self._seed)
        print(report)


def log_rounds(
    target: Target,
    drafter: Any,
    prompts: list[list[int]],
    settings: DecodeSettings,
    sampling: list[SamplingParams],
    batch_size: int,
) -> LoggedRounds:
    """Answer the prompts with whole drafts and log every round. Raises UserError where no round had a draft."""
    parts: list[LoggedRounds] = []
    with Progress("answers logged", len(prompts) * len(sampling)) as progress:
        for law in sampling:
            for first in range(0, len(prompts), batch_size):
                chosen = prompts[first : first + batch_size]
                recorder = Recorder()
                decode = replace(settings, sampling=law, draft_length=recorder)
                generate(target, chosen, decode, drafter, seeds=[settings.seed + first + i for i in range(len(chosen))])
                parts += [_logged(*entry, first, settings.depth) for entry in recorder.log]
                progress.advance(len(chosen))
    if not parts:
        raise UserError("The answers are too short to log a draft: raise drafter.training.max_new_tokens.")
    return LoggedRounds(*(torch.cat([getattr(p, name) for p in parts]) for name in LoggedRounds.__slots__))


def _logged(features: Tensor, made: Round, first: int, most: int) -> LoggedRounds:
    """One round of a batch: features (n, B, F) as (B, N, F), of the requests that drafted."""
    drafted, accepted = torch.tensor(made.drafted), torch.tensor(made.accepted)
    whole = torch.zeros(len(drafted), most, NUM_FEATURES)
    whole[:, : len(features)] = features.transpose(0, 1).cpu()
    whole[torch.arange(most) >= drafted[:, None]] = 0
    return LoggedRounds(whole, drafted, accepted, first + torch.tensor(made.requests)).select(drafted > 0)


def time_rounds(target: Target, drafter: Any, prompts: list[list[int]], settings: DecodeSettings) -> RoundCosts:
    """Time rounds of every length, one request at a time and the lengths in turns, with the predictor's work in them.

    A run's first draft reads the prompt as well, and is left out. Raises UserError where nothing else is drafted.
    """
    costs = RoundCosts(settings.depth, None, first=2**31)
    for prompt in prompts:
        for length in range(settings.depth, 0, -1):
            recorder = Recorder()
            decode = replace(
                settings,
                max_new_tokens=max(_TIMED_TOKENS, _TIMED_ROUNDS * (length + 1)),
                num_speculative_tokens=length,
                draft_length=recorder,
                stop_token_ids=frozenset(),
            )
            generate(target, [prompt], decode, drafter)
            for _, made in recorder.log[1:]:
                costs.add(made.drawn, made.seconds)
    if not any(costs.counts):
        raise UserError(
            f"No round could be timed behind the first {len(prompts)} prompts, which leave no room in the context: "
            "shorten the prompts, or give drafter.training.cost, a draft step over a target step."
        )
    return costs


def fit(
    predictor: LengthPredictor, logged: LoggedRounds, costs: list[float], max_steps: int, lr: float, seed: int
) -> str:
    """Train the predictor, choose its thresholds on the prompts held out, and say what that is expected to give.

    costs (N + 1,) are those of rounds with 0, 1, .. drafted tokens, in any unit. Raises UserError where no round is of
    a prompt that is held out, or all are.
    """
    held_out = logged.prompt % _HELD_OUT == _HELD_OUT - 1
    train, held = logged.select(~held_out), logged.select(held_out)
    for part, what in ((train, "that are learnt from"), (held, f"held out, one of every {_HELD_OUT}")):
        if not len(part.drafted):
            raise UserError(
                f"No round was drafted behind the prompts {what}: their answers end at once, or they fill the context. "
                "Raise drafter.training.num_prompts or max_new_tokens."
            )
    features = train.features[train.tested]
    device = predictor.thresholds.device
    predictor.center.copy_(features.mean(0))
    predictor.scale.copy_(features.std(0).clamp(min=1e-3))
    labels = (torch.arange(train.features.shape[1]) < train.accepted[:, None])[train.tested].float()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(predictor.parameters(), lr=lr, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max_steps)
    for _ in range(max_steps):
        rows = torch.randint(len(labels), (min(_BATCH_ROUNDS, len(labels)),), generator=generator)
        logits = predictor(features[rows].to(device))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels[rows].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        survival = predictor(held.features.to(device)).sigmoid().cumprod(1).cpu()
    thresholds, rate = best_thresholds(survival, held, costs)
    predictor.thresholds.fill_(thresholds[-1])
    predictor.thresholds[: len(thresholds)] = thresholds[:MOST_POSITIONS]
    fixed = {n: tokens_per_cost(held.drafted.clamp(max=n), held, costs) for n in range(1, len(costs))}
    best = max(fixed, key=lambda n: fixed[n])
    return (
        f"{len(logged.drafted)} rounds logged. A draft ends where its chance to have survived is not above "
        f"{' '.join(f'{t:.2f}' for t in thresholds.tolist())}, by position: {rate / fixed[best]:.3f} times the tokens "
        f"per second of the best fixed length, {best}, on the prompts that chose them"
    )


def best_thresholds(survival: Tensor, logged: LoggedRounds, costs: list[float]) -> tuple[Tensor, float]:
    """The thresholds (N,) that give the most tokens per unit of cost, and that rate; survival (R, N) up to each token.

    From the best that is the same for all positions, each in turn takes the value that improves most, until none does;
    1 ends every draft there, so a fixed length is one of the choices. Of values that are as good, within a thousandth,
    it is the one in the middle.
    """

    def rate(thresholds: Tensor) -> float:
        return tokens_per_cost(lengths_at(survival, logged.drafted, thresholds), logged, costs)

    num_tokens = survival.shape[1]
    starts = [torch.full((num_tokens,), t) for t in _candidates(survival)]
    starts += [torch.where(torch.arange(num_tokens) < n, 0.0, 1.0) for n in range(num_tokens)]
    found = _middle_of_best(starts, [rate(start) for start in starts])
    for _ in range(_SWEEPS):
        for position in range(num_tokens):
            moved = [found.clone() for _ in _candidates(survival[:, position])]
            for thresholds, value in zip(moved, _candidates(survival[:, position]), strict=True):
                thresholds[position] = value
            rates = [rate(thresholds) for thresholds in moved]
            if max(rates) > 1.0001 * rate(found):
                found = _middle_of_best(moved, rates)
    return found, rate(found)


def _candidates(survival: Tensor) -> list[float]:
    """Values that a threshold may take, from 0, which ends no draft, to 1, which ends all."""
    quantiles = torch.linspace(0, 1, _CANDIDATES, dtype=survival.dtype)
    few = survival.flatten()[:: max(1, survival.numel() // 100_000)]
    return sorted({0.0, *few.quantile(quantiles).tolist(), 1.0})


def _middle_of_best(choices: list[Tensor], rates: list[float]) -> Tensor:
    good = [choice for choice, rate in zip(choices, rates, strict=True) if rate >= 0.999 * max(rates)]
    return good[len(good) // 2]


def lengths_at(survival: Tensor, drafted: Tensor, thresholds: Tensor) -> Tensor:
    """How many tokens (R,) are drafted up to and including the first whose survival is not above its threshold."""
    over = torch.cat([survival <= thresholds, torch.ones_like(drafted, dtype=torch.bool)[:, None]], dim=1)
    return torch.minimum(over.int().argmax(1) + 1, drafted)


def tokens_per_cost(lengths: Tensor, logged: LoggedRounds, costs: list[float]) -> float:
    """Tokens per unit of cost, had the drafts been cut to these lengths (R,)."""
    tokens = torch.minimum(logged.accepted, lengths) + 1
    return float(tokens.sum() / torch.tensor(costs, dtype=torch.float64)[lengths].sum())


@dataclass(frozen=True)
class Recorder(DraftLength):
    """Whole drafts; of every round that drafted, `log` keeps the features (n, B, F) and what came of it."""

    name: ClassVar[str] = "recorder"
    reads_laws: ClassVar[bool] = True
    log: list[tuple[Tensor, Round]] = field(default_factory=list)

    def start(self, num_requests: int, most: int, drafter: Any) -> Lengths:
        """Log another run."""
        return _RecorderLengths(self.log, num_requests)


class _RecorderLengths(Lengths):
    def __init__(self, log: list[tuple[Tensor, Round]], num_requests: int) -> None:
        self._log, self._recent = log, RecentAcceptance(num_requests)
        self._rule: _RecorderRule

    def rule(self, requests: list[int], limits: list[int]) -> StopRule:
        self._rule = _RecorderRule(self._recent.of(requests), limits)
        return self._rule

    def after(self, made: Round) -> None:
        if made.drawn:
            self._log.append((torch.stack(self._rule.found), made))
        self._recent.after(made)


class _RecorderRule:
    def __init__(self, recent: Tensor, limits: list[int]) -> None:
        self.limits = limits
        self.found: list[Tensor] = []  # (B, F) of each token
        self._recent = recent
        self._features: ChainFeatures | None = None

    def draws(self, law: Tensor) -> Tensor:
        if self._features is None:
            self._features = ChainFeatures(self._recent.to(law.device))
        self._features.look(law)
        return torch.ones(len(law), dtype=torch.bool)

    def goes_on(self, chance: Tensor) -> Tensor:
        assert self._features is not None
        self.found.append(self._features.add(chance))
        return torch.ones(len(chance), dtype=torch.bool)
