"""Theory as tables: what a profile of acceptance promises at each draft length, and predicted beside measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.measured_drafts import (
    Reached,
    acceptance_of,
    measured_cost,
    predicted_efficiency,
    predicted_speedup,
    reach_of,
)
from eval.theory import (
    Constant,
    Decay,
    Linear,
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
_PRINTED = ("drafter", "temperature", "block_efficiency", "speedup", "predicted_speedup", "conditional_acceptance",
            "counts")  # fmt: skip


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


def table_of(profile: Profile, cost: RoundCost, lengths: list[int], reach: tuple[float, ...] | None = None) -> Table:
    """τ, speed-up and sensitivities at each length, where drafts have a token at each position as often as `reach`."""
    table = Table(title=f"Expected of {profile}, at c = {cost.draft:g}")
    told = () if reach is None else ("drafted at n",)
    for column in ("n", "α at n", *told, "τ", "pass", "speed-up", "dτ/dα", "dS/dα", "dS/dc"):
        table.add_column(column, justify="right")
    drafted = profile if reach is None else Reached(profile, reach)
    for n in lengths:
        rates, s = drafted.rates(n), sensitivity(drafted, cost, n)
        numbers = (block_efficiency(rates), cost.verify(cost.drafted(n)), speedup(rates, cost))
        slopes = (s.block_efficiency_by_alpha, s.speedup_by_alpha, s.speedup_by_draft_cost)
        last = [f"{float(profile.rates(n)[-1]):.3f}" if n else ""]
        if reach is not None:
            last.append(f"{reach[n - 1]:.3f}" if n else "")
        table.add_row(str(n), *last, *(f"{float(x):.3f}" for x in (*numbers, *slopes)))
    return table


def read_report(path: Path) -> list[dict[str, Any]]:
    """The results of an acceptance.json. Raises UserError where it is none, or nothing was measured."""
    try:
        results: list[dict[str, Any]] = json.loads(path.read_text())["results"]
        for result in results:
            lacking = [key for key in _PRINTED if key not in result]
            if lacking or not result["counts"]["rounds"]:
                what = f"lacks {', '.join(lacking)}" if lacking else "is of no prompt at all"
                raise UserError(f"report={path}: a result {what}: measure again with eval/acceptance.py.")
            measured_cost(result)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"report={path}: cannot read an acceptance report from it ({error!r}).") from error
    return results


def print_result(result: dict[str, Any], console: Console) -> None:
    """Predicted beside measured of one drafter at one temperature, and what to expect of other lengths."""
    acceptance, reach, cost = acceptance_of(result), reach_of(result), measured_cost(result)
    most = len(acceptance.values)
    predicted, measured = result["predicted_speedup"], result["speedup"]
    console.print(
        f"{result['drafter']}, T = {result['temperature']:g}, {most} tokens: τ predicted "
        f"{predicted_efficiency(result, most):.3f}, measured {_number(result['block_efficiency'])}; speed-up predicted "
        f"{_number(predicted)}, measured {_number(measured)} ({_off(predicted, measured)})",
        style="bold",
    )
    if cost is None:
        console.print("a draft tree, or nothing timed: theory is for chains")
        return
    console.print(table_of(acceptance, cost, list(range(1, most + 1)), reach))
    best = best_length(Reached(acceptance, reach), cost, most)
    speed = predicted_speedup(result, best)
    console.print(f"best of those: {best} tokens, speed-up {_number(speed)} while decoding")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _off(predicted: float | None, measured: float | None) -> str:
    return f"{predicted / measured - 1:+.1%}" if predicted is not None and measured else "not timed"
