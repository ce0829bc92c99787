"""A mover on a thread: its end is a fence, and one that does not end costs the instance, never somebody's KV."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from benchmarks.plain_pool import plain
from benchmarks.transfer_half import Half
from tests.nixl_here import needs_nixl

from pdkv.core.ports import FromConsumer, MoverRestarted
from pdkv.errors import FenceLost
from pdkv.runtime import mover_thread
from pdkv.runtime.mover_thread import MoverThread
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.transports.base import Copy, TransferMemory
from pdkv.runtime.transports.shm import ShmTransport

ROOT = Path(__file__).resolve().parents[2]


class Stuck(ShmTransport):
    """Hangs in `post` until ``freed``, as a call into a driver may."""

    def __init__(self, memory: TransferMemory, freed: threading.Event) -> None:
        super().__init__(memory)
        self._freed = freed
        self.entered = threading.Event()

    def post(self, copy: Copy) -> None:
        self.entered.set()
        assert self._freed.wait(60)
        super().post(copy)


class Unclosable(ShmTransport):
    """Cannot promise that nothing lands any more."""

    def close(self) -> None:
        raise RuntimeError("the agent lives on")


@pytest.fixture
def memory() -> Iterator[TransferMemory]:
    local = TransferMemory(SharedMemory(8 * 64), SharedMemory(4 * 16), plain(8, 64), 4)
    yield local
    local.pool.close()
    local.slots.close()


@pytest.fixture
def freed() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def _movers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("pdkv-mover")]


@pytest.mark.parametrize("transport", ["shm", pytest.param("nixl", marks=needs_nixl)])
def test_kill_ends_the_thread_at_once_and_may_be_repeated(memory: TransferMemory, transport: str) -> None:
    before = _movers()
    mover = MoverThread(transport, "a", memory)
    mover.kill()  # perhaps before it is ready
    mover.kill()
    assert _movers() == before
    assert mover.pid is None


def test_an_error_in_the_mover_ends_it_with_its_cause(memory: TransferMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ShmTransport) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(ShmTransport, "progress", broken)
    mover = MoverThread("shm", "a", memory)
    until = time.monotonic() + 10
    while mover.receive()[1]:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert "a bug" in mover.reap()


def test_a_transport_that_cannot_end_is_no_fence(memory: TransferMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_thread, "make_transport", lambda name, agent, local: Unclosable(local))
    mover = MoverThread("shm", "a", memory)
    for end in (mover.kill, mover.reap):
        with pytest.raises(FenceLost, match="the agent lives on"):
            end()


@needs_nixl
def test_an_agent_that_somebody_keeps_is_noticed(memory: TransferMemory) -> None:
    from pdkv.runtime.transports.nixl import NixlTransport

    transport = NixlTransport("a", memory)
    kept = transport._agent.api
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lives on"):
            transport.close()
    del kept
    transport.close()


def test_a_stuck_mover_stops_the_instance_and_keeps_the_memory(
    monkeypatch: pytest.MonkeyPatch, freed: threading.Event
) -> None:
    monkeypatch.setattr(mover_thread, "_END_TIMEOUT_S", 0.3)
    made: list[Stuck] = []

    def make(name: str, agent: str, local: TransferMemory) -> Stuck:
        made.append(Stuck(local, freed))
        return made[-1]

    monkeypatch.setattr(mover_thread, "make_transport", make)
    producer = Half("producer", transport="shm", lease_ns=300_000_000).start()
    consumer = Half("consumer", transport="shm", mover="thread", lease_ns=300_000_000).start()
    producer.fill(1)
    source = producer.grant((1, 2))
    consumer.keep(producer.peer, source.grant.token)
    producer.wait(FromConsumer)
    consumer.post(source, (4, 5))
    assert made[0].entered.wait(10)
    consumer.submit(restart_mover=True)
    with pytest.raises(FenceLost, match="does not end") as lost:
        _close_when_failed(consumer)
    assert consumer.failures == [lost.value]
    while not consumer.inbox.empty():
        assert not isinstance(consumer.inbox.get(), MoverRestarted)  # nothing is fenced
    assert len(made) == 1
    with pytest.raises(FenceLost):  # as often as it is asked
        consumer.control.close()
    while not producer.inbox.empty():
        producer.inbox.get()
    time.sleep(0.2)
    assert producer.inbox.empty()  # and no lease is renewed any more

    freed.set()  # what is late lands in memory that was kept
    until = time.monotonic() + 10
    while not np.array_equal(consumer.blocks[4:6], producer.blocks[1:3]):
        assert time.monotonic() < until
        time.sleep(0.01)
    producer.close()


def _close_when_failed(half: Half) -> None:
    until = time.monotonic() + 10
    while not half.failures:
        assert time.monotonic() < until
        time.sleep(0.01)
    half.control.close()


_HANGS_WITH_PYTHONS_LOCK = """
    import ctypes, sys
    sys.path.insert(0, {root!r})
    from pdkv.runtime import mover_thread
    from pdkv.runtime.transports.shm import ShmTransport
    from benchmarks.transfer_half import Half

    class Hanging(ShmTransport):
        def close(self):
            ctypes.PyDLL(None).sleep(60)

    mover_thread._END_TIMEOUT_S = 0.5
    mover_thread.make_transport = lambda name, agent, local: Hanging(local)
    half = Half("p", transport="shm", mover="thread").start()
    print("started", flush=True)
    half.close()
"""


def test_an_end_that_hangs_with_pythons_lock_ends_the_process() -> None:
    code = textwrap.dedent(_HANGS_WITH_PYTHONS_LOCK).format(root=str(ROOT))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=45, check=False)
    assert done.stdout == "started\n"
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in close" in done.stderr
