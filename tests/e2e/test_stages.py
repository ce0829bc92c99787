"""kill -9 of P and of D at each stage of a request, in both modes, and what stands still for longer than a lease.

Router, P and D are processes on a tiny model, at fixed ports: what was killed is started again where it was. Each takes
one request at a time, so that another can be queued. NIXL moves over TCP, where a READ needs P's mover: a READ from a
stopped mover is under way for as long as a test wants. The table in docs/transfer.md says what must come of it.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.e2e.processes import Part, free_port, tokens_of, until
from tests.nixl_here import needs_nixl
from tests.runtime.tiny import save_tiny

from pdkv.serve.params import push_legs, side_channel_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), needs_nixl]

LEASE_S = 6
SILENCE_S = 10
MODES = ("pull", "push")
NEW_TOKENS = 6
MAX_LENGTH = 4096
OPTIONS = (
    *("--threads", "1", "--debug", "--max-model-len", str(MAX_LENGTH), "--kv-cache-memory-bytes", "8MiB"),
    *("--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--kv-lease-duration", str(LEASE_S)),
    *("--transport", "nixl"),
)


class Cluster:
    """One P, one D, and a router for each mode."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._model = str(save_tiny("llama", directory / "model", max_position_embeddings=MAX_LENGTH).directory)
        self._parts: list[Part] = []
        self._ports = {role: free_port() for role in ("prefill", "decode")}
        starting = [self._start(role) for role in self._ports]
        self.p, self.d = (part.ready() for part in starting)
        urls = ("--prefill", self.p.url, "--decode", self.d.url, "--instance-timeout", str(SILENCE_S))
        self.routers = {
            mode: self._part(mode, "router", "--port", "0", "--transfer-mode", mode, *urls) for mode in MODES
        }
        for router in self.routers.values():
            router.ready()

    def _part(self, log: str, *arguments: str) -> Part:
        part = Part(self._directory / f"{log}.log", *arguments, UCX_TLS="tcp,self")
        self._parts.append(part)
        return part

    def _start(self, role: str) -> Part:
        return self._part(role, role, self._model, "--port", str(self._ports[role]), *OPTIONS)

    def mend(self) -> None:
        """Start again what was killed; the routers have noticed."""
        if not self.p.process.alive():
            self.p = self._start("prefill").ready()
        if not self.d.process.alive():
            self.d = self._start("decode").ready()
        for router in self.routers.values():
            until(lambda router=router: self.answers(router), 60)  # type: ignore[misc]

    def answers(self, router: Part) -> bool:
        """Whether a request through ``router`` has its prompt computed by P."""
        answer = router.ask(prompt(20), 1)
        return answer.status_code == 200 and answer.headers["x-pdkv-prefill"] == "remote"

    def settled(self) -> bool:
        """Nobody who is alive holds a block or waits for KV."""
        alive = [part for part in (self.p, self.d) if part.process.alive()]
        return all(part.idle() and not part.memory()["awaiting"] for part in alive)

    def close(self) -> None:
        for part in self._parts:
            part.end()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("stages"))
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    """All of it alive, nothing held."""
    running.mend()
    until(running.settled)
    return running


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """How KV gets from P to D."""
    mode: str = request.param
    return mode


def prompt(length: int = 100) -> list[int]:
    """A prompt that nobody has seen."""
    return [5 + secrets.randbelow(90) for _ in range(length)]


@contextmanager
def busy(part: Part, pool: ThreadPoolExecutor) -> Iterator[None]:
    """``part`` works on a request of its own, for as long as this lasts or it lives; others wait in its queue."""
    pool.submit(_occupy, part)
    until(lambda: part.counter("vllm:num_requests_running") == 1)
    yield


def _occupy(part: Part) -> None:
    try:
        part.ask(prompt(16), 3000)
    except httpx.HTTPError:
        pass  # it was killed


@contextmanager
def stopped(send: Callable[[int], None]) -> Iterator[None]:
    """SIGSTOP, and SIGCONT if it is still there."""
    send(signal.SIGSTOP)
    try:
        yield
    finally:
        try:
            send(signal.SIGCONT)
        except ProcessLookupError:
            pass


def ask_both(cluster: Cluster, pool: ThreadPoolExecutor) -> dict[str, tuple[list[int], Future[httpx.Response]]]:
    """By mode, a prompt and its answer: at once, where a test waits for a lease to end."""
    prompts = {mode: prompt() for mode in MODES}
    return {m: (tokens, pool.submit(cluster.routers[m].ask, tokens, NEW_TOKENS)) for m, tokens in prompts.items()}


def granted(part: Part) -> float:
    """Leases so far."""
    return part.counter("pdkv:leases_granted_total")


def check_right(cluster: Cluster, answer: httpx.Response, tokens: list[int]) -> None:
    """The tokens that D computes alone; and everything is given back."""
    assert tokens_of(answer) == tokens_of(cluster.d.ask(tokens, len(tokens_of(answer)), cache_salt="alone"))
    until(cluster.settled)


def check_lost(cluster: Cluster, asked: Future[httpx.Response], within_s: float) -> None:
    """An error that the client can see, and P's blocks are free in time."""
    answer = asked.result(60)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "decode_unavailable"
    until(cluster.settled, within_s)


# ------------------------------------------------------------------------------------------------------- P is killed


def test_p_killed_with_the_request_in_its_queue(cluster: Cluster, pool: ThreadPoolExecutor, mode: str) -> None:
    tokens = prompt()
    with busy(cluster.p, pool):
        asked = pool.submit(cluster.routers[mode].ask, tokens, NEW_TOKENS)
        until(lambda: cluster.p.counter("vllm:num_requests_waiting") == 1)
        cluster.p.end()
    assert asked.result(60).headers["x-pdkv-prefill"] == "local"
    check_right(cluster, asked.result(), tokens)


def test_p_killed_in_the_prefill(cluster: Cluster, pool: ThreadPoolExecutor, mode: str) -> None:
    tokens = prompt(2000)
    asked = pool.submit(cluster.routers[mode].ask, tokens, NEW_TOKENS)
    until(lambda: cluster.p.memory()["accounts"]["running"] > 0)
    cluster.p.end()
    assert asked.result(60).headers["x-pdkv-prefill"] == "local"
    check_right(cluster, asked.result(), tokens)


def test_p_killed_before_its_lease_is_read(cluster: Cluster, pool: ThreadPoolExecutor, mode: str) -> None:
    """D stands still meanwhile. (In push mode the router has noticed when D goes on, and asks it to compute.)"""
    tokens = prompt()
    with stopped(cluster.d.signal):
        asked = pool.submit(cluster.routers[mode].ask, tokens, NEW_TOKENS)
        until(lambda: cluster.p.memory()["accounts"]["retained"] > 0)
        cluster.p.end()
    assert asked.result(60).headers["x-pdkv-kv"] == "recomputed" or mode == "push"
    check_right(cluster, asked.result(), tokens)


def test_p_killed_during_the_read(cluster: Cluster, pool: ThreadPoolExecutor, mode: str) -> None:
    tokens = prompt()
    with stopped(cluster.p.mover().send_signal):
        asked = pool.submit(cluster.routers[mode].ask, tokens, NEW_TOKENS)
        until(lambda: cluster.d.memory()["accounts"]["loading"] > 0)
        time.sleep(0.3)  # both are connected, so the READ is posted at once
        cluster.p.end()
    assert asked.result(60).headers["x-pdkv-kv"] == "recomputed"
    check_right(cluster, asked.result(), tokens)


def test_p_killed_after_the_read_is_not_missed(cluster: Cluster, pool: ThreadPoolExecutor, mode: str) -> None:
    tokens = prompt()
    asked = pool.submit(cluster.routers[mode].ask, tokens, 400)
    until(lambda: cluster.d.memory()["accounts"]["running"] > 0 and cluster.p.idle())
    cluster.p.end()
    assert asked.result(60).headers["x-pdkv-kv"] == "loaded"
    assert asked.result().headers["x-pdkv-prefill"] == "remote"
    check_right(cluster, asked.result(), tokens)


# ------------------------------------------------------------------------------------------------------- D is killed


def test_d_killed_with_the_request_in_its_queue(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    before = granted(cluster.p)
    with busy(cluster.d, pool):
        asked = ask_both(cluster, pool)
        until(lambda: granted(cluster.p) == before + 2 and cluster.d.counter("vllm:num_requests_waiting") == 2)
        cluster.d.end()
        for _, answer in asked.values():
            check_lost(cluster, answer, 3 * LEASE_S)


def test_d_killed_during_the_read(cluster: Cluster, pool: ThreadPoolExecutor, mode: str) -> None:
    with stopped(cluster.p.mover().send_signal):
        asked = pool.submit(cluster.routers[mode].ask, prompt(), NEW_TOKENS)
        until(lambda: cluster.d.memory()["accounts"]["loading"] > 0)
        cluster.d.end()
    check_lost(cluster, asked, 3 * LEASE_S)


def test_d_killed_while_it_decodes(cluster: Cluster, pool: ThreadPoolExecutor, mode: str) -> None:
    """P has been told that it may free: nothing is held there."""
    asked = pool.submit(cluster.routers[mode].ask, prompt(), 2000)
    until(lambda: cluster.d.memory()["accounts"]["running"] > 0 and cluster.p.idle())
    assert not asked.done()
    cluster.d.end()
    assert cluster.p.idle()
    check_lost(cluster, asked, 5)


# ------------------------------------------------------------------------------- stopped for longer than a lease


def test_p_stopped_for_longer_than_the_lease(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    """The router gives it up; when it goes on it frees what its client no longer waits for."""
    with stopped(cluster.p.signal):
        asked = ask_both(cluster, pool)
        for _, answer in asked.values():
            assert answer.result(60).headers["x-pdkv-prefill"] == "local"
    for tokens, answer in asked.values():
        check_right(cluster, answer.result(), tokens)


def test_d_stopped_for_longer_than_the_lease(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    """P frees when it has heard nothing for so long; D finds that out and computes."""
    before, expired = granted(cluster.p), cluster.p.counter("vllm:nixl_num_kv_expired_reqs_total")
    with stopped(cluster.d.signal):
        asked = ask_both(cluster, pool)
        until(lambda: granted(cluster.p) == before + 2)
        until(cluster.p.idle, 3 * LEASE_S)
    assert cluster.p.counter("vllm:nixl_num_kv_expired_reqs_total") == expired + 2
    for tokens, answer in asked.values():
        assert answer.result(60).headers["x-pdkv-kv"] == "recomputed"
        check_right(cluster, answer.result(), tokens)


# --------------------------------------------------------------------------------------------------- a closed port


def test_a_side_channel_that_nobody_listens_on(cluster: Cluster) -> None:
    """D computes; P, whom nobody asks, frees when its lease ends."""
    pulled, pushed = prompt(), prompt()
    leg = cluster.p.prefill(pulled)
    side_channel = side_channel_of(httpx.get(f"{cluster.p.url}/health", timeout=30).json())
    to_p, to_d = push_legs(side_channel, secrets.token_hex(16))
    assert cluster.p.ask(pushed, 1, kv_transfer_params=to_p).status_code == 200
    for tokens, params in ((pulled, leg), (pushed, to_d)):
        answer = cluster.d.ask(tokens, NEW_TOKENS, kv_transfer_params={**params, "remote_port": free_port()})
        assert answer.headers["x-pdkv-kv"] == "recomputed"
        assert tokens_of(answer) == tokens_of(cluster.d.ask(tokens, NEW_TOKENS, cache_salt="alone"))
    until(cluster.settled)
