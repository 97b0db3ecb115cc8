"""The report in a real browser, of two runs and of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conf.compose import ROOT
from eval.sample import Piece, Sample
from tests.helpers.browser import available, browser
from tests.helpers.written_runs import compared_runs, report, two_runs


@pytest.mark.skipif(not available(), reason="no chromium and chromedriver (Debian: chromium chromium-driver)")
@pytest.mark.parametrize("made", [two_runs, compared_runs])
def test_in_a_browser(made: Callable[[Path], list[Path]], tmp_path: Path) -> None:
    """No errors, no overflow on a phone, another look in the dark; pictures are kept in outputs/report."""
    pieces = [Piece("x" * 300, 0, False), Piece(" accepted", 1, True)]
    sample = Sample("eagle", "a/export", "def f():\n", pieces, "2 tokens")
    path = tmp_path / "report.html"
    path.write_text(report(*made(tmp_path), samples=[sample], asked=True), encoding="utf-8")
    looks = {}
    with browser() as shown:
        for width in (390, 1280):
            for dark in (False, True):
                shown.open(path, width, dark)
                shown.run("document.querySelectorAll('details').forEach(d => d.open = true)")
                assert shown.run("return [innerWidth, document.documentElement.scrollWidth]") == [width, width]
                assert shown.console() == []
                looks[dark] = shown.run(
                    "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
                )
                name = f"{made.__name__}-{'phone' if width == 390 else 'wide'}-{'dark' if dark else 'light'}.png"
                shown.screenshot(ROOT.parent / "outputs" / "report" / name)
        assert shown.run("return performance.getEntriesByType('resource').length") == 0
        level = "[...document.querySelectorAll('figure svg text:not([transform])')]"
        sizes = f"return {level}.map(text => text.getBoundingClientRect().height)"
        shown.open(path, 390, False)
        heights = [height for height in shown.run(sizes) if height]  # what is folded has none
        assert len(heights) > 50 and min(heights) > 9  # text in pictures stays legible on a phone
        rows = "[...document.querySelectorAll('figure svg text.label')].map(text => text.getBoundingClientRect())"
        boxes = shown.run(f"return {rows}.map(box => [box.left, box.right])")
        assert len(boxes) > 10 and all(name[1] <= value[0] for name, value in zip(boxes[::2], boxes[1::2], strict=True))
        shown.run("console.error('planted')")
        assert len(shown.console()) == 1  # the check above could fail
    assert looks[False] == ["rgb(255, 255, 255)", "rgb(26, 31, 39)"]
    assert looks[True] == ["rgb(18, 21, 26)", "rgb(230, 233, 238)"]
