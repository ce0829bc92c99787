"""Where text for a person goes."""

from __future__ import annotations

from rich.console import Console

_WIDE = 200


def stdout_console() -> Console:
    """A console on stdout. In a file or a pipe its lines are wide, so that a row of a table stays a line."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=_WIDE)
