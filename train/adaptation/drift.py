"""Has acceptance fallen for good? Two tests on the acceptance rate of request after request.

Both learn mean and spread from the first `warm_up` requests, and count in units of that spread, so that their
thresholds mean the same whatever the drafter is worth. After an alarm they begin anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from models.errors import UserError

_LEAST_SPREAD = 0.02  # of α: rates that hardly vary must not make every request an alarm


@dataclass
class _Baseline:
    """Mean and spread (Welford's) of the first requests."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        change = value - self.mean
        self.mean += change / self.count
        self.squares += change * (value - self.mean)

    @property
    def spread(self) -> float:
        return max(_LEAST_SPREAD, math.sqrt(self.squares / max(1, self.count - 1)))


class Detector:
    """Counts how far rates fall below the mean by more than `slack` spreads; an alarm where that passes `threshold`."""

    name: ClassVar[str]

    def __init__(self, warm_up: int, slack: float, threshold: float) -> None:
        if warm_up < 2:
            raise UserError(f"adaptation.drift.warm_up is {warm_up}: it must be at least 2.")
        if slack < 0 or not threshold > 0:
            raise UserError(f"adaptation.drift: slack is {slack} and threshold {threshold}: at least 0, and above 0.")
        self.warm_up, self.slack, self.threshold = warm_up, slack, threshold
        self.reset()

    def reset(self) -> None:
        """Begin anew, with another baseline."""
        self._baseline = _Baseline()
        self._sums = [0.0, 0.0]

    def update(self, rate: float) -> bool:
        """Take in the acceptance rate of a request; True is an alarm. A request without a draft (nan) is no sign."""
        if math.isnan(rate):
            return False
        if self._baseline.count < self.warm_up:
            self._baseline.add(rate)
            return False
        if self._statistic((self._baseline.mean - rate) / self._baseline.spread) <= self.threshold:
            return False
        self.reset()
        return True

    def _statistic(self, fall: float) -> float:
        raise NotImplementedError

    def state(self) -> list[float]:
        """What a restart needs."""
        baseline = self._baseline
        return [float(baseline.count), baseline.mean, baseline.squares, *self._sums]

    def load_state(self, state: list[float]) -> None:
        """Go on from what `state` gave."""
        count, mean, squares, *sums = state
        self._baseline, self._sums = _Baseline(int(count), mean, squares), list(sums)


class PageHinkley(Detector):
    """m_t = Σ (fall_i − slack), M_t = min m_i: an alarm where m_t − M_t > threshold (Page 1954, Hinkley 1971).

    The mean that falls are measured from is the running one of all requests since the last alarm.
    """

    name = "page_hinkley"

    def update(self, rate: float) -> bool:
        """As every detector; the running mean takes in the rate too."""
        known = self._baseline.count >= self.warm_up
        alarm = super().update(rate)
        if known and not alarm and not math.isnan(rate):
            spread = self._baseline.spread
            self._baseline.add(rate)
            self._baseline.squares = spread**2 * max(1, self._baseline.count - 1)  # the spread stays the first one
        return alarm

    def _statistic(self, fall: float) -> float:
        total, least = self._sums
        total += fall - self.slack
        self._sums = [total, min(least, total)]
        return total - self._sums[1]


class Cusum(Detector):
    """S_t = max(0, S_{t−1} + fall_t − slack) from the mean of the first requests: an alarm where S_t > threshold."""

    name = "cusum"

    def _statistic(self, fall: float) -> float:
        self._sums[0] = max(0.0, self._sums[0] + fall - self.slack)
        return self._sums[0]


DETECTORS = {detector.name: detector for detector in (PageHinkley, Cusum)}


class Drift:
    """All detectors side by side; `alarms` of a request are the names of those that went off."""

    def __init__(self, warm_up: int, slack: float, threshold: float) -> None:
        self._detectors = {name: kind(warm_up, slack, threshold) for name, kind in DETECTORS.items()}

    def update(self, rate: float) -> list[str]:
        """Take in a request's acceptance rate."""
        return [name for name, detector in self._detectors.items() if detector.update(rate)]

    def state(self) -> dict[str, Any]:
        """What a restart needs."""
        return {name: detector.state() for name, detector in self._detectors.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        for name, detector in self._detectors.items():
            detector.load_state(state[name])
