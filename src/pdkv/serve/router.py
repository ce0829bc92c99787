"""The P/D proxy (design 3): the prompt to a prefill instance, then the request with P's lease to a decode instance.

What P answers is opaque here. The client's own ``kv_transfer_params`` are stripped. D's bytes go to the client as they
are. When no P can be reached, D computes the prompt itself unless ``prefill_fallback`` is ``fail``: a slower answer is
what a user expects from a router that still has a working instance, and the header ``x-pdkv-prefill: local`` and a
metric say that it happened. When D cannot be reached, P's lease ends by expiry: only a consumer may end one.

A long queue is no failure, so there is no limit on how long a leg may take; an instance that gives no sign of life for
``instance_timeout_s`` is given up (`backends.Watch`). An instance that fails before anything of its answer was passed
on is replaced by the next of its role. Which instance comes first is `placement`'s to say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.responses import Response

from pdkv.serve.backends import Backend, Pool, Silent, Unreachable, Watch, make_client, open_response
from pdkv.serve.drains import Drains
from pdkv.serve.fleet import Fleet, error_text, passed_on
from pdkv.serve.http import (
    StreamResponse,
    error_response,
    make_app,
    read_body,
    request_id_of,
    until_disconnect,
)
from pdkv.serve.many_prompts import ManyPrompts, prompts_to_split
from pdkv.serve.openai import ApiError
from pdkv.serve.options import RouterOptions
from pdkv.serve.params import PREFILL_LEG
from pdkv.serve.placement import Placement, Prompt, keep_asking
from pdkv.serve.strict_json import parse_json

LOG = logging.getLogger("pdkv.router")
PREFILL_HEADER = "x-pdkv-prefill"

_NOT_FORWARDED = frozenset(
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
class PrefillResult:
    """What leg 1 gave: P's params for D, or why D prefills itself, or an error answer of P to pass on."""

    params: Any = None
    local_because: str | None = None
    refused: Response | None = None


class RouterMetrics:
    """The router's own numbers, beside the merged ones of its instances."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter("pdkv:router_requests", "Answered requests", ["status"], registry=self.registry)
        self.local = Counter("pdkv:router_local_prefills", "Requests that D prefilled itself", registry=self.registry)
        self.prefill_s = Histogram("pdkv:router_prefill_leg_seconds", "Seconds of leg 1", registry=self.registry)


class Router:
    """The handlers. One `httpx.AsyncClient` per router, made on the loop that serves."""

    def __init__(self, options: RouterOptions, client: httpx.AsyncClient | None = None) -> None:
        self._options = options
        self._prefill = Pool("prefill", options.prefill)
        self._decode = Pool("decode", options.decode)
        self._metrics = RouterMetrics()
        self._client = client or make_client(options.connect_timeout_s)
        self.fleet = Fleet(
            self._client, self._prefill, self._decode, self._metrics.registry,
            decode_alone=options.prefill_fallback == "local",
        )  # fmt: skip
        self._on_prefill, self._on_decode = Placement(self._prefill), Placement(self._decode)
        self.drains = Drains((self._on_prefill, self._on_decode))
        self._asking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Ask the instances for their figures from now on."""
        self._asking = asyncio.create_task(keep_asking(self._client, (self._on_prefill, self._on_decode)))

    async def close(self) -> None:
        """Close the connections to the instances."""
        if self._asking is not None:
            self._asking.cancel()
        await self._client.aclose()

    # -------------------------------------------------------------------------------------------------- generation

    async def generate(self, request: Request) -> Response:
        """``POST /v1/completions`` and ``/v1/chat/completions``."""
        request_id = request_id_of(request)
        try:
            body = parse_json(await read_body(request))
            response = await until_disconnect(request.receive, self._answer(request, body, request_id))
        except ApiError as error:
            response = error_response(error, {"x-request-id": request_id})
        self._metrics.requests.labels(status=str(response.status_code)).inc()
        return response

    async def _answer(self, request: Request, body: dict[str, Any], request_id: str) -> Response:
        prompts = prompts_to_split(request.url.path, body)
        if prompts is None:
            return await self._both_legs(request, body, request_id)
        return await ManyPrompts(prompts, body, request_id, partial(self._both_legs, request)).answer()

    async def _both_legs(self, request: Request, body: dict[str, Any], request_id: str) -> Response:
        headers = {k: v for k, v in request.headers.items() if k not in _NOT_FORWARDED}
        headers |= {"x-request-id": request_id, "accept-encoding": "identity", "content-type": "application/json"}
        body.pop("kv_transfer_params", None)
        started, path, prompt = time.monotonic(), request.url.path, Prompt.of(body)
        with ExitStack() as leased:  # the prefill instance is needed until the decode instance has begun to answer
            prefill = await self._prefill_leg(path, body, headers, prompt, leased)
            if prefill.refused is not None:
                return prefill.refused
            if prefill.local_because is not None:
                LOG.warning("%s: the decode instance prefills itself: %s", request_id, prefill.local_because)
                self._metrics.local.inc()
            else:
                self._metrics.prefill_s.observe(time.monotonic() - started)
                body["kv_transfer_params"] = prefill.params
            extra = {"x-request-id": request_id, PREFILL_HEADER: "local" if prefill.local_because else "remote"}
            return await self._decode_leg(path, body, headers, extra, prompt.with_tokens(prefill.params))

    async def _prefill_leg(
        self, path: str, body: dict[str, Any], headers: dict[str, str], prompt: Prompt, leased: ExitStack
    ) -> PrefillResult:
        leg = {key: value for key, value in body.items() if key not in _DROPPED_ON_PREFILL}
        leg |= {"stream": False, "max_tokens": 1, "max_completion_tokens": 1, "kv_transfer_params": PREFILL_LEG}
        content = msgspec.json.encode(leg)
        failures: list[str] = []
        for backend in self._on_prefill.order(prompt):
            leased.close()
            leased.enter_context(self._on_prefill.sending(backend, prompt))
            outgoing = self._client.build_request("POST", backend.url + path, content=content, headers=headers)
            try:
                async with Watch(self._client, backend, self._options.instance_timeout_s) as watch:
                    response = await watch.wait(self._whole(backend, outgoing))
            except (Unreachable, Silent) as error:
                failures.append(str(error))
                continue
            except httpx.TransportError as error:  # P died while it computed: nothing was shown to anybody
                failures.append(f"{backend.name}: {error or type(error).__name__}")
                continue
            answer = response.content
            if response.status_code == 503:
                backend.rest()
                failures.append(f"{backend.name}: {error_text(answer)}")
                continue
            if not response.is_success:
                return PrefillResult(refused=passed_on(response, answer))
            return self._params_of(backend, answer)
        if self._options.prefill_fallback == "fail":
            raise ApiError(
                503,
                f"no prefill instance answers ({'; '.join(failures)}); start one, or let the decode instance compute "
                "prompts with --prefill-fallback local",
                code="prefill_unavailable",
            )
        return PrefillResult(local_because="; ".join(failures))

    async def _whole(self, backend: Backend, outgoing: httpx.Request) -> httpx.Response:
        async with open_response(self._client, backend, outgoing) as response:
            await response.aread()
        return response

    @staticmethod
    def _params_of(backend: Backend, answer: bytes) -> PrefillResult:
        try:
            decoded = msgspec.json.decode(answer)
        except msgspec.DecodeError as error:
            raise ApiError(502, f"{backend.label} {backend.url} answered what is not JSON: {error}") from None
        params = decoded.get("kv_transfer_params") if isinstance(decoded, dict) else None
        if not params:
            return PrefillResult(local_because=f"{backend.label} answered without kv_transfer_params")
        return PrefillResult(params=params)

    async def _decode_leg(
        self, path: str, body: dict[str, Any], headers: dict[str, str], extra: dict[str, str], prompt: Prompt
    ) -> Response:
        content = msgspec.json.encode(body)
        failures: list[str] = []
        for backend in self._on_decode.order(prompt):
            outgoing = self._client.build_request("POST", backend.url + path, content=content, headers=headers)
            async with AsyncExitStack() as stack:
                stack.enter_context(self._on_decode.sending(backend, prompt))
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
                    failures.append(
                        f"{backend.name} closed the connection before it answered ({error or type(error).__name__})"
                    )
                    continue
                passed = {k: v for k, v in response.headers.items() if k not in _NOT_FORWARDED - {"content-length"}}
                return StreamResponse(
                    self._bytes(backend, response, watch),
                    status_code=response.status_code,
                    headers=passed | extra,
                    media_type=None,
                    cleanup=stack.pop_all().aclose,
                )
        raise ApiError(503, f"no decode instance answers ({'; '.join(failures)})", code="decode_unavailable")

    @staticmethod
    async def _bytes(backend: Backend, response: httpx.Response, watch: Watch) -> AsyncGenerator[bytes]:
        chunks = response.aiter_raw()
        try:
            while (chunk := await watch.wait(anext(chunks, None))) is not None:
                yield chunk
        except (httpx.TransportError, Silent) as error:
            reason = error or type(error).__name__
            text = f"{backend.name} broke off in the middle of the answer ({reason})"
            LOG.error("%s", text)
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise
            yield b"data: " + msgspec.json.encode(ApiError(503, text, code="decode_failed").body()) + b"\n\n"


def create_router_app(options: RouterOptions, client: httpx.AsyncClient | None = None) -> FastAPI:
    """The application of the proxy. ``client`` replaces the connection pool (it is closed with the application)."""
    router = Router(options, client)

    routes = {
        "POST /v1/completions": router.generate,
        "POST /v1/chat/completions": router.generate,
        "GET /v1/models": router.fleet.models,
        "GET /health": router.fleet.health,
        "GET /metrics": router.fleet.metrics,
        "GET /debug/memory": router.fleet.memory,
        "GET /admin/instances": router.drains.instances,
        "POST /admin/drain": router.drains.drain,
    }
    return make_app("pdkv router", routes, router.close, router.start)


def run(options: RouterOptions) -> int:
    """`pdkv serve router`: serve until SIGINT or SIGTERM; returns the exit code. Raises `ConfigError` (port in use)."""
    from pdkv.serve.child import Reporter
    from pdkv.serve.router_main import serve_router

    return serve_router(options, Reporter(None))
