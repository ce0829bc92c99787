"""A consumer and its producers, real or simulated, behind one face: what `test_contract` drives.

Blocks are arrays with one row a block: bytes in real memory, tags in a simulated device. The producer of a real duo is
a process of its own, whose memory is mapped here.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from benchmarks.transfer_half import Half, empty_plan, make_grant

from pdkv.core.config import STRICT
from pdkv.core.engine import Identity
from pdkv.core.ports import MoverRestarted, Plan, PostRead, ReadEnded
from pdkv.core.transfer.messages import Peer, RemoteSource
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.transports.base import SLICE_BYTES
from pdkv.simulate.instance import Instance, Life
from pdkv.simulate.weather import MS, Weather
from pdkv.simulate.world import World

ROOT = Path(__file__).resolve().parents[2]

BLOCKS = 300
TAIL_BLOCKS = 97
BLOCK_BYTES = (SLICE_BYTES + 1) // TAIL_BLOCKS
"""97 blocks are a slice and one byte more; the pool is three slices and a bit."""
assert TAIL_BLOCKS * BLOCK_BYTES == SLICE_BYTES + 1

Report = ReadEnded | MoverRestarted


class Producer(ABC):
    """Memory that can be read: ``blocks`` and ``slots`` (uint64[n, 2]) are its own, ``identity`` says whose."""

    identity: Identity
    peer: Peer
    blocks: np.ndarray[Any, Any]
    slots: np.ndarray[Any, Any]
    block_size = 1
    killed = False

    def grant(self, blocks: Sequence[int], *, lease_id: int = 7, slot: int = 3) -> RemoteSource:
        """A lease, named in its slot."""
        size = self.block_size
        return make_grant(
            self.identity, self.peer, self.slots, tuple(blocks), block_size=size, lease_id=lease_id, slot=slot
        )

    @abstractmethod
    def kill(self) -> None:
        """kill -9 of all of it."""

    @abstractmethod
    def stop(self) -> None:
        """SIGSTOP of all of it."""

    @abstractmethod
    def resume(self) -> None:
        """SIGCONT."""


class Duo(ABC):
    """The consumer's side: ``blocks`` is its pool, ``block_bytes`` what one counts in reports."""

    blocks: np.ndarray[Any, Any]
    block_bytes: int
    #: Whether this side's mover can be stopped and killed by itself.
    has_process = False

    def __init__(self) -> None:
        self._handles = 0

    def post(
        self, *reads: tuple[RemoteSource, Sequence[int], Sequence[int]], cancel: bool = False, restart: bool = False
    ) -> tuple[int, ...]:
        """One plan that reads (source, remote blocks, local blocks) each, after a restart, before their cancels."""
        posts = []
        for source, remote, local in reads:
            self._handles += 1
            posts.append(PostRead(self._handles, source, np.asarray(remote, np.int32), np.asarray(local, np.int32)))
        handles = tuple(post.handle for post in posts)
        self.submit(empty_plan(reads=tuple(posts), cancels=handles if cancel else (), restart_mover=restart))
        return handles

    def read(self, source: RemoteSource, remote: Sequence[int], local: Sequence[int]) -> ReadEnded:
        """Post one and wait for its end."""
        (handle,) = self.post((source, remote, local))
        (ended,) = self.reports(1)
        assert isinstance(ended, ReadEnded)
        assert ended.handle == handle
        return ended

    @abstractmethod
    def submit(self, plan: Plan) -> None:
        """Hand a plan over."""

    @abstractmethod
    def reports(self, count: int) -> list[Report]:
        """The next so many reports; fails when they do not come."""

    @abstractmethod
    def pending(self) -> list[Report]:
        """Reports that are there by now."""

    @abstractmethod
    def pause(self, seconds: float) -> None:
        """Let time go by: as little as there is for 0."""

    def arrived(self) -> int:
        """Blocks of which the first byte is there (what is read is never 0)."""
        return int(np.count_nonzero(self.blocks[:, 0]))

    @abstractmethod
    def fill(self, producer: Producer) -> None:
        """No two blocks of the producer are alike, and no byte is 0."""

    @abstractmethod
    def start_producer(self) -> Producer:
        """One more."""

    @abstractmethod
    def kill_mover(self) -> None:
        """Our own mover dies by itself."""

    @abstractmethod
    def close(self) -> None:
        """End everything."""


class ProducerProcess(Producer):
    """A `tests.transfer.producer` and its mover."""

    def __init__(self, name: str, transport: str, mover: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.producer", name, transport, mover, str(BLOCKS), str(BLOCK_BYTES)],
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
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        del self.blocks, self.slots
        self._pool.close()
        self._slots.close()


class RealDuo(Duo):
    """Over NIXL or shared memory, with either kind of mover on the consumer's side."""

    block_bytes = BLOCK_BYTES

    def __init__(self, transport: str, mover: str) -> None:
        super().__init__()
        self._transport, self.has_process = transport, mover == "process"
        self._producers: list[ProducerProcess] = []
        self.half = Half(
            "consumer", transport=transport, mover=mover, num_blocks=BLOCKS, bytes_per_block=BLOCK_BYTES  # type: ignore[arg-type]
        ).start()  # fmt: skip
        self.blocks = self.half.blocks

    def submit(self, plan: Plan) -> None:
        self.half.control.submit(plan)

    def reports(self, count: int) -> list[Report]:
        return [self._next(timeout_s=30) for _ in range(count)]

    def pending(self) -> list[Report]:
        found: list[Report] = []
        while True:
            try:
                found.append(self._next(timeout_s=0.02))
            except queue.Empty:
                return found

    def _next(self, timeout_s: float) -> Report:
        while True:
            item = self.half.inbox.get(timeout=timeout_s)
            if isinstance(item, Report):
                return item

    def pause(self, seconds: float) -> None:
        time.sleep(max(seconds, 0.0001))

    def fill(self, producer: Producer) -> None:
        row = np.random.default_rng(1).integers(1, 255, BLOCK_BYTES, dtype=np.uint8)
        producer.blocks[:] = row
        producer.blocks[:, :: BLOCK_BYTES - 1] = np.arange(1, BLOCKS + 1)[:, None] % 255 + 1  # both ends of each
        producer.blocks[:, 1] = np.arange(BLOCKS) // 255 + 1

    def start_producer(self) -> ProducerProcess:
        self._producers.append(ProducerProcess(f"producer{len(self._producers)}", self._transport, "process"))
        return self._producers[-1]

    @property
    def mover_pid(self) -> int:
        """Of our mover, where it is a process."""
        pid = self.half.control.mover_pid
        assert pid is not None
        return pid

    def kill_mover(self) -> None:
        os.kill(self.mover_pid, signal.SIGKILL)

    def close(self) -> None:
        for producer in self._producers:
            producer.close()
        del self.blocks
        self.half.close()
        assert not self.half.failures


def _pool_of(life: Life) -> np.ndarray[Any, Any]:
    """int64[num_blocks, block size]: the tags in a simulated device's memory; a view."""
    return np.frombuffer(life.device.tags, dtype=np.int64).reshape(life.device.num_blocks, -1)


class SimulatedProducer(Producer):
    """A life of an instance in a simulated world."""

    def __init__(self, world: World, instance: Instance) -> None:
        assert instance.life is not None
        self._world, self._instance, self._life = world, instance, instance.life
        self.identity = self._life.engine.identity
        self.peer = self._life.peer
        self.block_size = self._life.engine.config.block_size
        self.blocks = _pool_of(self._life)
        self.slots = self._life.slots

    def kill(self) -> None:
        self.killed = True
        self._instance.kill()

    def stop(self) -> None:
        self._life.stop_for(60_000 * MS)

    def resume(self) -> None:
        while self._life.stopped_for_ns:
            _run(self._world, self._life.stopped_for_ns)


class SimulatedDuo(Duo):
    """In virtual time, in a calm world without requests: what the mover reports is kept from the engine."""

    has_process = True

    def __init__(self, seed: int) -> None:
        super().__init__()
        calm = Weather(max_delay_ms=2, read_ms=2000)  # long enough for what happens meanwhile
        self.world = World(seed, STRICT, requests=0, weather=calm, num_blocks=BLOCKS)
        self._instances = 0
        consumer = self._start("D")
        assert consumer.life is not None
        self._life = consumer.life
        self._inbox: list[Report] = []
        self._life.deliver = self._inbox.append  # type: ignore[method-assign, assignment]
        self.blocks = _pool_of(self._life)
        self.block_bytes = self.blocks[0].nbytes

    def _start(self, name: str) -> Instance:
        self._instances += 1
        return self.world._instance(f"{name}{self._instances}", 100 + self._instances, STRICT)

    def submit(self, plan: Plan) -> None:
        self._life._do(plan)

    def reports(self, count: int) -> list[Report]:
        until_ns = self.world.time.now_ns + 30_000 * MS
        while len(self._inbox) < count:
            assert self.world.time.now_ns < until_ns, "no report came"
            _run(self.world, MS)
        found, self._inbox[:] = self._inbox[:count], self._inbox[count:]
        return found

    def pending(self) -> list[Report]:
        _run(self.world, 1000 * MS)
        found, self._inbox[:] = self._inbox[:], []
        return found

    def pause(self, seconds: float) -> None:
        _run(self.world, max(int(seconds * 1000), 1) * MS)

    def fill(self, producer: Producer) -> None:
        producer.blocks[:] = np.arange(1, producer.blocks.size + 1).reshape(producer.blocks.shape)

    def start_producer(self) -> SimulatedProducer:
        return SimulatedProducer(self.world, self._start("P"))

    def kill_mover(self) -> None:
        self._life.mover.kill()

    def close(self) -> None:
        pass


def _run(world: World, duration_ns: int) -> None:
    """Play what happens in so long, whether anything does or not."""
    world.time.after(duration_ns, lambda: None)
    world.time.run(world.time.now_ns + duration_ns, most=1 << 60)
