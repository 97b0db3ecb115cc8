"""What two engines counted, side by side."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = ("drafter", "format", "engine", "T", "k", "same answers", "drafts", "drafted", "accepted", "by position", "")


def print_parity(results: list[dict[str, Any]], console: Console | None = None) -> None:
    """One table for all cases, ours first; below it what failed and why, what was left out, and what is not shown."""
    console = console or Console(width=168 if not Console().is_terminal else None)
    table = Table(title="Counts of two engines: ours, and the other where it differs")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:3] else "right")
    for result in results:
        table.add_row(*row(result))
    console.print(table)
    for result in results:
        for tie in result.get("near_ties", []):
            console.print(
                f"{result['name']}: the answers to prompt {tie['prompt']} part at token {tie['position']}, where the "
                f"two logits are {tie['gap']:.1e} apart: a near-tie, so that this prompt is left out"
            )
        if result.get("note") is not None:
            console.print(f"{result['name']}: {result['note']}")
        if result["cause"] is not None:
            console.print(f"{result['name']}: {result['cause']}", style="bold red")


def row(result: dict[str, Any]) -> list[str]:
    """A case as the cells of `COLUMNS`. Sampled counts are compared by their law, so both are always shown.

    A case that failed while it ran has no counts.
    """
    cells = [result["drafter"], result["format"] or "–", result["engine"], f"{result['temperature']:g}"]
    if "failed" in result:
        return [*cells, *["–"] * (len(COLUMNS) - len(cells) - 1), f"FAILED: {_shortened(result['failed'])}"]
    ours, theirs = result["ours"], result["theirs"]
    cells.append(str(result["num_speculative_tokens"]))
    answers = f"{result['same_answers']} of {result['prompts']}" if "same_answers" in result else "–"
    cells.append(answers)
    cells += [_pair(ours[key], theirs[key]) for key in ("drafts", "drafted", "accepted")]
    cells.append(_pair(*(" ".join(map(str, side["accepted_per_position"])) for side in (ours, theirs))))
    verdict = "equal" if result["passed"] else "DIFFERS"
    if "p_value" in result:
        verdict = f"{'one law' if result['passed'] else 'TWO LAWS'}, p = {result['p_value']:.2g}"
    return [*cells, verdict]


def _pair(ours: Any, theirs: Any) -> str:
    return str(ours) if ours == theirs else f"{ours} or {theirs}"


def _shortened(reason: str, most: int = 40) -> str:
    return reason if len(reason) <= most else f"{reason[: most - 1]}…"
