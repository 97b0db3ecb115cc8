"""The results of several folders, each with a name of its own, and the numbers of a result as text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.measured_drafts import is_chain
from eval.run_folder import Found, Run

_TIMES = ("plain_s", "plain_prefill_s", "plain_tokens", "speculative_s", "speculative_prefill_s", "speculative_tokens",
          "draft_s", "verify_s", "rounds", "emitted")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shown:
    """A result, and what it is called here: `drafter` is one name for all results of one export on the same prompts,
    which `colour` belongs to alone, and `label` tells the draft too, where not all results are of the same.
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
    """Every result with its name: the drafter's, with the run's where the drafter has several.

    Runs are one where they measured one export on the same prompts with different drafts.
    """
    pairs = [(run, export, r) for run in found.runs for r, export in zip(run.results, run.exports, strict=True)]
    same = [(r["drafter"], export.resolve(), _measured_on(run)) for run, export, r in pairs]
    twice = _measured_twice(pairs, same)
    keys = [(*key, run.name if key in twice else None) for key, (run, _, _) in zip(same, pairs, strict=True)]
    runs: dict[Hashable, dict[str, None]] = {}
    for key, (run, _, _) in zip(keys, pairs, strict=True):
        runs.setdefault(key, {})[run.name] = None
    names = _unlike({key: (key[0], f"{key[0]} ({', '.join(runs[key])})") for key in dict.fromkeys(keys)})
    colours = {key: index for index, key in enumerate(names)}
    alike = len({draft_of(result) for _, _, result in pairs}) == 1
    return [
        Shown(
            names[key],
            names[key] if alike else f"{names[key]}, {draft_of(result)}",
            colours[key],
            run,
            export,
            result,
        )
        for key, (run, export, result) in zip(keys, pairs, strict=True)
    ]


def _measured_on(run: Run) -> str:
    """What tells a run's prompts from those of others: eval/acceptance.py's settings, or the run itself."""
    config = run.config or {}
    if not isinstance(config.get("export"), str | list):
        return run.name
    return json.dumps([config.get(key) for key in ("prompts", "num_prompts", "seed")])


def _measured_twice(pairs: Sequence[tuple[Run, Path, dict[str, Any]]], keys: Sequence[Hashable]) -> set[Hashable]:
    """The keys under which two runs have a result of the same draft at the same temperature."""
    seen: dict[tuple[Hashable, float, str], str] = {}
    found = set()
    for key, (run, _, result) in zip(keys, pairs, strict=True):
        if seen.setdefault((key, result["temperature"], draft_of(result)), run.name) != run.name:
            found.add(key)
    return found


def _unlike(names: dict[Hashable, tuple[str, str]]) -> dict[Hashable, str]:
    """The short one of each key's two names, or the long one where another key has the same short one."""
    count = Counter(short for short, _ in names.values())
    chosen = {key: short if count[short] == 1 else long for key, (short, long) in names.items()}
    again = Counter(chosen.values())
    return {key: name if again[name] == 1 else names[key][1] for key, name in chosen.items()}


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
