from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest
from tests.serve.asgi import Exchange, client_of, eventually, sse_events
from tests.serve.network import PARAMS, STREAM, Backend, as_json, decode, post, prefill, router

from pdkv.serve.options import RouterOptions
from pdkv.serve.params import PREFILL_LEG
from pdkv.serve.router import create_router_app

# ------------------------------------------------------------------------------------------------------------ two legs


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prefill_first_then_decode_with_its_params(path: str) -> None:
    p, d = prefill(), decode()
    body = {
        "prompt": "x",
        "stream": True,
        "max_tokens": 50,
        "min_tokens": 3,
        "n": 2,
        "stream_options": {"include_usage": True},
    }
    response = post(router([p], [d]), body, path=path, headers={"x-request-id": "id-7", "authorization": "Bearer k"})
    assert response.status_code == 200
    assert response.content == STREAM
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["x-pdkv-prefill"] == "remote"
    assert response.headers["x-request-id"] == "id-7"
    (leg,) = p.seen
    assert leg == {
        "prompt": "x", "stream": False, "max_tokens": 1, "max_completion_tokens": 1, "kv_transfer_params": PREFILL_LEG,
    }  # fmt: skip
    assert d.seen == [body | {"kv_transfer_params": PARAMS}]
    for headers in (*p.headers, *d.headers):
        assert headers["x-request-id"] == "id-7"
        assert headers["authorization"] == "Bearer k"
        assert headers["accept-encoding"] == "identity"


def test_params_of_the_client_are_stripped() -> None:
    p, d = prefill(), decode()
    forged = {"do_remote_prefill": True, "remote_block_ids": [[1]], "mine": 1}
    post(router([p], [d]), {"prompt": "x", "kv_transfer_params": forged})
    assert p.seen[0]["kv_transfer_params"] == PREFILL_LEG
    assert d.seen[0]["kv_transfer_params"] == PARAMS
    p.down = True
    post(router([p], [d]), {"prompt": "x", "kv_transfer_params": forged})
    assert "kv_transfer_params" not in d.seen[1]


@pytest.mark.parametrize("params", ["x", 5, True, [PARAMS, "x"]])
def test_params_that_are_none_are_refused_though_they_would_be_stripped(params: Any) -> None:
    p = prefill()
    error = post(router([p], [decode()]), {"prompt": "x", "kv_transfer_params": params})
    assert error.status_code == 400
    assert error.json()["error"]["param"] == "kv_transfer_params"
    assert not p.seen


def test_what_every_request_meets_is_not_logged_for_each(caplog: pytest.LogCaptureFixture) -> None:
    app = router([prefill(down=True)], [decode()])

    async def go() -> None:
        async with client_of(app) as client:
            for _ in range(20):
                await client.post("/v1/completions", json={"prompt": "x"})

    asyncio.run(go())
    assert 1 <= sum("prefills itself" in record.message for record in caplog.records) <= 5


def test_a_request_without_id_gets_the_same_one_on_both_legs() -> None:
    p, d = prefill(), decode()
    response = post(router([p], [d]), {"prompt": "x"})
    assert p.headers[0]["x-request-id"] == d.headers[0]["x-request-id"] == response.headers["x-request-id"]


def test_instances_take_turns() -> None:
    ps, ds = [prefill(), prefill()], [decode(), decode(), decode()]
    app = router(ps, ds)

    async def go() -> None:
        async with client_of(app) as client:
            for _ in range(6):
                await client.post("/v1/completions", json={"prompt": "x"})

    asyncio.run(go())
    assert [len(b.seen) for b in ps] == [3, 3]
    assert [len(b.seen) for b in ds] == [2, 2, 2]


# -------------------------------------------------------------------------------------------------------------- faults


def test_prefill_down_means_that_decode_prefills_itself() -> None:
    p, d = prefill(down=True), decode()
    response = post(router([p], [d]), {"prompt": "x"})
    assert response.status_code == 200
    assert response.headers["x-pdkv-prefill"] == "local"
    assert d.seen == [{"prompt": "x"}]


def test_prefill_down_without_fallback_is_a_503_that_names_it() -> None:
    response = post(router([prefill(down=True)], [decode()], prefill_fallback="fail"), {"prompt": "x"})
    assert response.status_code == 503
    error = response.json()["error"]
    assert error["code"] == "prefill_unavailable"
    assert "http://p0:1" in error["message"]


def test_another_prefill_is_tried_before_falling_back() -> None:
    ps, d = [prefill(down=True), prefill()], decode()
    response = post(router(ps, [d]), {"prompt": "x"})
    assert response.headers["x-pdkv-prefill"] == "remote"
    assert len(ps[1].seen) == 1


def test_a_prefill_that_dies_while_it_computes_is_like_one_that_is_down() -> None:
    p, d = prefill(cut_after=0), decode()
    response = post(router([p], [d]), {"prompt": "x"})
    assert response.headers["x-pdkv-prefill"] == "local"


def test_a_failed_prefill_engine_is_like_one_that_is_down() -> None:
    p = Backend(as_json({"error": {"message": "the instance has stopped: boom"}}, 503))
    assert post(router([p], [decode()]), {"prompt": "x"}).headers["x-pdkv-prefill"] == "local"
    failed = post(router([p], [decode()], prefill_fallback="fail"), {"prompt": "x"})
    assert "boom" in failed.json()["error"]["message"]


@pytest.mark.parametrize("status", [400, 404, 500])
def test_other_refusals_of_prefill_are_passed_on(status: int) -> None:
    p, d = Backend(as_json({"error": {"message": "no"}}, status)), decode()
    response = post(router([p], [d]), {"prompt": "x"})
    assert response.status_code == status
    assert response.json() == {"error": {"message": "no"}}
    assert not d.seen


def test_a_prefill_without_params_means_local_prefill() -> None:
    p, d = Backend(as_json({"choices": [], "kv_transfer_params": None})), decode()
    assert post(router([p], [d]), {"prompt": "x"}).headers["x-pdkv-prefill"] == "local"
    assert "kv_transfer_params" not in d.seen[0]


def test_a_prefill_that_speaks_no_json_is_a_502() -> None:
    p = Backend(lambda _: (200, b"<html>", "text/html"))
    response = post(router([p], [decode()]), {"prompt": "x"})
    assert response.status_code == 502
    assert "p0" in response.json()["error"]["message"]


def test_decode_down_is_a_503_that_names_it_and_another_is_tried_first() -> None:
    response = post(router([prefill()], [decode(down=True)]), {"prompt": "x"})
    assert response.status_code == 503
    assert "http://d0:1" in response.json()["error"]["message"]
    ds = [decode(down=True), decode()]
    assert post(router([prefill()], ds), {"prompt": "x"}).status_code == 200
    assert ds[1].seen[0]["kv_transfer_params"] == PARAMS


def test_a_prefill_whose_kv_decode_could_not_use_is_not_called_remote() -> None:
    d = decode(says={"x-pdkv-kv": "recomputed"})
    app = router([prefill()], [d])
    response = post(app, {"prompt": "x"})
    assert (response.headers["x-pdkv-prefill"], response.headers["x-pdkv-kv"]) == ("local", "recomputed")
    d.says["x-pdkv-kv"] = "loaded"
    response = post(app, {"prompt": "x"})
    assert (response.headers["x-pdkv-prefill"], response.headers["x-pdkv-kv"]) == ("remote", "loaded")


def test_errors_of_decode_are_passed_on_byte_for_byte() -> None:
    d = Backend(lambda _: (400, b'{"error":  {"message": "bad top_p"}}', "application/json"))
    response = post(router([prefill()], [d]), {"prompt": "x"})
    assert response.status_code == 400
    assert response.content == b'{"error":  {"message": "bad top_p"}}'


def test_decode_that_dies_in_the_middle_of_a_stream_is_told_as_an_event() -> None:
    response = post(router([prefill()], [decode(cut_after=21)]), {"prompt": "x", "stream": True})
    *_, last = response.content.split(b"\n\n")[:-1]
    assert "d0" in json.loads(last[last.rindex(b"data: ") + 6 :])["error"]["message"]
    assert b"[DONE]" not in response.content


@pytest.mark.parametrize(
    "body",
    [
        *(b'{"prompt": ', b"[]", b"", b'{"prompt": "\\ud800"}', b'{"temperature": NaN}', b'{"top_p": 1e999}'),
        *(b'{"seed": 1' + b"0" * 30 + b"}", b'{"seed": ' + b"9" * 5000 + b"}"),
    ],
)
def test_malformed_json_reaches_nobody(body: bytes) -> None:
    p, d = prefill(), decode()
    response = post(router([p], [d]), body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"
    assert not p.seen + d.seen


@pytest.mark.parametrize("waiting_in", ["prefill", "decode"])
def test_a_client_that_leaves_cancels_the_leg_under_way(waiting_in: str) -> None:
    async def go() -> None:
        p, d = prefill(), decode()
        waiting = p if waiting_in == "prefill" else d
        waiting.gate = asyncio.Event()
        exchange = Exchange(router([p], [d]), "/v1/completions", {"prompt": "x", "stream": True}).start()
        await eventually(lambda: waiting.seen)
        exchange.leave()
        assert exchange.task is not None
        await asyncio.wait_for(exchange.task, 10)
        assert waiting.cancelled == 1
        assert len(d.seen) == (waiting_in == "decode")

    asyncio.run(go())


def test_a_decode_whose_engine_has_stopped_is_like_one_that_is_down() -> None:
    stopped = Backend(as_json({"error": {"message": "the instance has stopped: boom"}}, 503))
    ds = [stopped, decode()]
    assert post(router([prefill()], ds), {"prompt": "x"}).content == b'{"ok": 1}'
    assert ds[1].seen[0]["kv_transfer_params"] == PARAMS
    alone = post(router([prefill()], [stopped]), {"prompt": "x"})
    assert alone.status_code == 503
    assert alone.json()["error"]["code"] == "decode_unavailable"
    assert "http://d0:1: the instance has stopped: boom" in alone.json()["error"]["message"]


def test_a_decode_that_dies_before_it_answers_is_replaced_by_the_next() -> None:
    def dies(_body: dict[str, Any]) -> tuple[int, bytes, str]:
        raise httpx.ReadError("")

    ds = [Backend(dies), decode()]
    assert post(router([prefill()], ds), {"prompt": "x"}).content == b'{"ok": 1}'
    alone = post(router([prefill()], [Backend(dies)]), {"prompt": "x"})
    assert alone.status_code == 503
    assert "decode-0 http://d0:1 closed the connection before it answered (ReadError)" in alone.text


# ------------------------------------------------------------------------------------------------------ signs of life


async def asked(app: Any, body: Any) -> Exchange:
    exchange = Exchange(app, "/v1/completions", body).start()
    assert exchange.task is not None
    await asyncio.wait_for(exchange.task, 10)
    return exchange


def test_a_prefill_without_a_sign_of_life_is_given_up_and_at_once_the_next_time() -> None:
    async def go() -> None:
        p, d = prefill(gate=asyncio.Event(), hung=True), decode()
        app = router([p], [d], instance_timeout_s=0.3)
        assert (await asked(app, {"prompt": "x"})).status == 200
        assert p.cancelled == 1, "the hung connection was closed: when P goes on, it drops the request"
        assert "kv_transfer_params" not in d.seen[0]
        p.hung, p.gate = True, None
        await asked(app, {"prompt": "x"})
        assert len(p.seen) == 1, "not even asked: it was silent and still is"
        p.hung = False
        await asked(app, {"prompt": "x"})
        assert len(p.seen) == 2, "it is back"
        assert d.seen[-1]["kv_transfer_params"] == PARAMS

    asyncio.run(go())


def test_a_decode_that_is_started_again_is_given_nothing_before_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of the former instance on its port make the new one take others before its model is loaded."""
    monkeypatch.setattr("pdkv.serve.backends._REST_S", 0.0)
    monkeypatch.setattr("pdkv.serve.backends._QUICK_PROBE_S", 0.05)

    async def go() -> None:
        ds = [decode(down=True), decode()]
        app = router([prefill()], ds, instance_timeout_s=60.0)
        for _ in range(2):
            await asked(app, {"prompt": "x"})
        ds[0].down, ds[0].hung, ds[0].gate = False, True, asyncio.Event()
        for _ in range(2):
            assert (await asked(app, {"prompt": "x"})).status == 200
        assert not ds[0].seen
        ds[0].hung, ds[0].gate = False, None
        for _ in range(2):
            await asked(app, {"prompt": "x"})
        assert ds[0].seen, "it is back"

    asyncio.run(go())


def test_a_hung_prefill_without_fallback_is_a_503_that_says_so() -> None:
    async def go() -> None:
        app = router(
            [prefill(hung=True, gate=asyncio.Event())], [decode()], instance_timeout_s=0.3, prefill_fallback="fail"
        )
        exchange = await asked(app, {"prompt": "x"})
        assert exchange.status == 503
        assert b"http://p0:1 gives no sign of life" in b"".join(exchange.chunks)

    asyncio.run(go())


@pytest.mark.parametrize("waiting_in", ["prefill", "decode"])
def test_an_instance_that_is_only_busy_is_waited_for(waiting_in: str) -> None:
    async def go() -> None:
        p, d = prefill(), decode()
        busy = p if waiting_in == "prefill" else d
        busy.gate = asyncio.Event()
        exchange = Exchange(router([p], [d], instance_timeout_s=0.6), "/v1/completions", {"prompt": "x"}).start()
        await asyncio.sleep(1.5)
        assert exchange.status is None
        busy.gate.set()
        assert exchange.task is not None
        await asyncio.wait_for(exchange.task, 10)
        assert exchange.status == 200
        assert d.seen[0]["kv_transfer_params"] == PARAMS
        assert len(p.seen) == len(d.seen) == 1

    asyncio.run(go())


def test_a_hung_decode_is_replaced_by_the_next() -> None:
    async def go() -> None:
        hung, d = decode(hung=True, gate=asyncio.Event()), decode()
        exchange = await asked(router([prefill()], [hung, d], instance_timeout_s=0.3), {"prompt": "x"})
        assert exchange.status == 200
        assert d.seen[0]["kv_transfer_params"] == PARAMS
        alone = await asked(router([prefill()], [hung], instance_timeout_s=0.3), {"prompt": "x"})
        assert alone.status == 503
        assert b"gives no sign of life" in b"".join(alone.chunks)

    asyncio.run(go())


def test_a_decode_that_hangs_in_the_middle_of_a_stream_is_told_as_an_event() -> None:
    async def go() -> None:
        d = decode(hung=True, stuck_after=21)
        exchange = await asked(router([prefill()], [d], instance_timeout_s=0.3), {"prompt": "x", "stream": True})
        assert exchange.status == 200
        assert b"gives no sign of life" in exchange.chunks[-1]
        json.loads(exchange.chunks[-1].strip().removeprefix(b"data: "))

    asyncio.run(go())


def test_a_port_where_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        response = post(create_router_app(RouterOptions(prefill=(url,), decode=(url,))), {"prompt": "x"})
    assert response.status_code == 503
    assert url in response.json()["error"]["message"]


def test_stream_events_are_well_formed() -> None:
    response = post(router([prefill()], [decode()]), {"prompt": "x", "stream": True})
    assert sse_events(response.content)[-1] == "[DONE]"
