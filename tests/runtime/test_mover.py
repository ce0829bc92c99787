"""A mover by itself, a process or a thread, driven over its socket."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from benchmarks.plain_pool import plain
from tests.nixl_here import HAS_NIXL

from pdkv.runtime.mover_channel import MoverChannel
from pdkv.runtime.mover_process import MoverProcess
from pdkv.runtime.mover_thread import MoverThread
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.transports.base import TransferMemory
from pdkv.runtime.transports.shm import shm_offer
from pdkv.runtime.wire import (
    Broken,
    Cancel,
    Connect,
    Ended,
    Forget,
    FromMover,
    PeerMemory,
    Post,
    Ready,
    Serve,
    Start,
)


class Driven:
    """A mover on a pool of 8 blocks of 64 bytes; its peer is itself."""

    def __init__(self, transport: str = "shm", kind: str = "process") -> None:
        self.pool, self.slots = SharedMemory(8 * 64), SharedMemory(4 * 16)
        self.blocks = self.pool.array(np.uint8, (8, 64))
        self.process = self._start(transport) if kind == "process" else self._start_thread(transport)
        self.queue: list[FromMover] = []

    def _start(self, transport: str) -> MoverChannel:
        return MoverProcess(
            Start(
                transport=transport,
                agent="a",
                pool_fd=self.pool.fd,
                slots_fd=self.slots.fd,
                geometry=plain(8, 64),
                num_slots=4,
            )
        )

    def _start_thread(self, transport: str) -> MoverChannel:
        local = TransferMemory(pool=self.pool, slots=self.slots, geometry=plain(8, 64), num_slots=4)
        return MoverThread(transport, "a", local)

    def memory(self, **changes: object) -> PeerMemory:
        fields = {"geometry": plain(8, 64), "num_slots": 4, **changes}
        return PeerMemory(shm=shm_offer(self.pool, self.slots), **fields)  # type: ignore[arg-type]

    def next(self) -> FromMover | None:
        """The next message; None when the mover is gone."""
        until = time.monotonic() + 30
        while not self.queue:
            assert time.monotonic() < until
            select.select([self.process.fileno()], [], [], 1)
            messages, alive = self.process.receive()
            self.queue += messages
            if not alive and not self.queue:
                return None
        return self.queue.pop(0)

    def post(self, handle: int, remote: list[int], local: list[int], *, slot: int = 0, peer: str = "p") -> None:
        def ids(values: list[int]) -> bytes:
            return np.asarray(values, "<i4").tobytes()

        self.process.send(Post(handle=handle, peer=peer, remote_blocks=ids(remote), local_blocks=ids(local), slot=slot))


@pytest.fixture(params=["process", "thread"])
def mover(request: pytest.FixtureRequest) -> Iterator[Driven]:
    driven = Driven(kind=request.param)
    assert driven.next() == Ready(offer=None)
    yield driven
    driven.process.kill()


def test_read_then_slot(mover: Driven) -> None:
    mover.blocks[:4] = np.arange(1, 5, dtype=np.uint8)[:, None]
    mover.slots.array(np.uint64, (4, 2))[1] = (77, 5)
    mover.process.send(Connect(peer="p", memory=mover.memory()))
    mover.post(1, [0, 1, 3], [4, 5, 7], slot=1)
    ended = mover.next()
    assert isinstance(ended, Ended)
    assert (ended.handle, ended.slot, ended.moved_bytes, ended.error) == (1, (77, 5), 192, None)
    assert mover.blocks[:, 0].tolist() == [1, 2, 3, 4, 1, 2, 0, 4]


@pytest.mark.parametrize(
    ("remote", "local", "slot", "text"),
    [
        ([8], [0], 0, "remote block ids 8..8 outside the peer's 8 blocks"),
        ([0], [-1], 0, "local block ids -1..-1 outside the pool's 8 blocks"),
        ([0, 1], [0], 0, "2 remote and 1 local"),
        ([0], [0], 4, "slot 4 outside the peer's 4 slots"),
    ],
)
def test_impossible_reads_end_with_the_reason(
    mover: Driven, remote: list[int], local: list[int], slot: int, text: str
) -> None:
    mover.process.send(Connect(peer="p", memory=mover.memory()))
    mover.post(3, remote, local, slot=slot)
    ended = mover.next()
    assert isinstance(ended, Ended)
    assert ended.slot is None
    assert text in str(ended.error)


def test_peers_that_are_unknown_forgotten_or_of_another_shape(mover: Driven) -> None:
    mover.post(1, [0], [1], peer="nobody")
    mover.process.send(Connect(peer="p", memory=mover.memory()))
    mover.process.send(Forget(peer="p"))
    mover.process.send(Forget(peer="p"))
    mover.post(2, [0], [1])
    mover.process.send(Connect(peer="p", memory=mover.memory(geometry=plain(8, 128))))
    mover.post(3, [0], [1])
    errors = [ended.error for ended in (mover.next(), mover.next(), mover.next()) if isinstance(ended, Ended)]
    assert "nobody is not connected" in str(errors[0])
    assert "p is not connected" in str(errors[1])
    assert "has 128 bytes a head's vector, ours 64" in str(errors[2])


def test_unknown_cancels_and_serving_do_no_harm(mover: Driven) -> None:
    mover.process.send(Cancel(handle=12))
    mover.process.send(Serve(for_ns=10**9))
    mover.process.send(Serve(for_ns=0))
    mover.process.send(Connect(peer="p", memory=mover.memory()))
    mover.post(1, [0], [1])
    assert isinstance(mover.next(), Ended)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_when_it_stops_is_its_parents_to_say(number: signal.Signals) -> None:
    """Ctrl-C and a service manager's stop reach it, too; requests that are open then still need it."""
    driven = Driven()
    assert driven.next() == Ready(offer=None)
    os.kill(driven.process.pid, number)
    driven.process.send(Cancel(handle=99))
    driven.post(7, [0], [1], peer="nobody")
    assert isinstance(driven.next(), Ended)
    driven.process.kill()


def test_a_stopped_mover_does_not_block_the_sender() -> None:
    mover = Driven()
    os.kill(mover.process.pid, 19)
    for handle in range(2000):
        mover.post(handle, [0] * 200, [1] * 200, peer="nobody")
    assert mover.process.wants_write
    mover.process.kill()


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_transport_that_cannot_start_says_why(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_NIXL:
        pytest.skip("no NIXL wheel is installed")
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "no-such-device")
    driven = Driven("nixl", kind)
    message = driven.next()
    assert isinstance(message, Broken)
    assert "UCX" in message.reason
    assert driven.next() is None
    assert driven.process.reap() == ("exit code 1" if kind == "process" else message.reason)


def test_it_refuses_to_live_under_another_parent() -> None:
    """Started by somebody who is already gone: it must not stay."""
    process = subprocess.run([sys.executable, "-m", "pdkv.runtime.mover", "0", "1"], timeout=30, check=False)
    assert process.returncode == 1
