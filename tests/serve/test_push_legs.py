"""The router in push mode: both legs at once, and what becomes of one when the other fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from tests.serve.asgi import Exchange, client_of, eventually
from tests.serve.network import PARAMS, Backend, as_json, decode, post, prefill
from tests.serve.network import router as any_router

from pdkv.serve.params import parse_params


def health(engine_id: str = "engine-p", port: int = 5600) -> dict[str, tuple[int, bytes]]:
    said = {"status": "ok", "engine_id": engine_id, "side_channel": {"host": "10.0.0.5", "port": port}}
    return {"/health": (200, json.dumps(said).encode())}


def answering(engine_id: str = "engine-p", **options: Any) -> Backend:
    params = {**PARAMS, "remote_engine_id": engine_id}
    reply = as_json({"id": "p", "choices": [], "kv_transfer_params": params})
    return Backend(reply, pages=options.pop("pages", health()), **options)


def router(p: list[Backend], d: list[Backend], **options: Any) -> Any:
    return any_router(p, d, transfer_mode="push", **options)


def ids(leg: dict[str, Any]) -> str:
    return str(leg["kv_transfer_params"]["transfer_id"])


def test_both_legs_begin_at_once_under_one_id() -> None:
    async def go() -> None:
        p, d = answering(gate=asyncio.Event()), decode(gate=asyncio.Event())
        body = {"prompt": "x", "n": 2, "kv_transfer_params": {"do_remote_prefill": True, "of": "the client"}}
        exchange = Exchange(router([p], [d]), "/v1/completions", body).start()
        await eventually(lambda: p.seen and d.seen)
        (to_p,), (to_d,) = p.seen, d.seen
        assert parse_params(to_p["kv_transfer_params"]).transfer_id == ids(to_p) == ids(to_d)
        awaited = parse_params(to_d["kv_transfer_params"]).awaited
        assert awaited is not None
        assert (awaited.peer.engine_id, awaited.peer.host, awaited.peer.port) == ("engine-p", "10.0.0.5", 5600)
        assert (to_p["max_tokens"], to_p["stream"], "n" in to_p, to_d["n"]) == (1, False, False, 2)
        assert p.headers[0]["x-request-id"] == d.headers[0]["x-request-id"]
        p.gate.set()  # type: ignore[union-attr]
        await asyncio.sleep(0.05)
        assert exchange.status is None
        d.gate.set()  # type: ignore[union-attr]
        await asyncio.wait_for(exchange.task, 10)  # type: ignore[arg-type]
        assert (exchange.status, b"".join(exchange.chunks)) == (200, b'{"ok": 1}')

    asyncio.run(go())


def answered(app: Any, p: Backend, d: Backend, body: dict[str, Any]) -> Exchange:
    """The answer to ``body``; ``d`` does not answer before ``p`` was asked too."""

    async def go() -> Exchange:
        d.gate, before = asyncio.Event(), len(p.seen)
        exchange = Exchange(app, "/v1/completions", body).start()
        await eventually(lambda: len(p.seen) > before)
        d.gate.set()
        await asyncio.wait_for(exchange.task, 10)  # type: ignore[arg-type]
        return exchange

    return asyncio.run(go())


def test_ids_are_new_for_every_request() -> None:
    p, d = answering(), decode()
    for _ in range(2):
        assert answered(router([p], [d]), p, d, {"prompt": "x"}).status == 200
    assert [ids(leg) for leg in p.seen] == [ids(leg) for leg in d.seen]
    assert len({*map(ids, d.seen)}) == 2
    assert all(len(ids(leg)) == 32 for leg in d.seen)


def test_an_answer_of_d_ends_the_leg_of_p() -> None:
    """D has computed or found the prompt itself: what P still computes is of no use to anybody."""

    async def go() -> None:
        p, d = answering(gate=asyncio.Event()), decode(gate=asyncio.Event())
        exchange = Exchange(router([p], [d]), "/v1/completions", {"prompt": "x", "stream": True}).start()
        await eventually(lambda: p.seen and d.seen)
        d.gate.set()  # type: ignore[union-attr]
        await asyncio.wait_for(exchange.task, 10)  # type: ignore[arg-type]
        assert exchange.status == 200
        await eventually(lambda: p.cancelled)

    asyncio.run(go())


def test_a_client_that_leaves_cancels_both() -> None:
    async def go() -> None:
        p, d = answering(gate=asyncio.Event()), decode(gate=asyncio.Event())
        app = router([p], [d])
        exchange = Exchange(app, "/v1/completions", {"prompt": "x"}).start()
        await eventually(lambda: p.seen and d.seen)
        assert await in_flight(app) == {"prefill-0": 1, "decode-0": 1}
        exchange.leave()
        await asyncio.wait_for(exchange.task, 10)  # type: ignore[arg-type]
        await eventually(lambda: p.cancelled and d.cancelled)
        assert await in_flight(app) == {"prefill-0": 0, "decode-0": 0}

    asyncio.run(go())


async def in_flight(app: Any) -> dict[str, int]:
    """As drains see it."""
    transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = (await client.get("/admin/instances")).json()
    return {one["instance"]: one["in_flight"] for one in answer["instances"]}


@pytest.mark.parametrize("status", [400, 404, 413, 500])
def test_a_refusal_of_p_is_passed_on_and_ends_the_leg_of_d(status: int) -> None:
    async def go() -> None:
        p, d = Backend(as_json({"error": {"message": "no"}}, status), pages=health()), decode(gate=asyncio.Event())
        exchange = Exchange(router([p], [d]), "/v1/completions", {"prompt": "x"}).start()
        await asyncio.wait_for(exchange.task, 10)  # type: ignore[arg-type]
        assert (exchange.status, b"".join(exchange.chunks)) == (status, b'{"error": {"message": "no"}}')
        assert d.cancelled == len(d.seen) == 1

    asyncio.run(go())


def failing(how: str) -> Backend:
    """A prefill instance that is asked and then gives nothing."""
    if how == "its engine has stopped":
        return Backend(as_json({"error": {"message": "stopped"}}, 503), pages=health())
    if how == "dies":
        return answering(cut_after=0)
    if how == "unreachable":
        return answering(down=True)
    return answering(gate=asyncio.Event(), hung=True)


FAILURES = ["its engine has stopped", "dies", "unreachable", "silent"]


@pytest.mark.parametrize("how", FAILURES)
def test_when_p_fails_the_next_one_is_tried_under_a_new_id(how: str) -> None:
    async def go() -> None:
        first, second = failing(how), answering("engine-q", pages=health("engine-q", 5700))
        d = decode(gate=asyncio.Event())
        app = router([first, second], [d], instance_timeout_s=0.3)
        # the first one in turn; a hung one has said where it is before it hung
        if how == "silent":
            first.hung = False
            exchange = Exchange(app, "/v1/completions", {"prompt": "x"}).start()
            await eventually(lambda: first.seen)
            first.hung = True
        else:
            exchange = Exchange(app, "/v1/completions", {"prompt": "x"}).start()
        await eventually(lambda: second.seen and d.seen and ids(d.seen[-1]) == ids(second.seen[0]))
        d.gate.set()  # type: ignore[union-attr]
        await asyncio.wait_for(exchange.task, 10)  # type: ignore[arg-type]
        assert exchange.status == 200
        if how != "unreachable":  # then nobody knew where it is, and D was not asked
            assert d.cancelled == 1
            assert [leg["kv_transfer_params"]["remote_engine_id"] for leg in d.seen] == ["engine-p", "engine-q"]
            assert ids(d.seen[0]) != ids(d.seen[1])

    asyncio.run(go())


@pytest.mark.parametrize("how", FAILURES[:3])
def test_when_every_p_fails_decode_prefills_itself_or_it_is_said(how: str) -> None:
    d = decode()
    d.reply = lambda body: (200 if "kv_transfer_params" not in body else 418, b"{}", "application/json")
    if how == "unreachable":
        answer = post(router([failing(how)], [d]), {"prompt": "x"})
        assert (answer.status_code, answer.headers["x-pdkv-prefill"]) == (200, "local")
        assert "kv_transfer_params" not in d.seen[-1]

    async def go(fallback: str) -> Exchange:
        waits = decode(gate=asyncio.Event())
        exchange = Exchange(
            router([failing(how)], [waits], prefill_fallback=fallback), "/v1/completions", {"prompt": "x"}
        ).start()
        if fallback == "local":
            await eventually(lambda: waits.seen and "kv_transfer_params" not in waits.seen[-1])
            waits.gate.set()  # type: ignore[union-attr]
        await asyncio.wait_for(exchange.task, 10)  # type: ignore[arg-type]
        return exchange

    assert asyncio.run(go("local")).status == 200
    refused = asyncio.run(go("fail"))
    assert refused.status == 503
    assert b"prefill_unavailable" in b"".join(refused.chunks)


def test_a_p_that_was_restarted_meanwhile_is_read_from_by_its_own_params() -> None:
    """D was told of a life of P that is no more, and would wait in vain."""

    async def go() -> None:
        p, d = answering("engine-p-again"), decode(gate=asyncio.Event())
        exchange = Exchange(router([p], [d]), "/v1/completions", {"prompt": "x"}).start()
        await eventually(lambda: len(d.seen) == 2)
        assert d.cancelled == 1
        assert d.seen[1]["kv_transfer_params"] == {**PARAMS, "remote_engine_id": "engine-p-again"}
        d.gate.set()  # type: ignore[union-attr]
        await asyncio.wait_for(exchange.task, 10)  # type: ignore[arg-type]
        assert exchange.status == 200

    asyncio.run(go())


def test_a_p_that_kept_nothing_is_no_failure() -> None:
    """D has told it that it needs nothing, or is told by P itself."""

    async def go() -> None:
        p, d = Backend(as_json({"id": "p", "choices": []}), pages=health()), decode(gate=asyncio.Event())
        exchange = Exchange(router([p], [d]), "/v1/completions", {"prompt": "x"}).start()
        await eventually(lambda: p.seen and d.seen)
        await asyncio.sleep(0.05)
        assert not d.cancelled
        d.gate.set()  # type: ignore[union-attr]
        await asyncio.wait_for(exchange.task, 10)  # type: ignore[arg-type]
        assert exchange.status == 200

    asyncio.run(go())


def test_a_decode_instance_that_fails_is_replaced_under_the_same_id() -> None:
    p, down, d = answering(), Backend(as_json({"error": {"message": "stopped"}}, 503)), decode()
    assert answered(router([p], [down, d]), p, d, {"prompt": "x"}).status == 200
    assert ids(down.seen[0]) == ids(d.seen[0]) == ids(p.seen[0])
    gone = post(router([answering()], [decode(down=True)]), {"prompt": "x"})
    assert gone.json()["error"]["code"] == "decode_unavailable"


def test_an_instance_that_does_not_say_where_it_is_cannot_push() -> None:
    d = decode()
    answer = post(router([prefill()], [d]), {"prompt": "x"})
    assert (answer.status_code, answer.headers["x-pdkv-prefill"]) == (200, "local")
    stopped = prefill(pages={"/health": (503, b'{"status": "failed", "reason": "no memory"}')})
    refused = post(router([stopped], [d], prefill_fallback="fail"), {"prompt": "x"})
    assert "/health answers with HTTP 503" in refused.json()["error"]["message"]
    refused = post(router([prefill()], [d], prefill_fallback="fail"), {"prompt": "x"})
    assert "--transfer-mode pull" in refused.json()["error"]["message"]


def test_it_is_learned_within_a_second_that_p_was_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdkv.serve.push_legs._ASK_EVERY_S", 0.01)

    async def go() -> None:
        p, d = answering(), decode()
        app = router([p], [d])
        async with app.router.lifespan_context(app), client_of(app) as client:
            await client.post("/v1/completions", json={"prompt": "x"})
            p.pages = health("engine-p-again", 5700)
            await asyncio.sleep(0.2)
            await client.post("/v1/completions", json={"prompt": "x"})
        told = [
            (leg["kv_transfer_params"]["remote_engine_id"], leg["kv_transfer_params"]["remote_port"]) for leg in d.seen
        ]
        assert told == [("engine-p", 5600), ("engine-p-again", 5700)]

    asyncio.run(go())
