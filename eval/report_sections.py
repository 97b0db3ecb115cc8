"""The sections of a report about runs: overview, comparison, training, text, provenance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from eval.charts import Bar, Series, interval_chart, line_chart, thinned
from eval.page import charts, folded, said, source, table
from eval.report_results import Shown, interval, number, temperatures, with_interval
from eval.run_folder import Comparison, Found, unlike
from eval.sample import Sample, coloured

_FIRST = ("val/block_efficiency", "val/acceptance_rate", "train/loss")  # the curves that are not folded


def overview(shown: Sequence[Shown], found: Found) -> str:
    """A row of every result: acceptance, τ, speed-up, and what was checked."""
    parts = [said(note, "lacking") for note in found.notes]
    waiting = [run.name for run in found.runs if not run.results]
    if waiting:
        parts.append(said(f"Not measured yet (no acceptance.json): {', '.join(waiting)}.", "lacking"))
    rows = []
    for s in shown:
        n = s.numbers
        rows.append(
            [
                s.drafter if n.get("lossless", True) else f"{s.drafter} (lossy)",
                f"{s.temperature:g}",
                s.draft,
                with_interval(n, "block_efficiency"),
                with_interval(n, "speedup"),
                number(n.get("predicted_speedup")),
                with_interval(n, "acceptance_rate"),
                number(n.get("expected_acceptance_rate"), 3),
                number(n.get("draft_utilization"), 3),
                _identical(n),
                str(n.get("prompts", "–")),
                f"{n['tokens']:,}" if "tokens" in n else "–",
            ]
        )
    columns = ("drafter", "T", "draft", "τ [95%]", "speed-up [95%]", "predicted", "α [95%]", "α expected",
               "utilization", "same as plain", "prompts", "tokens")  # fmt: skip
    parts.append(table("Acceptance in the engine", columns, rows, text=[2], most=40))
    if rows:
        parts.append(folded("What the columns mean", _glossary()))
    if any(not s.numbers.get("lossless", True) for s in shown):
        parts.append(said("lossy: typical acceptance gives tokens that do not have the target's own law."))
    ceilings = [
        f"{s.drafter}: its draft vocabulary holds {s.numbers['ceiling']:.1%} of the target's mass at "
        f"T = {s.temperature:g}: no α can be above it."
        for s in shown
        if (s.numbers.get("ceiling") or 1) < 1
    ]
    parts += [said(line) for line in dict.fromkeys(ceilings)]
    adapted = [(run, told) for run in found.runs for told in run.adapted]
    if adapted:
        from eval.adapted import report

        for run, told in adapted:
            where = f" ({run.name})" if len(found.runs) > 1 else ""
            parts.append(said(f"{told.get('drafter', '')}{where}: {report({'adapted': told})}"))
    return "".join(parts)


def comparison(shown: Sequence[Shown], found: Found) -> str:
    """Several drafters or runs side by side; nothing where there is one."""
    drafters = list(dict.fromkeys(s.drafter for s in shown))
    if len({s.label for s in shown}) < 2 and len(found.runs) < 2:
        return ""
    drawn = []
    for key, what, level in (("block_efficiency", "τ, tokens per target pass", None), ("speedup", "speed-up", 1.0)):
        for temperature in temperatures(shown):
            bars = [
                Bar(s.label, [s.numbers[key]], interval(s.numbers, key), s.colour)
                for s in shown
                if s.temperature == temperature and s.numbers.get(key) is not None
            ]
            bars.sort(key=lambda b: -b.parts[0])
            drawn.append(interval_chart(f"{what} at T = {temperature:g}", bars, x=what, reference=level))
    parts = [charts(*drawn)]
    if tables := [_compared(c, len(found.comparisons) > 1) for c in found.comparisons]:
        parts += tables
    elif len(drafters) > 1:
        parts.append(said("No compare.json is among these folders: sizes and readiness are not told.", "lacking"))
    differing = unlike(found.runs)
    if 0 < len(differing) <= 30:
        columns = ["setting", *(run.name for run in found.runs)]
        rows_of = [[name, *values] for name, values in differing]
        parts.append(folded("Settings in which the runs differ", table("Settings that differ", columns, rows_of)))
    elif differing:
        parts.append(said(f"The runs differ in {len(differing)} settings: see their configurations below.", "soft"))
    return "".join(parts)


def _compared(comparison: Comparison, several: bool) -> str:
    """The tables of train/compare.py; nothing where not all of its drafters are measured."""
    from eval.comparison import Compared, notes, readiness_rows, table_rows

    if not all(c["results"] for c in comparison.drafters):
        return ""
    compared = [Compared(c["name"], c["results"], c["about"]) for c in comparison.drafters]
    where = f"{comparison.name}: " if several else ""
    parts = []
    for title, rows in (
        ("Drafters under one budget (train/compare.py)", table_rows(compared)),
        ("Readiness, at temperature 1 on the target's own answers", readiness_rows(compared)),
    ):
        columns = list(dict.fromkeys(column for row in rows for column in row))
        parts.append(table(where + title, columns, [[row.get(c, "–") for c in columns] for row in rows]))
    return "".join([*parts, *(said(where + note) for note in notes(compared))])


def training_curves(found: Found, shown: Sequence[Shown]) -> str:
    """Metrics over steps: the runs in one picture each, and the rest of the metrics folded away."""
    trained = [run for run in found.runs if run.metrics]
    colours = {s.run.name: s.colour for s in reversed(shown)}
    for run in trained:  # one that is not measured yet has none
        colours.setdefault(run.name, max(colours.values(), default=-1) + 1)
    parts = []
    if lacking := [run.name for run in found.runs if not run.metrics]:
        why = "no metrics/…/metrics.csv: not trained by steps, or by another logger"
        parts.append(said(f"No curves of {', '.join(lacking)} ({why}).", "lacking"))
    rows = [
        [run.name, *(_count(run.training.get(k)) for k in ("steps", "seconds", "tokens", "tokens_per_s")),
         number((run.training.get("peak_memory_bytes") or 0) / 1e6, 0)]
        for run in found.runs if run.training
    ]  # fmt: skip
    parts.append(table("Training", ("run", "steps", "seconds", "tokens", "tokens/s", "peak MB"), rows))
    drawn = []
    for name in _FIRST:
        series = [
            Series(run.name, thinned(run.metrics.get(name, [])), colours[run.name], marks=name.startswith("val/"))
            for run in trained
        ]
        drawn.append(line_chart(name, series, x="step", y=name.partition("/")[2], from_zero=name != "train/loss"))
    parts.append(charts(*drawn))
    for run in trained:
        groups: dict[str, list[str]] = {}
        for name in run.metrics:
            base, _, last = name.rpartition("_")
            groups.setdefault(base if last.isdigit() and base in run.metrics else name, []).append(name)
        figures = [
            line_chart(
                base,
                [Series(name, thinned(run.metrics[name]), i, marks=False) for i, name in enumerate(names)],
                x="step",
                y=base.rpartition("/")[2],
                from_zero="lr" not in base,
            )
            for base, names in groups.items()
            if base not in _FIRST or len(names) > 1
        ]
        parts.append(folded(f"All metrics of {run.name} ({len(run.metrics)})", charts(*figures)))
    return "".join(parts)


def text_samples(samples: Sequence[Sample], lacking: Sequence[str], asked: bool) -> str:
    """What each export wrote, its accepted tokens marked."""
    if not asked:
        return said("Left out: sample=true lets the exports answer a prompt in the engine.", "lacking")
    parts = [said(line, "lacking") for line in lacking]
    if samples:
        how = (
            "Marked: tokens that the drafter proposed and the target accepted, in two colours by turns of rounds. "
            "Unmarked behind the prompt: the target's own tokens."
        )
        parts.append(said(how, "soft"))
    for sample in samples:
        drafted = sum(piece.drafted for piece in sample.pieces)
        count = f"{drafted} of {len(sample.pieces)} tokens proposed by {sample.proposer}"
        heading = f"{sample.proposer} ({sample.export})"
        parts.append(f"<h3>{escape(heading)}</h3>{coloured(sample)}{said(f'{count} · {sample.summary}')}")
    return "".join(parts)


def provenance(found: Found) -> str:
    """How to make the same again: commands, versions, machine, data, and the whole configuration."""
    origins: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {}
    for c in found.comparisons:
        if c.provenance:
            name = "train/compare.py" if len(found.comparisons) == 1 else f"train/compare.py, {c.name}"
            origins[name] = (c.provenance, None)
    origins |= {run.name: (run.provenance, run.data) for run in found.runs}
    told = {name: _flat_provenance(*both) for name, both in origins.items() if both[0] or both[1]}
    parts = [
        said(f"{name} does not tell its provenance (neither acceptance.json nor an export is there).", "lacking")
        for name, (provenance, _) in origins.items()
        if not provenance
    ]
    for name, values in told.items():
        if command := values.pop("command", None):
            parts.append(f"<h3>{escape(name)}</h3><p><code>{escape(command)}</code></p>")
    keys = list(dict.fromkeys(key for values in told.values() for key in values))
    same = [key for key in keys if len({values.get(key) for values in told.values()}) == 1]
    if same:
        first = next(iter(told.values()))
        whose = "all of them" if len(told) > 1 else next(iter(told))
        parts.append(table("Made with", ("", whose), [[key, first[key]] for key in same], text=[1], most=40))
    if rows := [[key, *(values.get(key, "–") for values in told.values())] for key in keys if key not in same]:
        parts.append(table("Not the same in all", ("", *told), rows, text=range(1, len(told) + 1), most=40))
    for run in found.runs:
        whole = {key: value for key, value in (("config", run.config), ("data", run.data)) if value}
        written = source(json.dumps(whole, indent=1, ensure_ascii=False)) if whole else ""
        parts.append(folded(f"Configuration of {run.name}", written))
    return "".join(parts)


def _flat_provenance(provenance: dict[str, Any] | None, data: dict[str, Any] | None) -> dict[str, str]:
    """Provenance and the data's fingerprints as text by name; a run's whole configuration is told elsewhere."""
    found = dict(provenance or {})
    versions = found.pop("versions", None) or {}
    found |= {f"version of {name}": version for name, version in versions.items()}
    found |= {f"data: {name}": value for name, value in (data or {}).items()}
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in found.items()
        if not isinstance(value, dict)
    }


def _identical(numbers: dict[str, Any]) -> str:
    """On how many prompts the greedy answer was that of plain decoding."""
    if "identical_to_plain" not in numbers:
        return "–"
    return f"{numbers['identical_to_plain']} of {numbers.get('prompts', '?')}"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _glossary() -> str:
    """The terms of the overview, each in a sentence."""
    terms = {
        "T": "temperature; 0 is greedy.",
        "draft": "what is proposed in a round: a chain of so many tokens, or a tree of so many nodes.",
        "τ": "block efficiency: tokens per target pass, the extra token included; 1 is plain decoding.",
        "speed-up": "seconds per token, plain over speculative, run in turns on the same prompts.",
        "predicted": "the speed-up by theory, from acceptance by position and what each part of a round took.",
        "α": "acceptance rate: accepted over tested tokens. Expected: the mean of Σ min(p, q) there.",
        "utilization": "accepted over drafted tokens, those that were never tested counted too.",
        "same as plain": "prompts whose greedy answer is plain decoding's, token for token.",
        "[95%]": "bootstrap interval over prompts.",
    }
    return table("Terms", ("", "meaning"), [[term, meaning] for term, meaning in terms.items()], text=[1])
