"""Drift detectors against loops over the whole history, on steady and on falling acceptance."""

import math
import random
import statistics

import pytest
from omegaconf import OmegaConf

from conf.compose import ROOT
from models.errors import UserError
from train.adaptation.drift import Cusum, Drift, PageHinkley

WARM_UP, SLACK, THRESHOLD = 10, 0.5, 6.0


def rates(mean: float, count: int, seed: int, spread: float = 0.1) -> list[float]:
    rng = random.Random(seed)
    return [min(1.0, max(0.0, rng.gauss(mean, spread))) for _ in range(count)]


def first_cusum_alarm(values: list[float]) -> int | None:
    start = values[:WARM_UP]
    mean, spread = statistics.mean(start), statistics.stdev(start)
    for end in range(WARM_UP, len(values)):
        falls = [(mean - v) / spread - SLACK for v in values[WARM_UP : end + 1]]
        if max(0.0, max(sum(falls[i:]) for i in range(len(falls)))) > THRESHOLD:
            return end
    return None


def first_page_hinkley_alarm(values: list[float]) -> int | None:
    spread = statistics.stdev(values[:WARM_UP])
    total, totals = 0.0, [0.0]
    for end in range(WARM_UP, len(values)):
        mean = statistics.mean(values[:end])
        total += (mean - values[end]) / spread - SLACK
        totals.append(total)
        if total - min(totals) > THRESHOLD:
            return end
    return None


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("kind", "oracle"), [(Cusum, first_cusum_alarm), (PageHinkley, first_page_hinkley_alarm)])
def test_the_first_alarm_is_the_loops(kind, oracle, seed: int) -> None:
    values = rates(0.7, 25, seed) + rates(0.45, 30, seed + 100)
    detector = kind(WARM_UP, SLACK, THRESHOLD)
    found = next((i for i, value in enumerate(values) if detector.update(value)), None)
    assert found == oracle(values) and found is not None


@pytest.mark.parametrize("kind", [Cusum, PageHinkley])
def test_a_fall_is_seen_soon_and_a_rise_or_steady_traffic_is_none(kind) -> None:
    late = []
    for seed in range(20):
        detector = kind(25, 0.5, 10.0)
        steady = [detector.update(v) for v in rates(0.7, 100, seed)]
        fallen = [detector.update(v) for v in rates(0.5, 40, seed + 50)]
        assert sum(steady) == 0 and any(fallen)
        late.append(fallen.index(True))
        rising = kind(25, 0.5, 10.0)
        assert not any(rising.update(v) for v in rates(0.5, 60, seed) + rates(0.8, 60, seed))
    assert sorted(late)[10] <= 15


def test_the_defaults_see_code_turn_to_prose_and_seldom_what_is_not_there() -> None:
    """Rates of 32 tokens each as an EAGLE drafter of code has them: 0.437 ± 0.206, and on prose 0.344 ± 0.177."""
    given, late, false = defaults(), {"cusum": [], "page_hinkley": []}, 0
    for seed in range(100):
        drift = Drift(**given)
        false += any(drift.update(value) for value in rates(0.437, 150, seed, 0.206))
        drift = Drift(**given)
        before = [drift.update(value) for value in rates(0.437, 100, seed, 0.206)]
        found = [drift.update(value) for value in rates(0.344, 150, seed + 1000, 0.177)]
        for name, delays in late.items():
            if not any(name in alarms for alarms in before):
                delays.append(next((i for i, alarms in enumerate(found) if name in alarms), 150))
    assert false <= 25
    for delays in late.values():
        assert sorted(delays)[len(delays) // 2] <= 45 and sorted(delays)[len(delays) * 4 // 5] <= 80


def defaults() -> dict[str, float]:
    return dict(OmegaConf.load(ROOT / "adaptation" / "replay.yaml").drift)


def test_a_request_without_a_draft_is_no_sign() -> None:
    with_gaps, without = Drift(5, 0.5, 3.0), Drift(5, 0.5, 3.0)
    values = rates(0.7, 12, 0) + rates(0.3, 12, 1)
    found = [without.update(v) for v in values]
    again = []
    for value in values:
        assert with_gaps.update(math.nan) == []
        again.append(with_gaps.update(value))
    assert again == found and any(found)


def test_a_restart_goes_on_the_same() -> None:
    values = rates(0.7, 15, 3) + rates(0.4, 25, 4)
    whole, first, second = (Drift(5, 0.5, 4.0) for _ in range(3))
    expected = [whole.update(v) for v in values]
    found = [first.update(v) for v in values[:18]]
    second.load_state(first.state())
    assert found + [second.update(v) for v in values[18:]] == expected and any(expected)


def test_senseless_settings_are_refused() -> None:
    for wrong in ({"warm_up": 1}, {"slack": -1.0}, {"threshold": 0.0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            Drift(**{"warm_up": 5, "slack": 0.5, "threshold": 3.0, **wrong})
