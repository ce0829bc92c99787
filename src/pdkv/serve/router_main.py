"""The router as a process: ``python -m pdkv.serve.router_main TASK`` under the supervisor."""

from __future__ import annotations

import logging
import socket
import sys

import msgspec

from pdkv.serve.child import ChildTask, Reporter, run_child
from pdkv.serve.options import RouterOptions
from pdkv.serve.router import create_router_app
from pdkv.serve.web import bind, serve_app, url_of


def serve_router(options: RouterOptions, reporter: Reporter, sock: socket.socket | None = None) -> int:
    """Serve the proxy until told to stop; returns the exit code. Raises `ConfigError` when the port is in use."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    sock = sock or bind(options.host, options.port)
    url = url_of(sock)
    line = f"pdkv router ready: {url} prefill={','.join(options.prefill)} decode={','.join(options.decode)}"
    return serve_app(
        create_router_app(options), sock, on_ready=lambda: reporter.ready(line, {"role": "router", "url": url})
    )


if __name__ == "__main__":
    sys.exit(run_child(msgspec.json.decode(sys.argv[1], type=ChildTask[RouterOptions]), serve_router))
