"""What a router says of its instances in one answer: metrics, memory, health, models."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from tests.serve.asgi import client_of, eventually
from tests.serve.network import Network, decode, prefill, router

from pdkv.serve.options import RouterOptions
from pdkv.serve.router import create_router_app


def get(app: Any, path: str) -> httpx.Response:
    async def go() -> httpx.Response:
        async with client_of(app) as client:
            return await client.get(path)

    return asyncio.run(go())


def test_merged_metrics_have_one_family_each_and_name_the_instance() -> None:
    text = b'# HELP vllm:x_total about\n# TYPE vllm:x_total counter\nvllm:x_total{engine="0"} 3.0\n'
    p, d = prefill(pages={"/metrics": (200, text)}), decode(pages={"/metrics": (200, text)})
    merged = get(router([p], [d]), "/metrics").text
    assert merged.count("# TYPE vllm:x_total counter") == 1
    assert 'vllm:x_total{engine="0",instance="prefill-0"} 3.0' in merged
    assert 'vllm:x_total{engine="0",instance="decode-0"} 3.0' in merged
    assert 'pdkv:router_backend_up{instance="decode-0"} 1.0' in merged


def test_what_is_no_metrics_text_and_no_ledger_is_left_out() -> None:
    junk = {"/metrics": (200, b"<html>{{"), "/debug/memory": (404, b"not here")}
    app = router([prefill(pages=junk)], [decode(pages={"/metrics": (200, b"a 1\n"), "/debug/memory": (200, b"[]")})])
    assert 'a{instance="decode-0"} 1.0' in get(app, "/metrics").text
    body = get(app, "/debug/memory").json()
    assert body["instances"] == []
    assert len(body["unreachable"]) == 2


def test_metrics_of_a_router_with_a_dead_instance() -> None:
    merged = get(router([prefill(down=True)], [decode(pages={"/metrics": (200, b"")})]), "/metrics").text
    assert 'pdkv:router_backend_up{instance="prefill-0"} 0.0' in merged


def test_merged_memory() -> None:
    page = {"/debug/memory": (200, json.dumps({"instances": [{"role": "decode", "num_blocks": 5}]}).encode())}
    body = get(router([prefill(down=True)], [decode(pages=page)]), "/debug/memory").json()
    assert body["instances"] == [{"role": "decode", "num_blocks": 5, "instance": "decode-0"}]
    assert "p0" in body["unreachable"][0]


def test_health_needs_one_of_each() -> None:
    ok = {"/health": (200, b'{"status": "ok"}')}
    bad = {"/health": (503, b'{"status": "failed", "reason": "engine fell over"}')}
    assert get(router([prefill(pages=ok)], [decode(pages=ok)]), "/health").json()["status"] == "ok"
    degraded = get(router([prefill(pages=ok), prefill(down=True)], [decode(pages=ok)]), "/health")
    assert (degraded.status_code, degraded.json()["status"]) == (200, "degraded")
    failed = get(router([prefill(pages=ok)], [decode(pages=bad)]), "/health")
    assert failed.status_code == 503
    assert failed.json()["instances"]["decode-0"] == "engine fell over"


def test_health_passes_on_why_an_instance_is_degraded() -> None:
    page = {"/health": (200, b'{"status": "degraded", "reason": "p-1 refused: dtype"}')}
    answer = get(router([prefill()], [decode(pages=page)]), "/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
    assert answer.json()["instances"]["decode-0"] == "p-1 refused: dtype"


def test_swapped_roles_are_no_healthy_pair_and_are_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    def says(role: str) -> dict[str, tuple[int, bytes]]:
        return {"/health": (200, json.dumps({"status": "ok", "role": role}).encode())}

    p, d = prefill(pages=says("decode")), decode(pages=says("prefill"))
    answer = get(router([p], [d]), "/health")
    assert answer.status_code == 503
    assert "it is a prefill instance, but stands under --decode" in answer.json()["instances"]["decode-0"]

    async def go() -> None:
        app = router([p], [d])
        async with app.router.lifespan_context(app):
            await eventually(lambda: len([r for r in caplog.records if "swapped" in r.message]) == 2)

    asyncio.run(go())
    assert "prefill-0 http://p0:1: it is a decode instance" in caplog.text


def test_health_of_an_instance_that_hangs_has_a_reason() -> None:
    p = prefill(hung=True)
    network = Network({"p0": p, "d0": decode()})

    class Slow(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.host == "p0":
                raise httpx.ReadTimeout("", request=request)  # httpx says no more
            return await network.handle_async_request(request)

    options = RouterOptions(prefill=("http://p0:1",), decode=("http://d0:1",))
    answer = get(create_router_app(options, httpx.AsyncClient(transport=Slow())), "/health")
    assert answer.json()["instances"]["prefill-0"].startswith("prefill-0 http://p0:1: no answer within 5 s")


def test_health_without_prefill_is_degraded_where_decode_stands_in_for_it() -> None:
    answer = get(router([prefill(down=True)], [decode()]), "/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
    answer = get(router([prefill(down=True)], [decode()], prefill_fallback="fail"), "/health")
    assert (answer.status_code, answer.json()["reason"]) == (503, "no healthy prefill instance")


def test_models_come_from_decode() -> None:
    page = {"/v1/models": (200, b'{"data": []}')}
    assert get(router([prefill()], [decode(pages=page)]), "/v1/models").json() == {"data": []}
    assert get(router([prefill()], [decode(down=True)]), "/v1/models").status_code == 503
