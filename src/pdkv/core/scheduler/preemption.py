"""Who loses its blocks when a running request cannot grow."""

from __future__ import annotations

from collections.abc import Sequence

from pdkv.core.scheduler.request import Request


def choose_victim(running: Sequence[Request], *, priority_scheduling: bool) -> Request:
    """FCFS: the most recently admitted, which may be the one that asks. Priority: the last by priority, then arrival.

    (spec scheduler section 3.1, step 3b)
    """
    return max(running, key=_urgency) if priority_scheduling else running[-1]


def _urgency(request: Request) -> tuple[int, int]:
    return request.new.priority, request.arrival_ns
