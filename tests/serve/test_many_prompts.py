"""A completion of several prompts through the router: one P leg and one D leg each, one answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from tests.serve.asgi import Exchange, client_of, eventually, sse_events
from tests.serve.client import app_of
from tests.serve.client import post as ask
from tests.serve.fake import FakeInstance
from tests.serve.network import Backend, decode, post, prefill, router

from pdkv.serve.many_prompts import AT_ONCE
from pdkv.serve.options import RouterOptions
from pdkv.serve.router import create_router_app

PATH = "/v1/completions"


def answer(body: dict[str, Any]) -> tuple[int, bytes, str]:
    """What a decode instance says to one prompt: itself, n times."""
    n = body.get("n") or 1
    usage = {
        "prompt_tokens": len(body["prompt"]), "completion_tokens": n, "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip
    head = {"id": "cmpl-sub", "created": 5, "model": "m"}
    choices = [{"index": i, "text": f"{body['prompt']}{i}", "finish_reason": "length"} for i in range(n)]
    if not body.get("stream"):
        return 200, json.dumps(head | {"choices": choices, "usage": usage}).encode(), "application/json"
    chunks: list[dict[str, Any]] = [head | {"choices": [choice]} for choice in choices]
    if (body.get("stream_options") or {}).get("continuous_usage_stats"):
        chunks = [chunk | {"usage": usage} for chunk in chunks]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append(head | {"choices": [], "usage": usage})
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return 200, f"{events}data: [DONE]\n\n".encode(), "text/event-stream"


def test_each_prompt_has_its_own_legs_and_the_choices_stand_in_order() -> None:
    p, d = prefill(), Backend(answer)
    body = {"prompt": ["a", "bb", "ccc"], "n": 2, "max_tokens": 4}
    response = post(router([p], [d]), body, headers={"x-request-id": "id-7"})
    assert response.status_code == 200
    assert sorted(leg["prompt"] for leg in p.seen) == ["a", "bb", "ccc"]
    assert sorted(leg["prompt"] for leg in d.seen) == ["a", "bb", "ccc"]
    assert all(leg["kv_transfer_params"] for leg in d.seen)
    assert len({headers["x-request-id"] for headers in d.headers}) == 3
    merged = response.json()
    assert merged["id"] == "cmpl-id-7"
    assert response.headers["x-request-id"] == "id-7"
    assert response.headers["x-pdkv-prefill"] == "remote"
    assert [choice["index"] for choice in merged["choices"]] == list(range(6))
    assert [choice["text"] for choice in merged["choices"]] == ["a0", "a1", "bb0", "bb1", "ccc0", "ccc1"]
    assert merged["usage"] == {
        "prompt_tokens": 6, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 3},
    }  # fmt: skip


def test_prompts_of_token_ids_are_split_and_a_single_one_is_not() -> None:
    d = Backend(lambda body: answer(body | {"prompt": str(body["prompt"])}))
    response = post(router([prefill()], [d]), {"prompt": [[1, 2], [3]]})
    assert [choice["text"] for choice in response.json()["choices"]] == ["[1, 2]0", "[3]0"]
    for alone in ([1, 2], ["x"], [[1, 2]], "x"):
        d.seen.clear()
        post(router([prefill()], [d]), {"prompt": alone})
        assert [leg["prompt"] for leg in d.seen] == [alone]


def test_streams_are_interleaved_into_one() -> None:
    options = {"include_usage": True}
    body = {"prompt": ["a", "bb", "ccc"], "n": 2, "stream": True, "stream_options": options}
    response = post(router([prefill()], [Backend(answer)]), body, headers={"x-request-id": "id-7"})
    *chunks, usage, end = sse_events(response.content)
    assert end == "[DONE]"
    texts = {chunk["choices"][0]["index"]: chunk["choices"][0]["text"] for chunk in chunks}
    assert texts == {0: "a0", 1: "a1", 2: "bb0", 3: "bb1", 4: "ccc0", 5: "ccc1"}
    assert {chunk["id"] for chunk in (*chunks, usage)} == {"cmpl-id-7"}
    assert usage["choices"] == []
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (6, 6)


def test_usage_is_streamed_only_when_asked_for_and_counts_all_prompts() -> None:
    body = {"prompt": ["a", "bb"], "stream": True}
    assert all("usage" not in chunk for chunk in sse_events(post(router([prefill()], [Backend(answer)]), body).content))
    body["stream_options"] = {"continuous_usage_stats": True}
    *chunks, _ = sse_events(post(router([prefill()], [Backend(answer)]), body).content)
    assert chunks[-1]["usage"]["prompt_tokens"] == 3


def test_the_first_error_is_the_answer_and_the_rest_is_cancelled() -> None:
    async def go() -> None:
        gate = asyncio.Event()

        class Choosy(Backend):
            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                message = await receive()
                bad = b'"bad"' in message.get("body", b"")
                self.gate = None if bad else gate

                async def again() -> Any:
                    return message

                await super().__call__(scope, again, send)

        def refuse(_body: dict[str, Any]) -> tuple[int, bytes, str]:
            return 400, b'{"error":  {"message": "no"}}', "application/json"

        for stream in (False, True):
            d = Choosy(refuse)
            body = {"prompt": ["x", "bad", "y"], "stream": stream}
            exchange = Exchange(router([prefill()], [d]), PATH, body).start()
            assert exchange.task is not None
            await asyncio.wait_for(exchange.task, 10)
            assert (exchange.status, b"".join(exchange.chunks)) == (400, b'{"error":  {"message": "no"}}')
            assert d.cancelled == 2

    asyncio.run(go())


def test_a_stream_that_fails_later_says_so_and_ends() -> None:
    d = Backend(lambda body: answer(body) if body["prompt"] == "a" else (400, b'{"error": {"message": "no"}}', "x/y"))
    response = post(router([prefill()], [d]), {"prompt": ["a", "b"], "stream": True})
    assert response.status_code == 200
    *_, error, end = sse_events(response.content)
    assert (error, end) == ({"error": {"message": "no"}}, "[DONE]")


def test_a_decode_that_breaks_off_is_an_error_event() -> None:
    response = post(router([prefill()], [Backend(answer, cut_after=21)]), {"prompt": ["a", "b"], "stream": True})
    error, end = sse_events(response.content)
    assert "broke off" in error["error"]["message"]
    assert end == "[DONE]"


def test_a_client_that_leaves_cancels_every_prompt() -> None:
    async def go() -> None:
        for stream in (False, True):
            d = Backend(answer, gate=asyncio.Event())
            exchange = Exchange(router([prefill()], [d]), PATH, {"prompt": ["a"] * 5, "stream": stream}).start()
            await eventually(lambda d=d: len(d.seen) == 5)
            exchange.leave()
            assert exchange.task is not None
            await asyncio.wait_for(exchange.task, 10)
            assert d.cancelled == 5

    asyncio.run(go())


def test_a_few_prompts_at_a_time() -> None:
    async def go() -> None:
        p = prefill(gate=asyncio.Event())
        exchange = Exchange(router([p], [Backend(answer)]), PATH, {"prompt": ["a"] * (AT_ONCE + 4)}).start()
        await eventually(lambda: len(p.seen) == AT_ONCE)
        await asyncio.sleep(0.05)
        assert len(p.seen) == AT_ONCE
        assert p.gate is not None
        p.gate.set()
        assert exchange.task is not None
        await asyncio.wait_for(exchange.task, 10)
        assert (exchange.status, len(p.seen)) == (200, AT_ONCE + 4)

    asyncio.run(go())


def test_more_answers_than_one_request_may_ask_for_reach_nobody() -> None:
    p = prefill()
    response = post(router([p], [decode()]), {"prompt": ["a"] * 65, "n": 2})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert not p.seen


@asynccontextmanager
async def served(*instances: FakeInstance) -> AsyncIterator[httpx.AsyncClient]:
    """A router whose instances are the API over fakes: the first prefills, the second decodes."""
    mounts = {f"all://{name}": httpx.ASGITransport(app=app_of(one)) for name, one in zip("pd", instances, strict=True)}
    options = RouterOptions(prefill=("http://p",), decode=("http://d",))
    async with client_of(create_router_app(options, httpx.AsyncClient(mounts=mounts))) as client:
        yield client


def test_an_answer_has_the_shape_of_one_instance_alone() -> None:
    async def go() -> None:
        def script(request: Any) -> list[int]:
            return [int(request.prompt[0]), int(request.prompt[0])]

        p, d, alone = (FakeInstance(script, engine_id=name) for name in ("p", "d", "alone"))
        body = {"prompt": ["a", "bb"], "n": 2, "max_tokens": 2, "logprobs": 1}
        async with served(p, d) as client, client_of(app_of(alone)) as direct:
            through, by_itself = [(await one.post(PATH, json=body)).json() for one in (client, direct)]
        for answer in (through, by_itself):
            del answer["id"], answer["created"]
            answer["usage"].pop("prompt_tokens_details")  # the fake's prompts from a peer count as cached
        assert through == by_itself

    asyncio.run(go())


def test_an_instance_knows_which_prompts_it_answers_together() -> None:
    """So that none of them waits for the others' leases (core: `NewRequest.answer_id`)."""
    instance = FakeInstance()
    for prompt in (["a", "b"], ["c", "d"], ["e"]):
        ask(instance, PATH, {"prompt": prompt, "kv_transfer_params": {"do_remote_decode": True}})
    first, second, third, fourth, alone = [request.answer_id for request in instance.requests]
    assert first == second != third == fourth
    assert alone is None
