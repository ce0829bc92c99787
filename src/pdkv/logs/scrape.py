"""Reading an HTTP endpoint of a running server, /metrics or /debug/memory: bounded in size and time."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import msgspec

from pdkv.errors import ConfigError
from pdkv.logs.metrics_text import MAX_BYTES, Metrics, parse_metrics

TIMEOUT_S = 10.0
_PIECE_BYTES = 1 << 16


def is_url(source: str) -> bool:
    """Whether ``source`` is meant as an endpoint rather than a file."""
    return source.startswith(("http://", "https://"))


def metrics_url(url: str) -> str:
    """The URL of the metrics: a server's own address is completed with ``/metrics``."""
    parts = _checked(url)
    return url if parts.path.strip("/") else urllib.parse.urlunsplit(parts._replace(path="/metrics"))


def sibling_url(url: str, path: str) -> str:
    """Another path of the same server."""
    return urllib.parse.urlunsplit(_checked(url)._replace(path=path, query="", fragment=""))


def scrape(url: str, timeout_s: float = TIMEOUT_S) -> Metrics:
    """The samples at ``url``. Raises ConfigError when there is no answer in time, or it is no metrics text."""
    return parse_metrics(fetch(metrics_url(url), timeout_s), metrics_url(url))


def fetch_json(url: str, timeout_s: float = TIMEOUT_S) -> Any:
    """The JSON at ``url``. Raises ConfigError when there is no answer in time, or it is no JSON."""
    try:
        return msgspec.json.decode(fetch(url, timeout_s))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{url} did not answer JSON ({error})") from error


def fetch(url: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """The body at ``url``, at most MAX_BYTES and within ``timeout_s`` altogether. Raises ConfigError otherwise."""
    _checked(url)
    end = time.monotonic() + timeout_s
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            pieces, size = [], 0
            # One piece at a time: a server that sends a byte a second must not hold us for ever.
            while piece := answer.read1(_PIECE_BYTES):
                size += len(piece)
                pieces.append(piece)
                if size > MAX_BYTES:
                    raise ConfigError(f"{url} answers more than {MAX_BYTES >> 20} MiB; is it a /metrics endpoint?")
                if time.monotonic() > end:
                    raise ConfigError(f"{url} did not finish its answer within {timeout_s:g} s")
            return b"".join(pieces)
    except urllib.error.HTTPError as error:
        raise ConfigError(f"{url} answers {error.code} {error.reason}; give the address of the server") from error
    except (urllib.error.URLError, OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"cannot read {url}: {reason}; is the server up, and is this its address?") from error


def _checked(url: str) -> urllib.parse.SplitResult:
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"{url}: not a URL ({error})") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url}: give http://HOST:PORT of a server, or the URL of its /metrics")
    return parts
