"""The router's view of its prefill and decode instances: who is next, who can be reached."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

_REST_S = 2.0


@dataclass(slots=True)
class Backend:
    """One instance behind the router. ``label`` is what metrics call it, for example ``prefill-0``."""

    role: str
    url: str
    label: str
    down_since: float | None = field(default=None)


class Unreachable(Exception):
    """No connection could be made; nothing of the request was processed."""


class Pool:
    """Instances of one role, taken in turn; one that could not be reached rests for two seconds before its next try."""

    def __init__(self, role: str, urls: tuple[str, ...]) -> None:
        self.role = role
        self.backends = [Backend(role, url, f"{role}-{i}") for i, url in enumerate(urls)]
        self._turn = itertools.count()

    def candidates(self) -> list[Backend]:
        """All instances in the order in which to try them: those not resting first, starting with the next in turn."""
        start = next(self._turn) % len(self.backends)
        in_turn = self.backends[start:] + self.backends[:start]
        now = time.monotonic()
        return sorted(in_turn, key=lambda b: b.down_since is not None and now - b.down_since < _REST_S)

    def names(self) -> str:
        """The URLs, for error texts."""
        return ", ".join(backend.url for backend in self.backends)


@asynccontextmanager
async def open_response(
    client: httpx.AsyncClient, backend: Backend, request: httpx.Request
) -> AsyncIterator[httpx.Response]:
    """Send ``request``; gives the response before its body is read. Raises `Unreachable` when nobody answers there."""
    try:
        response = await client.send(request, stream=True)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        backend.down_since = time.monotonic()
        raise Unreachable(f"{backend.label} {backend.url}: {error or type(error).__name__}") from error
    backend.down_since = None
    try:
        yield response
    finally:
        await response.aclose()
