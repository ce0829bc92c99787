"""A client that goes away before it has its answer: its requests are aborted, and no lease is kept for it."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.serve.asgi import Exchange, eventually
from tests.serve.client import COMPLETIONS, GOOD_PARAMS, app_of, ask, post
from tests.serve.fake import FakeInstance

from pdkv.core.events import FinishReason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_before", [0, 4])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_has_its_requests_aborted(stream: bool, tokens_before: int, n: int) -> None:
    instance = FakeInstance()
    instance.gate, instance.gate_at = threading.Event(), tokens_before

    async def go() -> None:
        exchange = Exchange(app_of(instance), COMPLETIONS, ask(stream=stream, n=n)).start()
        await eventually(lambda: len(instance.requests) == n)
        if stream and tokens_before:
            await eventually(lambda: len(exchange.chunks) == n * tokens_before)
        assert not instance.aborts
        exchange.leave()
        assert exchange.task is not None
        await asyncio.wait_for(exchange.task, 10)

    asyncio.run(go())
    assert sorted(instance.aborts, key=str) == sorted(
        [(r.request_id, FinishReason.ABORT) for r in instance.requests], key=str
    )


def test_a_client_that_leaves_one_prefill_too_early_gets_no_lease_kept() -> None:
    """Of the prompts that it does not wait for, some have been prefilled and leased already."""
    instance = FakeInstance(lambda request: [1] if request.prompt[0] == instance.tokens("a")[0] else [1, 2])
    instance.gate, instance.gate_at = threading.Event(), 1
    body = ask(prompt=["a", "b"], kv_transfer_params={"do_remote_decode": True})
    ended: list[str] = []

    async def go() -> None:
        app = app_of(instance)
        heard = instance.on_events
        instance.on_events = lambda events: (heard(events), ended.extend(type(e).__name__ for e in events))[0]
        exchange = Exchange(app, COMPLETIONS, body).start()
        await eventually(lambda: "Finished" in ended)
        await asyncio.sleep(0.05)
        assert not instance.aborts
        exchange.leave()
        assert exchange.task is not None
        await asyncio.wait_for(exchange.task, 10)

    asyncio.run(go())
    assert sorted(i for i, _ in instance.aborts) == sorted(r.request_id for r in instance.requests)


def test_a_delivered_prefill_is_not_aborted() -> None:
    instance = FakeInstance()
    assert post(instance, COMPLETIONS, ask(prompt=["a", "b"], kv_transfer_params={"do_remote_decode": True})).is_success
    assert not instance.aborts


def test_a_client_that_leaves_while_siblings_wait() -> None:
    instance = FakeInstance()
    instance.gate = threading.Event()

    async def go() -> None:
        exchange = Exchange(app_of(instance), COMPLETIONS, ask(n=2, kv_transfer_params=GOOD_PARAMS)).start()
        await eventually(lambda: instance.requests)
        exchange.leave()
        assert exchange.task is not None
        await asyncio.wait_for(exchange.task, 10)

    asyncio.run(go())
    assert len(instance.requests) == 1
    assert len(instance.aborts) == 1
