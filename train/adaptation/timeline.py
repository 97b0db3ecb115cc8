"""What happened request by request: rows, a picture, and the adapted drafter beside the frozen one."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from engine.stats import DecodingStats
from models.files import replacing, write_text
from train.adaptation.versus import RATES, Versus, versus

_WINDOW = 25  # requests of a rolling mean in the picture


@dataclass(frozen=True, slots=True)
class Row:
    """A served request. Counts are sums over its rounds; `frozen_` is of the drafter as it was handed in.

    `alarms`, `update_s` and what follows happened behind it; nan where nothing was measured.
    """

    request: int
    domain: str
    member: str
    version: int
    rounds: float
    emitted: float
    tested: float
    accepted: float
    seconds: float
    frozen_rounds: float
    frozen_emitted: float
    frozen_tested: float
    frozen_accepted: float
    identical: float
    alarms: str = ""
    updated: int = 0
    update_s: float = 0.0
    loss: float = float("nan")
    guard_acceptance: float = float("nan")  # of held-out old requests, ...
    guard_change: float = float("nan")  # ... less that of the drafter as it was handed in, ...
    guard_low: float = float("nan")  # ... and the 95% interval of that
    guard_high: float = float("nan")
    guard_s: float = 0.0
    rolled_back: int = 0
    buffer: int = 0


def counts(stats: DecodingStats, prefix: str = "") -> dict[str, float]:
    """The sums of a request's counters that a row holds."""
    names = ("rounds", "emitted", "tested", "accepted")
    return {f"{prefix}{name}": float(getattr(stats, name).sum()) for name in names}


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """All rows as a CSV file, whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    write_text(path, text.getvalue())


def metrics(row: Row) -> dict[str, float]:
    """What a logger gets of a request: nothing that was not measured."""
    found = {
        f"acceptance_rate/{row.domain}": row.accepted / max(1.0, row.tested),
        f"block_efficiency/{row.domain}": row.emitted / max(1.0, row.rounds),
        f"frozen_acceptance_rate/{row.domain}": row.frozen_accepted / max(1.0, row.frozen_tested),
        "alarms": float(bool(row.alarms)),
        "updates": float(row.updated),
        "seconds": row.seconds,
        "update_s": row.update_s,
        "guard_s": row.guard_s,
        "rollbacks": float(row.rolled_back),
        "version": float(row.version),
        "buffer": float(row.buffer),
        "loss": row.loss,
        "guard/acceptance_rate": row.guard_acceptance,
        "guard/change": row.guard_change,
    }
    return {name: value for name, value in found.items() if value == value}


def paired(rows: Sequence[Row], rate: str) -> np.ndarray:
    """The counts (n, 4) of a rate of served requests, for `versus`."""
    names = [f"{side}{name}" for side in ("frozen_", "") for name in RATES[rate]]
    return np.array([[getattr(row, name) for name in names] for row in rows]).reshape(-1, 4)


def requests_to_win(rows: Sequence[Row], window: int = 50) -> int | None:
    """After how many requests of a domain the last `window` of them first show a gain outside its interval."""
    for end in range(window, len(rows) + 1, 10):
        if versus("", paired(rows[end - window : end], "acceptance_rate")).interval[0] > 0:
            return end
    return None


def print_report(report: dict[str, Any], console: Console | None = None) -> None:
    """The table of `train.adaptation.report.report`, and what was done meanwhile in a few lines."""
    console = console or Console(width=128 if not Console().is_terminal else None)
    table = Table(title="Frozen and adapted drafter on the same requests")
    for column in ("requests", "n", "rate", "frozen", "adapted", "difference [95%]"):
        table.add_column(column, justify="left" if column in ("requests", "rate") else "right")
    for entry in report["compared"]:
        for rate in RATES:
            found: Versus = entry[rate]
            table.add_row(
                found.what if rate == "acceptance_rate" else "",
                f"{found.requests}" if rate == "acceptance_rate" else "",
                {"acceptance_rate": "α", "block_efficiency": "τ"}[rate],
                f"{found.frozen:.3f}",
                f"{found.adapted:.3f}",
                f"{found.difference:+.3f} [{found.interval[0]:+.3f}, {found.interval[1]:+.3f}]",
            )
    console.print(table)
    for line in report["told"]:
        console.print(line, markup=False)


def draw(rows: Sequence[Row], old: str, max_loss: float | None, path: Path) -> None:
    """The timeline as a PNG: rolling acceptance of both drafters, the guard's measurements, and what happened when."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(11, 6), sharex=True, layout="constrained", height_ratios=(3, 1)
    )
    numbers = np.array([row.request for row in rows])
    for prefix, label, colour in (("frozen_", "frozen", "tab:grey"), ("", "adapted", "tab:blue")):
        done = np.array([[getattr(r, f"{prefix}accepted"), getattr(r, f"{prefix}tested")] for r in rows]).reshape(-1, 2)
        if np.nansum(done):
            sums = np.cumsum(done, axis=0)
            before = np.vstack([np.zeros((min(_WINDOW, len(sums)), 2)), sums[:-_WINDOW]])
            ratio = (sums - before)[:, 0] / np.maximum(1, (sums - before)[:, 1])
            above.plot(numbers, ratio, color=colour, label=f"{label}, last {_WINDOW} requests")
    looks = [r for r in rows if r.guard_change == r.guard_change]
    if looks:
        places, rates = [r.request for r in looks], [r.guard_acceptance for r in looks]
        ends = np.array([[r.guard_change - r.guard_low, r.guard_high - r.guard_change] for r in looks]).T.clip(min=0)
        above.errorbar(places, rates, ends, fmt="o", ms=3, lw=0.6, color="tab:green", label=f"held-out {old} [95%]")
        if max_loss is not None:
            start = looks[0].guard_acceptance - looks[0].guard_change
            above.axhline(start - max_loss, color="tab:green", ls=":", label="the guard's limit")
    changes = [b.request for a, b in pairwise(rows) if a.domain != b.domain]
    marks = (
        ([r.request for r in rows if r.alarms], "alarm", "tab:orange", "--"),
        ([r.request for r in rows if r.rolled_back], "rollback", "tab:red", "-"),
        (changes if len(changes) < 20 else [], "the domain changes", "black", "-."),
    )
    for places, label, colour, style in marks:
        for index, place in enumerate(places):
            above.axvline(place, color=colour, ls=style, lw=1, label=label if index == 0 else None)
    above.set(ylabel="acceptance rate", ylim=(0, 1.02))
    above.legend(fontsize="small")
    below.step(numbers, [r.version for r in rows], where="post", color="tab:blue")
    below.set(xlabel="request", ylabel="version served")
    seconds = below.twinx()
    seconds.bar(numbers, [r.update_s + r.guard_s for r in rows], color="tab:red", alpha=0.4)
    seconds.set_ylabel("s of learning and guard")
    for axis in (above, below):
        axis.grid(alpha=0.3)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    pyplot.close(figure)
