"""Where requests go: memory left, queues, prefixes, instances that are silent or being drained."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from tests.serve.asgi import Exchange, client_of

from pdkv.logs.metrics_text import parse_metrics
from pdkv.serve.affinity import PrefixMemory, prefix_keys
from pdkv.serve.backends import Pool
from pdkv.serve.options import RouterOptions
from pdkv.serve.placement import ASK_EVERY_S, Figures, Placement, Prompt, figures_of
from pdkv.serve.router import create_router_app

BLOCK = 16
LONG = "a prefix that is shared by many, " * 64  # 2112 characters: 8 whole pieces


def placement(*free: int | None, waiting: tuple[int, ...] = ()) -> Placement:
    """Decode instances with so many free blocks each; ``None``: it says nothing."""
    found = Placement(Pool("decode", tuple(f"http://127.0.0.1:{8200 + i}" for i in range(len(free)))))
    for i, (seat, blocks) in enumerate(zip(found.seats.values(), free, strict=True)):
        queue = waiting[i] if waiting else 0
        seat.told(None if blocks is None else Figures(time.monotonic(), 1000, BLOCK, blocks, queue))
    return found


def prompt(tokens: int, text: str = "") -> Prompt:
    return Prompt(prefix_keys({"prompt": text}), tokens)


def labels(found: Placement, asked: Prompt) -> list[str]:
    return [backend.label for backend in found.order(asked)]


# --------------------------------------------------------------------------------------------------- figures and keys


def metrics_text(usage: float, accounts: dict[str, int] | None = None, waiting: int = 0) -> bytes:
    registry = CollectorRegistry()
    Gauge("vllm:kv_cache_usage_perc", "", registry=registry).set(usage)
    Gauge("vllm:num_requests_waiting", "", registry=registry).set(waiting)
    config = Gauge("vllm:cache_config_info", "", ["num_gpu_blocks", "block_size"], registry=registry)
    config.labels(num_gpu_blocks="101", block_size="16").set(1)
    blocks = Gauge("pdkv:kv_blocks", "", ["account"], registry=registry)
    for account, count in (accounts or {}).items():
        blocks.labels(account=account).set(count)
    return generate_latest(registry)


def test_figures_of_vllm_and_of_pdkv() -> None:
    assert figures_of(parse_metrics(metrics_text(0.25, waiting=3)), 7.0) == Figures(7.0, 101, 16, 75, 3)
    ledger = {"free": 10, "cached": 20, "running": 70, "null": 1}
    assert figures_of(parse_metrics(metrics_text(0.7, ledger)), 7.0) == Figures(7.0, 101, 16, 30, 0)


def test_figures_that_are_not_all_there() -> None:
    assert figures_of(parse_metrics("vllm:kv_cache_usage_perc 0.5\n"), 0.0) is None
    text = 'vllm:kv_cache_usage_perc 0.5\nvllm:cache_config_info{num_gpu_blocks="None",block_size="16"} 1\n'
    assert figures_of(parse_metrics(text), 0.0) is None


def test_keys_cover_everything_before_them() -> None:
    one, other = prefix_keys({"prompt": LONG}), prefix_keys({"prompt": "b" + LONG[1:]})
    assert len(one) == 8
    assert not set(one) & set(other)
    longer = prefix_keys({"prompt": LONG + "and more" * 100})
    assert longer[:8] == one
    assert len(longer) > 8
    assert prefix_keys({"prompt": LONG, "cache_salt": "s"}) != one
    assert prefix_keys({"messages": [{"role": "user", "content": LONG}]})


def test_a_memory_forgets_the_oldest() -> None:
    memory = PrefixMemory(most_keys=4)
    keys = [bytes([i]) for i in range(6)]
    memory.remember(keys[:3], "a")
    assert memory.share(keys[:3], "a") == 1.0
    assert memory.share(keys[:6], "a") == 0.5
    assert memory.share([], "a") == 0.0
    memory.remember(keys[3:], "b")
    assert memory.share(keys[:3], "a") == 0.0, "its first piece has been forgotten"
    assert memory.share(keys[3:], "b") == 1.0
    memory.forget("b")
    assert memory.share(keys[3:], "b") == 0.0


@pytest.mark.parametrize(
    ("body", "tokens"),
    [({"prompt": [1, 2, 3]}, 3), ({"prompt": "x" * 400}, 100), ({"prompt": []}, 1), ({}, 1), ({"prompt": 7}, 1)],
)
def test_tokens_of_a_body(body: dict[str, Any], tokens: int) -> None:
    assert Prompt.of(body).tokens == tokens


@pytest.mark.parametrize(("count", "tokens"), [(77, 77), (None, 3), ("77", 3), (-1, 3), (1 << 40, 3), (True, 3)])
def test_the_prefill_instance_knows_better(count: object, tokens: int) -> None:
    assert Prompt.of({"prompt": [1, 2, 3]}).with_tokens({"remote_num_tokens": count}).tokens == tokens


# -------------------------------------------------------------------------------------------------------- the choice


def test_most_memory_left_comes_first() -> None:
    assert labels(placement(10, 30, 20), prompt(64)) == ["decode-1", "decode-2", "decode-0"]


def test_what_was_just_sent_counts_until_the_instance_says_so_itself() -> None:
    found = placement(30, 20)
    first = found.order(prompt(20 * BLOCK))[0]
    with found.sending(first, prompt(20 * BLOCK)):
        assert labels(found, prompt(BLOCK))[0] == "decode-1"
        found.seats["decode-0"].told(Figures(time.monotonic(), 1000, BLOCK, 30, 0))
        assert labels(found, prompt(BLOCK))[0] == "decode-1", "sent after that answer was made, perhaps"
        found.seats["decode-0"].sent = [(time.monotonic() - 2 * ASK_EVERY_S, 20 * BLOCK)]
        found.seats["decode-0"].told(Figures(time.monotonic(), 1000, BLOCK, 30, 0))
        assert labels(found, prompt(BLOCK))[0] == "decode-0"


def test_a_queue_counts_where_the_request_would_queue_too() -> None:
    found = placement(4, 2, waiting=(5, 1))
    assert labels(found, prompt(BLOCK))[0] == "decode-0", "it fits: whoever waits there waits for more"
    assert labels(found, prompt(100 * BLOCK))[0] == "decode-1"


def test_a_prefix_is_memory_that_is_not_needed() -> None:
    found = placement(50, 50)
    asked = prompt(40 * BLOCK, LONG)
    with found.sending(found.order(asked)[0], asked):
        holder = next(seat for seat in found.seats.values() if seat.sent)
    assert not holder.sent
    for seat in found.seats.values():
        seat.told(Figures(time.monotonic(), 1000, BLOCK, 50 if seat is not holder else 20, 0))
    assert labels(found, asked)[0] == holder.backend.label, "30 blocks fewer, but 40 of the prompt's are there"
    assert labels(found, prompt(40 * BLOCK, "something else" * 99))[0] != holder.backend.label


def test_the_silent_take_turns() -> None:
    found = placement(None, None, None)
    assert {labels(found, prompt(10))[0] for _ in range(3)} == {"decode-0", "decode-1", "decode-2"}


def test_old_figures_are_no_figures() -> None:
    found = placement(30, 20)
    for seat in found.seats.values():
        assert seat.figures is not None
        seat.figures = Figures(time.monotonic() - 60, 1000, BLOCK, seat.figures.free_blocks, 0)
    assert {labels(found, prompt(10))[0] for _ in range(2)} == {"decode-0", "decode-1"}


def test_a_resting_instance_comes_last() -> None:
    found = placement(30, 20)
    found.seats["decode-0"].backend.rest()
    assert labels(found, prompt(10)) == ["decode-1", "decode-0"]


def test_a_draining_instance_gets_nothing_unless_it_is_the_only_one() -> None:
    found = placement(30, 20)
    found.seats["decode-0"].draining = True
    assert labels(found, prompt(10)) == ["decode-1"]
    found.seats["decode-1"].draining = True
    assert set(labels(found, prompt(10))) == {"decode-0", "decode-1"}


def test_asking_survives_what_instances_answer() -> None:
    answers: dict[int, tuple[int, bytes]] = {
        8200: (200, metrics_text(0.5)), 8201: (200, b"\x00 no metrics"), 8202: (500, b""), 8203: (200, b""),
    }  # fmt: skip

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.port not in answers:
            raise httpx.ConnectError("refused")
        status, content = answers[request.url.port]
        return httpx.Response(status, content=content)

    async def go() -> dict[str, int | None]:
        found = Placement(Pool("decode", tuple(f"http://127.0.0.1:{8200 + i}" for i in range(5))))
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
            await found.ask_all(client)
        assert [seat.backend.silent for seat in found.seats.values()] == [False] * 4 + [True], "nobody listens there"
        return {label: seat.figures and seat.figures.free_blocks for label, seat in found.seats.items()}

    assert asyncio.run(go()) == {
        "decode-0": 50, "decode-1": None, "decode-2": None, "decode-3": None, "decode-4": None,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- draining


def admin(client_host: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    async def go() -> tuple[int, Any]:
        transport = httpx.ASGITransport(create_router_app(options()), client=(client_host, 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            if body is None:
                response = await client.get(path, headers=headers)
            else:
                response = await client.post(path, json=body, headers=headers)
        return response.status_code, response.json()

    return asyncio.run(go())


def options() -> RouterOptions:
    return RouterOptions(prefill=("http://127.0.0.1:8100",), decode=("http://127.0.0.1:8200", "http://127.0.0.1:8201"))


def test_instances_are_listed_and_drained() -> None:
    status, answer = admin("127.0.0.1", "/admin/instances")
    assert status == 200
    assert [(one["instance"], one["draining"], one["in_flight"]) for one in answer["instances"]] == [
        ("prefill-0", False, 0), ("decode-0", False, 0), ("decode-1", False, 0),
    ]  # fmt: skip
    for name in ("decode-1", "http://127.0.0.1:8201"):
        status, answer = admin("::1", "/admin/drain", {"instance": name})
        assert (status, answer["instance"], answer["draining"]) == (200, "decode-1", True)


@pytest.mark.parametrize(
    ("host", "headers", "body", "status", "words"),
    [
        ("10.0.0.7", {}, {"instance": "decode-0"}, 403, "own host"),
        ("127.0.0.1", {"x-forwarded-for": "10.0.0.7"}, {"instance": "decode-0"}, 403, "own host"),
        ("127.0.0.1", {}, {"instance": "decode-9"}, 404, "decode-0 http://127.0.0.1:8200"),
        ("127.0.0.1", {}, {"instance": "decode-0", "drain": 1}, 400, "true or false"),
        ("127.0.0.1", {}, {}, 404, "no instance None"),
    ],
)
def test_draining_refuses(host: str, headers: dict[str, str], body: Any, status: int, words: str) -> None:
    got, answer = admin(host, "/admin/drain", body, headers)
    assert got == status
    assert words in answer["error"]["message"]


def test_a_web_page_cannot_drain() -> None:
    """What a browser sends across origins without asking first is not taken."""
    status, answer = admin("127.0.0.1", "/admin/drain", {"instance": "decode-0"}, {"content-type": "text/plain"})
    assert status == 415
    assert "application/json" in answer["error"]["message"]


def test_requests_in_flight_are_counted_on_both_instances() -> None:
    async def go() -> None:
        gate = asyncio.Event()

        async def handle(request: httpx.Request) -> httpx.Response:
            if request.url.port == 8100:
                return httpx.Response(200, json={"kv_transfer_params": {"remote_num_tokens": 5}})
            await gate.wait()
            return httpx.Response(200, content=answer())

        async def answer() -> AsyncIterator[bytes]:
            yield b'{"choices": []}'

        app = create_router_app(options(), httpx.AsyncClient(transport=httpx.MockTransport(handle)))
        exchange = Exchange(app, "/v1/completions", {"model": "m", "prompt": "hello"}).start()
        async with client_of(app) as client:
            for _ in range(200):
                facts = (await client.get("/admin/instances")).json()["instances"]
                if sum(one["in_flight"] for one in facts) == 2:
                    break
                await asyncio.sleep(0.01)
            assert {one["instance"][:-2]: one["in_flight"] for one in facts if one["in_flight"]} == {
                "prefill": 1, "decode": 1,
            }  # fmt: skip
            gate.set()
            assert exchange.task is not None
            await exchange.task
            facts = (await client.get("/admin/instances")).json()["instances"]
            assert sum(one["in_flight"] for one in facts) == 0
        assert json.loads(b"".join(exchange.chunks)) == {"choices": []}

    asyncio.run(go())
