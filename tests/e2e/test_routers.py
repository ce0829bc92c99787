"""One prefill and two decode instances behind a router: ours, which places and drains, and PyPI's vllm-router."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.processes import INSTANCE, Part, free_port, tokens_of, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG_ANSWER = 400  # tokens: seconds, so that it is seen at work
MEMORY = ("--kv-cache-memory-bytes", "150MiB")
VLLM_ROUTER = os.environ.get("PDKV_VLLM_ROUTER") or shutil.which("vllm-router", path=Path(sys.executable).parent)


@pytest.fixture(scope="module")
def parts(stand_in: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Part]]:
    logs, started = tmp_path_factory.mktemp("logs"), {}
    try:
        for name in ("prefill", "decode-0", "decode-1"):
            role = name.split("-")[0]
            started[name] = Part(logs / f"{name}.log", role, stand_in, *INSTANCE, *MEMORY, "--served-model-name", "m")
        for part in started.values():
            part.ready()
        yield started
    finally:
        for part in started.values():
            part.end()


@pytest.fixture(scope="module")
def router(parts: dict[str, Part], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Part]:
    decode = [word for name in ("decode-0", "decode-1") for word in ("--decode", parts[name].url)]
    log = tmp_path_factory.mktemp("router") / "log"
    part = Part(log, "router", "--prefill", parts["prefill"].url, *decode, "--port", "0")
    try:
        yield part.ready()
    finally:
        part.end()


def instances(router: Part) -> dict[str, dict[str, Any]]:
    answer = httpx.get(f"{router.url}/admin/instances", timeout=30).json()
    return {one["instance"]: one for one in answer["instances"]}


def drain(router: Part, name: str, wanted: bool) -> None:
    answer = httpx.post(f"{router.url}/admin/drain", json={"instance": name, "drain": wanted}, timeout=30)
    assert answer.status_code == 200, answer.text


def test_requests_go_where_memory_is_left(parts: dict[str, Part], router: Part) -> None:
    """Two long answers at once: the second one finds less memory left where the first one is."""
    until(lambda: all(one["free_blocks"] for one in instances(router).values()))
    before = {name: parts[name].counter("vllm:generation_tokens_total") for name in ("decode-0", "decode-1")}
    with ThreadPoolExecutor() as pool:
        first = pool.submit(router.ask, [7] * 400, LONG_ANSWER)
        until(lambda: sum(one["in_flight"] for name, one in instances(router).items() if "decode" in name) == 1)
        second = pool.submit(router.ask, [9] * 400, LONG_ANSWER)
        assert len(tokens_of(first.result())) == len(tokens_of(second.result())) == LONG_ANSWER
    for name, tokens in before.items():
        assert parts[name].counter("vllm:generation_tokens_total") - tokens == LONG_ANSWER, (
            f"{name} answered one of the two"
        )


def test_a_prompt_goes_where_its_prefix_is(parts: dict[str, Part], router: Part) -> None:
    """The same long beginning three times, one after the other: all on the same decode instance."""
    text = "Once upon a time a cache was asked where it kept its blocks. " * 20
    tokens = {name: parts[name].counter("vllm:generation_tokens_total") for name in ("decode-0", "decode-1")}
    for number in range(3):
        assert tokens_of(router.ask(f"{text} {number}", 4))
    grown = [parts[name].counter("vllm:generation_tokens_total") - count for name, count in tokens.items()]
    assert sorted(grown) == [0, 12]


def test_draining_ends_nothing_and_lets_nothing_in(parts: dict[str, Part], router: Part) -> None:
    with ThreadPoolExecutor() as pool:
        running = pool.submit(router.ask, [11] * 64, LONG_ANSWER)
        until(lambda: sum(one["in_flight"] for name, one in instances(router).items() if "decode" in name) == 1)
        (busy,) = [name for name, one in instances(router).items() if one["in_flight"] and "decode" in name]
        other = "decode-1" if busy == "decode-0" else "decode-0"
        drain(router, busy, True)
        before = parts[other].counter("vllm:request_success_total")
        for number in range(3):
            assert tokens_of(router.ask([20 + number] * 40, 3))
        assert parts[other].counter("vllm:request_success_total") - before == 3
        assert len(tokens_of(running.result())) == LONG_ANSWER, (
            "the one that ran there ended as if nothing had been said"
        )
    until(lambda: instances(router)[busy]["in_flight"] == 0 and parts[busy].idle())
    drain(router, busy, False)


def test_a_decode_instance_that_dies_is_replaced(parts: dict[str, Part], router: Part) -> None:
    """It is stopped, so its connections stand; P's grant is good for the other one as well."""
    expected = tokens_of(router.ask([31] * 100, 5))
    parts["decode-0"].signal(signal.SIGKILL)
    for _ in range(2):
        assert tokens_of(router.ask([31] * 100, 5)) == expected
    until(parts["prefill"].idle)


@pytest.mark.skipif(VLLM_ROUTER is None, reason="the PyPI package vllm-router is not installed in this environment")
def test_vllm_router_in_front(parts: dict[str, Part], tmp_path: Path) -> None:
    """vLLM's own P/D router carries our kv_transfer_params: the prompt's KV is moved, not computed again."""
    prefill, decode = parts["prefill"], parts["decode-1"]
    ports = [str(free_port()) for _ in range(2)]
    command = [
        str(VLLM_ROUTER), "--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode", decode.url,
        "--kv-connector", "nixl", "--policy", "round_robin", "--port", ports[0], "--prometheus-port", ports[1],
    ]  # fmt: skip
    prompt, url = [41] * 200, f"http://127.0.0.1:{ports[0]}"
    expected = tokens_of(prefill.ask(prompt, 6))
    moved = decode.counter("vllm:external_prefix_cache_hits_total")
    with (tmp_path / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: _answers(f"{url}/health"), 60)
        body = {"model": "m", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=120)
        assert tokens_of(answer) == expected
    finally:
        process.kill()
        process.wait()
    assert decode.counter("vllm:external_prefix_cache_hits_total") - moved == 200
    until(prefill.idle)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).is_success
    except httpx.TransportError:
        return False
