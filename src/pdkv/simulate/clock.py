"""Virtual time: a queue of actions, played in the order of their times."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]


class VirtualTime:
    """``now_ns`` is the time of the action being played; actions of equal times play in the order of their making."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.played = 0
        self._queue: list[tuple[int, int, Action, tuple[Any, ...]]] = []
        self._made = 0

    def after(self, delay_ns: int, action: Action, *args: Any) -> None:
        """Play ``action(*args)`` in ``delay_ns`` (never in the past)."""
        self._made += 1
        heapq.heappush(self._queue, (self.now_ns + max(delay_ns, 0), self._made, action, args))

    def run(self, until_ns: int, most: int) -> bool:
        """Play until nothing is left (True), or until ``until_ns`` or ``most`` actions have passed (False)."""
        while self._queue:
            if self._queue[0][0] > until_ns or self.played >= most:
                return False
            self.now_ns, _, action, args = heapq.heappop(self._queue)
            self.played += 1
            action(*args)
        return True
