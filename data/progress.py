"""Progress of long work: a bar on a terminal, now and then a line elsewhere; both with a rate and the time left."""

from __future__ import annotations

import sys
import time
from types import TracebackType

_LINE_EVERY_S = 20.0


class Progress:
    """Counts `total` items of `what`. What was finished before this process started does not enter the rate."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self._started = self._printed = time.monotonic()
        self._first = 0
        self._terminal = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def advance(self, items: int, note: str = "") -> None:
        """Count `items` more as done; `note` is shown behind the numbers."""
        now = time.monotonic()
        self.done += items
        if now - self._started < 0.01 * self.done:  # read from a log, not done now
            self._first = self.done
        if self._terminal or now - self._printed >= _LINE_EVERY_S or self.done >= self.total:
            self._printed = now
            self._write(now, note)

    def _write(self, now: float, note: str) -> None:
        rate = (self.done - self._first) / max(now - self._started, 1e-9)
        left = (self.total - self.done) / rate if rate else float("nan")
        line = f"{self.what}: {self.done}/{self.total}  {rate:.1f}/s  {_clock(left)} left  {note}".rstrip()
        print(
            f"\r\033[K{line}" if self._terminal else line,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        """Leave the bar's line."""
        if self._terminal:
            print(file=sys.stderr)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _clock(seconds: float) -> str:
    if seconds != seconds:
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
