"""A child process that cannot outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when the thread that started it ends, even if stuck in a copy.

    Linux only: elsewhere nothing is done. Raises OSError when the kernel refuses.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)  # it ended before the call above


def leave_stops_to_the_parent() -> None:
    """Ctrl-C reaches a whole group, a service manager's SIGTERM a whole service: the parent says when this one stops.

    The parent would take its end for a failure, and still needs it for requests that are open.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
