"""What all our child processes share: an environment in which they find pdkv, and words for how they ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

import pdkv

LAST_LINES = 20
"""Of its log that a dead child is shown with."""


def environment(**changes: str) -> dict[str, str]:
    """Ours, with the pdkv that runs here on the path, and ``changes``."""
    root = str(Path(pdkv.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **changes}


def ending(code: int | None) -> str:
    """Exit code or signal, of `subprocess`, as the end of a sentence."""
    if code is None:
        return "is still running"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def last_words(lines: Iterable[str]) -> str:
    """The last log lines, one under the other."""
    return "".join(f"\n  | {line}" for line in lines) or " nothing"
