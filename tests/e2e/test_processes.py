"""P, D and router as separate processes, started one by one as on several hosts, and what happens when one stops.

There are two Ds, one for each answer to KV that does not arrive. NIXL moves over TCP, where a READ needs P's mover to
be alive (on one host the kernel would copy without it).
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.processes import INSTANCE, Part, tokens_of, until
from tests.e2e.reference import Reference
from tests.nixl_here import HAS_NIXL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LEASE_S = 6
SILENCE_S = 8
OPTIONS = (
    *("--kv-cache-memory-bytes", "256MiB", "--kv-lease-duration", str(LEASE_S), "--kv-load-timeout", "20"),
    *INSTANCE,
)
STORY = "The lighthouse keeper wrote the weather down every evening, because his father had done so. "
SHORT, LONG = STORY * 3 + "One evening", STORY * 12 + "The ship"
NEW_TOKENS = 8


class Cluster:
    """P, two Ds, and the router in front of P and the first D; each can be put in place of a dead one."""

    def __init__(self, directory: Path, model: str) -> None:
        self.directory, self.model = directory, model
        self.parts: list[Part] = []
        instances = [
            self.start("prefill"),
            self.start("decode"),
            self.start("decode", "--kv-load-failure-policy", "fail"),
        ]  # all load at once
        self.p, self.d, self.failing = (part.ready() for part in instances)
        self.router = self.start_router()

    def start(self, role: str, *more: str) -> Part:
        log = self.directory / f"{role}{len(self.parts)}.log"
        part = Part(log, role, self.model, *OPTIONS, *more, UCX_TLS="tcp,self")
        self.parts.append(part)
        return part

    def start_router(self) -> Part:
        urls = ("--prefill", self.p.url, "--decode", self.d.url)
        options = ("--port", "0", "--instance-timeout", str(SILENCE_S))
        part = Part(self.directory / "router.log", "router", *options, *urls)
        self.parts.append(part)
        return part.ready()

    def replace_p(self) -> None:
        """Another P, and a router that knows it."""
        self.p = self.start("prefill").ready()
        self.router.end()
        self.router = self.start_router()

    def settled(self, *parts: Part) -> bool:
        """Nobody holds a block."""
        return all(part.idle() for part in parts or (self.p, self.d, self.failing))

    def close(self) -> None:
        for part in self.parts:
            part.end()


@pytest.fixture(scope="module")
def cluster(stand_in: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("logs"), stand_in)
    yield running
    running.close()


@pytest.fixture(scope="module")
def truth(stand_in_reference: Reference) -> dict[str, list[int]]:
    """transformers' own continuations."""
    model = stand_in_reference
    return {prompt: model.generate(model.tokenize(prompt), NEW_TOKENS) for prompt in (SHORT, LONG)}


def both_policies(cluster: Cluster, leases: list[dict[str, Any]], salt: str) -> list[httpx.Response]:
    """The same prompt at both Ds at once, each with a lease of its own on P: recomputing, failing."""
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(
                lambda part, lease: part.ask(LONG, NEW_TOKENS, kv_transfer_params=lease, cache_salt=salt),
                (cluster.d, cluster.failing),
                leases,
            )
        )


def assert_exact(cluster: Cluster, answers: list[httpx.Response], truth: list[int]) -> None:
    """Recomputed, every token is right; failed, there is none and the reason is given. No D holds a block."""
    recomputed, failed = answers
    assert tokens_of(recomputed) == truth
    assert recomputed.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert failed.status_code == 500
    assert "KV transfer failed" in failed.json()["error"]["message"]
    until(lambda: cluster.settled(cluster.d, cluster.failing))
    for part in (cluster.d, cluster.failing):
        assert "KV did not arrive" in part.log.read_text()


def test_p_stopped_for_longer_than_its_lease_during_traffic(cluster: Cluster, truth: dict[str, list[int]]) -> None:
    prompts = [f"{i} {STORY * 4}" for i in range(4)]
    expected = [tokens_of(cluster.d.ask(prompt, NEW_TOKENS)) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(cluster.router.ask, p, NEW_TOKENS, cache_salt=f"under way {p}") for p in prompts]
        time.sleep(0.3)
        cluster.p.signal(signal.SIGSTOP)
        try:
            asking += [pool.submit(cluster.router.ask, p, NEW_TOKENS, cache_salt=f"later {p}") for p in prompts]
            time.sleep(max(LEASE_S, SILENCE_S) + 3)
        finally:
            cluster.p.signal(signal.SIGCONT)
        answers = [one.result() for one in asking]
    assert [tokens_of(answer) for answer in answers] == expected * 2
    assert "local" in {answer.headers["x-pdkv-prefill"] for answer in answers[4:]}, "nobody waited for a stopped P"
    until(cluster.settled)
    until(lambda: cluster.router.ask("Hi", 1).headers["x-pdkv-prefill"] == "remote")
    assert tokens_of(cluster.router.ask(SHORT, NEW_TOKENS, cache_salt="afterwards")) == truth[SHORT]


def test_d_killed_while_p_holds_its_lease(cluster: Cluster, truth: dict[str, list[int]]) -> None:
    expired = cluster.p.counter("vllm:nixl_num_kv_expired_reqs_total")
    cluster.d.signal(signal.SIGSTOP)  # so that it cannot read and give the lease back
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cluster.router.ask, LONG, NEW_TOKENS, cache_salt="never read")
        until(lambda: cluster.p.memory()["accounts"]["retained"] > 0)
        cluster.d.end()
        answer = waiting.result(60)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "decode_unavailable"
    assert cluster.d.url in answer.json()["error"]["message"]
    assert cluster.p.memory()["accounts"]["retained"] > 0, "P cannot know: only time ends this lease"
    until(cluster.p.idle, timeout_s=3 * LEASE_S)
    assert cluster.p.counter("vllm:nixl_num_kv_expired_reqs_total") == expired + 1
    cluster.d = cluster.start("decode").ready()
    cluster.router.end()
    cluster.router = cluster.start_router()
    assert tokens_of(cluster.router.ask(LONG, NEW_TOKENS)) == truth[LONG]
    until(cluster.settled)


@pytest.mark.skipif(not HAS_NIXL, reason="through shared memory a READ does not need P to be alive")
def test_clients_that_leave_while_queued_loading_and_decoding(cluster: Cluster, truth: dict[str, list[int]]) -> None:
    """P's mover stands still, so the first client's READ cannot end and the second waits for it, without a block."""

    def leave(salt: str, **more: Any) -> None:
        with pytest.raises(httpx.ReadTimeout):
            cluster.d.ask(LONG, 1500, cache_salt=salt, timeout_s=httpx.Timeout(30, read=1.5), **more)

    leases = [cluster.p.prefill(LONG, cache_salt="leaves") for _ in range(2)]
    aborted = cluster.d.counter("pdkv:quarantined_blocks_total")
    cluster.p.mover().send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(2) as pool:
            loading = pool.submit(leave, "leaves", kv_transfer_params=leases[0])
            until(lambda: cluster.d.memory()["accounts"]["loading"] > 0)
            queued = pool.submit(leave, "leaves", kv_transfer_params=leases[1])
            loading.result()
            until(lambda: cluster.d.memory()["accounts"]["quarantine"] > 0)
            queued.result()
        until(lambda: {one["account"] for one in cluster.d.memory()["holders"]} == {"quarantine"})
    finally:
        cluster.p.mover().send_signal(signal.SIGCONT)
    assert cluster.d.counter("pdkv:quarantined_blocks_total") > aborted
    leave("decodes")
    until(cluster.settled)
    assert tokens_of(cluster.router.ask(LONG, NEW_TOKENS, cache_salt="after them")) == truth[LONG]


@pytest.mark.skipif(not HAS_NIXL, reason="through shared memory a READ does not need P to be alive")
def test_p_killed_during_the_read(cluster: Cluster, truth: dict[str, list[int]]) -> None:
    """All of P dies by kill -9 while READs of both Ds are under way: its mover had stopped, so they could not end."""
    warm = cluster.p.prefill("Hi")
    assert cluster.failing.ask("Hi", 1, kv_transfer_params=warm).status_code == 200  # both are connected now
    leases = [cluster.p.prefill(LONG, cache_salt="during") for _ in range(2)]
    before = [part.counter("pdkv:kv_load_blocks_total") for part in (cluster.d, cluster.failing)]
    cluster.p.mover().send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(both_policies, cluster, leases, "during")
        until(lambda: all(part.memory()["accounts"]["loading"] > 0 for part in (cluster.d, cluster.failing)))
        time.sleep(1.0)  # both are connected, so the READs are posted at once
        assert not asking.done()
        cluster.p.end()
        answers = asking.result(60)
    assert_exact(cluster, answers, truth[LONG])
    assert [part.counter("pdkv:kv_load_blocks_total") for part in (cluster.d, cluster.failing)] == before
    for part in (cluster.d, cluster.failing):
        assert "the read failed" in part.log.read_text(), "it was under way, not about to begin"
    cluster.replace_p()
    assert tokens_of(cluster.router.ask(SHORT, NEW_TOKENS, cache_salt="another P")) == truth[SHORT]
    until(cluster.settled)


def test_p_killed_before_the_read(cluster: Cluster, truth: dict[str, list[int]]) -> None:
    leases = [cluster.p.prefill(LONG, cache_salt="before") for _ in range(2)]
    cluster.p.end()
    assert_exact(cluster, both_policies(cluster, leases, "before"), truth[LONG])
    through_router = cluster.router.ask(SHORT, NEW_TOKENS, cache_salt="p is dead")
    assert tokens_of(through_router) == truth[SHORT]
    assert through_router.headers["x-pdkv-prefill"] == "local"
    metrics = httpx.get(f"{cluster.d.url}/metrics", timeout=30).text
    assert re.search(r"vllm:nixl_num_failed_transfers_total\{[^}]*\} [1-9]", metrics)
