"""The P/D proxy (design 3): the prompt to a prefill instance, and the request with P's lease to a decode instance.

What P answers is opaque here; in bidirectional mode D's answer is read, too (`turns`). The client's own
``kv_transfer_params`` are stripped. Else D's bytes go to the client as they are. When no P can be reached, D computes
the prompt itself unless ``prefill_fallback`` is ``fail``: a slower answer is what a user expects from a router that
still has a working instance, and the header ``x-pdkv-prefill: local`` and a metric say that it happened. When D cannot
be reached, P's lease ends by expiry: only a consumer may end one.

In pull mode D is asked when P has answered, in push and write mode both are asked at once (`push_legs`). An instance
that fails before anything of its answer was passed on is replaced by the next of its role. Which instance comes first
is `placement`'s to say.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httpx
from fastapi import FastAPI, Request
from starlette.responses import Response

from pdkv.errors import BadRequest
from pdkv.serve.backends import Pool, make_client
from pdkv.serve.drains import Drains
from pdkv.serve.fleet import Fleet
from pdkv.serve.http import error_response, make_app, read_body, request_id_of, until_disconnect
from pdkv.serve.legs import NOT_FORWARDED, Call, LegFailed, Legs, RouterMetrics
from pdkv.serve.many_prompts import ManyPrompts, prompts_to_split
from pdkv.serve.openai import ApiError
from pdkv.serve.options import RouterOptions
from pdkv.serve.params import PREFILL_LEG, check_form
from pdkv.serve.placement import Placement, Prompt, keep_asking
from pdkv.serve.push_legs import PushLegs
from pdkv.serve.strict_json import parse_json
from pdkv.serve.turns import TurnMemory


class Router:
    """The handlers. One `httpx.AsyncClient` per router, made on the loop that serves."""

    def __init__(self, options: RouterOptions, client: httpx.AsyncClient | None = None) -> None:
        prefill, decode = Pool("prefill", options.prefill), Pool("decode", options.decode)
        self._metrics = RouterMetrics()
        self._client = client or make_client(options.connect_timeout_s)
        self.fleet = Fleet(
            self._client, prefill, decode, self._metrics.registry,
            decode_alone=options.prefill_fallback == "local",
        )  # fmt: skip
        self._on_prefill, self._on_decode = Placement(prefill), Placement(decode)
        self.drains = Drains((self._on_prefill, self._on_decode))
        self._turns = self._turn_memory(options) if options.bidirectional_kv_xfer else None
        self._legs = Legs(options, self._client, self._on_prefill, self._on_decode, self._metrics, self._turns)
        mode = options.transfer_mode
        self._push = PushLegs(self._legs, self._client, mode) if mode != "pull" else None
        self._asking: list[asyncio.Task[None]] = []

    def _turn_memory(self, options: RouterOptions) -> TurnMemory:
        """For the turns that decode instances keep: not those of one that is to stop, or has lost its memory."""
        seats = self._on_decode.seats
        turns = TurnMemory(
            options.decoder_kv_blocks_ttl_s,
            lambda label: not (seats[label].draining or seats[label].backend.resting),
        )
        self._on_decode.on_lost.append(turns.forget)
        return turns

    async def start(self) -> None:
        """Ask the instances for their figures from now on."""
        self._asking.append(asyncio.create_task(keep_asking(self._client, (self._on_prefill, self._on_decode))))
        if self._push is not None:
            self._asking.append(asyncio.create_task(self._push.keep_learning()))
        self._asking.append(asyncio.create_task(self.fleet.warn_of_swapped()))

    async def close(self) -> None:
        """Close the connections to the instances."""
        for task in self._asking:
            task.cancel()
        await self._client.aclose()

    # -------------------------------------------------------------------------------------------------- generation

    async def generate(self, request: Request) -> Response:
        """``POST /v1/completions`` and ``/v1/chat/completions``."""
        request_id = request_id_of(request)
        try:
            body = parse_json(await read_body(request))
            response = await until_disconnect(request.receive, self._answer(request, body, request_id))
        except (ApiError, BadRequest) as error:
            response = error_response(error, {"x-request-id": request_id})
        self._metrics.requests.labels(status=str(response.status_code)).inc()
        return response

    async def _answer(self, request: Request, body: dict[str, Any], request_id: str) -> Response:
        prompts = prompts_to_split(request.url.path, body)
        if prompts is None:
            return await self._both_legs(request, body, request_id)
        return await ManyPrompts(prompts, body, request_id, partial(self._both_legs, request)).answer()

    async def _both_legs(self, request: Request, body: dict[str, Any], request_id: str) -> Response:
        headers = {k: v for k, v in request.headers.items() if k not in NOT_FORWARDED}
        headers |= {"x-request-id": request_id, "accept-encoding": "identity", "content-type": "application/json"}
        check_form(body.pop("kv_transfer_params", None))
        call = Call(request_id, request.url.path, body, headers, Prompt.of(body))
        return await (self._push.answer(call) if self._push is not None else self._pull(call))

    async def _pull(self, call: Call) -> Response:
        """One leg after the other."""
        failures: list[str] = []
        kept = None
        if self._turns is not None:
            kept = self._turns.take(call.body)
            self._metrics.turns.labels(offered="no" if kept is None else "yes").inc()
        for backend in self._on_prefill.order(call.prompt):
            # It is needed until the decode instance has begun to answer.
            with self._on_prefill.sending(backend, call.prompt):
                try:
                    prefill = await self._legs.prefill(backend, call, kept or PREFILL_LEG)
                except LegFailed as error:
                    failures.append(str(error))
                    continue
                if prefill.refused is not None:
                    return prefill.refused
                if prefill.local_because is not None:
                    return await self._legs.decode_alone(call, prefill.local_because)
                return await self._legs.decode(call, prefill.params, prefill.turn)
        return await self._legs.without_prefill(call, failures)


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
