"""One instance without an engine, real or simulated, behind one face: who reads, or who writes and is written to.

Blocks are arrays with one row a block: bytes in real memory, tags in a simulated device.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from benchmarks.transfer_half import Half, empty_plan, make_grant, make_write_grant

from pdkv.core.engine import Identity
from pdkv.core.ports import (
    FromProducer,
    GrantsFenced,
    MoverRestarted,
    Plan,
    PostRead,
    PostWrite,
    ReadEnded,
    Revoked,
    WriteEnded,
)
from pdkv.core.transfer.messages import Peer, RemoteSource, WriteGrant
from pdkv.runtime.transports.base import SLICE_BYTES
from pdkv.simulate.instance import Instance
from pdkv.simulate.weather import MS
from pdkv.simulate.world import World

BLOCKS = 300
TAIL_BLOCKS = 97
BLOCK_BYTES = (SLICE_BYTES + 1) // TAIL_BLOCKS
"""97 blocks are a slice and one byte more; the pool is three slices and a bit."""
assert TAIL_BLOCKS * BLOCK_BYTES == SLICE_BYTES + 1

ALL = tuple(range(BLOCKS))
_RNG = np.random.default_rng(0)
SHAPES: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "one": ((5,), (9,)),
    "contiguous": (range(10, 60), range(100, 150)),
    "contiguous on one side": (range(10, 20), (3, 1, 4, 15, 9, 2, 6, 5, 35, 8)),
    "a few anywhere": ((5, 6, 7, 20, 0), (1, 2, 3, 9, BLOCKS - 1)),
    "one byte more than a slice": (range(TAIL_BLOCKS), range(TAIL_BLOCKS)),
    "all, scattered": (_RNG.permutation(BLOCKS).tolist(), _RNG.permutation(BLOCKS).tolist()),
    "one block twice": ((7, 7), (8, 9)),
}
"""Which blocks are moved, and where to."""

Report = ReadEnded | WriteEnded | MoverRestarted | GrantsFenced | FromProducer


class Readable:
    """Memory that can be read: ``blocks`` and ``slots`` (uint64[n, 2]) are its own, ``identity`` says whose."""

    identity: Identity
    peer: Peer
    blocks: np.ndarray[Any, Any]
    slots: np.ndarray[Any, Any]
    block_size = 1

    def grant(self, blocks: Sequence[int], *, lease_id: int = 7, slot: int = 3) -> RemoteSource:
        """A lease to read, named in its slot."""
        size = self.block_size
        return make_grant(
            self.identity, self.peer, self.slots, tuple(blocks), block_size=size, lease_id=lease_id, slot=slot
        )


class Side(Readable, ABC):
    """``blocks`` is its pool, ``block_bytes`` what one counts in reports, ``slots`` its words (uint64[n, 2])."""

    block_bytes: int
    #: Whether its mover can be stopped and killed by itself.
    has_process = False
    #: Whether only a new mover of its own is a fence for what peers write (NIXL); else the grant's slot is.
    fenced_by_restart: bool
    #: Whether what a peer's mover has left behind may still be written: it is in sockets (TCP).
    by_sockets = False

    def __init__(self) -> None:
        self._handles = 0

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Of its memory: a grant to write names it."""

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
    def taken(self) -> list[Report]:
        """Reports that are there already; no time goes by."""

    @abstractmethod
    def pause(self, seconds: float) -> None:
        """Let time go by: as little as there is for 0."""

    @abstractmethod
    def kill_mover(self) -> None:
        """Its mover dies by itself."""

    @abstractmethod
    def fill(self) -> None:
        """No two blocks are alike, and no byte is 0."""

    def say(self, **fields: object) -> None:
        """Hand over a plan with these fields and nothing else."""
        self.submit(empty_plan(**fields))

    def post(
        self,
        *reads: tuple[RemoteSource, Sequence[int], Sequence[int]],
        cancel: bool = False,
        restart: bool = False,
        revoked: tuple[Revoked, ...] = (),
    ) -> tuple[int, ...]:
        """One plan that reads (source, remote blocks, local blocks) each, after a restart, before their cancels."""
        posts = []
        for source, remote, local in reads:
            self._handles += 1
            posts.append(PostRead(self._handles, source, np.asarray(remote, np.int32), np.asarray(local, np.int32)))
        handles = tuple(post.handle for post in posts)
        self.say(reads=tuple(posts), cancels=handles if cancel else (), restart_mover=restart, revoked=revoked)
        return handles

    def read(self, source: RemoteSource, remote: Sequence[int], local: Sequence[int]) -> ReadEnded:
        """Post one and wait for its end."""
        (handle,) = self.post((source, remote, local))
        (ended,) = self.reports(1)
        assert isinstance(ended, ReadEnded)
        assert ended.handle == handle
        return ended

    def post_write(
        self,
        to: Side,
        grant: WriteGrant,
        local: Sequence[int],
        *,
        epoch: int | None = None,
        cancel: bool = False,
        restart: bool = False,
    ) -> int:
        """One plan that writes our ``local`` blocks into the grant's, after a restart, before its cancel; its handle.

        ``epoch`` is that of ``to`` now, unless given.
        """
        self._handles += 1
        blocks = np.asarray(grant.block_ids, np.int32), np.asarray(local, np.int32)
        post = PostWrite(self._handles, to.peer, grant, *blocks, to.epoch if epoch is None else epoch)
        self.say(writes=(post,), cancels=(self._handles,) if cancel else (), restart_mover=restart)
        return self._handles

    def write(self, to: Side, grant: WriteGrant, local: Sequence[int], *, epoch: int | None = None) -> WriteEnded:
        """Post one and wait for its end."""
        handle = self.post_write(to, grant, local, epoch=epoch)
        (ended,) = self.reports(1)
        assert isinstance(ended, WriteEnded)
        assert ended.handle == handle
        return ended

    def arrived(self) -> int:
        """Blocks of which the first byte is there (what is moved is never 0)."""
        return int(np.count_nonzero(self.blocks[:, 0]))

    def await_first(self) -> None:
        """Until the first blocks have arrived."""
        for _ in range(100_000):
            if self.arrived():
                return
            self.pause(0)
        raise AssertionError("nothing arrives")

    def take_restart(self, handles: set[int]) -> set[int]:
        """All reports about ``handles`` up to the restart; which of them that has fenced: none that was reported."""
        ended: set[int] = set()
        while not isinstance(report := self.reports(1)[0], MoverRestarted):
            assert isinstance(report, WriteEnded | ReadEnded)
            assert report.handle in handles - ended
            ended.add(report.handle)
        fenced = set(report.handles)
        assert len(fenced) == len(report.handles)
        assert fenced <= handles - ended
        return fenced

    def check_untouched(self, go_on: Callable[[], Sequence[int]]) -> None:
        """What is over writes nothing any more, also when the transport goes on (an idle mover drives it every 0.2 s):
        ``go_on`` moves something and says into which blocks."""
        self.blocks[:] = 0
        self.blocks[list(go_on())] = 0
        self.pause(0.02)
        assert not self.blocks.any()

    def write_grant(self, blocks: Sequence[int], *, grant_id: int, slot: int = 5) -> WriteGrant:
        """A grant to write, named in its slot."""
        size = self.block_size
        return make_write_grant(self.identity, self.slots, tuple(blocks), block_size=size, grant_id=grant_id, slot=slot)


def fill_real(blocks: np.ndarray[Any, Any]) -> None:
    """What `Side.fill` says, of real memory."""
    blocks[:] = np.random.default_rng(1).integers(1, 255, BLOCK_BYTES, dtype=np.uint8)
    blocks[:, :: BLOCK_BYTES - 1] = np.arange(1, BLOCKS + 1)[:, None] % 255 + 1  # both ends of each
    blocks[:, 1] = np.arange(BLOCKS) // 255 + 1


class RealSide(Side):
    """Over NIXL or shared memory, with either kind of mover."""

    block_bytes = BLOCK_BYTES

    def __init__(self, name: str, transport: str, mover: str) -> None:
        super().__init__()
        self.has_process, self.fenced_by_restart = mover == "process", transport == "nixl"
        self.half = Half(
            name, transport=transport, mover=mover, num_blocks=BLOCKS, bytes_per_block=BLOCK_BYTES  # type: ignore[arg-type]
        ).start()  # fmt: skip
        self.identity, self.peer = self.half.identity, self.half.peer
        self.blocks, self.slots = self.half.blocks, self.half.slot_words

    @property
    def epoch(self) -> int:
        return self.half.control.epoch

    def submit(self, plan: Plan) -> None:
        self.half.control.submit(plan)

    def reports(self, count: int) -> list[Report]:
        return [self._next(timeout_s=30) for _ in range(count)]

    def pending(self) -> list[Report]:
        found: list[Report] = []
        while True:
            try:
                found.append(self._next(timeout_s=0.005))
            except queue.Empty:
                return found

    def taken(self) -> list[Report]:
        inbox = self.half.inbox
        items = [inbox.get_nowait() for _ in range(inbox.qsize())]
        return [item for item in items if isinstance(item, Report)]

    def _next(self, timeout_s: float) -> Report:
        while True:
            item = self.half.inbox.get(timeout=timeout_s)
            if isinstance(item, Report):
                return item

    def pause(self, seconds: float) -> None:
        time.sleep(max(seconds, 0.0001))

    @property
    def mover_pid(self) -> int:
        """Of its mover, where that is a process."""
        pid = self.half.control.mover_pid
        assert pid is not None
        return pid

    def kill_mover(self) -> None:
        os.kill(self.mover_pid, signal.SIGKILL)

    def fill(self) -> None:
        fill_real(self.blocks)

    def close(self) -> None:
        """End it."""
        del self.blocks, self.slots
        self.half.close()
        assert not self.half.failures


class SimulatedSide(Side):
    """A life of an instance in a world without requests, in virtual time.

    What its engine would hear is kept here, unless it is to hear that itself (``heard`` False).
    """

    has_process = True

    def __init__(self, world: World, instance: Instance, *, heard: bool = True) -> None:
        super().__init__()
        assert instance.life is not None
        self.world, self.instance, self.life = world, instance, instance.life
        self.identity = self.life.engine.identity
        self.peer = self.life.peer
        self.fenced_by_restart, self.by_sockets = not world.shared_memory, world.sockets.used
        self.block_size = self.life.engine.config.block_size
        device = self.life.device
        self.blocks = np.frombuffer(device.tags, dtype=np.int64).reshape(device.num_blocks, -1)  # a view
        self.slots = self.life.slots
        self.block_bytes = self.blocks[0].nbytes
        self._inbox: list[Report] = []
        if heard:
            self.life.deliver = self._inbox.append  # type: ignore[method-assign, assignment]

    @property
    def epoch(self) -> int:
        return self.life.fences.epoch

    def submit(self, plan: Plan) -> None:
        self.life._do(plan)

    def reports(self, count: int) -> list[Report]:
        until_ns = self.world.time.now_ns + 30_000 * MS
        while len(self._inbox) < count:
            assert self.world.time.now_ns < until_ns, "no report came"
            run(self.world, MS)
        found, self._inbox[:] = self._inbox[:count], self._inbox[count:]
        return found

    def pending(self) -> list[Report]:
        run(self.world, 1000 * MS)
        return self.taken()

    def taken(self) -> list[Report]:
        found, self._inbox[:] = self._inbox[:], []
        return found

    def pause(self, seconds: float) -> None:
        run(self.world, max(int(seconds * 1000), 1) * MS)

    def kill_mover(self) -> None:
        self.life.mover.kill()

    def fill(self) -> None:
        self.blocks[:] = np.arange(1, self.blocks.size + 1).reshape(self.blocks.shape)


def run(world: World, duration_ns: int) -> None:
    """Play what happens in so long, whether anything does or not."""
    world.time.after(duration_ns, lambda: None)
    world.time.run(world.time.now_ns + duration_ns, most=1 << 60)


@contextmanager
def ucx_held_to(tls: str | None) -> Iterator[None]:
    """UCX uses these transports of its own only, here and in children."""
    with pytest.MonkeyPatch.context() as patch:
        if tls is not None:
            patch.setenv("UCX_TLS", tls)
        yield
