"""Was it worth it: the adapted drafter against the frozen one, on the traffic as it came and on held-out requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from data.streams import Stream
from engine.loop import generate
from engine.settings import DecodeSettings
from models.target import Target
from train.adaptation.pool import ADAPTED
from train.adaptation.timeline import Row, paired, requests_to_win
from train.adaptation.versus import RATES, Versus, counted, versus

_FIRST, _LAST = 200, 100  # requests of a new domain that the table tells of


def report(rows: Sequence[Row], stream: Stream, held_out: dict[str, dict[str, Versus]]) -> dict[str, Any]:
    """`compared` pairs of rates, and what was `told` of alarms, updates, rollbacks and their cost.

    Compared are the requests that the adapted drafter answered, and no expert of the pool.
    """
    compared = []
    domains = list(dict.fromkeys(row.domain for row in rows))
    for domain in domains:
        own = [row for row in rows if row.domain == domain and row.member == ADAPTED]
        parts = {f"{domain}, as served": own}
        if domain != stream.old and len(own) > _LAST:
            parts |= {f"{domain}, its first {_FIRST}": own[:_FIRST]} if len(own) > _FIRST else {}
            parts |= {f"{domain}, its last {_LAST}": own[-_LAST:]}
        compared += [{rate: versus(what, paired(part, rate)) for rate in RATES} for what, part in parts.items()]
    compared += held_out.values()
    return {"compared": compared, "told": _told(rows, stream, domains)}


def _told(rows: Sequence[Row], stream: Stream, domains: Sequence[str]) -> list[str]:
    count = max(1, len(rows))
    learning, guarding, answering = (sum(getattr(r, n) for r in rows) for n in ("update_s", "guard_s", "seconds"))
    lines = [
        f"{len(rows)} requests, {sum(r.updated for r in rows)} updates, {len({r.version for r in rows})} versions "
        f"served; seconds per request: learning {learning / count:.3f}, the guard {guarding / count:.3f}, answering "
        f"{answering / count:.3f}"
    ]
    for domain in domains[1:]:
        first = next(i for i, row in enumerate(rows) if row.domain == domain)
        won = requests_to_win([row for row in rows if row.domain == domain and row.member == ADAPTED])
        when = f"after {won} of its requests" if won else "never"
        lines.append(f"{domain} begins at request {first}; a gain of the last 50 outside its interval: {when}")
    alarms = [f"{r.request} ({r.alarms})" for r in rows if r.alarms]
    lines.append(f"drift alarms at {', '.join(alarms) or 'no request'}")
    lines.append(f"rollbacks at {', '.join(str(r.request) for r in rows if r.rolled_back) or 'no request'}")
    looks = [r for r in rows if r.guard_change == r.guard_change]
    if looks:
        worst = min(looks, key=lambda r: r.guard_change)
        lines.append(
            f"held-out {stream.old}: at the worst of the guard's {len(looks)} looks, request {worst.request}, "
            f"acceptance was {worst.guard_change:+.3f} [{worst.guard_low:+.3f}, {worst.guard_high:+.3f}] from its start"
        )
    members = {r.member for r in rows}
    if len(members) > 1:
        chosen = {m: sum(r.member == m for r in rows) for m in sorted(members)}
        lines.append("answered by " + ", ".join(f"{m} {n}" for m, n in chosen.items()))
    for name, whose in (("identical", "the frozen drafter's"), ("as_plain", "plain decoding's")):
        known = [value for r in rows if (value := getattr(r, name)) == value]
        if known:
            lines.append(f"answers identical to {whose}: {int(sum(known))} of {len(known)}")
    return lines


def compare_held_out(
    target: Target, stream: Stream, frozen: Any, adapted: Any, decode: DecodeSettings
) -> dict[str, dict[str, Versus]]:
    """Both drafters on the held-out requests of every domain."""
    found = {}
    for domain in dict.fromkeys(request.domain for request in stream.held_out):
        prompts = stream.of(domain)
        both = [generate(target, prompts, decode, drafter).stats for drafter in (frozen, adapted)]
        tables = {rate: np.concatenate([counted(stats, rate) for stats in both], axis=1) for rate in RATES}
        found[domain] = {rate: versus(f"{domain}, held out", table) for rate, table in tables.items()}
    return found


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """The report as JSON has it."""
    compared = [
        {rate: asdict(entry[rate]) | {"outside": entry[rate].outside} for rate in entry} for entry in found["compared"]
    ]
    return {**found, "compared": compared}
