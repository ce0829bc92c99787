"""The two legs of a request: one prefill instance asked for a prompt's KV, and the decode instances for the answer.

A long queue is no failure, so there is no limit on how long a leg may take; an instance that gives no sign of life for
``instance_timeout_s`` is given up (`backends.Watch`). Params are opaque here: whoever calls puts them together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import httpx
import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.responses import Response

from pdkv.errors import in_words
from pdkv.runtime.trouble_log import TroubleLog
from pdkv.serve.backends import Backend, Silent, Unreachable, Watch, open_response
from pdkv.serve.fleet import error_text, passed_on
from pdkv.serve.http import StreamResponse
from pdkv.serve.openai import ApiError
from pdkv.serve.options import RouterOptions
from pdkv.serve.params import KV_HEADER
from pdkv.serve.placement import Placement, Prompt
from pdkv.serve.turns import Listener, TurnMemory

LOG = logging.getLogger("pdkv.router")
PREFILL_HEADER = "x-pdkv-prefill"
TURN_HEADER = "x-pdkv-turn"
"""What P did about the turn before, which D had kept: `KV_HEADER`'s words."""

NOT_FORWARDED = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade"),
        *("transfer-encoding", "expect", "host", "content-length", "accept-encoding", "x-request-id", "date", "server"),
    }
)
_DROPPED_ON_PREFILL = frozenset(
    {
        *("min_tokens", "n", "best_of", "stream_options", "logprobs", "top_logprobs", "return_token_ids"),
        "kv_transfer_params",
    }
)


@dataclass(frozen=True, slots=True)
class Call:
    """A client's request, as it goes to the instances: ``body`` has no params of the client's own."""

    request_id: str
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What a prefill instance gave: params for D, or why D prefills itself, or an error answer to pass on.

    ``turn``: what became of the KV of the turn before, if it was offered that.
    """

    params: Any = None
    turn: str | None = None
    local_because: str | None = None
    refused: Response | None = None


class LegFailed(Exception):
    """An instance cannot answer; another one of its role may."""


class RouterMetrics:
    """The router's own numbers, beside the merged ones of its instances."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter("pdkv:router_requests", "Answered requests", ["status"], registry=self.registry)
        self.local = Counter("pdkv:router_local_prefills", "Requests that D prefilled itself", registry=self.registry)
        self.turns = Counter("pdkv:router_turns", "Turns by what D kept of the one before", ["offered"],
                             registry=self.registry)  # fmt: skip
        self.prefill_s = Histogram("pdkv:router_prefill_leg_seconds", "Seconds of leg 1", registry=self.registry)


class Legs:
    """Asks the instances. What fails before anything of its answer was passed on is tried elsewhere."""

    def __init__(
        self,
        options: RouterOptions,
        client: httpx.AsyncClient,
        on_prefill: Placement,
        on_decode: Placement,
        metrics: RouterMetrics,
        turns: TurnMemory | None = None,
    ) -> None:
        self._options = options
        self._client = client
        self._metrics = metrics
        self._troubles = TroubleLog(LOG)
        self._turns = turns
        self.on_prefill, self.on_decode = on_prefill, on_decode

    async def prefill(self, backend: Backend, call: Call, params: Any) -> PrefillResult:
        """The prompt's KV from ``backend``. Raises `LegFailed`, and `ApiError` when its answer makes no sense."""
        leg = {key: value for key, value in call.body.items() if key not in _DROPPED_ON_PREFILL}
        leg |= {"stream": False, "max_tokens": 1, "max_completion_tokens": 1, "kv_transfer_params": params}
        outgoing = self._request(backend, call, leg)
        started = time.monotonic()
        try:
            async with Watch(self._client, backend, self._options.instance_timeout_s) as watch:
                response = await watch.wait(self._whole(backend, outgoing))
        except (Unreachable, Silent) as error:
            raise LegFailed(str(error)) from error
        except httpx.TransportError as error:  # it died while it computed: nothing was shown to anybody
            raise LegFailed(f"{backend.name}: {in_words(error)}") from error
        if response.status_code == 503:  # its engine has stopped
            backend.rest()
            raise LegFailed(f"{backend.name}: {error_text(response.content)}")
        if not response.is_success:
            return PrefillResult(refused=passed_on(response, response.content))
        self._metrics.prefill_s.observe(time.monotonic() - started)
        return replace(_params_of(backend, response.content), turn=response.headers.get(KV_HEADER))

    async def decode(self, call: Call, params: Any, turn: str | None = None) -> Response:
        """D's answer, as it comes; without ``params`` D prefills itself. Raises `ApiError` 503 when no D answers."""
        body = call.body if params is None else {**call.body, "kv_transfer_params": params}
        extra = {"x-request-id": call.request_id, PREFILL_HEADER: "local" if params is None else "remote"}
        extra |= {} if turn is None else {TURN_HEADER: turn}
        prompt = call.prompt.with_tokens(params)
        failures: list[str] = []
        for backend in self.on_decode.order(prompt):
            outgoing = self._request(backend, call, body)
            async with AsyncExitStack() as stack:
                stack.enter_context(self.on_decode.sending(backend, prompt))
                try:
                    watch = await stack.enter_async_context(
                        Watch(self._client, backend, self._options.instance_timeout_s)
                    )
                    opened = open_response(self._client, backend, outgoing)
                    response = await watch.wait(stack.enter_async_context(opened))
                    if response.status_code == 503:  # its engine has stopped
                        backend.rest()
                        failures.append(f"{backend.name}: {error_text(await watch.wait(response.aread()))}")
                        continue
                except (Unreachable, Silent) as error:
                    failures.append(str(error))
                    continue
                except httpx.TransportError as error:  # it died while it computed: nothing was shown to anybody
                    failures.append(f"{backend.name} closed the connection before it answered ({in_words(error)})")
                    continue
                chunks, length = _bytes(backend, response, watch), {"content-length"}
                if self._turns is not None and params is not None and response.is_success:
                    listener, length = Listener(self._turns, call.body, backend.label), set()
                    chunks = listener.streamed(chunks) if _is_stream(response) else listener.whole(chunks)
                passed = {k: v for k, v in response.headers.items() if k not in NOT_FORWARDED - length}
                if passed.get(KV_HEADER) == "recomputed":  # P has prefilled, in vain
                    extra |= {PREFILL_HEADER: "local"}
                    self._metrics.local.inc()
                return StreamResponse(
                    chunks,
                    status_code=response.status_code,
                    headers=passed | extra,
                    media_type=None,
                    cleanup=stack.pop_all().aclose,
                )
        raise ApiError(503, f"no decode instance answers ({'; '.join(failures)})", code="decode_unavailable")

    async def decode_alone(self, call: Call, because: str) -> Response:
        """D's answer to a prompt that it computes itself."""
        line = f"{call.request_id}: the decode instance prefills itself: {because}"
        self._troubles.tell(because, line, time.monotonic_ns())
        self._metrics.local.inc()
        return await self.decode(call, None)

    async def without_prefill(self, call: Call, failures: list[str]) -> Response:
        """D's answer when no prefill instance gave one; raises `ApiError` 503 where D may not stand in."""
        because = "; ".join(failures)
        if self._options.prefill_fallback == "fail":
            raise ApiError(
                503,
                f"no prefill instance answers ({because}); start one, or let the decode instance compute prompts with "
                "--prefill-fallback local",
                code="prefill_unavailable",
            )
        return await self.decode_alone(call, because)

    def _request(self, backend: Backend, call: Call, body: dict[str, Any]) -> httpx.Request:
        content = msgspec.json.encode(body)
        return self._client.build_request("POST", backend.url + call.path, content=content, headers=call.headers)

    async def _whole(self, backend: Backend, outgoing: httpx.Request) -> httpx.Response:
        async with open_response(self._client, backend, outgoing) as response:
            await response.aread()
        return response


def _params_of(backend: Backend, answer: bytes) -> PrefillResult:
    try:
        decoded = msgspec.json.decode(answer)
    except msgspec.DecodeError as error:
        raise ApiError(502, f"{backend.label} {backend.url} answered what is not JSON: {error}") from None
    params = decoded.get("kv_transfer_params") if isinstance(decoded, dict) else None
    if not params:
        return PrefillResult(local_because=f"{backend.label} answered without kv_transfer_params")
    return PrefillResult(params=params)


def _is_stream(response: httpx.Response) -> bool:
    return response.headers.get("content-type", "").startswith("text/event-stream")


async def _bytes(backend: Backend, response: httpx.Response, watch: Watch) -> AsyncGenerator[bytes]:
    chunks = response.aiter_raw()
    try:
        while (chunk := await watch.wait(anext(chunks, None))) is not None:
            yield chunk
    except (httpx.TransportError, Silent) as error:
        text = f"{backend.name} broke off in the middle of the answer ({in_words(error)})"
        LOG.error("%s", text)
        if not _is_stream(response):
            raise
        yield b"data: " + msgspec.json.encode(ApiError(503, text, code="decode_failed").body()) + b"\n\n"
