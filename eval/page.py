"""One HTML page that needs nothing but itself: its style, light and dark, and the pieces it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_STYLE = """
:root{color-scheme:light dark;--page:#fff;--card:#f6f7f9;--ink:#1a1f27;--soft:#566070;--rule:#d5dae1;--grid:#e3e7ec;
--k0:#0b62b0;--k1:#b84a08;--k2:#0b7568;--k3:#8333cf;--k4:#b3261e;--k5:#7a6200;--k6:#be2470;--k7:#46556a;
--p0:#64748b;--p1:#b84a08;--p2:#0b62b0;--p3:#9aa3b2;--mark0:#cfe8d5;--mark1:#cfe0f7;--link:#0b62b0}
@media (prefers-color-scheme:dark){:root{--page:#12151a;--card:#1b2028;--ink:#e6e9ee;--soft:#a3adbb;--rule:#343c48;
--grid:#2a313b;--k0:#6cb2ff;--k1:#ff9d5c;--k2:#4fd1be;--k3:#c79bff;--k4:#ff8a80;--k5:#e3c44a;--k6:#ff8fc0;--k7:#a9b6c8;
--p0:#8391a7;--p1:#ff9d5c;--p2:#6cb2ff;--p3:#566070;--mark0:#1f4a2c;--mark1:#1d3c63;--link:#6cb2ff}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,"Segoe UI","DejaVu Sans",sans-serif}
main,header,footer{max-width:1180px;margin:0 auto;padding:0 16px}
header{padding-top:20px}h1{font-size:1.6rem;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:40px 0 8px;padding-top:12px;border-top:1px solid var(--rule)}
h3{font-size:1rem;margin:20px 0 6px;overflow-wrap:anywhere}
p{max-width:75ch;margin:6px 0;overflow-wrap:anywhere}.soft,.lacking,footer{color:var(--soft)}a{color:var(--link)}
.lacking{border-left:3px solid var(--rule);padding-left:10px}
nav ul{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;padding:0;margin:10px 0}
nav a{display:inline-block;padding:4px 0}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:16px;margin:12px 0}
figure{margin:0;background:var(--card);border-radius:8px;padding:10px;min-width:0;max-width:560px}
figure.tree{max-width:none;margin:12px 0}
figcaption{font-weight:600;font-size:.9rem;overflow-wrap:anywhere}
figure>svg{display:block;width:100%;height:auto}
svg text{font:11px system-ui,"DejaVu Sans",sans-serif;fill:var(--soft)}svg text.label{fill:var(--ink);font-size:12px;
paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round}
.grid{fill:none;stroke:var(--grid)}.reference{fill:none;stroke:var(--soft);stroke-dasharray:4 4}
.line{fill:none;stroke-width:2;stroke-linejoin:round}.thin{stroke-width:1.2}
.edge{fill:none;stroke:var(--soft);stroke-width:1.2}
.mark{stroke:var(--card);stroke-width:.8}
.node circle{fill:var(--card);stroke:var(--soft);stroke-width:1.5}.node text{fill:var(--ink)}
.node.root circle{fill:var(--soft)}.node.r0 circle{stroke:var(--k0);stroke-width:3}.node.r1 circle{stroke:var(--k2)}
.node.r2 circle{stroke:var(--k1)}.node.r3 circle{stroke:var(--k3)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:6px 0 0;padding:0;font-size:.82rem}
.legend li{overflow-wrap:anywhere}.swatch{width:14px;height:10px;margin-right:6px;vertical-align:-1px}
.swatch.wide{width:22px}
.scroll{overflow-x:auto;max-width:100%;margin:8px 0}.scroll:focus-visible{outline:2px solid var(--link)}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:4px 0}
th,td{padding:4px 10px;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}thead th{color:var(--soft);font-weight:600}
td.text,th.text{text-align:left}tbody th{font-weight:600}
th:first-child{position:sticky;left:0;background:var(--page);white-space:normal;overflow-wrap:anywhere;max-width:11rem}
.named th:first-child{min-width:8.5rem}
details{margin:8px 0}summary{cursor:pointer;padding:4px 0;overflow-wrap:anywhere}
pre{background:var(--card);border-radius:8px;padding:10px;overflow-x:auto;font-size:.82rem;max-height:30rem}
code,.sample{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:.86rem}
code{overflow-wrap:anywhere}
.sample{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--card);border-radius:8px;padding:12px;line-height:1.7}
mark{color:inherit;border-radius:3px;border-bottom:2px solid var(--k2);background:var(--mark0)}
mark.odd{background:var(--mark1);border-color:var(--k0)}
footer{margin:40px auto 24px;font-size:.85rem}
@media print{.scroll,pre{overflow:visible;max-height:none}}
"""
_COLOURS = "".join(
    f".line.k{i}{{stroke:var(--k{i})}}.mark.k{i}{{fill:var(--k{i})}}.fill.p{i % 4}{{fill:var(--p{i % 4})}}"
    for i in range(8)
)


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, the anchor that leads to it, and HTML."""

    title: str
    anchor: str
    body: str


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page; `title` is text, `lead` and the sections' bodies are HTML."""
    links = "".join(f'<li><a href="#{s.anchor}">{escape(s.title)}</a></li>' for s in sections)
    body = "".join(
        f'<section id="{s.anchor}" aria-labelledby="{s.anchor}-title"><h2 id="{s.anchor}-title">{escape(s.title)}</h2>'
        f"{s.body}</section>\n"
        for s in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # an icon of nothing keeps browsers from asking for one
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{_COLOURS}</style>\n</head>\n<body>\n"
        f'<header><h1>{escape(title)}</h1>{lead}<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n'
        f"<main>\n{body}</main>\n<footer>Written by draftsmith's eval/report.py. Nothing on this page is fetched from "
        "anywhere.</footer>\n</body>\n</html>\n"
    )


def table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = (), most: int = 10
) -> str:
    """A table in a box of its own that scrolls; all cells are text. Columns in `text` and the first stand left.

    One of more than `most` rows is folded away.
    """
    if not rows:
        return ""
    kinds = [' class="text"' if i in text else "" for i in range(len(columns))]
    head = "".join(f'<th scope="col"{k}>{escape(c)}</th>' for c, k in zip(columns, kinds, strict=True))
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td{k}>{escape(cell)}</td>" for cell, k in zip(row[1:], kinds[1:], strict=True))
        + "</tr>"
        for row in rows
    )
    named = ' class="named"' if max(len(row[0]) for row in rows) > 12 else ""  # long names break, but not too early
    drawn = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table{named}><caption>'
        f"{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    return folded(f"{caption}: a table of {len(rows)} rows", drawn) if len(rows) > most else drawn


def charts(*drawn: str) -> str:
    """Figures side by side where there is room; nothing for no figure."""
    inside = "".join(drawn)
    return f'<div class="charts">{inside}</div>' if inside else ""


def said(text: str, kind: str = "") -> str:
    """A paragraph of plain text; kind: soft (an explanation) or lacking (what is left out, and why)."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def folded(summary: str, body: str) -> str:
    """HTML that is shown once it is asked for."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>" if body else ""


def source(text: str) -> str:
    """Text as it is, in a box that scrolls."""
    return f'<pre tabindex="0">{escape(text)}</pre>'
