"""Theory as tables: what a profile of acceptance promises at each draft length, and predicted beside measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.theory import (
    Constant,
    Decay,
    Linear,
    Measured,
    Profile,
    Roofline,
    RoundCost,
    Stepped,
    best_length,
    best_length_closed,
    block_efficiency,
    sensitivity,
    speedup,
)
from models.errors import UserError

_LONGEST = 64  # drafts are looked at up to that length for the best one


def job(options: dict[str, Any]) -> None:
    """Print the table of a profile, or of each result in a report."""
    console = Console(width=132 if not Console().is_terminal else None)
    if options["report"] is not None:
        for result in read_report(Path(options["report"])):
            print_result(result, console)
        return
    profile, cost, lengths = profile_of(options), cost_of(options), lengths_of(options["lengths"])
    console.print(table_of(profile, cost, lengths))
    best = best_length(profile, cost, _LONGEST)
    line = f"best: {best} tokens, speed-up {speedup(profile.rates(best), cost):.3f}"
    if isinstance(profile, Constant) and options["roofline"] is None and cost.draft > 0:
        growth = (cost.of(1) - cost.of(0)) / cost.of(0)
        line += f"; between whole lengths {best_length_closed(profile.alpha, growth):.2f}"
    console.print(line)


def profile_of(options: dict[str, Any]) -> Profile:
    """The profile that a configuration names. Raises UserError for an unknown one."""
    name, alpha = options["profile"], options["alpha"]
    if name == "constant":
        return Constant(alpha)
    if name == "exponential":
        return Decay(alpha, options["beta"])
    if name == "linear":
        return Linear(alpha, options["fall"])
    if name == "stepped":
        try:
            return Stepped(tuple((int(start), float(rate)) for start, rate in options["steps"]))
        except (TypeError, ValueError) as error:
            raise UserError(f"steps is {options['steps']!r}: write [[1, 0.9], [4, 0.6]].") from error
    raise UserError(f"profile is {name!r}: choose constant, exponential, linear or stepped.")


def cost_of(options: dict[str, Any]) -> RoundCost:
    """The cost of a round: the target's pass grows by a fixed part for each token, or as a roofline says."""
    growth, machine, requests = options["verify_per_token"], options["roofline"], options["requests"]
    if not growth >= 0 or not isinstance(requests, int) or requests < 1:
        raise UserError(f"verify_per_token is {growth} and requests {requests}: 0 or more, and at least 1.")
    if machine is None:
        return RoundCost(options["c"], lambda n: 1 + growth * n, options["other"])
    try:
        roofline = Roofline(**machine)
    except TypeError as error:
        raise UserError(f"roofline is {machine!r}: {error}.") from error
    return RoundCost(options["c"], lambda n: roofline.relative(n, requests), options["other"])


def lengths_of(given: Any) -> list[int]:
    """Draft lengths. Raises UserError where they are no whole numbers from 0 on."""
    lengths = given if isinstance(given, list) else [given]
    if not lengths or not all(type(n) is int and n >= 0 for n in lengths):
        raise UserError(f"lengths is {given!r}: give whole numbers, as [1, 2, 4, 8].")
    return lengths


def table_of(profile: Profile, cost: RoundCost, lengths: list[int]) -> Table:
    """τ, speed-up and sensitivities at each length."""
    table = Table(title=f"Expected of {profile}, at c = {cost.draft:g}")
    for column in ("n", "α at n", "τ", "pass", "speed-up", "dτ/dα", "dS/dα", "dS/dc"):
        table.add_column(column, justify="right")
    for n in lengths:
        rates, s = profile.rates(n), sensitivity(profile, cost, n)
        numbers = (block_efficiency(rates), cost.verify(n), speedup(rates, cost))
        slopes = (s.block_efficiency_by_alpha, s.speedup_by_alpha, s.speedup_by_draft_cost)
        last = f"{float(rates[-1]):.3f}" if rates else ""
        table.add_row(str(n), last, *(f"{float(x):.3f}" for x in (*numbers, *slopes)))
    return table


def read_report(path: Path) -> list[dict[str, Any]]:
    """The results of an acceptance.json. Raises UserError where it is none."""
    try:
        results: list[dict[str, Any]] = json.loads(path.read_text())["results"]
        for result in results:
            measured_cost(result)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"report={path}: cannot read an acceptance report from it ({error!r}).") from error
    return results


def measured_cost(result: dict[str, Any]) -> RoundCost | None:
    """What a result's rounds cost, in units of a plain token's time; None where nothing was drafted or timed.

    The target's pass is known at length 0, that of plain decoding, and at the mean length of the drafts; between them
    and beyond it is taken as a straight line. A prompt of several turns counts as one answer.
    """
    counts = {name: sum(values) for name, values in result["counts"].items() if isinstance(values[0], int | float)}
    drafted = sum(map(sum, result["counts"]["drafted"]))
    rounds, plain_rounds = counts["rounds"], counts["plain_tokens"] - len(result["counts"]["plain_s"])
    if not drafted or plain_rounds <= 0 or result["num_nodes"] != result["num_speculative_tokens"]:
        return None
    plain_s = (counts["plain_s"] - counts["plain_prefill_s"]) / plain_rounds
    check = counts["verify_s"] / rounds / plain_s
    length = drafted / rounds
    spent = counts["speculative_prefill_s"] + counts["draft_s"] + counts["verify_s"]
    other = max((counts["speculative_s"] - spent) / rounds / plain_s, 0.0)
    return RoundCost(
        counts["draft_s"] / drafted / plain_s,
        lambda n: max(1 - other + (check - 1 + other) * n / length, 0.0),  # a plain round has the rest in it, too
        other,
    )


def print_result(result: dict[str, Any], console: Console) -> None:
    """Predicted beside measured of one drafter at one temperature, and what to expect of other lengths."""
    profile, cost = Measured(tuple(result["conditional_acceptance"])), measured_cost(result)
    most = len(profile.values)
    tau = block_efficiency(profile.rates(most))
    console.print(
        f"{result['drafter']}, T = {result['temperature']:g}, {most} tokens: τ predicted {tau:.3f}, measured "
        f"{result['block_efficiency']:.3f}; speed-up predicted {result['predicted_speedup']:.3f}, measured "
        f"{result['speedup']:.3f} ({_off(result['predicted_speedup'], result['speedup'])})",
        style="bold",
    )
    if cost is None:
        console.print("a draft tree, or nothing timed: theory is for chains")
        return
    console.print(table_of(profile, cost, list(range(1, most + 1))))
    best = best_length(profile, cost, most)
    console.print(f"best of those: {best} tokens, speed-up {speedup(profile.rates(best), cost):.3f} while decoding")


def _off(predicted: float, measured: float) -> str:
    return "not timed" if math.isnan(predicted) or not measured else f"{predicted / measured - 1:+.1%}"
