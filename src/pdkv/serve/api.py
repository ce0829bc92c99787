"""The OpenAI API of one instance, with health, metrics and the memory report."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from pdkv.core.ports import Int32Array
from pdkv.errors import PdkvError
from pdkv.runtime.shown import quoted
from pdkv.serve.engine import ServedInstance
from pdkv.serve.generation import Choice, Delta, Frontend, Kv
from pdkv.serve.http import (
    JsonResponse,
    StreamResponse,
    as_api_error,
    error_response,
    make_app,
    read_body,
    request_id_of,
    until_disconnect,
)
from pdkv.serve.memory_report import memory_report
from pdkv.serve.merge import CONTENT_TYPE
from pdkv.serve.openai import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Generation,
    chat_generation,
    completion_generation,
    parse_request,
    prompts_of,
)
from pdkv.serve.params import KV_HEADER, offers_in
from pdkv.serve.queue_limits import NO_LIMITS, QueueLimits
from pdkv.serve.responses import SSE_DONE, Answer, sse
from pdkv.serve.strict_json import parse_json
from pdkv.serve.telemetry import Telemetry
from pdkv.serve.unsupported import CHAT, COMPLETIONS, refuse_unsupported
from pdkv.units import NS_PER_S

LOG = logging.getLogger("pdkv.api")
_REFUSAL_SHOWN_NS = 60 * NS_PER_S


def create_app(
    instance: ServedInstance,
    telemetry: Telemetry,
    *,
    served_model_name: str | None = None,
    limits: QueueLimits = NO_LIMITS,
) -> FastAPI:
    """The application that serves ``instance``. ``telemetry`` must be the one that hears the instance's events."""
    api = InstanceApi(instance, telemetry, served_model_name or instance.info.model_name, limits)

    routes = {
        "POST /v1/completions": api.completions,
        "POST /v1/chat/completions": api.chat,
        "GET /v1/models": api.models,
        "GET /health": api.health,
        "GET /metrics": api.metrics,
        "GET /debug/memory": api.memory,
    }
    return make_app(f"pdkv {instance.info.role}", routes, api.close)


def kv_header(choices: Sequence[Choice]) -> dict[str, str]:
    """What became of the KV that these choices were promised, the worst of it; empty when they were promised none."""
    outcomes = {choice.kv for choice in choices}
    return next(({KV_HEADER: kv.value} for kv in Kv if kv in outcomes), {})


class InstanceApi:
    """The handlers. A request is parsed, turned into choices, submitted, and answered whole or as a stream."""

    def __init__(
        self, instance: ServedInstance, telemetry: Telemetry, model_name: str, limits: QueueLimits = NO_LIMITS
    ) -> None:
        self.frontend = Frontend(instance, telemetry, limits)
        self._instance = instance
        self._telemetry = telemetry
        self._model_name = model_name
        self._created = int(time.time())

    async def close(self) -> None:
        """Stop what the front end runs beside the event loop."""
        self.frontend.close()

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        return await self._answer(request, chat=False)

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        return await self._answer(request, chat=True)

    async def models(self, _request: Request) -> Response:
        """``GET /v1/models``: the one model served."""
        model = {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "pdkv",
            "root": self._instance.info.model_name,
            "max_model_len": self._instance.info.max_model_len,
        }
        return JsonResponse({"object": "list", "data": [model]})

    async def health(self, _request: Request) -> Response:
        """``GET /health``: 200, or 503 with the reason when the engine has stopped.

        ``engine_id`` and ``side_channel`` are what push mode tells a decode instance before a prefill has ended.
        The status is ``degraded``, with the reason, for a minute after a peer refused to hand its KV over.
        """
        if (failure := self._instance.failed) is not None:
            reason = str(failure) or type(failure).__name__
            return JsonResponse({"status": "failed", "reason": reason}, status_code=503)
        info, transfer = self._instance.info, self._instance.stats().transfer
        body = {
            "status": "ok",
            "role": info.role,
            "engine_id": info.engine_id,
            "side_channel": {"host": info.side_channel_host, "port": info.side_channel_port},
        }
        if transfer.refused_ns is not None and time.monotonic_ns() - transfer.refused_ns < _REFUSAL_SHOWN_NS:
            body |= {"status": "degraded", "reason": transfer.refused_because}
        return JsonResponse(body)

    async def metrics(self, _request: Request) -> Response:
        """``GET /metrics`` in Prometheus' text format."""
        return Response(self._telemetry.render(self._instance), media_type=CONTENT_TYPE)

    async def memory(self, _request: Request) -> Response:
        """``GET /debug/memory``."""
        report = memory_report(self._instance.info, self._instance.memory(), time.monotonic_ns())
        return JsonResponse({"instances": [report]})

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        request_id = request_id_of(request)
        headers = {"x-request-id": request_id}
        try:
            body = parse_json(await read_body(request))
            return await self._generate(request, body, chat=chat, request_id=request_id, headers=headers)
        except (ApiError, PdkvError) as error:
            return error_response(error, headers)

    async def _generate(
        self, request: Request, body: dict[str, Any], *, chat: bool, request_id: str, headers: dict[str, str]
    ) -> Response:
        self.frontend.check_alive()
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"
        try:
            prompts, generation = await self._parse(body, chat=chat)
            generation = await self.frontend.with_addresses(generation)
            choices = self.frontend.plan(prompts, generation, answer_id)
        except Exception:
            await self.frontend.release(offers_in(body.get("kv_transfer_params")))
            raise
        self.frontend.submit(choices)
        answer = Answer(
            chat=chat,
            answer_id=answer_id,
            model=self._model_name,
            choices=choices,
            tokenizer=self._instance.model.tokenizer,
            want_logprobs=generation.logprobs,
            want_token_ids=generation.token_ids,
        )
        deltas = self.frontend.deltas(choices)
        if not generation.stream:
            return await until_disconnect(request.receive, self._whole(answer, deltas, choices, headers))
        # The first delta is awaited before the status line is sent, so that a request that fails at once gets its 5xx.
        first = await until_disconnect(request.receive, anext(deltas))
        body_chunks = self._stream(answer, first, deltas, generation)
        return StreamResponse(body_chunks, headers=headers | kv_header(choices), cleanup=deltas.aclose)

    async def _parse(self, body: dict[str, Any], *, chat: bool) -> tuple[list[Int32Array], Generation]:
        refuse_unsupported(body, CHAT if chat else COMPLETIONS)
        if chat:
            chat_request = parse_request(ChatRequest, body)
            self._check_model(chat_request.model)
            generation = chat_generation(chat_request)
        else:
            completion = parse_request(CompletionRequest, body)
            self._check_model(completion.model)
            texts = prompts_of(completion)
            generation = completion_generation(completion, len(texts))
        if generation.stream and any(transfer.produce for transfer in generation.transfers):
            raise ApiError(
                400,
                "stream: a request with do_remote_decode is answered whole (its kv_transfer_params are in the body); "
                "send stream = false",
                param="stream",
                code="unsupported_value",
            )
        if chat:
            return [await self.frontend.prompts.encode_chat(chat_request)], generation
        return [await self.frontend.prompts.encode(text) for text in texts], generation

    def _check_model(self, name: str | None) -> None:
        served = {self._model_name, self._instance.info.model_name}
        if name is not None and name not in served:
            raise ApiError(
                404,
                f"the model {quoted(name)} is not served here; this instance serves {self._model_name!r} "
                "(see /v1/models)",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )

    async def _whole(
        self,
        answer: Answer,
        deltas: AsyncGenerator[tuple[Choice, Delta]],
        choices: Sequence[Choice],
        headers: dict[str, str],
    ) -> Response:
        async with aclosing(deltas):
            async for choice, delta in deltas:
                answer.add(choice, delta)
        return JsonResponse(answer.body(self._transfer_params(answer, choices)), headers=headers | kv_header(choices))

    def _transfer_params(self, answer: Answer, choices: Sequence[Choice]) -> Any:
        """One object for one prompt, a list for several, ``None`` when nothing was kept."""
        params = []
        for choice in choices:
            if choice.request.produce or choice.request.keep_turn:
                finished = answer.results[choice.index].finished
                assert finished is not None
                params.append(self.frontend.transfer_params(choice, finished))
        if not any(params):
            return None
        return params[0] if len({choice.prompt_index for choice in choices}) == 1 else params

    async def _stream(
        self,
        answer: Answer,
        first: tuple[Choice, Delta],
        deltas: AsyncGenerator[tuple[Choice, Delta]],
        generation: Generation,
    ) -> AsyncGenerator[bytes]:
        for chunk in answer.first_chunks():
            yield sse(chunk)
        try:
            yield self._chunk(answer, *first, generation)
            async for choice, delta in deltas:
                yield self._chunk(answer, choice, delta, generation)
            if generation.include_usage:
                yield sse(answer.usage_chunk())
        except Exception as error:  # the status line is gone: an event is the one way left to say it
            if not isinstance(error, ApiError | PdkvError):
                LOG.exception("a stream breaks off")
            yield sse(as_api_error(error).body())
        yield SSE_DONE

    def _chunk(self, answer: Answer, choice: Choice, delta: Delta, generation: Generation) -> bytes:
        """A choice's last chunk has its params, if its KV was kept for the next turn."""
        chunk = answer.chunk(choice, delta, with_usage=generation.continuous_usage)
        if delta.finished is not None and (params := self.frontend.transfer_params(choice, delta.finished)):
            chunk["kv_transfer_params"] = params
        return sse(chunk)
