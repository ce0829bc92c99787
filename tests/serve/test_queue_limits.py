"""``--max-num-queued-reqs`` and ``--max-num-queued-tokens``: HTTP 503 where the queue is full (vLLM's admission)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.core.helpers import new_request
from tests.serve.asgi import Exchange, client_of, eventually
from tests.serve.client import COMPLETIONS, GOOD_PARAMS, ask
from tests.serve.fake import FakeInstance

from pdkv.errors import ConfigError
from pdkv.serve.api import create_app
from pdkv.serve.openai import ApiError
from pdkv.serve.options import InstanceOptions
from pdkv.serve.queue_limits import QueueGate, QueueLimits
from pdkv.serve.telemetry import Telemetry


class Rejected(list[str]):
    """What telemetry is told."""

    def rejected(self, limit: str) -> None:
        self.append(limit)


def refusal(gate: QueueGate, requests: int = 1) -> str | None:
    """The answer's text, or ``None`` where it may come in."""
    try:
        gate.check(requests)
    except ApiError as error:
        assert (error.status, error.code) == (503, "queue_full")
        return str(error)
    return None


def test_requests_count_until_they_end() -> None:
    told = Rejected()
    gate = QueueGate(QueueLimits(requests=3), told)
    one, two = new_request("a", 5), new_request("b", 5)
    gate.enter(one)
    gate.enter(two)
    assert refusal(gate) is None
    assert "2 requests wait or run here and 2 more were asked for; at most 3" in (refusal(gate, 2) or "")
    gate.first_token(one)
    assert refusal(gate, 2) is not None, "one that decodes counts as well"
    gate.leave(one)
    gate.leave(one)
    assert refusal(gate, 2) is None
    assert told == ["max_num_queued_reqs"] * 2


def test_prompt_tokens_count_until_the_first_token() -> None:
    told = Rejected()
    gate = QueueGate(QueueLimits(tokens=10), told)
    one, two = new_request("a", 9), new_request("b", 30)
    assert refusal(gate, 50) is None
    gate.enter(one)
    assert refusal(gate) is None, "the limit is not reached, however long the next one is"
    gate.enter(two)
    assert "39 prompt tokens" in (refusal(gate) or "")
    gate.first_token(two)
    assert refusal(gate) is None
    gate.leave(two)
    gate.first_token(two)
    gate.enter(new_request("c", 1))
    assert refusal(gate) is not None
    assert told == ["max_num_queued_tokens"] * 2
    assert refusal(QueueGate(QueueLimits(requests=0), told)) is not None


def app_with(instance: FakeInstance, limits: QueueLimits) -> Any:
    telemetry = Telemetry(instance.info.model_name)
    instance.on_events = telemetry.on_events
    return create_app(instance, telemetry, limits=limits)


def test_a_full_queue_answers_503_gives_the_grant_back_and_opens_again() -> None:
    instance = FakeInstance()
    instance.gate = threading.Event()

    async def go() -> None:
        app = app_with(instance, QueueLimits(requests=2))
        first = Exchange(app, COMPLETIONS, ask(n=2, stream=True)).start()
        await eventually(lambda: len(instance.requests) == 2)
        async with client_of(app) as client:
            refused = await client.post(COMPLETIONS, json=ask(kv_transfer_params=GOOD_PARAMS))
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "queue_full"
            assert "--max-num-queued-reqs" in refused.json()["error"]["message"]
            assert len(instance.requests) == 2
            assert len(instance.released) == 1, "the prefill instance is told that its KV is not needed"
            metrics = (await client.get("/metrics")).text
            assert 'vllm:admission_rejections_total{engine="0",model_name="tiny",reason="max_num_queued_reqs"} 1.0' in (
                metrics
            )
            assert instance.gate is not None
            instance.gate.set()
            assert first.task is not None
            await first.task
            assert (await client.post(COMPLETIONS, json=ask())).status_code == 200

    asyncio.run(go())


def test_who_leaves_makes_room() -> None:
    instance = FakeInstance()
    instance.gate = threading.Event()

    async def go() -> None:
        app = app_with(instance, QueueLimits(tokens=1))
        first = Exchange(app, COMPLETIONS, ask(stream=True)).start()
        await eventually(lambda: len(instance.requests) == 1)
        async with client_of(app) as client:
            assert (await client.post(COMPLETIONS, json=ask())).status_code == 503
            first.leave()
            assert first.task is not None
            await first.task
            assert (await client.post(COMPLETIONS, json=ask())).status_code == 200

    asyncio.run(go())


@pytest.mark.parametrize("option", ["max_num_queued_reqs", "max_num_queued_tokens"])
def test_a_negative_limit_is_refused(option: str) -> None:
    flag = "--" + option.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} -1"):
        InstanceOptions(role="decode", model="smollm2", **{option: -1})
