"""The router's view of its prefill and decode instances: who is next, who can be reached, who is still alive."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import httpx

from pdkv.errors import in_words

_REST_S = 2.0
_QUICK_PROBE_S = 1.0
Result = TypeVar("Result")


class Unreachable(Exception):
    """It could not be asked: no connection, or no sign of life. Nothing of an answer was seen."""


class Silent(Exception):
    """It was asked and gives no sign of life any more."""


@dataclass(slots=True, eq=False)
class Backend:
    """One instance behind the router. ``label`` is what metrics call it, for example ``prefill-0``.

    ``last_sign``, ``down_since``: `time.monotonic` of its last sign of life and of its last failure. ``silent``: it
    was given up as `Silent`, or nobody listened there, so the next one who asks looks first whether it is back.
    """

    role: str
    url: str
    label: str
    last_sign: float = 0.0
    down_since: float | None = None
    silent: bool = False
    _probe: asyncio.Task[bool] | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.label} {self.url}"

    def seen(self) -> None:
        """It said something."""
        self.last_sign, self.silent = time.monotonic(), False

    def rest(self) -> None:
        """It failed: others are tried before it for a while."""
        self.down_since = time.monotonic()

    def lost(self) -> None:
        """Nobody is there. One that is started again may take connections long before it answers any."""
        self.rest()
        self.silent = True

    @property
    def resting(self) -> bool:
        """Whether it failed a moment ago."""
        return self.down_since is not None and time.monotonic() - self.down_since < _REST_S

    def probe(self, client: httpx.AsyncClient, timeout_s: float) -> asyncio.Future[bool]:
        """Whether it answers `/health`, with whatever status. All who wonder at one time share one question."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._ask(client, timeout_s))
        return asyncio.shield(self._probe)

    async def _ask(self, client: httpx.AsyncClient, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await client.get(f"{self.url}/health", timeout=timeout_s)
        except (httpx.HTTPError, TimeoutError, RuntimeError):  # RuntimeError: the client was closed meanwhile
            return False
        self.seen()
        return True


class Pool:
    """Instances of one role, taken in turn; one that failed rests for two seconds, in which others are tried first."""

    def __init__(self, role: str, urls: tuple[str, ...]) -> None:
        self.role = role
        self.backends = [Backend(role, url, f"{role}-{i}") for i, url in enumerate(urls)]
        self._turn = itertools.count()

    def candidates(self) -> list[Backend]:
        """All instances in the order in which to try them: those not resting first, starting with the next in turn."""
        start = next(self._turn) % len(self.backends)
        in_turn = self.backends[start:] + self.backends[:start]
        return sorted(in_turn, key=lambda backend: backend.resting)


class Watch:
    """Waiting for one instance's answer without end while it lives, and no longer. To be entered like a context.

    A prompt may queue for long, so time alone says nothing. While somebody waits, `/health` is asked when the instance
    was quiet for a third of ``silence_s``, and has the rest of it to answer.
    """

    def __init__(self, client: httpx.AsyncClient, backend: Backend, silence_s: float) -> None:
        self._client = client
        self._backend = backend
        self._silence_s = silence_s
        self._silent = False
        self._scope: asyncio.Timeout | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()

    async def wait(self, work: Awaitable[Result]) -> Result:
        """The result of ``work``. Raises `Silent` when the instance gives no sign of life meanwhile."""
        try:
            async with asyncio.timeout(0 if self._silent else None) as self._scope:
                result = await work
        except TimeoutError:
            if not self._silent:
                raise
            raise Silent(
                f"{self._backend.name} gives no sign of life (nor does its /health for {self._silence_s:g} s)"
            ) from None
        finally:
            self._scope = None
        self._backend.seen()
        return result

    async def _look(self) -> None:
        backend, quiet_s = self._backend, self._silence_s / 3
        while True:
            await asyncio.sleep(quiet_s)
            now = time.monotonic()
            if backend.last_sign > now - quiet_s or await backend.probe(self._client, self._silence_s - quiet_s):
                continue
            if backend.last_sign > now:
                continue
            backend.lost()
            self._silent = True
            if self._scope is not None:
                self._scope.reschedule(asyncio.get_running_loop().time())
            return


@asynccontextmanager
async def open_response(
    client: httpx.AsyncClient, backend: Backend, request: httpx.Request
) -> AsyncIterator[httpx.Response]:
    """Send ``request``; gives the response before its body is read. Raises `Unreachable` when nobody answers there."""
    if backend.silent and not await backend.probe(client, _QUICK_PROBE_S):
        backend.rest()
        raise Unreachable(f"{backend.name}: still gives no sign of life")
    try:
        response = await client.send(request, stream=True)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        backend.lost()
        raise Unreachable(f"{backend.name}: {in_words(error)}") from error
    backend.down_since = None
    try:
        yield response
    finally:
        await response.aclose()


def make_client(connect_timeout_s: float) -> httpx.AsyncClient:
    """Connections to instances: only connecting has a limit (`Watch` has the others), the environment has no say."""
    # A host that went away and came back resets the connection when it is asked this way, and only then.
    keepalive = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if (option := getattr(socket, name, None)) is not None:
            keepalive.append((socket.IPPROTO_TCP, option, value))
    limits: dict[str, Any] = {"max_connections": None, "max_keepalive_connections": 256, "keepalive_expiry": 3.0}
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=connect_timeout_s),
        transport=httpx.AsyncHTTPTransport(limits=httpx.Limits(**limits), socket_options=keepalive, trust_env=False),
        trust_env=False,
    )
