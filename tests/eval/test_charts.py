"""Charts: what is drawn, where, and whether their labels have room."""

from __future__ import annotations

import re

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from eval.charts import Bar, Series, interval_chart, line_chart, number, stacked_chart, thinned, ticks, tree_chart
from tests.helpers.written_runs import LONG_NAME, TREE, Reader

DEJAVU = FontProperties(family="DejaVu Sans", size=12)


def test_axes_and_pictures() -> None:
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0]) and ticks(1, 4, 6, whole=True) == [1, 2, 3, 4]
    assert ticks(-0.3, 0.9, 3) == pytest.approx([0, 0.5]) and ticks(5, 5) == [5]
    assert [number(x) for x in (0.25, 12, 3000, 0.00001, 0)] == ["0.25", "12", "3,000", "1e-05", "0"]
    assert thinned([(i, float(i % 2)) for i in range(1000)], 100)[0] == (9, 0.5)
    drawn = line_chart("t", [Series("s", [(1, 0.0), (2, 1.0)], 0)], x="n", y="v", top=1.0)
    low, high = (tuple(map(float, m)) for m in re.findall(r"translate\(([\d.]+) ([\d.]+)\)", drawn)[:2])
    assert low[1] == 192 and high == (pytest.approx(low[0] + 306 / 1.08, abs=0.1), 12)  # the plot's bottom and top
    nodes = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', tree_chart("t", TREE["parents"], TREE["ranks"]))
    assert [float(y) for _, y in nodes] == [20, 60, 60, 100, 100, 140] and float(nodes[1][0]) < float(nodes[2][0])
    assert nodes[3][0] == nodes[5][0]  # an only child stands under its parent


@pytest.mark.parametrize("label", ["eagle", LONG_NAME, f"{LONG_NAME} (compare-a/eagle)", "MW@" * 30, "草稿" * 30])
def test_labels_stay_clear_of_the_values_beside_them(label: str) -> None:
    """Measured in DejaVu Sans, the widest of the page's fonts, at the size of its labels."""

    def width(text: str) -> float:
        plain = text.encode("ascii", "ignore").decode()
        known: float = TextToPath().get_text_width_height_descent(plain, DEJAVU, False)[0]
        return known + 12 * (len(text) - len(plain))

    bars = [Bar(label, [1234.567], (1200.0, 1300.0)), Bar(label[:-1] + "z", [1.0])]
    for drawn in (
        interval_chart("t", bars, x="τ"),
        stacked_chart("t", ["a"], [Bar(b.label, b.parts) for b in bars], x="ms", top=2000.0),
    ):
        Reader(drawn)
        found = re.findall(r'<text class="label" x="([\d.]+)"[^>]*>(?:<title>(.*?)</title>)?(.*?)</text>', drawn)
        for bar, (left, whole, short), (right, _, value) in zip(bars, found[::2], found[1::2], strict=True):
            assert float(left) + width(short) + 4 < float(right) - width(value) and float(right) <= 360
            assert (whole or short) == bar.label and bar.label in drawn.partition("</figcaption>")[2].partition(">")[0]
            assert short == bar.label if len(bar.label) < 20 else short[0] + short[-1] == bar.label[0] + bar.label[-1]
            assert "…" not in short or width(short) > 180  # no more is cut than must be
