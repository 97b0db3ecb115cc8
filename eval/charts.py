"""Charts as inline SVG, small enough for a phone, coloured by the page's style so that they follow its dark mode.

A chart is a string of HTML: a figure with the picture, which says in words what it shows, and its legend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from unicodedata import east_asian_width

COLOURS = 8  # the style's classes k0 … k7
_WIDTH, _HEIGHT = 360, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 12, 38
_LABEL = 12  # the size of a label's letters, as in the page's style
_SHARES = ((" !'(),-./:;IJ[\\]fijlrt|", 0.42), ("#&+<=>^w~", 0.85), ("%@MWm…", 1.0))
_DASHES = ("", "6 3", "2 3")  # where colours come round again


@dataclass(frozen=True, slots=True)
class Series:
    """Points (x, y) of one thing: joined by a line or marks alone; `intervals` (low, high) belong to the points."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    intervals: Sequence[tuple[float, float] | None] = field(default_factory=list)
    line: bool = True
    marks: bool = True
    listed: bool = True  # in the legend


@dataclass(frozen=True, slots=True)
class Bar:
    """A labelled row: a value with its interval, or parts that add up."""

    label: str
    parts: Sequence[float]
    interval: tuple[float, float] | None = None
    colour: int = 0


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Round numbers within [low, high], about `count` of them; one that stands for all where both ends are equal."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    step = max(1.0, round(step)) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Short, for an axis: 0.25, 12, 3,000, 1e-05."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.3g}"
    return f"{value:,.3f}".rstrip("0").rstrip(".") if "." in f"{value:,.3f}" else f"{value:,}"


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    top: float | None = None,
    from_zero: bool = True,
    whole_x: bool = True,
    reference: float | None = None,
) -> str:
    """Lines and marks over one pair of axes. `top` is the vertical axis' end, `reference` a dashed level."""
    shown = [s for s in series if s.points]
    xs = [point[0] for s in shown for point in s.points]
    ys = [point[1] for s in shown for point in s.points]
    ys += [end for s in shown for pair in s.intervals if pair is not None for end in pair]
    ys += [] if reference is None else [reference]
    if not xs:
        return ""
    low, high = min(ys), max(ys)
    low = min(low, 0.0) if from_zero else low - 0.05 * (high - low)
    high = top if top is not None else high + 0.05 * (high - low or abs(high) or 1.0)
    left, right = min(xs), max(xs)
    pad = (right - left) * 0.04 or 0.5
    across = _scale(left - pad, right + pad, _LEFT, _WIDTH - _RIGHT)
    up = _scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    parts = [_axes(ticks(left, right, 6, whole_x), ticks(low, high), across, up, x, y)]
    if reference is not None:
        parts.append(_path([(_LEFT, up(reference)), (_WIDTH - _RIGHT, up(reference))], "reference"))
    for s in shown:
        parts.append(_drawn(s, across, up, x))
    names = "; ".join(f"{s.name}: {_told(s)}" for s in shown)
    legend = "".join(f"<li>{_swatch(s)}{escape(s.name)}</li>" for s in shown if s.listed)
    return _figure(title, "".join(parts), f"{title}. {y} over {x}. {names}", legend, _HEIGHT)


def interval_chart(title: str, bars: Sequence[Bar], *, x: str, reference: float | None = None) -> str:
    """A dot with its interval in each row, under its label."""
    if not bars:
        return ""
    ends = [end for b in bars for end in (*(b.interval or ()), b.parts[0])] + ([] if reference is None else [reference])
    low, high = min(ends), max(ends)
    pad = (high - low) * 0.06 or 0.5
    across = _scale(low - pad, high + pad, 10, _WIDTH - 14)
    height, parts = 30 * len(bars) + 40, []
    for tick in ticks(low - pad, high + pad):
        parts.append(_path([(across(tick), 4), (across(tick), height - 34)], "grid"))
        parts.append(_text(across(tick), height - 22, number(tick), "middle"))
    if reference is not None:
        parts.append(_path([(across(reference), 4), (across(reference), height - 34)], "reference"))
    for row, b in enumerate(bars):
        y, value = 30 * row + 26, across(b.parts[0])
        parts.append(_labelled(30 * row + 15, b.label, f"{b.parts[0]:.2f}"))
        if b.interval is not None:
            low_end, high_end = (across(end) for end in b.interval)
            parts.append(_path([(low_end, y), (high_end, y)], f"line k{b.colour % COLOURS}"))
        parts.append(f'<circle class="mark k{b.colour % COLOURS}" cx="{value:.1f}" cy="{y}" r="4"/>')
    parts.append(_text(_WIDTH / 2, height - 6, x, "middle"))
    told = "; ".join(f"{b.label}: {b.parts[0]:.2f}" for b in bars)
    return _figure(title, "".join(parts), f"{title}, {x}. {told}", "", height)


def stacked_chart(title: str, names: Sequence[str], bars: Sequence[Bar], *, x: str, top: float) -> str:
    """Parts that add up, one bar under each label, in a colour for each name. The axis ends at `top`."""
    if not bars:
        return ""
    across = _scale(0, top, 10, _WIDTH - 14)
    height, pieces = 36 * len(bars) + 40, []
    for tick in ticks(0, top):
        pieces.append(_path([(across(tick), 4), (across(tick), height - 34)], "grid"))
        pieces.append(_text(across(tick), height - 22, number(tick), "middle"))
    for row, b in enumerate(bars):
        pieces.append(_labelled(36 * row + 14, b.label, f"{sum(b.parts):.2f}"))
        start = 0.0
        for index, (name, part) in enumerate(zip(names, b.parts, strict=True)):
            if part > 0:
                width = across(start + part) - across(start)
                pieces.append(
                    f'<rect class="fill p{index}" x="{across(start):.1f}" y="{36 * row + 19}" width="{width:.1f}" '
                    f'height="13"><title>{escape(name)}: {part:.3f}</title></rect>'
                )
            start += part
    pieces.append(_text(_WIDTH / 2, height - 6, x, "middle"))
    legend = "".join(
        f'<li><svg class="swatch" viewBox="0 0 14 10" aria-hidden="true"><rect class="fill p{i}" width="14" '
        f'height="10"/></svg>{escape(name)}</li>'
        for i, name in enumerate(names)
    )
    told = "; ".join(
        f"{b.label}: {', '.join(f'{n} {p:.2f}' for n, p in zip(names, b.parts, strict=True))}" for b in bars
    )
    return _figure(title, "".join(pieces), f"{title}, {x}. {told}", legend, height)


def tree_chart(title: str, parents: Sequence[int], ranks: Sequence[int]) -> str:
    """A draft tree, its root the last committed token: a node stands under its parent, and its number is its rank."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    depths, slots, leaves = {-1: 0}, {}, 0
    for node, parent in enumerate(parents):
        depths[node] = depths[parent] + 1
    stack: list[tuple[int, bool]] = [(-1, False)]
    while stack:  # children before their parents, without recursion: a tree may be a long chain
        node, seen = stack.pop()
        below = sorted(children.get(node, []), key=lambda child: ranks[child])
        if not below:
            slots[node], leaves = float(leaves), leaves + 1
        elif seen:
            slots[node] = sum(slots[child] for child in below) / len(below)
        else:
            stack += [(node, True), *((child, False) for child in reversed(below))]
    width, height = max(120, 26 * leaves + 20), 40 * max(depths.values()) + 40
    place = {node: (23 + 26 * slots[node] + (width - 26 * leaves - 20) / 2, 20 + 40 * depths[node]) for node in depths}
    parts = [_path([place[parent], place[node]], "edge") for node, parent in enumerate(parents)]
    parts.append(_node(*place[-1], "", "root", "the last committed token"))
    for node, rank in enumerate(ranks):
        said = f"depth {depths[node]}, rank {rank + 1}"
        parts.append(_node(*place[node], str(rank + 1), f"r{min(rank, 4)}", said))
    counts = [len(list(group)) for _, group in groupby(sorted(d for n, d in depths.items() if n >= 0))]
    told = f"{title}: {len(parents)} nodes; by depth {', '.join(map(str, counts))}"
    return (
        f'<figure class="tree"><div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">'
        f'<svg role="img" aria-label="{escape(told)}" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<title>{escape(told)}</title>{''.join(parts)}</svg></div><figcaption>{escape(title)}</figcaption></figure>"
    )


def thinned(points: Sequence[tuple[float, float]], most: int = 240) -> list[tuple[float, float]]:
    """At most `most` points: means of so many stretches of equal length, where there are more."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / most)
    stretches = [points[i : i + size] for i in range(0, len(points), size)]
    return [(s[-1][0], sum(y for _, y in s) / len(s)) for s in stretches]


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _axes(
    x_ticks: list[float], y_ticks: list[float], across: Callable[[float], float], up: Callable[[float], float],
    x: str, y: str,
) -> str:  # fmt: skip
    parts = []
    for tick in y_ticks:
        parts.append(_path([(_LEFT, up(tick)), (_WIDTH - _RIGHT, up(tick))], "grid"))
        parts.append(_text(_LEFT - 5, up(tick) + 4, number(tick), "end"))
    for tick in x_ticks:
        parts.append(_text(across(tick), _HEIGHT - _BOTTOM + 15, number(tick), "middle"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, x, "middle"))
    turned = f'transform="rotate(-90 11 {(_TOP + _HEIGHT - _BOTTOM) / 2:.0f})"'
    parts.append(_text(11, (_TOP + _HEIGHT - _BOTTOM) / 2, y, "middle", extra=turned))
    return "".join(parts)


def _drawn(s: Series, across: Callable[[float], float], up: Callable[[float], float], x: str) -> str:
    parts = []
    colour = f"k{s.colour % COLOURS}"
    if s.line and len(s.points) > 1:
        dash = _DASHES[s.colour // COLOURS % len(_DASHES)]
        parts.append(_path([(across(a), up(b)) for a, b in s.points], f"line {colour}", dash))
    for (a, _), pair in zip(s.points, s.intervals, strict=False):
        if pair is not None:
            parts.append(_path([(across(a), up(pair[0])), (across(a), up(pair[1]))], f"line thin {colour}"))
    if s.marks or len(s.points) == 1:
        for a, b in s.points:
            said = f"{s.name}, {x} {number(a)}: {number(b)}"
            parts.append(_mark(s.colour, across(a), up(b), said))
    return "".join(parts)


def _mark(colour: int, x: float, y: float, said: str) -> str:
    """A circle, square, triangle or diamond: which one goes with the colour, for those who cannot tell colours."""
    shapes = (
        "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0",
        "M-3-3h6v6h-6z",
        "M0-4l4 7h-8z",
        "M0-4.5l4.5 4.5l-4.5 4.5l-4.5-4.5z",
    )
    title = f"<title>{escape(said)}</title>" if said else ""
    shape = shapes[colour % len(shapes)]
    return f'<path class="mark k{colour % COLOURS}" transform="translate({x:.1f} {y:.1f})" d="{shape}">{title}</path>'


def _swatch(s: Series) -> str:
    dash = _DASHES[s.colour // COLOURS % len(_DASHES)]
    line = _path([(0, 5), (22, 5)], f"line k{s.colour % COLOURS}", dash) if s.line else ""
    mark = _mark(s.colour, 11, 5, "") if s.marks else ""
    return f'<svg class="swatch wide" viewBox="0 0 22 10" aria-hidden="true">{line}{mark}</svg>'


def _told(s: Series) -> str:
    first, last = s.points[0], s.points[-1]
    if len(s.points) <= 8:
        return ", ".join(number(b) for _, b in s.points)
    return f"from {number(first[1])} at {number(first[0])} to {number(last[1])} at {number(last[0])}"


def _path(points: Sequence[tuple[float, float]], kind: str, dash: str = "") -> str:
    places = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline class="{kind}" points="{places}"{dashed}/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick", extra: str = "", whole: str = "") -> str:
    title = f"<title>{escape(whole)}</title>" if whole else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{title}{escape(text)}</text>'


def _labelled(y: float, label: str, value: str) -> str:
    """A row's label and its value. One longer than its room loses its middle, and is told whole on pointing there."""
    room = _WIDTH - 8 - _width(value) - 12 - 10
    short = label
    for kept in range(len(label) - 1, 0, -1):
        if _width(short) <= room:
            break
        short = f"{label[: kept - kept // 2]}…{label[len(label) - kept // 2 :]}"
    written = _text(10, y, short, "start", "label", whole=label if short != label else "")
    return written + _text(_WIDTH - 8, y, value, "end", "label")


def _width(text: str) -> float:
    """The most that a label takes in the wider of the page's fonts, DejaVu Sans, in the figure's units."""
    return _LABEL * sum(next((share for among, share in _SHARES if c in among), _share(c)) for c in text)


def _share(character: str) -> float:
    """Of the letters' size, by what kind of character it is."""
    if character.isascii():
        return 0.8 if character.isupper() else 0.65
    return 1.2 if east_asian_width(character) in "FW" else 0.9


def _node(x: float, y: float, text: str, kind: str, said: str) -> str:
    return (
        f'<g class="node {kind}"><circle cx="{x:.1f}" cy="{y:.1f}" r="10"><title>{escape(said)}</title></circle>'
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{escape(text)}</text></g>'
    )


def _figure(title: str, inside: str, told: str, legend: str, height: int) -> str:
    listed = f'<ul class="legend">{legend}</ul>' if legend else ""
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg role="img" aria-label="{escape(told)}" '
        f'viewBox="0 0 {_WIDTH} {height}">{inside}</svg>{listed}</figure>'
    )
