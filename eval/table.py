"""Measurements as tables for a terminal and as a picture."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.draft_length import Fixed
from eval.measure import Measurement
from models.files import replacing

Named = list[tuple[str, Measurement]]


def print_tables(measured: Named, console: Console | None = None) -> None:
    """The acceptance table, and a second one by category where there are several."""
    console = console or Console(width=144 if not Console().is_terminal else None)
    console.print(_overview(measured))
    console.print(
        "α expected: mean of Σ min(p, q) over tested positions; realised: accepted / tested. By position: accepted / "
        "tested at draft token 1, 2, …\nτ: tokens emitted per target pass, the extra token included. Speed-up: seconds "
        "per token, plain / speculative, run in turns. [95% bootstrap interval over prompts]\nPredicted: speed-up by "
        "theory, from acceptance by position and the measured seconds of a draft token, a check, the rest of a round, "
        "a plain token and the prompt's pass.",
        style="dim",
    )
    if not all(m.settings.lossless for _, m in measured):
        console.print("lossy: typical acceptance gives tokens that do not have the target's own law")
    if len({category for _, m in measured for category in m.categories}) > 1:
        console.print(_by_category(measured))
    for name, m in measured:
        if m.ceiling < 1:
            at = f"at T = {m.settings.sampling.temperature:g}"
            console.print(f"{name}: its draft vocabulary holds {m.ceiling:.1%} of the target's mass {at}: α's ceiling")
        if m.settings.sampling.greedy:
            console.print(_identity(name, m))


def unique_names(folders: list[Path], kinds: list[str]) -> list[str]:
    """The kind of each drafter, with its run's folder where two exports are of one kind."""
    return [
        k if kinds.count(k) == 1 else f"{k} ({f.resolve().parent.name})" for k, f in zip(kinds, folders, strict=True)
    ]


def _overview(measured: Named) -> Table:
    table = Table(title="Acceptance in the engine")
    for column in ("drafter", "T", "k", "α expected", "α realised", "by position", "τ", "speed-up", "predicted"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for name, m in measured:
        s = m.summary()
        table.add_row(
            name if s["lossless"] else f"{name} (lossy)",
            f"{s['temperature']:g}",
            _drafted(m),
            f"{s['expected_acceptance_rate']:.3f}",
            _with_interval(s, "acceptance_rate"),
            " ".join("–" if isnan(x) else f"{x:.2f}" for x in s["conditional_acceptance"]),
            _with_interval(s, "block_efficiency"),
            _with_interval(s, "speedup"),
            f"{s['predicted_speedup']:.2f}",
        )
    return table


def _drafted(m: Measurement) -> str:
    """How many tokens are drafted, and the policy that says so where it is not a fixed number."""
    if m.settings.tree is not None:
        return f"{m.settings.num_nodes} in a tree"
    fixed = isinstance(m.settings.draft_length, Fixed | None)
    return f"{m.settings.depth}" if fixed else f"≤{m.settings.depth}, {m.settings.draft_length}"


def _by_category(measured: Named) -> Table:
    table = Table(title="By category: τ (speed-up)")
    table.add_column("drafter")
    table.add_column("T", justify="right")
    categories = sorted({category for _, m in measured for category in m.categories})
    for category in categories:
        table.add_column(category, justify="right")
    for name, m in measured:
        cells = []
        for category in categories:
            part = m.select([i for i, c in enumerate(m.categories) if c == category])
            cells.append(f"{part.stats.block_efficiency:.2f} ({part.speedup:.2f})" if part.categories else "–")
        table.add_row(name, f"{m.settings.sampling.temperature:g}", *cells)
    return table


def _identity(name: str, m: Measurement) -> str:
    count = len(m.categories)
    if m.identical == count:
        return f"{name}: greedy output identical to plain decoding on {count} of {count} prompts"
    gaps = ", ".join(f"{gap:.1e}" for gap in m.near_ties)
    return (
        f"{name}: greedy output identical to plain decoding on {m.identical} of {count} prompts; "
        f"where they part, the two largest logits differ by {gaps}"
    )


def _with_interval(summary: dict[str, Any], key: str) -> str:
    low, high = summary[f"{key}_interval"]
    return f"{summary[key]:.3f} [{low:.2f}, {high:.2f}]"


def draw(measured: Named, path: Path) -> None:
    """Acceptance by position, joint and conditional, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    titles = ("accepted / drafts (joint)", "accepted / tested (conditional)")
    for axis, title in zip(axes, titles, strict=True):
        for name, m in measured:
            joint = title.endswith("(joint)")
            values = m.stats.acceptance_per_position if joint else m.stats.conditional_acceptance
            label = f"{name}, T = {m.settings.sampling.temperature:g}"
            axis.plot(range(1, len(values) + 1), values, marker="o", label=label)
        axis.set(title=title, xlabel="position in the draft", ylim=(0, 1.02))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("acceptance")
    axes[1].legend()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    pyplot.close(figure)
