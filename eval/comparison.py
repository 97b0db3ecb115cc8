"""Several drafters side by side: one table, one picture, one file of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from data.answers import context_ids
from data.prompts import Prompt
from engine.loop import generate
from engine.settings import DecodeSettings
from eval.adapted import report
from eval.provenance import provenance
from eval.readiness import readiness
from models.files import replacing, write_json, write_text
from models.target import Target
from models.types import max_depth

Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Compared:
    """A drafter's results (`Measurement.summary` and counts), and what `describe_drafter` and its training tell."""

    name: str
    results: list[dict[str, Any]]
    about: dict[str, Any]

    def result(self, temperature: float, tree: bool) -> dict[str, Any] | None:
        """The result of chains, or of trees, at a temperature; None where there is none."""
        found = (r for r in self.results if r["temperature"] == temperature and (r["tree"] is not None) == tree)
        return next(found, None)

    @property
    def temperatures(self) -> list[float]:
        """Those that were measured, ascending."""
        return sorted({r["temperature"] for r in self.results})

    @property
    def draft_ms_per_token(self) -> float | None:
        """Milliseconds that a drafted token took, in chains at the lowest temperature; None where none was drafted.

        All that drafting takes is counted: what the drafter reads of the prompt and of accepted tokens as well.
        """
        result = self.result(self.temperatures[0], False)
        drafted = 0 if result is None else sum(map(sum, result["counts"]["drafted"]))
        return None if result is None or not drafted else 1000 * sum(result["counts"]["draft_s"]) / drafted


def describe_drafter(
    target: Target, drafter: Any, prompts: Sequence[Prompt], settings: DecodeSettings
) -> dict[str, Any]:
    """Parameters, share of the target's bytes, and readiness on the target's greedy answers to `prompts`."""
    contexts = [context_ids(target, prompt) for prompt in prompts]
    answers = generate(target, contexts, settings).token_ids
    texts = [(context + answer, len(context)) for context, answer in zip(contexts, answers, strict=True)]
    deepest = min(settings.depth, max_depth(drafter) or settings.depth)
    found = readiness(target, drafter, texts, deepest)
    return {
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "memory_share": _held_bytes(drafter) / _held_bytes(target.model),
        "readiness": None if found is None else asdict(found),
    }


def _held_bytes(module: Any) -> int:
    """Of parameters and of buffers, where counts and int8 weights are; each tensor once."""
    held = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())


def latency_margin(result: dict[str, Any]) -> float | None:
    """τ_p / (γ·(1 − α)·τ_q): above 1, drafting is cheap enough for what is accepted.

    τ_p and τ_q are the seconds of a plain and of a drafted token, γ the drafted tokens of a round, α the acceptance
    rate. None where nothing was drafted, or every token accepted.
    """
    counts = result["counts"]
    drafted, rounds = sum(map(sum, counts["drafts"])), sum(counts["rounds"])
    if not drafted or result["acceptance_rate"] in (None, 1):
        return None
    plain_s = sum(counts["plain_s"]) / sum(counts["plain_tokens"])
    draft_s = sum(counts["draft_s"]) / drafted
    return float(plain_s / (drafted / rounds * (1 - result["acceptance_rate"]) * draft_s))


def table_rows(compared: list[Compared]) -> list[Row]:
    """The main table: a row per drafter, by τ of its chain at the lowest temperature, the best first."""
    rows = []
    for c in sorted(compared, key=lambda c: -_number(c.result(c.temperatures[0], False), "block_efficiency")):
        training = c.about["training"] or {}
        row = {
            "drafter": c.name,
            "parameters": f"{c.about['parameters']:,}" if c.about["parameters"] else "–",
            "trained tokens": _shown(training.get("tokens"), "{:,.0f}"),
            "training tokens/s": _shown(training.get("tokens_per_s"), "{:,.0f}"),
            "peak MB": _shown(training.get("peak_memory_bytes"), "{:,.0f}", 1e-6),
        }
        for temperature in c.temperatures:
            for tree in (False, True):
                what = "tree" if tree else "chain"
                row[f"τ {what}, T={temperature:g}"] = _with_interval(c.result(temperature, tree), "block_efficiency")
            row[f"speed-up chain, T={temperature:g}"] = _with_interval(c.result(temperature, False), "speedup")
        first = c.result(c.temperatures[0], False)
        row["ms per drafted token"] = _shown(c.draft_ms_per_token, "{:.3f}")
        positions = [] if first is None else first["conditional_acceptance"]
        row["α by position"] = " ".join(_shown(x, "{:.2f}") for x in positions)
        rows.append(row)
    return rows


def readiness_rows(compared: list[Compared]) -> list[Row]:
    """What the literature asks of a drafter before it is used."""
    rows = []
    for c in compared:
        ready, first = c.about["readiness"] or {}, c.result(c.temperatures[0], False)
        rows.append(
            {
                "drafter": c.name,
                "top-1 agreement, frequent": _shown(ready.get("top1_agreement"), "{:.1%}"),
                "top-10 coverage": _shown(ready.get("top10_coverage"), "{:.1%}"),
                "entropy ratio": _shown(ready.get("entropy_ratio"), "{:.2f}"),
                "KL, nats": _shown(ready.get("kl"), "{:.2f}"),
                "mass in draft vocabulary": _shown(ready.get("ceiling"), "{:.1%}"),
                "τ if q = p there": _shown(ready.get("ceiling_block_efficiency"), "{:.2f}"),
                "latency margin": _shown(None if first is None else latency_margin(first), "{:.1f}"),
                "memory share": f"{c.about['memory_share']:.1%}",
            }
        )
    return rows


def notes(compared: list[Compared]) -> list[str]:
    """What must be said: of targets trained with drafters, of unequal settings, and of who drafts no trees."""
    found = [(c.name, report({"adapted": c.about["adapted"]})) for c in compared if c.about.get("adapted")]
    told = [f"{name}: {said}" for name, said in found]
    told += [
        f"{c.name}: not on the same terms as the others, for it alone had {', '.join(c.about['unequal'])}."
        for c in compared
        if c.about.get("unequal")
    ]
    without = [c.name for c in compared if c.results and all(result["tree"] is None for result in c.results)]
    if without and any(result["tree"] is not None for c in compared for result in c.results):
        told.append(f"Chains alone, for they draft no trees: {', '.join(without)}.")
    return told


def write(compared: list[Compared], target: Target, folder: Path, options: dict[str, Any]) -> None:
    """Print both tables, and write them as compare.md, the numbers as compare.json and the picture as compare.png."""
    console = Console(width=200 if not Console().is_terminal else None)
    tables = {
        f"Drafters of {target.name!r}": table_rows(compared),
        "Readiness, at temperature 1 on the target's own answers": readiness_rows(compared),
    }
    for title, rows in tables.items():
        table = Table(title=title)
        for column in rows[0]:
            table.add_column(column, justify="left" if column == "drafter" else "right")
        for row in rows:
            table.add_row(*row.values())
        console.print(table)
    text = "\n".join(f"## {title}\n\n{markdown(rows)}" for title, rows in tables.items())
    for line in notes(compared):
        console.print(line)
        text += f"\n{line}\n"
    write_text(folder / "compare.md", text)
    numbers = [{**asdict(c), "draft_ms_per_token": c.draft_ms_per_token} for c in compared]
    write_json(folder / "compare.json", {"drafters": numbers, "config": options, "provenance": provenance()})
    draw(compared, folder / "compare.png")
    print(f"wrote compare.md, compare.json and compare.png in {folder}")


def markdown(rows: list[Row]) -> str:
    """Rows as a Markdown table."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(compared: list[Compared], path: Path) -> None:
    """τ with its intervals, α by position, and speed-up over parameters, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 0.35 * len(compared) + 4), layout="constrained")
    kinds = sorted({(r["temperature"], r["tree"] is not None) for c in compared for r in c.results})
    height = 0.8 / len(kinds)
    for index, (temperature, tree) in enumerate(kinds):
        found = [(place, c.result(temperature, tree)) for place, c in enumerate(compared)]
        shown = [(place, r) for place, r in found if r is not None]
        values = [r["block_efficiency"] for _, r in shown]
        ends = [r["block_efficiency_interval"] for _, r in shown]
        errors = [
            [v - low for v, (low, _) in zip(values, ends, strict=True)],
            [high - v for v, (_, high) in zip(values, ends, strict=True)],
        ]
        places = [place + (index - (len(kinds) - 1) / 2) * height for place, _ in shown]
        label = f"{'tree' if tree else 'chain'}, T = {temperature:g}"
        axes[0].barh(places, values, height, xerr=errors, label=label, error_kw={"lw": 0.8})
    axes[0].set(yticks=range(len(compared)), yticklabels=[c.name for c in compared], xlabel="τ, tokens per target pass")
    axes[0].invert_yaxis()
    axes[0].legend()
    lowest = f"chain, T = {min(t for t, _ in kinds):g}"
    for c in compared:
        result = c.result(c.temperatures[0], False)
        if result is None:
            continue
        rates = [float("nan") if x is None else x for x in result["conditional_acceptance"]]
        axes[1].plot(range(1, len(rates) + 1), rates, marker="o", label=c.name)
        axes[2].scatter(max(c.about["parameters"], 1), result["speedup"])
        axes[2].annotate(c.name, (max(c.about["parameters"], 1), result["speedup"]), fontsize=8)
    axes[1].set(xlabel="position in the draft", ylabel=f"accepted / tested, {lowest}", ylim=(0, 1.02))
    axes[1].legend(fontsize=8)
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[2].set(xlabel="parameters (at 1: none)", ylabel=f"speed-up over plain decoding, {lowest}", xscale="log")
    axes[2].axhline(1, color="grey", lw=0.8)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    pyplot.close(figure)


def _number(result: dict[str, Any] | None, key: str) -> float:
    return 0.0 if result is None or result[key] is None else float(result[key])


def _shown(value: float | None, form: str, scale: float = 1.0) -> str:
    return "–" if value is None else form.format(value * scale)


def _with_interval(result: dict[str, Any] | None, key: str) -> str:
    if result is None or result[key] is None:
        return "–"
    low, high = result[f"{key}_interval"]
    return f"{result[key]:.2f} [{low:.2f}, {high:.2f}]"
