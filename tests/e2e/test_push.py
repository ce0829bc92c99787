"""Late push with real processes: two P, a strict D, a D by vLLM's rules, and a router that starts both legs at once.

Where a test sends only D's leg, D waits for as long as the test wants: P knows nothing of that id yet. The model is a
tiny one, computed 16 tokens a step, so that a long prefill takes its time.
"""

from __future__ import annotations

import re
import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.processes import Part, tokens_of, until
from tests.runtime.tiny import save_tiny

from pdkv.serve.params import push_legs, side_channel_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MAX_LENGTH = 8192
OPTIONS = (
    *("--port", "0", "--threads", "1", "--debug", "--max-model-len", str(MAX_LENGTH)),
    *("--kv-cache-memory-bytes", "16MiB", "--max-num-batched-tokens", "16", "--max-num-seqs", "16"),
)
NEW_TOKENS = 6
LONG = 5000  # tokens: 300 steps of P, a second or so


@dataclass
class Cluster:
    """The instances; ``prefills`` are those alive."""

    prefills: list[Part]
    d: Part
    vllm: Part
    router: Part

    @property
    def p(self) -> Part:
        return self.prefills[0]

    def settled(self) -> bool:
        """Nobody holds a block or waits for KV."""
        parts = [*self.prefills, self.d, self.vllm]
        return all(part.idle() and not part.memory()["awaiting"] for part in parts)


@contextmanager
def started(logs: Path, mode: str, *more: str, of_p: tuple[str, ...] = ()) -> Iterator[Cluster]:
    """All of it, with a router in ``mode``; ``more`` options for all instances, ``of_p`` for P."""
    parts: list[Part] = []
    model = str(save_tiny("llama", logs / "model", max_position_embeddings=MAX_LENGTH).directory)

    def start(name: str, *arguments: str) -> Part:
        parts.append(Part(logs / f"{name}.log", *arguments))
        return parts[-1]

    def instance(name: str, role: str, *own: str) -> Part:
        return start(name, role, model, *OPTIONS, *more, *own)

    try:
        prefills = [instance(f"p{i}", "prefill", *of_p) for i in range(2)]
        d = instance("d", "decode")
        vllm = instance("vllm", "decode", "--policy", "vllm", "--push-registration-timeout", "1")
        for part in parts:
            part.ready()
        urls = ("--prefill", prefills[0].url, "--prefill", prefills[1].url, "--decode", d.url)
        router = start("router", "router", "--port", "0", "--transfer-mode", mode, *urls).ready()
        yield Cluster(prefills, d, vllm, router)
    finally:
        for part in parts:
            part.end()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started(tmp_path_factory.mktemp("logs"), "push") as running:
        yield running


def prompt(length: int = 100) -> list[int]:
    """A prompt that nobody has seen."""
    return [5 + secrets.randbelow(90) for _ in range(length)]


def legs(p: Part) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a router would send to ``p`` and to D."""
    return push_legs(side_channel_of(httpx.get(f"{p.url}/health", timeout=30).json()), secrets.token_hex(16))


def expected(d: Part, tokens: list[int]) -> list[int]:
    """The right continuation: what D computes alone, under a salt so that the KV stays its own."""
    return tokens_of(d.ask(tokens, NEW_TOKENS, cache_salt="alone"))


def waiting_at(pool: ThreadPoolExecutor, d: Part, tokens: list[int], leg: dict[str, Any]) -> Future[httpx.Response]:
    """D's leg, which waits from now on."""
    answer = pool.submit(d.ask, tokens, NEW_TOKENS, kv_transfer_params=leg)
    until(lambda: len(d.memory()["awaiting"]) == 1)
    return answer


def test_through_the_router_the_kv_moves_and_the_tokens_are_right(cluster: Cluster) -> None:
    moved = cluster.d.counter("vllm:external_prefix_cache_hits_total")
    prompts = [prompt(), prompt(70), prompt(40)]
    for tokens in prompts[:2]:
        answer = cluster.router.ask(tokens, NEW_TOKENS)
        assert tokens_of(answer) == expected(cluster.d, tokens)
        assert (answer.headers["x-pdkv-prefill"], answer.headers["x-pdkv-kv"]) == ("remote", "loaded")
    assert cluster.d.counter("vllm:external_prefix_cache_hits_total") == moved + 170
    several = cluster.router.ask([prompt(40), prompt(50)], NEW_TOKENS)  # type: ignore[list-item]
    assert [len(choice["token_ids"]) for choice in several.json()["choices"]] == [NEW_TOKENS] * 2
    assert cluster.d.counter("vllm:external_prefix_cache_hits_total") == moved + 260
    assert sum(p.counter("pdkv:transfer_announcements_sent_total") for p in cluster.prefills) == 4
    until(cluster.settled)


def test_d_waits_without_memory_and_reads_what_is_announced(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    tokens, (to_p, to_d) = prompt(), legs(cluster.p)
    moved = cluster.d.counter("vllm:external_prefix_cache_hits_total")
    answer = waiting_at(pool, cluster.d, tokens, to_d)
    (shown,) = cluster.d.memory()["awaiting"]
    assert cluster.d.idle()
    assert shown["producer"] == to_d["remote_engine_id"]
    assert "to announce its prompt's KV" in shown["cause"]
    assert 470 < shown["deadline_s"] < 480
    assert cluster.d.counter("pdkv:num_requests_awaiting_announcement") == 1
    assert cluster.p.ask(tokens, 1, kv_transfer_params=to_p).status_code == 200
    assert tokens_of(answer.result(60)) == expected(cluster.d, tokens)
    assert cluster.d.counter("vllm:external_prefix_cache_hits_total") == moved + 100
    until(cluster.settled)


def test_a_client_that_leaves_while_d_waits_frees_both(cluster: Cluster) -> None:
    tokens, (to_p, to_d) = prompt(), legs(cluster.p)
    with pytest.raises(httpx.ReadTimeout):
        cluster.d.ask(tokens, NEW_TOKENS, kv_transfer_params=to_d, timeout_s=httpx.Timeout(30, read=1.0))
    until(lambda: not cluster.d.memory()["awaiting"])
    granted = cluster.p.counter("pdkv:leases_granted_total")
    assert cluster.p.ask(tokens, 1, kv_transfer_params=to_p).json().get("kv_transfer_params") is None
    assert cluster.p.counter("pdkv:leases_granted_total") == granted, "nobody would ever have read it"
    assert cluster.settled()


def test_a_request_that_d_refuses_frees_p(cluster: Cluster) -> None:
    tokens, (to_p, to_d) = prompt(), legs(cluster.p)
    answer = cluster.p.ask(tokens, 1, kv_transfer_params=to_p)
    assert answer.json()["kv_transfer_params"]["remote_num_tokens"] == 100
    assert cluster.p.memory()["accounts"]["retained"] > 0
    assert cluster.d.ask(tokens, 10**6, kv_transfer_params=to_d).status_code == 400
    until(cluster.settled, timeout_s=10)  # its lease would have stood for 30 s


def test_when_p_gives_the_prefill_up_the_strict_d_computes_and_the_other_fails(
    cluster: Cluster, pool: ThreadPoolExecutor
) -> None:
    """P's client leaves in the middle of the prefill, so P aborts it and says so to whoever waits."""
    for d in (cluster.d, cluster.vllm):
        tokens, (to_p, to_d) = prompt(LONG), legs(cluster.p)
        gone = d.counter("pdkv:transfer_gone_received_total")
        answer = waiting_at(pool, d, tokens, to_d)
        with pytest.raises(httpx.ReadTimeout):
            cluster.p.ask(tokens, 1, kv_transfer_params=to_p, timeout_s=httpx.Timeout(30, read=0.3))
        if d is cluster.d:
            assert len(tokens_of(answer.result(60))) == NEW_TOKENS
        else:
            assert answer.result(60).status_code == 500
            assert "the prefill ended (abort)" in answer.result().json()["error"]["message"]
        assert d.counter("pdkv:transfer_gone_received_total") == gone + 1
        until(cluster.settled)


def test_by_vllms_rules_d_waits_beyond_its_timeout_and_is_served_late(
    cluster: Cluster, pool: ThreadPoolExecutor
) -> None:
    """Its --push-registration-timeout is a second, which only shows (the reference logs, and waits on)."""
    tokens, (to_p, to_d) = prompt(), legs(cluster.p)
    answer = waiting_at(pool, cluster.vllm, tokens, to_d)
    until(lambda: cluster.vllm.memory()["awaiting"][0]["since_s"] > 2)
    assert cluster.vllm.memory()["awaiting"][0]["deadline_s"] is None
    assert cluster.p.ask(tokens, 1, kv_transfer_params=to_p).status_code == 200
    assert tokens_of(answer.result(60)) == expected(cluster.d, tokens)
    until(cluster.settled)


def test_d_that_was_told_of_a_former_life_of_p_does_not_wait(cluster: Cluster) -> None:
    tokens, (_, to_d) = prompt(), legs(cluster.p)
    answer = cluster.d.ask(tokens, NEW_TOKENS, kv_transfer_params={**to_d, "remote_engine_id": "p-before"})
    assert tokens_of(answer) == expected(cluster.d, tokens)
    assert answer.headers["x-pdkv-kv"] == "recomputed"
    assert re.search(r"p-before.* is (gone|not here)", cluster.d.log.read_text())


def test_p_killed_while_d_waits(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    """Through the router the other P is asked; alone, D computes the prompt itself. Nothing is left anywhere."""
    tokens, by_id = prompt(), {legs(p)[1]["remote_engine_id"]: p for p in cluster.prefills}
    for p in cluster.prefills:
        p.signal(signal.SIGSTOP)
    answer = pool.submit(cluster.router.ask, tokens, NEW_TOKENS)
    until(lambda: bool(cluster.d.memory()["awaiting"]))
    (shown,) = cluster.d.memory()["awaiting"]
    dead = by_id.pop(shown["producer"])
    (alive,) = by_id.values()
    dead.end()
    alive.signal(signal.SIGCONT)
    cluster.prefills.remove(dead)
    assert tokens_of(answer.result(60)) == expected(cluster.d, tokens)
    assert answer.result().headers["x-pdkv-prefill"] == "remote"
    assert alive.counter("pdkv:transfer_announcements_sent_total") > 0
    until(cluster.settled)

    tokens, (_, to_d) = prompt(), legs(alive)
    answer = waiting_at(pool, cluster.d, tokens, to_d)
    alive.end()
    cluster.prefills.clear()
    assert tokens_of(answer.result(60)) == expected(cluster.d, tokens)
    assert "is gone" in cluster.d.log.read_text()
    assert cluster.settled()
    alone = cluster.router.ask(prompt(), NEW_TOKENS)
    assert (len(tokens_of(alone)), alone.headers["x-pdkv-prefill"]) == (NEW_TOKENS, "local")
