"""A router between hand-made instances, without sockets: what they are asked, and what comes of their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from tests.serve.asgi import client_of

from pdkv.serve.options import RouterOptions
from pdkv.serve.router import create_router_app

PARAMS = {"do_remote_prefill": True, "pdkv_token": "secret", "opaque": [1, {"x": None}], "big": 2**62 + 1}


@dataclass
class Backend:
    """A hand-made instance: records what it is sent, answers what it is told to."""

    reply: Callable[[dict[str, Any]], tuple[int, bytes, str]]
    down: bool = False
    seen: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    gate: asyncio.Event | None = None
    cut_after: int | None = None
    hung: bool = False  # its /health is not answered
    stuck_after: int | None = None
    cancelled: int = 0
    says: dict[str, str] = field(default_factory=dict)  # headers of its answers
    pages: dict[str, tuple[int, bytes]] = field(default_factory=dict)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if path == "/health" and self.hung:
            await asyncio.sleep(3600)
        page = path in self.pages or path == "/health"
        if page:
            status, content = self.pages.get(path, (200, b'{"status": "ok"}'))
            kind = "text/plain"
        else:
            self.seen.append(json.loads(body))
            self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
            try:
                if self.gate is not None:
                    await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            status, content, kind = self.reply(self.seen[-1])
        headers = [(b"content-type", kind.encode()), *((k.encode(), v.encode()) for k, v in self.says.items())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for i in range(0, len(content), 7):
            if self.cut_after is not None and i >= self.cut_after and not page:
                raise httpx.RemoteProtocolError("peer closed connection")
            await send({"type": "http.response.body", "body": content[i : i + 7], "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class _CutStream(httpx.AsyncByteStream):
    def __init__(self, chunks: list[bytes], error: Exception | None, stuck_after: int | None) -> None:
        self.chunks, self.error, self.stuck_after = chunks, error, stuck_after

    async def __aiter__(self) -> Any:
        sent = 0
        for chunk in self.chunks:
            if self.stuck_after is not None and sent >= self.stuck_after:
                await asyncio.sleep(3600)
            yield chunk
            sent += len(chunk)
        if self.error is not None:
            raise self.error


class Network(httpx.AsyncBaseTransport):
    """Routes by host name to the backends; a backend that is down refuses the connection."""

    def __init__(self, backends: dict[str, Backend]) -> None:
        self.backends = backends

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        backend = self.backends[request.url.host]
        if backend.down:
            raise httpx.ConnectError("All connection attempts failed", request=request)
        chunks: list[bytes] = []
        start: dict[str, Any] = {}
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await asyncio.sleep(3600)
            sent = True
            return {"type": "http.request", "body": request.content, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                chunks.append(message.get("body", b""))

        scope = {"path": request.url.path, "headers": request.headers.raw}
        error: Exception | None = None
        try:
            await backend(scope, receive, send)
        except httpx.TransportError as caught:
            error = caught
        if not start:
            assert error is not None
            raise error
        stream = _CutStream(chunks, error, backend.stuck_after if request.url.path.startswith("/v1/") else None)
        return httpx.Response(start["status"], headers=start["headers"], stream=stream, request=request)


def as_json(value: Any, status: int = 200) -> Callable[[dict[str, Any]], tuple[int, bytes, str]]:
    return lambda _body: (status, json.dumps(value).encode(), "application/json")


def prefill(**options: Any) -> Backend:
    return Backend(as_json({"id": "p", "choices": [], "kv_transfer_params": PARAMS}), **options)


STREAM = b'data: {"choices": [{"text": "Z\xc3\xbcrich"}]}\n\ndata: [DONE]\n\n'


def decode(**options: Any) -> Backend:
    return Backend(
        lambda body: (
            (200, STREAM, "text/event-stream") if body.get("stream") else (200, b'{"ok": 1}', "application/json")
        ),
        **options,
    )


def router(p: list[Backend], d: list[Backend], **options: Any) -> Any:
    backends = {f"p{i}": b for i, b in enumerate(p)} | {f"d{i}": b for i, b in enumerate(d)}
    made = RouterOptions(
        prefill=tuple(f"http://p{i}:1" for i in range(len(p))),
        decode=tuple(f"http://d{i}:1" for i in range(len(d))),
        **options,
    )
    return create_router_app(made, httpx.AsyncClient(transport=Network(backends)))


def post(app: Any, body: Any, *, path: str = "/v1/completions", **options: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with client_of(app) as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content, **options)

    return asyncio.run(go())
