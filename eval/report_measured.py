"""The sections of a report about what was measured: by position, category and draft length, in time, and in trees."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from eval.charts import Bar, Series, interval_chart, line_chart, stacked_chart, tree_chart
from eval.measured_drafts import is_chain, predicted_efficiency, predicted_speedup
from eval.page import charts, said, table
from eval.report_results import (
    Shown,
    categories,
    decoding_speedup,
    interval,
    number,
    policy_of,
    temperatures,
    totals,
    with_interval,
)
from eval.run_folder import Found, Tree, tree_of

PARTS = ("prompt's pass", "drafting", "checking", "other")


def by_position(shown: Sequence[Shown]) -> str:
    """Accepted over tested, and over all drafts, at each position."""
    keys = {"conditional_acceptance": "accepted / tested", "acceptance_per_position": "accepted / drafts"}
    drawn, rows = [], []
    for temperature in temperatures(shown):
        at = [s for s in shown if s.temperature == temperature]
        for key, what in keys.items():
            series = [Series(s.label, _points(s.numbers.get(key) or []), s.colour) for s in at]
            title = f"{what} at T = {temperature:g}"
            drawn.append(line_chart(title, series, x="position in the draft", y=what, top=1.0))
    most = max((len(s.numbers.get("conditional_acceptance") or []) for s in shown), default=0)
    for s in shown:
        for key, what in keys.items():
            rates = s.numbers.get(key) or []
            if rates:
                cells = [number(rate, 3) for rate in rates] + [""] * (most - len(rates))
                rows.append([s.drafter, f"{s.temperature:g}", s.draft, what, *cells])
    if not rows:
        return said("Left out: no result tells acceptance by position.", "lacking")
    how = (
        "Accepted / tested is the chance of a token once those before it were accepted; accepted / drafts counts every "
        "draft that had a token there. In a draft tree a position is a depth."
    )
    columns = ["drafter", "T", "draft", "rate", *map(str, range(1, most + 1))]
    return said(how, "soft") + charts(*drawn) + table("Acceptance by position", columns, rows, text=[2, 3])


def by_category(shown: Sequence[Shown]) -> str:
    """τ, speed-up and acceptance in each category of the prompts."""
    told = [(s, categories(s.numbers)) for s in shown]
    names = sorted({name for _, by_name in told for name in by_name})
    if not names:
        return said("Left out: no result tells of categories.", "lacking")
    drawn, rows = [], []
    for temperature in temperatures(shown) if len(names) > 1 else []:
        at = [(s, c) for s, c in told if s.temperature == temperature]
        for name in names:
            count = max((c[name].get("prompts", 0) for _, c in at if name in c), default=0)
            bars = [
                Bar(s.label, [c[name]["block_efficiency"]], interval(c[name], "block_efficiency"), s.colour)
                for s, c in at
                if name in c and c[name].get("block_efficiency") is not None
            ]
            title = f"{name} ({count} prompt{'s' if count != 1 else ''}), T = {temperature:g}"
            drawn.append(interval_chart(title, bars, x="τ, tokens per target pass"))
    for name in names:
        for s, by_name in told:
            if name in by_name:
                c = by_name[name]
                cells = (with_interval(c, "block_efficiency"), with_interval(c, "speedup"))
                rate, count = number(c.get("acceptance_rate"), 3), str(c.get("prompts", "–"))
                rows.append([name, s.drafter, f"{s.temperature:g}", s.draft, *cells, rate, count])
    columns = ("category", "drafter", "T", "draft", "τ [95%]", "speed-up [95%]", "α", "prompts")
    note = "" if len(names) > 1 else said(f"All prompts are of one category, {names[0]}.", "soft")
    return note + charts(*drawn) + table("By category", columns, rows, text=[1, 3])


def draft_lengths(shown: Sequence[Shown]) -> str:
    """τ and speed-up that theory expects of each draft length, beside what was measured at some."""
    chains = [s for s in shown if is_chain(s.numbers) and s.numbers.get("conditional_acceptance")]
    if not chains:
        return said("Left out: no result is of chains that tell acceptance by position.", "lacking")
    drawn: list[str] = []
    rows: list[list[str]] = []
    for temperature in temperatures(chains):
        expected: list[Series] = []
        speeds: list[Series] = []
        for own in dict.fromkeys(_drafting(s) for s in chains if s.temperature == temperature):
            of_it = [s for s in chains if (_drafting(s), s.temperature) == (own, temperature)]
            tau, speed, lines = _by_length(own[0], of_it)
            expected, speeds, rows = expected + tau, speeds + speed, rows + lines
        at, x = f"at T = {temperature:g}", "draft length, tokens"
        drawn.append(line_chart(f"τ by draft length {at}", expected, x=x, y="τ", from_zero=False))
        drawn.append(line_chart(f"Speed-up by draft length {at}", speeds, x=x, y="speed-up", reference=1.0))
    how = (
        "Lines: what theory (eval/theory.py) expects of each length, by the acceptance at every position and the cost "
        "of a round of the longest drafts that were measured; the checking pass is taken to grow evenly from a plain "
        "one. Where not all drafts are that long, a position counts as often as it was drafted. Marks: what was "
        "measured at that length. Speed-up here is without the prompts' own passes."
    )
    columns = ("drafter", "T", "draft length", "τ predicted", "τ measured", "speed-up predicted", "speed-up measured")
    return said(how, "soft") + charts(*drawn) + table("Prediction beside measurement", columns, rows)


def _drafting(shown: Shown) -> tuple[str, int]:
    """The drafter's name with that of its draft lengths' policy, for one policy's rates say nothing of another's, and
    its colour.
    """
    policy = policy_of(shown.numbers)
    return shown.drafter if policy == "fixed" else f"{shown.drafter}, {policy}", shown.colour


def _by_length(name: str, own: Sequence[Shown]) -> tuple[list[Series], list[Series], list[list[str]]]:
    """Of one drafter at one temperature: series of τ and of speed-up, predicted and measured, and the table's rows."""
    longest = max(own, key=lambda s: len(s.numbers["conditional_acceptance"]))
    colour, most = longest.colour, len(longest.numbers["conditional_acceptance"])
    by_length = {s.numbers["num_speculative_tokens"]: s for s in own}
    tau = {n: predicted_efficiency(longest.numbers, n) for n in range(most + 1)}
    speed = {n: predicted_speedup(longest.numbers, n) for n in range(1, most + 1)}
    found = {n: s.numbers["block_efficiency"] for n, s in by_length.items()}
    ends = [interval(s.numbers, "block_efficiency") for s in by_length.values() if s.numbers["block_efficiency"]]
    gained = {n: decoding_speedup(s.numbers) for n, s in by_length.items()}
    expected = [
        Series(f"{name}: predicted", _known(tau), colour, marks=False, listed=False),
        Series(name, _known(found), colour, ends, line=False),
    ]
    speeds = [
        Series(f"{name}: predicted", _known(speed), colour, marks=False, listed=False),
        Series(name, _known(gained), colour, line=False),
    ]
    rows = []
    for n in sorted({*speed, *by_length}):
        numbers = [number(values.get(n), 3) for values in (tau, found, speed, gained)]
        measured = n in by_length
        shown = [numbers[0], numbers[1] if measured else "", numbers[2], numbers[3] if measured else ""]
        rows.append([name, f"{longest.temperature:g}", str(n), *shown])
    return expected, speeds, rows


def _known(values: Mapping[int, float | None]) -> list[tuple[float, float]]:
    return [(float(n), value) for n, value in values.items() if value is not None]


def time_breakdown(shown: Sequence[Shown]) -> str:
    """Where a token's time went, beside plain decoding."""
    bars: dict[float, list[Bar]] = {}
    rows = []
    for s in shown:
        counts = totals(s.numbers)
        if counts is None:
            continue
        spent = [counts[k] for k in ("speculative_prefill_s", "draft_s", "verify_s")]
        parts = [*spent, max(counts["speculative_s"] - sum(spent), 0.0)]
        plain = [counts["plain_prefill_s"], 0.0, counts["plain_s"] - counts["plain_prefill_s"], 0.0]
        for how, seconds, tokens in (
            ("speculative", parts, counts["speculative_tokens"]),
            ("plain", plain, counts["plain_tokens"]),
        ):
            each = [1000 * second / tokens for second in seconds]
            label = s.label if how == "speculative" else f"plain, beside {s.label}"
            bars.setdefault(s.temperature, []).append(Bar(label, each))
            rows.append([s.label, f"{s.temperature:g}", how, *(f"{ms:.3f}" for ms in each), f"{sum(each):.3f}"])
    if not rows:
        return said("Left out: no result has counts of its time.", "lacking")
    how = (
        "Milliseconds per token of the answers. Checking is the target's pass over drafts and the verdict; in plain "
        "decoding, its passes over one token each with all that goes with it. Other is the rest of a round."
    )
    top = max(sum(bar.parts) for at in bars.values() for bar in at)
    drawn = [
        stacked_chart(f"Time of a token at T = {temperature:g}", PARTS, at, x="ms per token", top=top)
        for temperature, at in sorted(bars.items())
    ]
    columns = ("drafter", "T", "decoding", *PARTS, "sum")
    return said(how, "soft") + charts(*drawn) + table("Milliseconds per token", columns, rows, text=[2])


def tree_shapes(found: Found, shown: Sequence[Shown]) -> str:
    """Static trees as pictures with what they were built from; dynamic ones in a sentence."""
    parts: list[str] = []
    trees: list[tuple[str, Tree]] = [(run.name, tree) for run in found.runs for tree in run.trees]
    for s in shown:
        told = s.numbers.get("tree")
        if isinstance(told, dict) and "parents" in told:
            trees.append((s.drafter, tree_of(told, "measured", s.run.folder)))
        elif isinstance(told, dict):
            parts.append(
                said(
                    f"{s.drafter}, T = {s.temperature:g}: a dynamic tree, grown from the drafter's own probabilities "
                    f"in every round: {', '.join(f'{key} {value}' for key, value in told.items())}."
                )
            )
    seen: set[tuple[str, str]] = set()
    for name, tree in trees:
        if (shape := (name, json.dumps([tree.parents, tree.ranks]))) in seen:
            continue
        seen.add(shape)
        parts.append(f"{tree_chart(f'{name}: {tree.source}', tree.parents, tree.ranks)}{_built_from(name, tree)}")
    if not parts:
        return said("Left out: none of these runs has a draft tree.", "lacking")
    how = (
        "The grey root is the last committed token; a node's number is its rank among the drafter's guesses behind its "
        "parent, 1 the likeliest."
    )
    return said(how, "soft") + "".join(parts)


def _built_from(name: str, tree: Tree) -> str:
    """The table of acceptance by depth and rank, and what the tree promises."""
    parts = []
    if tree.expected_tokens is not None:
        promised = f"{tree.expected_tokens:.3f} tokens expected per target pass, the extra one included"
        parts.append(said(f"{len(tree.parents)} nodes; {promised}."))
    if tree.acceptance:
        columns = ["depth", *(f"rank {rank + 1}" for rank in range(len(tree.acceptance[0])))]
        rows = [[str(d), *(number(rate, 3) for rate in row)] for d, row in enumerate(tree.acceptance, 1)]
        parts.append(table(f"{name}: accepted, by depth and rank, behind the likeliest path", columns, rows))
    return "".join(parts)


def _points(rates: Sequence[float | None]) -> list[tuple[float, float]]:
    return [(float(i), rate) for i, rate in enumerate(rates, 1) if rate is not None]
