"""How far a start has come: one moving line per part on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class Progress:
    """Says nothing; the base of the two below."""

    def update(self, part: str, text: str) -> None:
        """``part`` is doing ``text`` now."""

    def done(self, part: str, text: str) -> None:
        """``part`` has finished."""


class PlainProgress(Progress):
    """One line per report, with the seconds since the start.

    ``brief``: only what takes time (reports of that end in "...") and the end of each part; the log has the rest.
    """

    def __init__(self, stream: TextIO, *, brief: bool = False) -> None:
        self._stream = stream
        self._brief = brief
        self._start = time.monotonic()

    def update(self, part: str, text: str) -> None:
        """Print it."""
        if not self._brief or text.endswith("..."):
            self.done(part, text)

    def done(self, part: str, text: str) -> None:
        """Print it."""
        self._stream.write(f"[{time.monotonic() - self._start:5.1f} s] {part}: {text}\n")
        self._stream.flush()


class TerminalProgress(Progress):
    """A bar per part on a `rich.progress.Progress`, full when it is done."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._tasks: dict[str, Any] = {}

    def update(self, part: str, text: str) -> None:
        """Show it behind the part's bar."""
        if part not in self._tasks:
            self._tasks[part] = self._bars.add_task(part, total=None, text=text)
        self._bars.update(self._tasks[part], text=text)

    def done(self, part: str, text: str) -> None:
        """Fill the bar."""
        self.update(part, text)
        self._bars.update(self._tasks[part], total=1, completed=1)


@contextmanager
def open_progress(stream: TextIO, *, brief: bool = False) -> Iterator[Progress]:
    """Bars when ``stream`` is a terminal, else plain lines (all, or the ``brief`` ones)."""
    if not stream.isatty():
        yield PlainProgress(stream, brief=brief)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:<8}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    with Bars(*columns, console=Console(file=stream)) as bars:
        yield TerminalProgress(bars)
