"""Both legs at once: D registers with P, which announces the prompt's KV when it has finished, or writes it.

The router draws a ``transfer_id`` for each attempt, and must tell D before P has answered where P's side
channel is: each prefill instance's ``/health`` says so, and is asked once a second. Only P's end of a race matters
here: while nothing of D's answer has come, a P that fails or refuses ends D's leg too, and the next P is tried. When
D begins to answer P is not needed any more, whatever D did about the KV.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from typing import Any

import httpx
from starlette.responses import Response

from pdkv.core.transfer.messages import Peer, TransferMode
from pdkv.errors import BadRequest, in_words
from pdkv.serve.backends import Backend
from pdkv.serve.legs import Call, LegFailed, Legs, PrefillResult
from pdkv.serve.params import push_legs, side_channel_of

LOG = logging.getLogger("pdkv.router")

_ASK_EVERY_S = 1.0
_HEALTH_TIMEOUT_S = 5.0


class PushLegs:
    """Runs the two legs beside each other. ``keep_learning`` is to run as long as requests come."""

    def __init__(self, legs: Legs, client: httpx.AsyncClient, mode: TransferMode) -> None:
        self._legs, self._mode = legs, mode
        self._client = client
        self._peers: dict[str, Peer] = {}  # side channels of the prefill instances, as they last said, by label
        self._under_way: set[asyncio.Task[PrefillResult]] = set()

    async def answer(self, call: Call) -> Response:
        """D's answer, or P's refusal. Raises `ApiError` when nobody can give one."""
        failures: list[str] = []
        for backend in self._legs.on_prefill.order(call.prompt):
            try:
                peer = self._peers.get(backend.label) or await self._learn(backend)
                return await self._race(backend, peer, call)
            except LegFailed as error:
                failures.append(str(error))
        return await self._legs.without_prefill(call, failures)

    async def _race(self, backend: Backend, peer: Peer, call: Call) -> Response:
        """Raises `LegFailed` when P failed before anything of D's answer had come; D's leg has been ended then."""
        to_prefill, to_decode = push_legs(peer, secrets.token_hex(16), mode=self._mode)
        with self._legs.on_prefill.sending(backend, call.prompt):
            prefill = self._start(self._legs.prefill(backend, call, to_prefill))
            try:
                response = await _while_it_may_help(prefill, peer, self._legs.decode(call, to_decode))
            finally:
                prefill.cancel()
            if response is not None:
                return response
            result = prefill.result()
            if result.refused is not None:
                return result.refused
            # P has been restarted: D waits for one that is no more, but here is what the new one keeps for it.
            self._peers.pop(backend.label, None)
            return await self._legs.decode(call, result.params)

    def _start(self, leg: Coroutine[Any, Any, PrefillResult]) -> asyncio.Task[PrefillResult]:
        task = asyncio.create_task(leg)
        self._under_way.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[PrefillResult]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # seen, or of no interest any more

    async def keep_learning(self) -> None:
        """Ask the prefill instances for ever where their side channels are; to be cancelled."""
        backends = [seat.backend for seat in self._legs.on_prefill.seats.values()]
        while True:
            for answer in await asyncio.gather(*map(self._learn, backends), return_exceptions=True):
                if isinstance(answer, BaseException):
                    LOG.debug("%s", answer)
            await asyncio.sleep(_ASK_EVERY_S)

    async def _learn(self, backend: Backend) -> Peer:
        """Where its side channel is. Raises `LegFailed` when it does not say; what it said before stands."""
        try:
            response = await self._client.get(f"{backend.url}/health", timeout=_HEALTH_TIMEOUT_S)
            if not response.is_success:
                raise LegFailed(f"{backend.name}: its /health answers with HTTP {response.status_code}")
            peer = side_channel_of(response.json())
        except httpx.TransportError as error:
            raise LegFailed(f"{backend.name}: {in_words(error)}") from error
        except (ValueError, BadRequest) as error:
            raise LegFailed(f"{backend.name}: its /health does not say where its side channel is ({error})") from error
        self._peers[backend.label] = peer
        return peer


async def _while_it_may_help(
    prefill: asyncio.Task[PrefillResult], peer: Peer, decode: Coroutine[Any, Any, Response]
) -> Response | None:
    """What ``decode`` gives; ``None`` when ``prefill`` ended first, in a way that makes D wait in vain.

    ``decode`` runs in this task and is cancelled from within, so that no answer of D can be left without an owner.
    """
    over = False
    try:
        async with asyncio.timeout(None) as scope:

            def ended(_task: object) -> None:
                if not over and _is_in_the_way(prefill, peer):
                    scope.reschedule(0)

            prefill.add_done_callback(ended)
            try:
                return await decode
            finally:
                over = True
    except TimeoutError:
        if not scope.expired():
            raise
        return None


def _is_in_the_way(prefill: asyncio.Task[PrefillResult], peer: Peer) -> bool:
    """Whether what P has ended with makes D wait in vain.

    That it kept nothing does not: P tells D so itself, or D has told P that it needs nothing.
    """
    if prefill.cancelled():
        return False
    if prefill.exception() is not None or prefill.result().refused is not None:
        return True
    params = prefill.result().params
    return isinstance(params, dict) and params.get("remote_engine_id") != peer.engine_id
