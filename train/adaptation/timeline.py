"""What happened request by request: rows, a picture, and the adapted drafter beside the frozen one."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from engine.stats import DecodingStats
from models.errors import UserError
from models.files import explain_disk_errors, replacing, write_text
from train.adaptation.pool import ADAPTED
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
    identical: float  # whether the frozen drafter's answer is the same
    as_plain: float  # whether plain decoding's is, which only some requests are answered by
    alarms: str = ""
    updated: int = 0
    update_s: float = 0.0
    loss: float = float("nan")
    guard_acceptance: float = float("nan")  # of held-out old requests, ...
    guard_change: float = float("nan")  # ... less that of the drafter as it was handed in, ...
    guard_low: float = float("nan")  # ... and the 95% interval of that
    guard_high: float = float("nan")
    guard_s: float = 0.0
    served_change: float = float("nan")  # of the requests served last, less that of the drafter as it was handed in
    rolled_back: int = 0
    buffer: int = 0


def counts(stats: DecodingStats, prefix: str = "") -> dict[str, float]:
    """The sums of a request's counters that a row holds."""
    names = ("rounds", "emitted", "tested", "accepted")
    return {f"{prefix}{name}": float(getattr(stats, name).sum()) for name in names}


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """A CSV file of these rows, whole or not at all."""
    names = ",".join(f.name for f in fields(Row))
    write_text(path, f"{names}\n{_lines(rows)}")


def append_csv(rows: Sequence[Row], path: Path) -> None:
    """Add rows to the file, and wait until they are on disk; a kill may cut the last of them."""
    with explain_disk_errors(path), path.open("a", encoding="utf-8", newline="") as file:
        file.write(_lines(rows))
        file.flush()
        os.fsync(file.fileno())


def read_csv(path: Path, count: int) -> list[Row]:
    """The first `count` rows; what a kill left behind them is not looked at. Raises UserError where they are fewer."""
    kinds = {"int": int, "float": float, "str": str}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            told = list(islice(csv.DictReader(file), count))
        rows = [Row(**{f.name: kinds[str(f.type)](row[f.name]) for f in fields(Row)}) for row in told]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{str(path)!r} is no timeline of this session: {type(error).__name__}: {error}.") from error
    if len(rows) < count:
        raise UserError(f"{str(path)!r} has {len(rows)} rows, and {count} requests were served: it was altered.")
    return rows


def _lines(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(astuple(row) for row in rows)
    return text.getvalue()


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


def log(rows: Sequence[Row], logger: Any) -> None:
    """Hand rows to a logger, and have it write them: what it holds back a kill would take."""
    for row in rows:
        logger.log_metrics(metrics(row), step=row.request)
    logger.save()


def paired(rows: Sequence[Row], rate: str) -> np.ndarray:
    """The counts (n, 4) of a rate of the requests that the adapted drafter answered, for `versus`."""
    names = [f"{side}{name}" for side in ("frozen_", "") for name in RATES[rate]]
    return np.array([[getattr(row, name) for name in names] for row in rows if row.member == ADAPTED]).reshape(-1, 4)


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
    numbers, own = np.array([row.request for row in rows]), [row for row in rows if row.member == ADAPTED]
    for prefix, label, colour in (("frozen_", "frozen", "tab:grey"), ("", "adapted", "tab:blue")):
        done = np.array([[getattr(r, f"{prefix}accepted"), getattr(r, f"{prefix}tested")] for r in own]).reshape(-1, 2)
        if np.nansum(done):
            sums = np.cumsum(done, axis=0)
            before = np.vstack([np.zeros((min(_WINDOW, len(sums)), 2)), sums[:-_WINDOW]])
            ratio = (sums - before)[:, 0] / np.maximum(1, (sums - before)[:, 1])
            above.plot([row.request for row in own], ratio, color=colour, label=f"{label}, last {_WINDOW} requests")
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
