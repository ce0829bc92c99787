"""Sockets and uvicorn: bind first, say so when the port is taken, serve until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn

from pdkv.errors import ConfigError

_GRACE_S = 2
_FULL_S = 10.0
_FULL = "no file descriptor is free: new connections wait until others have closed; raise the limit (ulimit -n)"


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket that has ``host:port`` (0: any free port) for itself from now on.

    It does not listen yet, so that a client is refused until somebody serves; except where connections of a former
    server still linger on the port. Raises `ConfigError` when the port is in use or the address is not this machine's.
    """
    try:
        return _bound(host, port, reuse=False)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not port:
            raise _cannot(host, port, error) from None
    # Somebody has the port, or only its old connections do. SO_REUSEADDR tells the two apart, but lets others bind
    # to the port as well until one listens.
    try:
        return _bound(host, port, reuse=True)
    except OSError as error:
        raise _cannot(host, port, error) from None


def _bound(host: str, port: int, *, reuse: bool) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if reuse:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        if reuse:
            sock.listen()
    except OSError:
        sock.close()
        raise
    return sock


def _cannot(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is in use by another process; choose another with --port (0: any)")
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} on {host} needs privileges; choose one above 1023 with --port")
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}; check --host")


def url_of(sock: socket.socket) -> str:
    """``http://host:port`` of a bound socket; a wildcard address is shown as loopback."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn that reports when it listens and watches a condition that ends it."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None], broken: Callable[[], bool]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._broken = broken
        self.broke = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()
            self._watch = asyncio.create_task(self._watch_broken())

    async def _watch_broken(self) -> None:
        while not self._broken():
            await asyncio.sleep(0.5)
        self.broke = True
        await asyncio.sleep(1.0)  # long enough for running requests and a health check to be told why
        self.should_exit = True


def _no_error(record: logging.LogRecord) -> bool:
    """Requests that a stop cancels are answered (`EndsInOrder`), and a second Ctrl-C cuts the rest of the stop off:
    nothing went wrong that uvicorn need report."""
    said = record.getMessage()
    return not (said.startswith("Cancel ") or said.rstrip().endswith("asyncio.exceptions.CancelledError"))


class FullNowAndThen(logging.Filter):
    """Without a free file descriptor asyncio logs thousands of vain accepts a second: lets one in ten seconds pass."""

    _last_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("socket.accept() out of system resource"):
            return True
        if record.created - self._last_s < _FULL_S:
            return False
        self._last_s = record.created
        record.msg, record.args, record.exc_info = _FULL, None, None
        return True


def allow_many_connections() -> None:
    """Take as many file descriptors as the system allows: the usual 1024 are few for a router."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has no unlimited ones
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def _signals_only_end_uvicorn() -> Iterator[None]:
    """uvicorn raises the signal that stopped it once more when it is done; our own clean-up must still run then."""

    def ignore(_number: int, _frame: FrameType | None) -> None:
        pass

    before = {number: signal.signal(number, ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve_app(
    app: Any, sock: socket.socket, *, on_ready: Callable[[], None], broken: Callable[[], bool] = lambda: False
) -> int:
    """Serve ``app`` on ``sock`` on this (the main) thread until SIGINT or SIGTERM, or ``broken()``.

    ``on_ready`` is called once it accepts connections. Returns the exit code: 0 when told to stop, 1 when broken.
    Open answers get two seconds to end.
    """
    from pdkv.serve.http import EndsInOrder  # not above: the supervisor binds sockets and needs nothing of FastAPI

    config = uvicorn.Config(
        EndsInOrder(app),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=75,
        ws="none",
    )
    logging.getLogger("uvicorn.error").addFilter(_no_error)
    logging.getLogger("asyncio").addFilter(FullNowAndThen())
    allow_many_connections()
    server = _Server(config, on_ready, broken)
    # For the next server: connections that linger after this one do not keep it from the port. Set only now, as it
    # would let others bind to the port while nobody listens.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with _signals_only_end_uvicorn():
        server.run(sockets=[sock])
    return 1 if server.broke or not server.started else 0
