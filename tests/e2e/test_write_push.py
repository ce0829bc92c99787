"""WRITE push with real processes: two P, a strict D, one by vLLM's rules, a router in mode write; shared memory.

Where a test sends only D's leg, P knows nothing of that id yet, and D holds the memory that it has granted.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.e2e.processes import Part, tokens_of, until
from tests.e2e.test_push import NEW_TOKENS, Cluster, expected, prompt, started

from pdkv.serve.params import push_legs, side_channel_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    logs = tmp_path_factory.mktemp("logs")
    with started(logs, "write", "--transport", "shm", of_p=("--kv-lease-duration", "6")) as running:
        yield running


def legs(p: Part) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a router would send to ``p`` and to D."""
    said = httpx.get(f"{p.url}/health", timeout=30).json()
    return push_legs(side_channel_of(said), secrets.token_hex(16), mode="write")


def holders(part: Part, account: str) -> list[dict[str, Any]]:
    return [one for one in part.memory()["holders"] if one["account"] == account]


def granted_at(pool: ThreadPoolExecutor, d: Part, tokens: list[int], leg: dict[str, Any]) -> Future[httpx.Response]:
    """D's leg, which has granted its memory from now on."""
    answer = pool.submit(d.ask, tokens, NEW_TOKENS, kv_transfer_params=leg)
    until(lambda: len(holders(d, "loading")) == 1)
    return answer


def test_through_the_router_the_kv_is_written_and_the_tokens_are_right(cluster: Cluster) -> None:
    moved = cluster.d.counter("vllm:external_prefix_cache_hits_total")
    for tokens in (prompt(), prompt(70), prompt(400)):
        answer = cluster.router.ask(tokens, NEW_TOKENS)
        assert tokens_of(answer) == expected(cluster.d, tokens)
        assert (answer.headers["x-pdkv-prefill"], answer.headers["x-pdkv-kv"]) == ("remote", "loaded")
    assert cluster.d.counter("vllm:external_prefix_cache_hits_total") == moved + 570
    written = sum(p.counter("pdkv:kv_written_bytes_total") for p in cluster.prefills)
    assert written == cluster.d.counter("vllm:nixl_bytes_transferred_sum") > 0
    assert sum(p.counter("pdkv:transfer_announcements_sent_total") for p in cluster.prefills) == 0
    until(cluster.settled)


def test_d_holds_its_memory_from_the_start_and_either_side_may_come_first(
    cluster: Cluster, pool: ThreadPoolExecutor
) -> None:
    tokens, (to_p, to_d) = prompt(), legs(cluster.p)
    answer = granted_at(pool, cluster.d, tokens, to_d)
    (held,) = holders(cluster.d, "loading")
    assert held["blocks"] == 7
    assert 400 < held["deadline_s"] <= 480
    cluster.p.ask(tokens, 1, kv_transfer_params=to_p)
    assert tokens_of(answer.result()) == expected(cluster.d, tokens)

    tokens, (to_p, to_d) = prompt(), legs(cluster.p)
    cluster.p.ask(tokens, 1, kv_transfer_params=to_p)
    assert len(holders(cluster.p, "retained")) == 1
    answer = pool.submit(cluster.d.ask, tokens, NEW_TOKENS, kv_transfer_params=to_d)
    assert tokens_of(answer.result()) == expected(cluster.d, tokens)
    assert answer.result().headers["x-pdkv-kv"] == "loaded"
    until(cluster.settled)


def test_without_a_transfer_id_the_request_ids_match(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    """As with vLLM's routers: one ``X-Request-Id`` on both legs, a random suffix on each side."""
    tokens, both = prompt(), legs(cluster.p)
    for leg in both:
        del leg["transfer_id"]
    name = {"x-request-id": f"r-{secrets.token_hex(8)}"}

    def ask(part: Part, max_tokens: int, leg: dict[str, Any]) -> httpx.Response:
        return part.ask(tokens, max_tokens, headers=name, kv_transfer_params=leg)

    answer = pool.submit(ask, cluster.d, NEW_TOKENS, both[1])
    until(lambda: len(holders(cluster.d, "loading")) == 1)
    ask(cluster.p, 1, both[0])
    assert tokens_of(answer.result()) == expected(cluster.d, tokens)
    assert answer.result().headers["x-pdkv-kv"] == "loaded"
    until(cluster.settled)


def test_a_late_registration_is_told_so(cluster: Cluster) -> None:
    tokens, (to_p, to_d) = prompt(), legs(cluster.p)
    cluster.p.ask(tokens, 1, kv_transfer_params=to_p)
    until(cluster.p.idle)
    answer = cluster.d.ask(tokens, NEW_TOKENS, kv_transfer_params=to_d)
    assert answer.headers["x-pdkv-kv"] == "recomputed"
    assert tokens_of(answer) == expected(cluster.d, tokens)
    until(cluster.settled)


def test_an_abort_gives_the_granted_memory_back_though_p_stands_still(cluster: Cluster) -> None:
    """P is stopped (SIGSTOP), so nobody answers the CANCEL; no slice was being copied, which the lock shows."""
    tokens, (to_p, to_d) = prompt(), legs(cluster.p)
    leg = cluster.d.send(tokens, NEW_TOKENS, kv_transfer_params=to_d)
    until(lambda: len(holders(cluster.d, "loading")) == 1)
    cluster.p.signal(signal.SIGSTOP)
    try:
        leg.close()
        until(cluster.d.idle)
    finally:
        cluster.p.signal(signal.SIGCONT)
    before = cluster.p.counter("pdkv:kv_written_bytes_total")
    cluster.p.ask(tokens, 1, kv_transfer_params=to_p)
    until(cluster.settled)
    assert cluster.p.counter("pdkv:kv_written_bytes_total") == before, "nothing is written any more"


def test_killed_p_before_it_writes(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    """The strict D computes the prompt itself at once; by vLLM's rules it hangs with its memory (spec 9)."""
    p = cluster.prefills[1]
    tokens, of_vllm = prompt(), prompt()
    answer = granted_at(pool, cluster.d, tokens, legs(p)[1])
    sent = cluster.vllm.counter("pdkv:transfer_registrations_sent_total")
    stuck = granted_at(pool, cluster.vllm, of_vllm, legs(p)[1])
    until(lambda: cluster.vllm.counter("pdkv:transfer_registrations_sent_total") > sent)
    p.signal(signal.SIGKILL)
    cluster.prefills.remove(p)
    assert answer.result(60).headers["x-pdkv-kv"] == "recomputed"
    assert tokens_of(answer.result()) == expected(cluster.d, tokens)
    until(cluster.d.idle)
    (held,) = holders(cluster.vllm, "loading")
    assert held["deadline_s"] is None
    assert not stuck.done()
    cluster.vllm.end()


def test_killed_d_leaves_nothing_at_p(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    """The last of them: D dies while it waits, P finds nobody to write to, and its lease ends."""
    tokens, (to_p, to_d) = prompt(), legs(cluster.p)
    known = cluster.p.counter("pdkv:transfer_registrations_received_total")
    answer = granted_at(pool, cluster.d, tokens, to_d)
    until(lambda: cluster.p.counter("pdkv:transfer_registrations_received_total") > known)
    cluster.d.signal(signal.SIGKILL)
    with pytest.raises(httpx.HTTPError):
        answer.result()
    cluster.p.ask(tokens, 1, kv_transfer_params=to_p)
    until(cluster.p.idle)
