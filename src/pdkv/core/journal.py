"""The engine's clock reading and the events of the current call, shared by its parts."""

from __future__ import annotations

from pdkv.core.events import Event, TokenSampled


class Journal:
    """``now_ns`` is the time that was passed in; ``take`` empties the list of events."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Append one event."""
        self._events.append(event)

    def extend(self, events: list[TokenSampled]) -> None:
        """Append many tokens."""
        self._events += events

    def take(self) -> tuple[Event, ...]:
        """All events since the last call, in order."""
        events, self._events = tuple(self._events), []
        return events
