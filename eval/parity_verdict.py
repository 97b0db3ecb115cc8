"""What the counts of two engines on the same prompts show, and the case whose counts never came."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from eval.diagnosis import SILENT, diagnose, two_samples
from eval.engines import Task
from eval.rounds import Counts, compare, logit_gap, total
from models.errors import UserError

MORE = "so train the drafter longer, or take prompts like those that it learnt from (prompts=FILE)"
NOTHING = f"nothing was accepted in either: that they are equal shows nothing, {MORE}"


def at_zero(task: Task, ours: list[Counts], theirs: list[Counts], options: dict[str, Any]) -> dict[str, Any]:
    """Whether all counts are equal and, where not, the likely cause."""

    def gap(prompt: int, position: int, token: int, other: int) -> float:
        before = ours[prompt].token_ids[:position]
        return logit_gap(task.target, task.contexts[prompt], before, token, other)

    compared = compare(ours, theirs, gap, options["near_tie"])
    mine, others = compared.totals()
    empty = compared.equal and not mine["accepted"]
    reached = mine["accepted_per_position"]
    unseen = reached.index(0) if compared.equal and not empty and 0 in reached else None
    same = [a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=True)]
    return {
        "passed": compared.equal and not empty,
        "prompts": len(ours),
        "same_answers": sum(same),
        "ours": mine,
        "theirs": others,
        "near_ties": [asdict(tie) for tie in compared.near_ties],
        "parted": [asdict(tie) | ({} if isfinite(tie.gap) else {"gap": None}) for tie in compared.parted],
        "unequal": compared.unequal,
        "cause": NOTHING if empty else diagnose(compared),
        "note": None
        if unseen is None
        else f"nothing was accepted from position {unseen} on: of those nothing is shown",
        "counts": {"ours": [asdict(c) for c in ours], "theirs": [asdict(c) for c in theirs]},
    }


def sampled(task: Task, ours: list[Counts], theirs: list[Counts], options: dict[str, Any]) -> dict[str, Any]:
    """Whether accepted counts may have one law."""
    statistic, p_value = two_samples(ours, theirs, options["seed"])
    silent = [side for side, counts in (("ours", ours), ("theirs", theirs)) if total(counts)["drafts"] == 0]
    empty = not any(sum(counts.accepted) for counts in (*ours, *theirs))
    passed = not silent and not empty and p_value >= options["significance"]
    cause = f"accepted counts have two laws (p = {p_value:.2g})"
    if silent:
        cause = f"ours drafted nothing, {MORE}" if "ours" in silent else SILENT
    elif empty:
        cause = NOTHING
    return {
        "passed": passed,
        "prompts": len(ours),
        "ours": total(ours),
        "theirs": total(theirs),
        "histograms": [[sum(column) for column in zip(*(c.histogram for c in s), strict=True)] for s in (ours, theirs)],
        "chi_square": statistic,
        "p_value": p_value,
        "cause": None if passed else cause,
    }


def broken(error: Exception) -> dict[str, Any]:
    """A case that failed while it ran, in one sentence."""
    said = (str(error).strip() or "nothing was said").splitlines()[0]
    why = said if isinstance(error, UserError) else f"{type(error).__name__}: {said}"
    return {"passed": False, "failed": why, "cause": f"could not be compared. {why}"}
