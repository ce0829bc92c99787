"""HTTP pieces that API and router share: request ids, error answers, and work that stops when the client leaves."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from pdkv.errors import BadRequest, DoesNotFit, PdkvError
from pdkv.serve.openai import ApiError, ChatRequest, CompletionRequest

MAX_BODY_BYTES = 64 << 20
_BODY_STALL_S = 60.0
_FIELD = re.compile(r"(\w+)(?:\.\w+)*(?:: | = | must )")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")

Receive = Callable[[], Awaitable[Any]]
Result = TypeVar("Result")


class ClientLeft(Exception):
    """The client closed the connection; nobody reads the answer."""


class JsonResponse(Response):
    """A JSON answer encoded by msgspec (UTF-8, compact)."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def request_id_of(request: Request) -> str:
    """The client's ``x-request-id``, or a new one. Raises `ApiError` 400 for one with characters that ids cannot have.

    A comma separates ids in heartbeat messages of NIXL peers, so it is not allowed, nor is anything unprintable.
    """
    given = request.headers.get("x-request-id")
    if given is None:
        return uuid.uuid4().hex
    if _REQUEST_ID.fullmatch(given) is None:
        raise ApiError(
            400,
            f"x-request-id {given[:60]!r}: use 1 to 128 letters, digits and . _ : - (no commas or spaces)",
            param="x-request-id",
            code="invalid_value",
        )
    return given


async def read_body(request: Request) -> bytes:
    """The whole body. Raises `ApiError` 413 above 64 MiB, where its length is announced before any of it is read.

    Or 408 when nothing of it comes for a minute: whoever stops in the middle would hold up to 64 MiB for good.
    """
    too_large = ApiError(413, f"the request body is larger than {MAX_BODY_BYTES >> 20} MiB", code="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise too_large
    body, chunks = bytearray(), request.stream()
    try:
        while True:
            async with asyncio.timeout(_BODY_STALL_S):
                body += await anext(chunks)
            if len(body) > MAX_BODY_BYTES:
                raise too_large
    except StopAsyncIteration:
        return bytes(body)
    except TimeoutError:
        said = f"nothing more of the request body came for {_BODY_STALL_S:g} s, after {len(body)} bytes"
        raise ApiError(408, said, code="body_timeout") from None


def as_api_error(error: Exception) -> ApiError:
    """``error`` as the OpenAI error object that tells of it: 400 for what the client can change, else 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, DoesNotFit):
        return ApiError(400, str(error), code="does_not_fit")
    if isinstance(error, BadRequest):
        return ApiError(400, str(error), param=field_of(str(error)))
    if isinstance(error, PdkvError):
        return ApiError(500, str(error))
    return ApiError(500, f"internal error: {type(error).__name__}: {error}")


def field_of(message: str) -> str | None:
    """The field of a request that ``message`` is about: such messages begin with its name."""
    match = _FIELD.match(message)
    return match[1] if match and match[1] in CompletionRequest.model_fields | ChatRequest.model_fields else None


def error_response(error: Exception, headers: dict[str, str] | None = None) -> JsonResponse:
    """The answer of `as_api_error`."""
    error = as_api_error(error)
    return JsonResponse(error.body(), status_code=error.status, headers=headers)


Handler = Callable[[Request], Awaitable[Response]]


def make_app(
    title: str,
    routes: Mapping[str, Handler],
    close: Callable[[], Awaitable[None]],
    start: Callable[[], Awaitable[None]] | None = None,
) -> FastAPI:
    """An application of ``routes`` ("POST /v1/completions": its handler).

    ``start`` is awaited when it begins, ``close`` when it ends.

    Without FastAPI's own pages: they load their scripts from another host, and the bodies are checked by us.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        if start is not None:
            await start()
        yield
        await close()

    app = FastAPI(title=title, lifespan=lifespan, openapi_url=None)
    for route, handler in routes.items():
        method, path = route.split()
        app.add_api_route(path, handler, methods=[method])
    _install_error_handlers(app, ", ".join(routes))
    return app


def _install_error_handlers(app: FastAPI, routes: str) -> None:
    """Make every error of ``app``, unknown paths and methods included, an OpenAI error object."""

    async def ours(_request: Request, error: Exception) -> Response:
        return error_response(error)

    async def unexpected(_request: Request, error: Exception) -> Response:
        # Starlette raises it on, for the log, and uvicorn then drops the connection: the client should know.
        return error_response(error, {"connection": "close"})

    async def of_starlette(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        asked, headers = f"{request.method} {request.url.path}", error.headers
        text = {
            404: f"{asked}: there is no such path here; there is {routes}",
            405: f"{asked}: this path takes {(headers or {}).get('Allow', 'another method')}",
        }.get(error.status_code, f"{asked}: {error.detail}")
        return error_response(ApiError(error.status_code, text), dict(headers or {}))

    async def left(_request: Request, _error: Exception) -> Response:
        return Response(status_code=499)

    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(PdkvError, ours)
    app.add_exception_handler(Exception, unexpected)
    app.add_exception_handler(HTTPException, of_starlette)
    for kind in (ClientLeft, ClientDisconnect):  # while it was answered; while its body was read
        app.add_exception_handler(kind, left)


class EndsInOrder:
    """An ASGI application whose requests that a stopping server cancels still get an answer: an error that says so."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        content_type: bytes | None = None  # of the answer; None until it has begun
        ended = False

        async def noting(message: Any) -> None:
            nonlocal content_type, ended
            if message["type"] == "http.response.start":
                content_type = dict(message["headers"]).get(b"content-type", b"")
            else:
                ended = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            error = ApiError(503, "the server is stopping; send the request again", code="server_stopping")
            if content_type is None:
                await error_response(error, {"connection": "close"})(scope, receive, send)
            elif content_type.startswith(b"text/event-stream") and not ended:
                event = b"data: " + msgspec.json.encode(error.body()) + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": False})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``, which is cancelled (`ClientLeft`) when the client disconnects first.

    The request's body must have been read, so that the next thing ``receive`` gives is the disconnect.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive()).get("type") != "http.disconnect":
        pass


class StreamResponse(Response):
    """Sends the chunks of ``body`` as they come and closes it at once when the client leaves.

    ``cleanup`` is awaited last, however it ends, even when ``body`` was never begun.

    Starlette's own streaming response notices a client that left only when it sends; a request that waits in a queue
    sends nothing for a long time.
    """

    def __init__(
        self,
        body: AsyncGenerator[bytes],
        *,
        status_code: int = 200,
        headers: dict[str, str] | None = None,
        media_type: str | None = "text/event-stream; charset=utf-8",
        cleanup: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(status_code=status_code, headers=headers, media_type=media_type)
        if "content-length" not in {name.lower() for name in headers or {}} and "content-length" in self.headers:
            del self.headers["content-length"]  # Starlette counted an empty body
        self._body = body
        self._cleanup = cleanup

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientLeft:
            pass

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[AsyncGenerator[bytes]]:
        """The chunks; in the end they are closed and cleaned up behind."""
        try:
            async with aclosing(self._body):
                yield self._body
        finally:
            if self._cleanup is not None:
                await self._cleanup()

    async def _send_all(self, send: Any) -> None:
        async with self.opened() as chunks:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
