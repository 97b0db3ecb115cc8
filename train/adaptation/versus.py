"""Two drafters on the same requests: their rates, and the difference with its paired interval."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.stats import DecodingStats

RATES = {"acceptance_rate": ("accepted", "tested"), "block_efficiency": ("emitted", "rounds")}
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Versus:
    """Rates of two drafters on the same requests, and their difference with its 95% interval over requests."""

    what: str
    requests: int
    frozen: float
    adapted: float
    difference: float
    interval: tuple[float, float]

    @property
    def outside(self) -> bool:
        """Whether the interval of the difference does not hold 0."""
        return self.interval[0] > 0 or self.interval[1] < 0


def versus(what: str, table: np.ndarray) -> Versus:
    """Compare pooled rates of paired counts (n, 4): numerator and denominator, frozen, and the same adapted.

    Requests are resampled in pairs (percentiles, fixed seed).
    """
    whole = table.sum(0)
    frozen, adapted = (float(a / b) if b > 0 else float("nan") for a, b in (whole[:2], whole[2:]))
    interval = (float("nan"), float("nan"))
    if frozen == frozen and adapted == adapted:
        rng = np.random.default_rng(0)
        sums = table[rng.integers(len(table), size=(_RESAMPLES, len(table)))].sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            low, high = np.nanpercentile(sums[:, 2] / sums[:, 3] - sums[:, 0] / sums[:, 1], [2.5, 97.5])
        interval = (float(low), float(high))
    return Versus(what, len(table), frozen, adapted, adapted - frozen, interval)


def counted(stats: DecodingStats, rate: str) -> np.ndarray:
    """Numerator and denominator (n, 2) of a rate of `RATES` of each request."""
    columns = [getattr(stats, name) for name in RATES[rate]]
    return np.stack([column.reshape(len(column), -1).sum(1).astype(np.float64) for column in columns], axis=1)
