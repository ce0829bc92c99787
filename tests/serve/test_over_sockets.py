"""API and router as users meet them: uvicorn on loopback, real connections, real disconnects (the engine is a fake)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from tests.serve.asgi import sse_events
from tests.serve.fake import FakeInstance

from pdkv.core.events import FinishReason
from pdkv.serve.api import create_app
from pdkv.serve.http import EndsInOrder
from pdkv.serve.options import RouterOptions
from pdkv.serve.router import create_router_app
from pdkv.serve.telemetry import Telemetry
from pdkv.serve.web import bind, url_of


@contextlib.contextmanager
def listening(app: Any) -> Iterator[str]:
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield url_of(sock)
    finally:
        server.should_exit = True
        thread.join(10)
        sock.close()


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def pair() -> Iterator[tuple[FakeInstance, FakeInstance, str]]:
    prefill, decode = FakeInstance(role="prefill", engine_id="engine-p"), FakeInstance("Zürich 🧪 is a city")
    with contextlib.ExitStack() as stack:
        urls = [
            stack.enter_context(listening(create_app(instance, Telemetry("tiny")))) for instance in (prefill, decode)
        ]
        router = create_router_app(RouterOptions(prefill=(urls[0],), decode=(urls[1],)))
        yield prefill, decode, stack.enter_context(listening(router))


def test_a_stream_through_both(pair: tuple[FakeInstance, FakeInstance, str]) -> None:
    prefill, decode, url = pair
    body = {"prompt": "x", "max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as response:
        assert response.headers["x-pdkv-prefill"] == "remote"
        *chunks, usage, done = sse_events(response.read())
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Zürich 🧪 is a city"
    assert done == "[DONE]"
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    assert prefill.requests[0].produce
    assert prefill.requests[0].max_tokens == 1
    assert decode.requests[0].source is not None
    assert decode.requests[0].source.peer.port == 5600


def test_several_prompts_travel_with_one_lease_each(pair: tuple[FakeInstance, FakeInstance, str]) -> None:
    prefill, decode, url = pair
    body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=20).json()
    assert len(answer["choices"]) == 6
    assert len(prefill.requests) == 3
    assert sum(request.source is not None for request in decode.requests) == 3


def hang_up_after(url: str, body: dict[str, Any], condition: Callable[[], Any]) -> None:
    """Send a request over a plain socket and close it once ``condition()`` holds."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        until(condition)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_hanging_up_reaches_the_instance_at_work(
    pair: tuple[FakeInstance, FakeInstance, str], stream: bool, role: str
) -> None:
    prefill, decode, url = pair
    at_work = prefill if role == "prefill" else decode
    at_work.gate = threading.Event()
    hang_up_after(url, {"prompt": "x", "max_tokens": 5, "stream": stream}, lambda: at_work.requests)
    until(lambda: at_work.aborts)
    assert at_work.aborts == [(at_work.requests[0].request_id, FinishReason.ABORT)]


def test_hanging_up_in_the_middle_of_a_stream(pair: tuple[FakeInstance, FakeInstance, str]) -> None:
    _, decode, url = pair
    decode.gate, decode.gate_at = threading.Event(), 3
    body = {"prompt": "x", "max_tokens": 9, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as response:
        for _ in response.iter_lines():
            break
    until(lambda: decode.aborts)


@pytest.mark.parametrize("stream", [False, True])
def test_requests_under_way_when_the_server_stops_are_told_so(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    instance = FakeInstance()
    instance.gate, instance.gate_at = threading.Event(), 2 if stream else 0
    body = {"prompt": "x", "max_tokens": 9, "stream": stream}
    answers: list[httpx.Response] = []
    with listening(EndsInOrder(create_app(instance, Telemetry("tiny")))) as url:
        asked = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=20))
        )
        asked.start()
        until(lambda: instance.requests)
    asked.join(10)
    (answer,) = answers
    error = sse_events(answer.content)[-1] if stream else answer.json()
    assert answer.status_code == (200 if stream else 503)
    assert error["error"]["code"] == "server_stopping"
    assert "Traceback" not in caplog.text
    assert instance.aborts, "and its blocks are free"


def test_merged_pages(pair: tuple[FakeInstance, FakeInstance, str]) -> None:
    _, _, url = pair
    assert {i["instance"] for i in httpx.get(f"{url}/debug/memory").json()["instances"]} == {"prefill-0", "decode-0"}
    metrics = httpx.get(f"{url}/metrics").text
    assert 'instance="prefill-0"' in metrics
    assert "_created" not in metrics
    assert httpx.get(f"{url}/health").json()["status"] == "ok"
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
