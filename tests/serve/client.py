"""One request to the API of a fake instance."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from tests.serve.asgi import client_of
from tests.serve.fake import GRANT, FakeInstance

from pdkv.serve.api import create_app
from pdkv.serve.params import grant_to_params
from pdkv.serve.telemetry import Telemetry

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD_PARAMS = grant_to_params(GRANT, engine_id="p-1", request_id="r", host="127.0.0.1", port=5600, tp_size=1)


def app_of(instance: FakeInstance) -> Any:
    telemetry = Telemetry(instance.info.model_name)
    instance.on_events = telemetry.on_events
    return create_app(instance, telemetry)


def post(instance: FakeInstance, path: str, body: Any, **options: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with client_of(app_of(instance)) as client:
            if isinstance(body, bytes):
                return await client.post(path, content=body, **options)
            return await client.post(path, json=body, **options)

    return asyncio.run(go())


def get(instance: FakeInstance, path: str) -> httpx.Response:
    async def go() -> httpx.Response:
        async with client_of(app_of(instance)) as client:
            return await client.get(path)

    return asyncio.run(go())


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Hi", "max_tokens": 11, **more}
