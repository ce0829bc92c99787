"""NIXL between unlike pools: regrouped by the CPU in a few large pieces, or copy by copy; buffers are given back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.nixl_here import needs_nixl
from tests.runtime.kv_model import laid_out, meant

from pdkv.runtime.geometry import Geometry
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.transports.base import Permit, Slice, TransferMemory, TransportError
from pdkv.runtime.transports.segments import Mapping
from pdkv.runtime.wire import PeerMemory

pytestmark = needs_nixl

THEIRS, OURS = (
    Geometry(ranks=ranks, num_blocks=8, layers=2, vectors=2, block_size=16, heads=4, head_bytes=64) for ranks in (1, 2)
)
UNITS = np.arange(8, dtype=np.int32)
PERMIT = Permit(0, (1, 1))


class Two:
    """A peer, and our transport that has connected to it; pools of KV as `meant`."""

    def __init__(self) -> None:
        from pdkv.runtime.transports.nixl import NixlTransport

        rng = np.random.default_rng(0)
        self.kv = meant(THEIRS, rng)
        self.peer, self.own = (
            TransferMemory(SharedMemory(pool.nbytes), SharedMemory(64), pool, 4) for pool in (THEIRS, OURS)
        )
        self.theirs = NixlTransport("theirs", self.peer)
        self.ours: Any = NixlTransport("ours", self.own)
        self.ours.connect("p", PeerMemory(geometry=THEIRS, num_slots=4, nixl=self.theirs.offer))

    def bytes_of(self, memory: TransferMemory) -> Any:
        return memory.pool.array(np.uint8, memory.pool.nbytes)  # type: ignore[union-attr]

    def slices(self, *, writes: bool = False) -> list[Slice]:
        return list(Mapping(THEIRS, OURS, writes=writes).slices(UNITS, UNITS[::-1]))

    def descriptors(self, copy: Any) -> int:
        """Of a copy that was posted, once it is over."""
        until = time.monotonic() + 20
        while not self.ours.done(copy):
            assert time.monotonic() < until
            self.theirs.progress()
        return len(copy.local)

    def close(self) -> None:
        for one in (self.ours, self.theirs):
            one.close()
        for memory in (self.peer, self.own):
            memory.pool.close()
            memory.slots.close()


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.close()


@pytest.mark.parametrize("free", [True, False], ids=["regrouped", "no buffer is free"])
@pytest.mark.parametrize("writes", [False, True], ids=["READ", "WRITE"])
def test_both_ways_put_every_head_where_it_belongs(two: Two, free: bool, writes: bool) -> None:
    theirs, ours = laid_out(two.kv, THEIRS), laid_out(two.kv[::-1], OURS)
    source, target = (two.own, two.peer) if writes else (two.peer, two.own)
    wanted = theirs if writes else ours
    two.bytes_of(source)[:] = ours if writes else theirs
    (part,) = two.slices(writes=writes)
    held = [] if free else [two.ours._bounce.take(part) for _ in range(8)]
    assert (two.ours._bounce.take(part) is None) == (not free)
    (copy,) = two.ours.prepare("p", [part], PERMIT if writes else None)
    two.ours.post(copy)
    assert two.descriptors(copy) == (8 if free else part.copies)
    assert np.array_equal(two.bytes_of(target), wanted)
    assert None not in held


def test_buffers_come_back_however_a_copy_ends(two: Two) -> None:
    (part,) = two.slices()
    free = two.ours._bounce._free
    before = len(free)
    for _ in range(3 * before):
        posted, left = two.ours.prepare("p", [part, part])
        two.ours.post(posted)
        two.descriptors(posted)
        two.ours.discard(left)
    assert len(free) == before
    offer = two.theirs.offer
    elsewhere = msgspec.structs.replace(offer, pool_address=offer.pool_address + (1 << 40))
    two.ours.connect("q", PeerMemory(geometry=THEIRS, num_slots=4, nixl=elsewhere))
    (refused,) = two.ours.prepare("q", [part])
    with pytest.raises(TransportError, match="NIXL refuses the read"):
        two.ours.post(refused)
    assert len(free) == before


def test_peers_reach_pool_and_slots_only(two: Two) -> None:
    """What the mover reads slots into, and regroups in, they have no keys of."""
    from pdkv.runtime.transports.nixl import NixlTransport

    assert isinstance(two.theirs, NixlTransport)
    for memory in (two.theirs._bounce.memory, two.theirs._scratch):
        offer = msgspec.structs.replace(two.theirs.offer, pool_address=memory.address, slots_address=memory.address)
        two.ours.connect("q", PeerMemory(geometry=THEIRS, num_slots=4, nixl=offer))
        (part,) = two.slices()
        (copy,) = two.ours.prepare("q", [part])
        with pytest.raises(TransportError, match="NIXL refuses the read"):
            two.ours.post(copy)
        with pytest.raises(TransportError, match="NIXL refuses the read"):
            two.ours.prepare_slot("q", 0)
