"""What does: torch, NIXL, sockets, clocks."""

from __future__ import annotations

import os

# Read by libgomp when torch loads it. By default a thread that waits at the end of a parallel loop spins for
# milliseconds; where cores are shared with other processes, it keeps the thread that it waits for from running.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
