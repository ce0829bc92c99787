"""Text of a stranger (a peer's, a client's) made fit for logs and errors: short, and without control characters."""

from __future__ import annotations

SHOWN_CHARS = 120
"""How much of one name or value is shown."""

REASON_CHARS = 1000
"""How much of a peer's whole reason is shown: it may list many facts."""


def readable(text: str, limit: int = SHOWN_CHARS) -> str:
    """``text`` on one line: what cannot be printed becomes an escape, what is beyond ``limit`` characters ``…``."""
    cut = text[:limit]
    if not cut.isprintable():
        cut = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)
    return cut if len(text) <= limit else cut + "…"


def quoted(text: str | None, limit: int = SHOWN_CHARS) -> str:
    """``text`` in quotes as `readable` would show it; ``not set`` for None."""
    if text is None:
        return "not set"
    return repr(text if len(text) <= limit else text[:limit] + "…")
