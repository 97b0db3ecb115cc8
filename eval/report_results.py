"""The results of several folders, each with a name of its own, and the numbers of a result as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.measured_drafts import is_chain
from eval.run_folder import Found, Run

_TIMES = ("plain_s", "plain_prefill_s", "plain_tokens", "speculative_s", "speculative_prefill_s", "speculative_tokens",
          "draft_s", "verify_s", "rounds", "emitted")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shown:
    """A result, and what it is called here: `drafter` is one name for all results of one export, and `label` tells the
    draft too, where not all results are of the same.
    """

    drafter: str
    label: str
    colour: int
    run: Run
    export: Path
    numbers: dict[str, Any]

    @property
    def temperature(self) -> float:
        return float(self.numbers["temperature"])

    @property
    def draft(self) -> str:
        """What is drafted, such as "chain of 4"."""
        return draft_of(self.numbers)


def policy_of(numbers: dict[str, Any]) -> str:
    """What says how long a result's drafts are."""
    length = numbers.get("draft_length")
    return str(length.get("policy", "fixed")) if isinstance(length, dict) else "fixed"


def draft_of(numbers: dict[str, Any]) -> str:
    """What a result's rounds draft: "chain of 4", "tree of 20", "≤8, entropy"."""
    count, policy = numbers["num_speculative_tokens"], policy_of(numbers)
    if numbers.get("tree") is not None:
        return f"tree of {numbers.get('num_nodes', '?')}"
    if not is_chain(numbers):
        return f"trees to depth {count}"
    return f"chain of {count}" if policy == "fixed" else f"≤{count}, {policy}"


def shown_results(found: Found) -> list[Shown]:
    """Every result with its name: the drafter's, with the run's where two exports have drafters of one name."""
    pairs = [(run, export, r) for run in found.runs for r, export in zip(run.results, run.exports, strict=True)]
    exports: dict[str, set[Path]] = {}
    for _, export, result in pairs:
        exports.setdefault(result["drafter"], set()).add(export.resolve())
    names = [
        result["drafter"] if len(exports[result["drafter"]]) == 1 else f"{result['drafter']} ({run.name})"
        for run, _, result in pairs
    ]
    colours = {name: index for index, name in enumerate(dict.fromkeys(names))}
    alike = len({draft_of(result) for _, _, result in pairs}) == 1
    return [
        Shown(name, name if alike else f"{name}, {draft_of(result)}", colours[name], run, export, result)
        for name, (run, export, result) in zip(names, pairs, strict=True)
    ]


def temperatures(shown: Sequence[Shown]) -> list[float]:
    """Those that were measured, ascending."""
    return sorted({s.temperature for s in shown})


def number(value: float | None, digits: int = 2) -> str:
    """With so many digits; a dash for what was not counted."""
    return "–" if value is None else f"{value:.{digits}f}"


def interval(numbers: dict[str, Any], key: str) -> tuple[float, float] | None:
    """The 95% interval of a number; None where none was told."""
    ends = numbers.get(f"{key}_interval")
    return None if ends is None or None in ends else (float(ends[0]), float(ends[1]))


def with_interval(numbers: dict[str, Any], key: str) -> str:
    """A number and its interval, as "2.71 [2.50, 2.90]"."""
    ends = interval(numbers, key)
    return number(numbers.get(key)) + (f" [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else "")


def totals(numbers: dict[str, Any]) -> dict[str, float] | None:
    """The counters that tell time, each summed over prompts; None where one is lacking or nothing was timed."""
    counts = numbers.get("counts") or {}
    if not all(counts.get(name) for name in _TIMES):
        return None
    found = {name: float(sum(counts[name])) for name in _TIMES}
    return found if found["plain_tokens"] and found["speculative_tokens"] and found["speculative_s"] else None


def categories(numbers: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """τ and α in each category, as told, or by the counts of a result that does not tell them."""
    if numbers.get("by_category"):
        told: dict[str, dict[str, Any]] = numbers["by_category"]
        return told
    counts = numbers.get("counts") or {}
    if not all(counts.get(name) for name in ("category", "emitted", "rounds", "accepted", "tested")):
        return {}
    found = {}
    for name in sorted(set(counts["category"])):
        chosen = [i for i, category in enumerate(counts["category"]) if category == name]
        emitted, rounds = (sum(counts[key][i] for i in chosen) for key in ("emitted", "rounds"))
        accepted, tested = (sum(sum(counts[key][i]) for i in chosen) for key in ("accepted", "tested"))
        found[name] = {
            "prompts": len(chosen),
            "block_efficiency": emitted / rounds if rounds else None,
            "acceptance_rate": accepted / tested if tested else None,
        }
    return found


def decoding_speedup(numbers: dict[str, Any]) -> float | None:
    """The measured speed-up without the prompts' own passes; None where the counts do not tell."""
    counts = totals(numbers)
    plain = 0.0 if counts is None else counts["plain_tokens"] - len(numbers["counts"]["plain_s"])
    if counts is None or plain <= 0 or not counts["emitted"]:
        return None
    spent = counts["speculative_s"] - counts["speculative_prefill_s"]
    return (counts["plain_s"] - counts["plain_prefill_s"]) / plain / (spent / counts["emitted"])
