"""What all our child processes share: how they start, in what environment, and words for how they ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pdkv

Child = tuple[subprocess.Popen[bytes], socket.socket]

LAST_LINES = 20
"""Of its log that a dead child is shown with."""


def environment(**changes: str) -> dict[str, str]:
    """Ours, with the pdkv that runs here on the path, and ``changes``."""
    root = str(Path(pdkv.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **changes}


def spawn(module: str, *, pass_fds: Sequence[int] = (), environ: Mapping[str, str], **streams: Any) -> Child:
    """Start ``python -m module FD PARENT_PID``: the process, and our end of the socket whose other end is its ``FD``.

    ``environ`` are changes of `environment`, ``streams`` those of `subprocess.Popen`; stdin is empty.
    """
    ours, theirs = socket.socketpair()
    try:
        process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(), *pass_fds),
            stdin=subprocess.DEVNULL,
            env=environment(**environ),
            **streams,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def ending(code: int | None) -> str:
    """Exit code or signal, of `subprocess`, as the end of a sentence."""
    if code is None:
        return "is still running"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def last_words(lines: Iterable[str]) -> str:
    """The last log lines, one under the other."""
    return "".join(f"\n  | {line}" for line in lines) or " nothing"
