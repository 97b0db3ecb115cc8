"""Calibration of a drafter's confidence head: a temperature for each position, from what the engine accepted.

    python eval/confidence.py export=outputs/.../export

prints how far an export's estimates are off without its positions' temperatures and with them, and writes
confidence.json. Every run of a drafter that has such a head fits them on validation prompts, when it is exported.

R rounds, N drafted positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from omegaconf import DictConfig
from torch import Tensor

from conf.compose import main, plain
from engine.draft_length import DraftLength, Lengths, Round
from engine.loop import generate
from engine.settings import DecodeSettings
from models.chain_drafting import EstimateRule
from models.errors import UserError
from models.target import Target

_BINS = 10
_LEAST_TESTED = 30  # tokens at a position, below which its temperature is that of all positions together
_LEAST_CHANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Estimated:
    """What was estimated of the drafts of R rounds, and what became of them."""

    chances: Tensor  # (R, N) float64
    tested: Tensor  # (R, N) bool
    accepted: Tensor  # (R, N) bool
    prompt: Tensor  # (R,)
    temperature: Tensor  # (R,) of sampling

    def select(self, rows: Tensor) -> Estimated:
        """Some rounds, by mask."""
        return Estimated(*(getattr(self, name)[rows] for name in Estimated.__slots__))


def job(config: DictConfig) -> None:
    """Measure how far an export's estimates are off, print and write it."""
    options = plain(config)
    from data.answers import context_ids
    from engine.options import decode_settings
    from eval.prompt_sets import prompt_set
    from models.checkpoint import detect, target_options
    from models.drafter import accelerate_drafter
    from models.files import write_json
    from models.target import load_target

    folder = Path(options["export"])
    module = detect(folder, options["format"])
    output = Path(options["output"] or folder.parent / "confidence.json")
    target = load_target(**target_options(module.read(folder), options["target"], folder))
    drafter = module.load(folder, target)
    if getattr(drafter, "confidence_head", None) is None:
        raise UserError(f"{str(folder)!r} holds a drafter that has no confidence head: train one with +drafter=dspark.")
    target.accelerate()
    accelerate_drafter(drafter)
    prompts = prompt_set(options["prompts"], target, options["num_prompts"], options["seed"])
    contexts = [context_ids(target, prompt) for prompt in prompts]
    decode = {**options["decode"], "tree": None, "verification": "token"}  # as at export
    settings = decode_settings(decode, 0.0, options["seed"], drafter.max_depth)
    given = options["temperatures"]
    temperatures = [float(t) for t in (given if isinstance(given, list) else [given])]
    found = calibration_errors(target, drafter, contexts, settings, temperatures)
    print(report(found))
    write_json(output, {**found, "config": options})
    print(f"wrote {output}")


def calibrate(
    target: Target,
    drafter: Any,
    contexts: Sequence[list[int]],
    settings: DecodeSettings,
    temperatures: Sequence[float],
) -> dict[str, Any]:
    """Set the temperatures of `drafter.confidence_head`, and say how far estimates are off, before and after.

    The contexts are answered at each of the sampling `temperatures`, with whole chains. Every other one fits, and the
    rest tell the calibration errors, of each position, of each temperature and of all together: `expected_error`. None
    where nothing was tested there.
    """
    logged = _log_untempered(target, drafter, contexts, settings, temperatures)
    fits = logged.prompt % 2 == 0
    found = fit_temperatures(logged.select(fits))
    drafter.confidence_head.temperatures.copy_(found)
    return _told(logged.select(~fits), found, temperatures)


def calibration_errors(
    target: Target,
    drafter: Any,
    contexts: Sequence[list[int]],
    settings: DecodeSettings,
    temperatures: Sequence[float],
) -> dict[str, Any]:
    """As `calibrate`, but of the temperatures that the head has, and on all contexts, of which it fits none."""
    head = drafter.confidence_head
    own = head.temperatures.clone()
    try:
        logged = _log_untempered(target, drafter, contexts, settings, temperatures)
    finally:
        head.temperatures.copy_(own)
    return _told(logged, own.double().cpu(), temperatures)


def _log_untempered(target: Target, drafter: Any, *given: Any) -> Estimated:
    drafter.confidence_head.temperatures.fill_(1.0)
    return log_estimates(target, drafter, *given)


def _told(held: Estimated, found: Tensor, temperatures: Sequence[float]) -> dict[str, Any]:
    """What estimates of other rounds are off by, without the positions' temperatures `found` (N,) and with them."""
    after = replace_chances(held, found)
    apart = [held.temperature == temperature for temperature in temperatures]
    return {
        "temperatures": found.tolist(),
        "tested": held.tested.sum(0).tolist(),
        "error_before": _total_error(held),
        "error_after": _total_error(after),
        "error_before_per_position": errors(held),
        "error_after_per_position": errors(after),
        "sampled_at": list(temperatures),
        "error_before_per_temperature": [_total_error(held.select(rows)) for rows in apart],
        "error_after_per_temperature": [_total_error(after.select(rows)) for rows in apart],
    }


def report(found: dict[str, Any]) -> str:
    """What was found, for people."""

    def told(values: Sequence[float | None]) -> str:
        return " ".join("-" if value is None else f"{value:.3f}" for value in values)

    before, after = (told([found[f"error_{when}"]]) for when in ("before", "after"))
    lines = [
        f"confidence head: calibration error {before} before the positions' temperatures, {after} after, on "
        f"{sum(found['tested'])} tested tokens that fitted none",
        "  (each tenth of the chances from 0 to 1: share of tokens there times |mean chance - share accepted|, summed)",
        f"  temperatures {told(found['temperatures'])}",
        f"  errors before {told(found['error_before_per_position'])}",
        f"  errors after {told(found['error_after_per_position'])}",
        f"  at temperatures {' '.join(f'{t:g}' for t in found['sampled_at'])}: before "
        f"{told(found['error_before_per_temperature'])}, after {told(found['error_after_per_temperature'])}",
    ]
    return "\n".join(lines)


def log_estimates(
    target: Target,
    drafter: Any,
    contexts: Sequence[list[int]],
    settings: DecodeSettings,
    temperatures: Sequence[float],
) -> Estimated:
    """Answer the contexts with whole chains, at every temperature, and log what was estimated of every token."""
    most, none = settings.depth, torch.zeros(0, dtype=torch.float64)
    nothing = none.new_zeros(0, most)  # all that is logged of answers too short to draft anything
    parts = [Estimated(nothing, nothing.bool(), nothing.bool(), none.long(), none)]
    for temperature in temperatures:
        recorder = Recorder()
        sampling = replace(settings.sampling, temperature=temperature)
        decode = replace(settings, sampling=sampling, tree=None, draft_length=recorder)
        generate(target, list(contexts), decode, drafter)
        parts += [_estimated(*entry, most, temperature) for entry in recorder.log]
    return Estimated(*(torch.cat([getattr(part, name) for part in parts]) for name in Estimated.__slots__))


def _estimated(chances: Tensor, made: Round, most: int, temperature: float) -> Estimated:
    """One round of a batch, of the requests that drafted; chances (B, n)."""
    drafted, accepted = torch.tensor(made.drafted)[:, None], torch.tensor(made.accepted)[:, None]
    whole = torch.zeros(len(drafted), most, dtype=torch.float64)
    whole[:, : chances.shape[1]] = chances
    position, requests = torch.arange(most), torch.tensor(made.requests)
    tested = position < torch.minimum(accepted + 1, drafted)
    sampled = torch.full((len(drafted),), temperature, dtype=torch.float64)
    return Estimated(whole, tested, position < accepted, requests, sampled).select(drafted[:, 0] > 0)


def fit_temperatures(logged: Estimated) -> Tensor:
    """The temperatures (N,) whose chances σ(logit / T) make what was accepted likeliest, each within 1/20 to 20."""
    together = _temperature(logged.chances[logged.tested], logged.accepted[logged.tested])
    found = []
    for position in range(logged.chances.shape[1]):
        tested = logged.tested[:, position]
        few = int(tested.sum()) < _LEAST_TESTED
        chances, accepted = logged.chances[tested, position], logged.accepted[tested, position]
        found.append(together if few else _temperature(chances, accepted))
    return torch.tensor(found, dtype=torch.float64)


def _temperature(chances: Tensor, accepted: Tensor) -> float:
    """1 of none. By bisection: the likelihood is concave in 1 / T, and its slope Σ x·(y − σ(x / T)) falls in that."""
    if not len(chances):
        return 1.0
    logits, low, high = _logits(chances), 0.05, 20.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        slope = (logits * (accepted.double() - (logits * middle).sigmoid())).sum()
        low, high = (middle, high) if slope > 0 else (low, middle)
    return 1 / (low * high) ** 0.5


def _logits(chances: Tensor) -> Tensor:
    return chances.clamp(_LEAST_CHANCE, 1 - _LEAST_CHANCE).logit()


def replace_chances(logged: Estimated, temperatures: Tensor) -> Estimated:
    """The same rounds, had the positions these temperatures (N,) in place of 1."""
    return replace(logged, chances=(_logits(logged.chances) / temperatures).sigmoid())


def errors(logged: Estimated) -> list[float | None]:
    """The expected calibration error at each position: (N,)."""
    columns = zip(logged.chances.t(), logged.accepted.t(), logged.tested.t(), strict=True)
    return [expected_error(chances[tested], accepted[tested]) for chances, accepted, tested in columns]


def _total_error(logged: Estimated) -> float | None:
    return expected_error(logged.chances[logged.tested], logged.accepted[logged.tested])


def expected_error(chances: Tensor, accepted: Tensor) -> float | None:
    """Σ over ten bins of equal width of their share times |mean chance − share accepted| (1706.04599); None of none."""
    if not len(chances):
        return None
    bins = (chances * _BINS).long().clamp(max=_BINS - 1)
    gaps = torch.zeros(_BINS, dtype=torch.float64).index_add_(0, bins, chances.double() - accepted.double())
    return float(gaps.abs().sum() / len(chances))


@dataclass(frozen=True)
class Recorder(DraftLength):
    """Whole drafts; of every round that drafted, `log` keeps the estimates (B, n) and what came of it."""

    name: ClassVar[str] = "recorder"
    reads_laws: ClassVar[bool] = True
    log: list[tuple[Tensor, Round]] = field(default_factory=list)

    def start(self, num_requests: int, most: int, drafter: Any) -> Lengths:
        """Log another run."""
        return _RecorderLengths(self.log)


class _RecorderLengths(Lengths):
    def __init__(self, log: list[tuple[Tensor, Round]]) -> None:
        self._log = log
        self._rule: _RecorderRule

    def rule(self, requests: list[int], limits: list[int]) -> EstimateRule:
        self._rule = _RecorderRule(limits)
        return self._rule

    def after(self, made: Round) -> None:
        if made.drawn:
            self._log.append((torch.stack(self._rule.found, dim=1).double().cpu(), made))


class _RecorderRule:
    def __init__(self, limits: list[int]) -> None:
        self.limits = limits
        self.found: list[Tensor] = []  # (B,) of each token

    def estimate(self, chance: Tensor) -> None:
        self.found.append(chance)

    def draws(self, law: Tensor) -> Tensor:
        return torch.ones(len(law), dtype=torch.bool)

    def goes_on(self, chance: Tensor) -> Tensor:
        return torch.ones(len(chance), dtype=torch.bool)


if __name__ == "__main__":
    main("confidence", job)
