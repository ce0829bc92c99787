"""WRITE push over TCP into a D that stands still: what P has cut off lies in a socket of D's, and must not be written
into memory that D has given to somebody else by then. D is a process group, P an instance of this process.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.harness import Flight, array, idle_blocks, instance
from tests.e2e.processes import Part, tokens_of, until
from tests.e2e.test_push import prompt
from tests.e2e.test_write_push import granted_at, holders
from tests.nixl_here import needs_nixl
from tests.runtime.tiny import save_tiny
from tests.transfer.sides import ucx_held_to

from pdkv.core.ports import NewRequest
from pdkv.core.transfer.messages import Peer
from pdkv.runtime import boot
from pdkv.runtime.instance import Instance
from pdkv.serve.params import push_legs
from pdkv.units import NS_PER_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), needs_nixl]

MAX_LENGTH = 2688
WRITTEN, REUSING = 600, 2500  # tokens of prompts: the pool has room for 2704, so the second takes what the first had
OPTIONS = (
    *("--port", "0", "--threads", "1", "--debug", "--max-model-len", str(MAX_LENGTH), "--transport", "nixl"),
    *("--kv-cache-memory-bytes", "1MiB", "--max-num-seqs", "4"),
)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Instance, Part]]:
    """P and D, whose movers reach each other over TCP and nothing else. P waits for a fence a second instead of ten."""
    real, of_p = boot.engine_config, {"kv_load_timeout_s": 1.0, "max_model_len": MAX_LENGTH}
    monkeypatch.setattr(boot, "engine_config", lambda *about: replace(real(*about), fence_timeout_ns=NS_PER_S))
    model = str(save_tiny("llama", tmp_path / "model", max_position_embeddings=MAX_LENGTH).directory)
    d = Part(tmp_path / "d.log", "decode", model, *OPTIONS, UCX_TLS="tcp,self")
    try:
        with ucx_held_to("tcp,self"), closing(instance("prefill", model, transport="nixl", **of_p)) as p:
            yield p, d.ready()
    finally:
        d.end()


class Leg:
    """One request, of which D has granted its memory to P, and P knows that."""

    def __init__(self, p: Instance, d: Part, pool: ThreadPoolExecutor, tokens: list[int]) -> None:
        self._p, self._tokens, self._id = p, tokens, secrets.token_hex(16)
        info, known = p.info, p.stats().transfer.registrations_received
        peer = Peer(info.engine_id, info.side_channel_host, info.side_channel_port)
        to_d = push_legs(peer, self._id, mode="write")[1]
        self.answer: Future[httpx.Response] = granted_at(pool, d, tokens, to_d)
        until(lambda: p.stats().transfer.registrations_received > known)

    def prefill(self) -> Flight:
        """P's leg; the WRITE is under way."""
        more: dict[str, Any] = {"max_tokens": 1, "produce": True, "transfer_id": self._id}
        return Flight(self._p, NewRequest(request_id=self._id, prompt=array(self._tokens), **more)).wait()


def check_written(p: Instance, d: Part, pool: ThreadPoolExecutor) -> None:
    """As a rule a WRITE arrives."""
    leg = Leg(p, d, pool, prompt())
    leg.prefill()
    assert leg.answer.result(30).headers["x-pdkv-kv"] == "loaded"


def unread_bytes(part: Part) -> int:
    """What has arrived in TCP sockets of its mover, and waits there to be read."""
    mover = Path(f"/proc/{part.mover().pid}")
    links = {os.readlink(fd) for fd in (mover / "fd").iterdir()}
    rows = [line.split() for line in (mover / "net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if f"socket:[{row[9]}]" in links)


def test_bytes_of_a_write_that_was_cut_off_come_into_no_memory_that_is_reused(
    pair: tuple[Instance, Part], pool: ThreadPoolExecutor
) -> None:
    p, d = pair
    free = idle_blocks(p)
    check_written(p, d, pool)  # they are connected now
    leg = Leg(p, d, pool, prompt(WRITTEN))
    d.signal(signal.SIGSTOP)
    leg.prefill()
    until(lambda: idle_blocks(p) == free)  # its deadline, and a second later its last fence
    assert unread_bytes(d) > 0, "nothing is under way: this shows nothing"
    os.kill(d.process.pid, signal.SIGCONT)  # its mover, whose sockets those are, comes to itself later
    assert leg.answer.result(30).headers["x-pdkv-kv"] == "recomputed"
    until(d.idle)

    other = prompt(REUSING)
    reusing = pool.submit(d.ask, other, 100)
    until(lambda: len(holders(d, "running")) == 1)
    d.signal(signal.SIGCONT)
    assert tokens_of(reusing.result()) == tokens_of(d.ask(other, 100, cache_salt="alone"))
    check_written(p, d, pool)
    until(lambda: idle_blocks(p) == free and d.idle())
