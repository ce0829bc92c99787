"""What all instances behind the router say together: `/health`, `/metrics`, `/debug/memory`, `/v1/models`."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import msgspec
from prometheus_client import CollectorRegistry, Gauge
from starlette.requests import Request
from starlette.responses import Response

from pdkv.runtime.shown import REASON_CHARS, readable
from pdkv.serve.backends import Backend, Pool
from pdkv.serve.http import JsonResponse, error_response
from pdkv.serve.merge import CONTENT_TYPE, merge_metrics
from pdkv.serve.openai import ApiError

LOG = logging.getLogger("pdkv.router")

_SCRAPE_TIMEOUT_S = 5.0
_ROLE_ASKED_EVERY_S = 2.0


class Fleet:
    """The handlers that ask every instance. ``decode_alone``: a decode instance may stand in for prefill ones."""

    def __init__(
        self, client: httpx.AsyncClient, prefill: Pool, decode: Pool, registry: CollectorRegistry, *, decode_alone: bool
    ) -> None:
        self._client, self._prefill, self._decode = client, prefill, decode
        self._registry, self._decode_alone = registry, decode_alone
        self._up = Gauge("pdkv:router_backend_up", "1 when the instance answers", ["instance"], registry=registry)

    async def _get(self, backend: Backend, path: str) -> httpx.Response | str:
        """The instance's answer, or why there is none."""
        try:
            response = await self._client.get(backend.url + path, timeout=_SCRAPE_TIMEOUT_S)
        except httpx.TransportError as error:
            self._up.labels(instance=backend.label).set(0)
            return f"{backend.name}: {str(error) or _said(error)}"
        self._up.labels(instance=backend.label).set(1)
        return response

    async def _get_all(self, path: str) -> list[tuple[Backend, httpx.Response | str]]:
        backends = [*self._prefill.backends, *self._decode.backends]
        answers = await asyncio.gather(*(self._get(backend, path) for backend in backends))
        return list(zip(backends, answers, strict=True))

    async def models(self, _request: Request) -> Response:
        """``GET /v1/models`` of the first decode instance that answers."""
        failures = []
        for backend in self._decode.candidates():
            answer = await self._get(backend, "/v1/models")
            if isinstance(answer, httpx.Response):
                return passed_on(answer, answer.content)
            failures.append(answer)
        return error_response(ApiError(503, f"no decode instance answers ({'; '.join(failures)})"))

    async def health(self, _request: Request) -> Response:
        """``GET /health``: 200 while requests are answered; every instance is named.

        That takes a healthy decode instance, and a prefill instance too if decode may not stand in for it.
        """
        states: dict[str, str] = {}
        healthy = {"prefill": 0, "decode": 0}
        for backend, answer in await self._get_all("/health"):
            if isinstance(answer, str):
                states[backend.label] = answer
            elif answer.is_success:
                states[backend.label] = wrong_role(backend, answer) or _degraded(answer) or "ok"
                healthy[backend.role] += wrong_role(backend, answer) is None
            else:
                states[backend.label] = _reason(answer)
        needed = ["decode"] if self._decode_alone else ["prefill", "decode"]
        missing = [role for role in needed if not healthy[role]]
        if missing:
            return JsonResponse(
                {"status": "failed", "reason": f"no healthy {' and no '.join(missing)} instance", "instances": states},
                status_code=503,
            )
        all_ok = all(state == "ok" for state in states.values())
        return JsonResponse({"status": "ok" if all_ok else "degraded", "instances": states})

    async def warn_of_swapped(self) -> None:
        """Log it once for each instance that is of another role than it was given for, when it first answers."""
        unknown = [*self._prefill.backends, *self._decode.backends]
        while unknown:
            answers = await asyncio.gather(*(self._get(backend, "/health") for backend in unknown))
            for backend, answer in zip(unknown, answers, strict=True):
                problem = wrong_role(backend, answer) if isinstance(answer, httpx.Response) else None
                if problem is not None:
                    LOG.error("%s: %s", backend.name, problem)
            unknown = [b for b, answer in zip(unknown, answers, strict=True) if isinstance(answer, str)]
            await asyncio.sleep(_ROLE_ASKED_EVERY_S)

    async def metrics(self, _request: Request) -> Response:
        """``GET /metrics``: the instances' metrics with the label ``instance``, and the router's own."""
        texts = {
            backend.label: answer.text
            for backend, answer in await self._get_all("/metrics")
            if isinstance(answer, httpx.Response) and answer.is_success
        }
        return Response(merge_metrics(texts, self._registry), media_type=CONTENT_TYPE)

    async def memory(self, _request: Request) -> Response:
        """``GET /debug/memory``: the instances' ledgers in one list; those without an answer under ``unreachable``."""
        instances: list[Any] = []
        unreachable: list[str] = []
        for backend, answer in await self._get_all("/debug/memory"):
            if isinstance(answer, str):
                unreachable.append(answer)
                continue
            try:
                instances += [{**entry, "instance": backend.label} for entry in answer.json()["instances"]]
            except (ValueError, KeyError, TypeError):
                unreachable.append(f"{backend.label} {backend.url}: no ledger there (HTTP {answer.status_code})")
        return JsonResponse({"instances": instances, "unreachable": unreachable})


def _said(error: httpx.TransportError) -> str:
    """For an error without a text of its own."""
    if isinstance(error, httpx.TimeoutException):
        return f"no answer within {_SCRAPE_TIMEOUT_S:g} s; it hangs, is stopped, or cannot be reached"
    return type(error).__name__


def wrong_role(backend: Backend, health: httpx.Response) -> str | None:
    """What is wrong when an instance says it is of another role than it was given to the router for."""
    role = _fact(health, "role")
    if role is None or role == backend.role:
        return None
    return f"it is a {role} instance, but stands under --{backend.role}: are --prefill and --decode swapped?"


def _degraded(health: httpx.Response) -> str | None:
    """Why an instance that serves calls itself degraded."""
    return _fact(health, "reason") if _fact(health, "status") == "degraded" else None


def _fact(health: httpx.Response, name: str) -> str | None:
    """A string in a `/health`; None where there is none (vLLM's is empty)."""
    try:
        value = health.json()[name]
    except (ValueError, KeyError, TypeError):
        return None
    return readable(value, REASON_CHARS) if isinstance(value, str) else None


def passed_on(response: httpx.Response, body: bytes) -> Response:
    """An instance's answer as it is."""
    return Response(body, status_code=response.status_code, media_type=response.headers.get("content-type"))


def _reason(response: httpx.Response) -> str:
    return _fact(response, "reason") or f"HTTP {response.status_code}"


def error_text(body: bytes) -> str:
    """What the error object in ``body`` says."""
    try:
        return readable(str(msgspec.json.decode(body)["error"]["message"]), REASON_CHARS)
    except (msgspec.DecodeError, KeyError, TypeError):
        return "HTTP 503"
