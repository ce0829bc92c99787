"""Host names to addresses: the side channel takes no names."""

from __future__ import annotations

import socket


def address_of(host: str) -> str | None:
    """An address of ``host``, of IPv4 if it has one; ``None`` when it has none. May wait for a name server."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    return str(min(found, key=lambda entry: entry[0] is not socket.AF_INET)[4][0])
