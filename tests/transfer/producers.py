"""Producers of test_contract, whole instances that can be stopped and killed: processes of their own, or simulated.

What a producer process has is mapped here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tests.transfer.sides import (
    BLOCK_BYTES,
    BLOCKS,
    Readable,
    RealSide,
    Side,
    SimulatedSide,
    fill_real,
    run,
    ucx_held_to,
)

from pdkv.core.config import STRICT
from pdkv.core.engine import Identity
from pdkv.core.transfer.messages import Peer
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.simulate.weather import MS, Weather
from pdkv.simulate.world import World

ROOT = Path(__file__).resolve().parents[2]


class Producer(Readable, ABC):
    """One that can be stopped and ``killed``."""

    killed = False

    @abstractmethod
    def fill(self) -> None:
        """No two blocks are alike, and no byte is 0."""

    @abstractmethod
    def kill(self) -> None:
        """kill -9 of all of it."""

    @abstractmethod
    def stop(self) -> None:
        """SIGSTOP of all of it."""

    @abstractmethod
    def resume(self) -> None:
        """SIGCONT."""


class ProducerProcess(Producer):
    """A `tests.transfer.producer` and its mover."""

    def __init__(self, name: str, transport: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.producer", name, transport, str(BLOCKS), str(BLOCK_BYTES)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        facts = json.loads(self.process.stdout.readline())
        self.identity = Identity(engine_id=name, nonce=facts["nonce"], secret=bytes.fromhex(facts["secret"]))
        self.peer = Peer(name, "127.0.0.1", facts["port"])
        self._pool = self._map(facts["pool_fd"], BLOCKS * BLOCK_BYTES)
        self._slots = self._map(facts["slots_fd"], 64 * 16)
        self.blocks = self._pool.array(np.uint8, (BLOCKS, BLOCK_BYTES))
        self.slots = self._slots.array(np.uint64, (64, 2))

    def _map(self, fd: int, nbytes: int) -> SharedMemory:
        return SharedMemory.attach(os.open(f"/proc/{self.process.pid}/fd/{fd}", os.O_RDWR), nbytes)

    def fill(self) -> None:
        fill_real(self.blocks)

    def kill(self) -> None:
        self.killed = True
        self._signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill_mover(self) -> None:
        """Its mover only: a process of its own."""
        (mover,) = psutil.Process(self.process.pid).children()
        mover.kill()

    def _signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        del self.blocks, self.slots
        self._pool.close()
        self._slots.close()


class SimulatedProducer(Producer):
    """A life of an instance in a simulated world."""

    def __init__(self, side: SimulatedSide) -> None:
        self._side = side
        self.identity, self.peer, self.block_size = side.identity, side.peer, side.block_size
        self.blocks, self.slots = side.blocks, side.slots

    def fill(self) -> None:
        self._side.fill()

    def kill(self) -> None:
        self.killed = True
        self._side.instance.kill()

    def stop(self) -> None:
        self._side.life.stop_for(60_000 * MS)

    def resume(self) -> None:
        while self._side.life.stopped_for_ns:
            run(self._side.world, self._side.life.stopped_for_ns)


#: Who reads, and how to start one more that can be read from.
Readers = Iterator[tuple[Side, Callable[[], Producer]]]


@contextmanager
def real(transport: str, mover: str, tls: str | None = None) -> Readers:
    """A consumer with this kind of mover; its producers' movers are processes. UCX is held to ``tls``."""
    producers: list[ProducerProcess] = []

    def start() -> ProducerProcess:
        producers.append(ProducerProcess(f"producer{len(producers)}", transport))
        return producers[-1]

    with ucx_held_to(tls):
        side = RealSide("consumer", transport, mover)
        try:
            yield side, start
        finally:
            for producer in producers:
                producer.close()
            side.close()


def calm_world(seed: int, *, shared_memory: bool | None = None, over_tcp: bool = False, **settings: Any) -> World:
    """Nothing goes wrong by itself in it, and transfers take long enough for what happens meanwhile."""
    weather = Weather(max_delay_ms=2, read_ms=2000)
    settings |= {"num_blocks": BLOCKS, "shared_memory": shared_memory, "over_tcp": over_tcp, "unlike": False}
    return World(seed, STRICT, requests=0, weather=weather, **settings)


def started(world: World, name: str, number: int, *, heard: bool = True) -> SimulatedSide:
    """One more instance in ``world``."""
    return SimulatedSide(world, world._instance(f"{name}{number}", 100 + number, STRICT), heard=heard)


@contextmanager
def simulated(seed: int) -> Readers:
    """In virtual time."""
    world = calm_world(seed)
    side, count = started(world, "D", 1), 1

    def start() -> SimulatedProducer:
        nonlocal count
        count += 1
        return SimulatedProducer(started(world, "P", count))

    yield side, start
