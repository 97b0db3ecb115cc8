"""The arms of an ablation side by side: what each reaches, and by how much the first one is ahead of the others.

Every arm was measured on the same prompts, seed by seed. A value is the mean over seeds of a ratio that is pooled over
a seed's prompts; so is a difference. S seeds, P prompts of a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from eval.comparison import Row, markdown
from eval.provenance import provenance
from models.files import replacing, write_json, write_text

Counts = Mapping[str, Any]  # `Measurement.counts`
Sums = tuple[np.ndarray, np.ndarray]  # numerators and denominators of prompts, each (P,)

_RESAMPLES = 2000
# The 97.5% quantile of Student's t for 1, 2, .. degrees of freedom; for more, the last is on the safe side.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def _accepted(positions: slice) -> Callable[[Counts], Sums]:
    def sums(counts: Counts) -> Sums:
        accepted, tested = (np.asarray(counts[name], dtype=float)[:, positions] for name in ("accepted", "tested"))
        return accepted.sum(1), tested.sum(1)

    return sums


STATISTICS: dict[str, tuple[str, Callable[[Counts], Sums]]] = {  # what each is called in a table
    "block_efficiency": ("τ", lambda counts: (np.asarray(counts["emitted"]), np.asarray(counts["rounds"]))),
    "first_acceptance": ("acceptance of a draft's first token", _accepted(slice(0, 1))),
    "later_acceptance": ("acceptance from the second token on", _accepted(slice(1, None))),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first arm's value less another one's.

    `over_prompts` is a 95% bootstrap interval over prompts, the same for both, of the drafters that were trained: it
    says nothing of what other seeds would give. `over_seeds` is Student's 95% interval of the seeds' differences, each
    of which has data, weights and prompts of its own: it says both. None of a single seed.
    """

    value: float
    by_seed: list[float]  # (S,)
    over_prompts: tuple[float, float]
    over_seeds: tuple[float, float] | None

    @property
    def interval(self) -> tuple[float, float]:
        """Over seeds where there are several."""
        return self.over_prompts if self.over_seeds is None else self.over_seeds

    @property
    def verdict(self) -> str:
        """Whether the first arm is ahead, as far as the interval can tell."""
        low, high = self.interval
        if math.isnan(low):
            return "nothing was counted"
        if low > 0:
            return "as the literature has it"
        if high < 0:
            return "the other way round"
        return "not told apart: the interval holds 0"


def value(counts: Sequence[Counts], statistic: str) -> float:
    """Mean over S seeds; nan where a seed counted nothing."""
    return float(np.mean([_ratio(*STATISTICS[statistic][1](found)) for found in counts]))


def difference(first: Sequence[Counts], other: Sequence[Counts], statistic: str) -> Difference:
    """What is between two arms of S seeds, prompt by prompt the same."""
    sums = STATISTICS[statistic][1]
    rng = np.random.default_rng(0)
    by_seed, resampled = [], []
    for ours, theirs in zip(map(sums, first), map(sums, other), strict=True):
        count = len(ours[0])
        assert count == len(theirs[0]), "the arms were measured on different prompts"
        by_seed.append(_ratio(*ours) - _ratio(*theirs))
        chosen = rng.integers(count, size=(_RESAMPLES, count))
        pair = [(over[chosen].sum(1), below[chosen].sum(1)) for over, below in (ours, theirs)]
        with np.errstate(divide="ignore", invalid="ignore"):
            resampled.append(pair[0][0] / pair[0][1] - pair[1][0] / pair[1][1])
    means = np.mean(resampled, axis=0)
    means = means[~np.isnan(means)]  # resamples of which nothing was counted
    low, high = np.percentile(means, [2.5, 97.5]) if len(means) else (math.nan, math.nan)
    middle, count = float(np.mean(by_seed)), len(by_seed)
    over_seeds = None
    if count > 1:
        reach = _STUDENT[min(count - 1, len(_STUDENT)) - 1] * float(np.std(by_seed, ddof=1)) / math.sqrt(count)
        over_seeds = (middle - reach, middle + reach)
    return Difference(middle, by_seed, (float(low), float(high)), over_seeds)


def _ratio(over: np.ndarray, below: np.ndarray) -> float:
    return float(over.sum() / below.sum()) if below.sum() else float("nan")


@dataclass(frozen=True, slots=True)
class Ablated:
    """What was found: for each arm and temperature the counts of S seeds. The first arm is the one said to win."""

    title: str
    arms: dict[str, dict[float, list[Counts]]]
    seeds: list[int]
    statistic: str  # that the claim is about
    temperature: float
    command: str = ""  # that found it

    @property
    def temperatures(self) -> list[float]:
        """Those that were measured, ascending."""
        return sorted(next(iter(self.arms.values())))

    def differences(self, statistic: str, temperature: float) -> dict[str, Difference]:
        """Of every arm but the first."""
        (_, first), *others = ((name, found[temperature]) for name, found in self.arms.items())
        return {name: difference(first, counts, statistic) for name, counts in others}

    def verdicts(self) -> list[str]:
        """A line for every other arm, on what the ablation is about."""
        first, called = next(iter(self.arms)), STATISTICS[self.statistic][0]
        lines = []
        for name, d in self.differences(self.statistic, self.temperature).items():
            seeds = f"{len(self.seeds)} seeds" if len(self.seeds) > 1 else "prompts of one seed"
            lines.append(
                f"{first} − {name}, {called}, T={self.temperature:g}: {_number(d.value)} {_shown(d.interval)} over "
                f"{seeds}: {d.verdict}"
            )
        return lines


def table_rows(found: Ablated) -> list[Row]:
    """A row for every arm, by temperature and statistic; the claim's stand first."""
    kinds = [(temperature, statistic) for temperature in found.temperatures for statistic in STATISTICS]
    kinds.sort(key=lambda kind: kind != (found.temperature, found.statistic))
    rows = []
    for temperature, statistic in kinds:
        differences = found.differences(statistic, temperature)
        for name, counts in found.arms.items():
            d = differences.get(name)
            rows.append(
                {
                    "of": f"{STATISTICS[statistic][0]}, T={temperature:g}",
                    "arm": name,
                    "value": _number(value(counts[temperature], statistic), ""),
                    "first − this": "" if d is None else _number(d.value),
                    "over prompts": "" if d is None else _shown(d.over_prompts),
                    "over seeds": "" if d is None or d.over_seeds is None else _shown(d.over_seeds),
                    "by seed": "" if d is None else " ".join(map(_number, d.by_seed)),
                }
            )
    return rows


NOTE = (
    "Over prompts: 95% bootstrap interval of the difference of these drafters, on the same prompts. Over seeds: "
    "Student's 95% interval of the seeds' differences, each with data, first weights and prompts of its own."
)


def write(found: Ablated, folder: Path, options: dict[str, Any]) -> None:
    """Print the table and the verdict; write ablation.md, the numbers as ablation.json and ablation.png."""
    rows = table_rows(found)
    console = Console(width=160 if not Console().is_terminal else None)
    table = Table(title=found.title)
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("of", "arm") else "right")
    for place, row in enumerate(rows, 1):
        table.add_row(*row.values(), end_section=place % len(found.arms) == 0)
    console.print(table)
    console.print(NOTE, style="dim")
    print("\n".join(found.verdicts()))
    verdicts = "".join(f"- {line}\n" for line in found.verdicts())
    text = f"## {found.title}\n\n    {found.command}\n\n{markdown(rows)}\n{NOTE}\n\n{verdicts}"
    write_text(folder / "ablation.md", text)
    differences = [
        {"statistic": s, "temperature": t, "arm": name, **asdict(d)}
        for t in found.temperatures
        for s in STATISTICS
        for name, d in found.differences(s, t).items()
    ]
    counts = {name: {f"{t:g}": seeds for t, seeds in by.items()} for name, by in found.arms.items()}
    told = {
        "title": found.title,
        "command": found.command,
        "seeds": found.seeds,
        "verdicts": found.verdicts(),
        "differences": differences,
        "counts": counts,
    }
    write_json(folder / "ablation.json", {**told, "config": options, "provenance": provenance()})
    draw(found, folder / "ablation.png")
    print(f"wrote ablation.md, ablation.json and ablation.png in {folder}")


def draw(found: Ablated, path: Path) -> None:
    """Values of all arms, seed by seed, and the differences with their intervals, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(found.arms)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 2.5 + 0.4 * len(names)), layout="constrained")
    for index, temperature in enumerate(found.temperatures):
        shift, colour = 0.15 * (index - (len(found.temperatures) - 1) / 2), f"C{index}"
        for place, name in enumerate(names):
            seeds = [value([counts], found.statistic) for counts in found.arms[name][temperature]]
            label = f"T = {temperature:g}" if place == 0 else None
            axes[0].plot(seeds, [place + shift] * len(seeds), "o", color=colour, alpha=0.6, label=label)
        for place, d in enumerate(found.differences(found.statistic, temperature).values(), 1):
            low, high = d.interval
            axes[1].errorbar(
                d.value, place + shift, xerr=[[d.value - low], [high - d.value]], fmt="o", color=colour, capsize=3
            )
    called = STATISTICS[found.statistic][0]
    axes[0].set(yticks=range(len(names)), yticklabels=names, xlabel=f"{called}, a point for each seed")
    axes[0].legend()
    axes[1].set(yticks=range(1, len(names)), yticklabels=names[1:], xlabel=f"{names[0]} − this: {called}, 95%")
    axes[1].set_ylim(0.5, len(names) - 0.5)
    axes[1].axvline(0, color="grey", lw=0.8)
    for axis in axes:
        axis.invert_yaxis()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    pyplot.close(figure)


def _number(value: float, sign: str = "+") -> str:
    return "–" if math.isnan(value) else f"{value:{sign}.3f}"


def _shown(interval: tuple[float, float]) -> str:
    return f"[{_number(interval[0])}, {_number(interval[1])}]"
