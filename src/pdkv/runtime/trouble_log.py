"""Warnings for what went wrong with a transfer: clients are sent to the log for the cause, so it must be there."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass

from pdkv.core.events import Event, LeaseReleased, LoadFailed, LoadOverdue, TurnDeclined, WriteFailed
from pdkv.runtime.shown import REASON_CHARS, quoted, readable
from pdkv.units import NS_PER_S

_QUIET_NS = NS_PER_S  # between two lines of one cause, at first
_MOST_QUIET_NS = 60 * NS_PER_S
_MAX_CAUSES = 64  # told apart at a time; a peer may invent as many as it likes
_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class _Told:
    at_ns: int
    line: str  # of the last one that was not logged
    suppressed: int = 0
    quiet_ns: int = _QUIET_NS


class TroubleLog:
    """Logs every failed load, every lease that expired unread, and every kept turn that was found to end too soon.

    At most one line a second for each cause. (That a kept turn expires is how most conversations end: no trouble.)

    A cause that goes on is told less and less often, down to once a minute. Causes that differ in numbers only (slots,
    leases) are one. What was not logged is counted in the next line.
    Used by the engine's thread only; clocks are the instance's own.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: dict[str, _Told] = {}

    def take(self, events: Iterable[Event], now_ns: int) -> None:
        """Warn of those among ``events`` that are trouble."""
        for event in events:
            match event:
                case LoadFailed(cause=cause):
                    cause = readable(cause, REASON_CHARS)
                    line = f"the KV of {quoted(event.request_id)} was not loaded: {cause}"
                    self.tell(f"load {cause}", line, now_ns)
                case LoadOverdue(cause=cause):
                    line = f"the KV of {quoted(event.request_id)} is overdue: {readable(cause, REASON_CHARS)}"
                    self.tell("overdue", line, now_ns)
                case WriteFailed(cause=cause):
                    cause = readable(cause, REASON_CHARS)
                    line = f"the KV of {quoted(event.request_id)} was not written to its consumer: {cause}"
                    self.tell(f"write {cause}", line, now_ns)
                case TurnDeclined(cause=cause):
                    line = f"the turn before {quoted(event.request_id)} is not read: {readable(cause, REASON_CHARS)}"
                    self.tell("declined", line, now_ns)
                case LeaseReleased(expired=True, next_turn=False):
                    line = (
                        f"lease {event.lease_id} of {quoted(event.request_id)} expired: nobody said that the "
                        f"{event.blocks} blocks had been read, and no heartbeat came"
                    )
                    self.tell("expired", line, now_ns)

    def tick(self, now_ns: int) -> None:
        """Log what was held back, once its time is over."""
        for key, told in list(self._told.items()):
            if now_ns - told.at_ns < told.quiet_ns:
                continue
            if told.suppressed:
                self._warn(told, now_ns)
            else:
                del self._told[key]

    def tell(self, cause: str, line: str, now_ns: int) -> None:
        """Warn with ``line``, now or counted in a later one of its ``cause``."""
        key = _NUMBER.sub("#", cause)
        told = self._told.get(key)
        if told is None and len(self._told) >= _MAX_CAUSES:
            key, told = "others", self._told.get("others")
        if told is None:
            self._told[key] = _Told(now_ns, line)
            self._log.warning("%s", line)
            return
        told.line = line
        told.suppressed += 1
        if now_ns - told.at_ns >= told.quiet_ns:
            self._warn(told, now_ns)

    def _warn(self, told: _Told, now_ns: int) -> None:
        """One line for all since the last; it stands for itself and ``suppressed - 1`` more."""
        more = f" (and {told.suppressed - 1} more like it)" if told.suppressed > 1 else ""
        self._log.warning("%s%s", told.line, more)
        told.at_ns, told.suppressed = now_ns, 0
        told.quiet_ns = min(2 * told.quiet_ns, _MOST_QUIET_NS)
