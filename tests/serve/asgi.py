"""Calling an ASGI application by hand: a test decides when the client leaves and sees each chunk as it is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Exchange:
    """One request to ``app``. ``chunks`` grow as they are sent; `leave` closes the client's side."""

    app: Any
    path: str
    body: Any
    headers: dict[str, str] = field(default_factory=dict)
    status: int | None = None
    chunks: list[bytes] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def start(self) -> Exchange:
        self.task = asyncio.create_task(self._run())
        return self

    def leave(self) -> None:
        self.left.set()

    async def _run(self) -> None:
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": json.dumps(self.body).encode(), "more_body": False}
            await self.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            elif message.get("body"):
                self.chunks.append(message["body"])

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
            "headers": [(k.encode(), v.encode()) for k, v in self.headers.items()],
        }
        await self.app(scope, receive, send)


async def eventually(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Wait until ``condition()`` holds; fails after ``timeout_s``."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def client_of(app: Any) -> httpx.AsyncClient:
    """A client whose requests go straight into ``app`` (answers arrive whole)."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


def sse_events(body: bytes | str) -> list[Any]:
    """The events of a stream; ``"[DONE]"`` as itself."""
    text = body.decode() if isinstance(body, bytes) else body
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
