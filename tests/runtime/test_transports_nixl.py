"""NIXL between unlike pools: regrouped by the CPU in a few large pieces, or copy by copy; buffers are given back, and
none before nothing uses it any more."""

from __future__ import annotations

import os
import time
from collections import Counter
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
from pdkv.runtime.wire import NixlOffer, PeerMemory

pytestmark = needs_nixl

THEIRS, OURS = (
    Geometry(ranks=ranks, num_blocks=8, layers=2, vectors=2, block_size=16, heads=4, head_bytes=64) for ranks in (1, 2)
)
UNITS = np.arange(8, dtype=np.int32)
PERMIT = Permit(0, (1, 1))


BUFFERS = 8


class Two:
    """A peer "p", and our transport that has connected to it; pools of KV as `meant`. There may be more peers."""

    def __init__(self) -> None:
        from pdkv.runtime.transports.nixl import NixlTransport

        rng = np.random.default_rng(0)
        self.kv = meant(THEIRS, rng)
        self.own = memory_of(OURS)
        self.ours: Any = NixlTransport("ours", self.own)
        self.free: list[int] = self.ours._bounce._free
        self.peers: list[tuple[NixlTransport, TransferMemory]] = []
        self.peer = self.join("p")
        self.theirs = self.peers[0][0]

    def join(self, name: str) -> TransferMemory:
        """One more peer, connected; its memory."""
        from pdkv.runtime.transports.nixl import NixlTransport

        memory = memory_of(THEIRS)
        self.peers.append((NixlTransport(name, memory), memory))
        self.connect(name, self.peers[-1][0].offer)
        return memory

    def connect(self, name: str, offer: NixlOffer) -> None:
        self.ours.connect(name, PeerMemory(geometry=THEIRS, num_slots=4, nixl=offer))

    def progress(self) -> None:
        """What the peers' movers do all the time."""
        for transport, _ in self.peers:
            transport.progress()

    def bytes_of(self, memory: TransferMemory) -> Any:
        return memory.pool.array(np.uint8, memory.pool.nbytes)  # type: ignore[union-attr]

    def slices(self, *, writes: bool = False) -> list[Slice]:
        return list(Mapping(THEIRS, OURS, writes=writes).slices(UNITS, UNITS[::-1]))

    def descriptors(self, copy: Any) -> int:
        """Of a copy that was posted, once it is over."""
        until = time.monotonic() + 20
        while not self.ours.done(copy):
            assert time.monotonic() < until
            self.progress()
        return len(copy.local)

    def close(self) -> None:
        for transport, memory in ((self.ours, self.own), *self.peers):
            transport.close()
            memory.pool.close()  # type: ignore[union-attr]
            memory.slots.close()


def memory_of(pool: Geometry) -> TransferMemory:
    return TransferMemory(SharedMemory(pool.nbytes), SharedMemory(64), pool, 4)


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
    held = [] if free else [two.ours._bounce.take(part) for _ in range(BUFFERS)]
    assert (two.ours._bounce.take(part) is None) == (not free)
    (copy,) = two.ours.prepare("p", [part], PERMIT if writes else None)
    two.ours.post(copy)
    assert two.descriptors(copy) == (8 if free else part.copies)
    assert np.array_equal(two.bytes_of(target), wanted)
    assert None not in held


def test_buffers_come_back_however_a_copy_ends(two: Two) -> None:
    (part,) = two.slices()
    for _ in range(3 * BUFFERS):
        posted, left = two.ours.prepare("p", [part, part])
        two.ours.post(posted)
        two.descriptors(posted)
        two.ours.discard(left)
    assert len(two.free) == BUFFERS
    offer = two.theirs.offer
    elsewhere = msgspec.structs.replace(offer, pool_address=offer.pool_address + (1 << 40))
    two.connect("q", elsewhere)
    (refused,) = two.ours.prepare("q", [part])
    with pytest.raises(TransportError, match="NIXL refuses the read"):
        two.ours.post(refused)
    assert len(two.free) == BUFFERS


@pytest.mark.parametrize(
    ("writes", "then"),
    [
        *((writes, then) for writes in (False, True) for then in ("ends meanwhile", "fails as well")),
        (False, "is posted again"),
        (True, "is cut off"),  # over TCP what it has sent could arrive after all of it was written once more
    ],
)
def test_a_fence_leaves_the_buffers_of_others_alone(
    two: Two, writes: bool, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy to one peer fails while one to another is under way: NIXL does it all, only what it says is changed."""
    other = two.join("q")
    theirs, ours = laid_out(two.kv, THEIRS), laid_out(two.kv[::-1], OURS)
    source, target, wanted = (two.own, other, theirs) if writes else (other, two.own, ours)
    two.bytes_of(source)[:] = ours if writes else theirs
    if not writes:
        two.bytes_of(two.peer)[:] = ~theirs  # what fails leaves nothing behind
    instead, posts, real = {"p": "PROC", "q": "PROC"}, Counter[str](), two.ours._status

    def status(call: str, flight: Any) -> str:
        posts[flight.peer] += call == "transfer"
        two.progress()
        return instead.get(flight.peer, real(call, flight))

    monkeypatch.setattr(two.ours, "_status", status)
    monkeypatch.setattr("pdkv.runtime.transports.nixl._DRAIN_S", 0.05 if then.startswith("is") else 20)
    (part,) = two.slices(writes=writes)
    copies: list[Any] = []
    for name in ("p", "q"):
        copies += two.ours.prepare(name, [part], PERMIT if writes else None)
        two.ours.post(copies[-1])
    failing, goes_on = copies
    assert len(two.free) == BUFFERS - 2
    instead["p"] = "NIXL says ERR"
    if then == "ends meanwhile":
        del instead["q"]
    elif then == "fails as well":
        instead["q"] = "NIXL says ERR"
    with pytest.raises(TransportError, match=f"p: the {'write' if writes else 'read'} failed: NIXL says ERR"):
        two.ours.done(failing)
    assert posts == {"p": 1, "q": 2 if then == "is posted again" else 1}
    if then == "is posted again":
        assert not two.ours.done(goes_on)
        assert len(two.free) == BUFFERS - 1
        assert goes_on.bounce not in two.free
        if not writes:
            assert not two.bytes_of(two.own).any()
        del instead["q"]
    if then in ("fails as well", "is cut off"):
        how = "was cut off" if then == "is cut off" else "failed"
        with pytest.raises(TransportError, match=f"q: the {'write' if writes else 'read'} {how}: .*NIXL says ERR"):
            two.ours.done(goes_on)
        assert writes or not two.bytes_of(two.own).any()
    else:
        two.descriptors(goes_on)
        assert np.array_equal(two.bytes_of(target), wanted)
    assert sorted(set(two.free)) == sorted(two.free)
    assert len(two.free) == BUFFERS


def test_an_agent_that_cannot_be_made_leaves_no_memory_open(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdkv.runtime.transports.nixl import NixlTransport

    memory = memory_of(OURS)
    before = own_memory()
    monkeypatch.setenv("UCX_TLS", "no-such-transport")
    with pytest.raises(TransportError, match="cannot make its UCX agent for DRAM memory"):
        NixlTransport("ours", memory)
    assert own_memory() == before
    memory.pool.close()  # type: ignore[union-attr]
    memory.slots.close()


def own_memory() -> list[str]:
    """The memory files that this process has open."""
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sorted(os.readlink(link) for link in links if os.path.lexists(link) and "memfd:" in os.readlink(link))


def test_peers_reach_pool_and_slots_only(two: Two) -> None:
    """What the mover reads slots into, and regroups in, they have no keys of."""
    from pdkv.runtime.transports.nixl import NixlTransport

    assert isinstance(two.theirs, NixlTransport)
    for memory in (two.theirs._bounce.memory, two.theirs._scratch):
        offer = msgspec.structs.replace(two.theirs.offer, pool_address=memory.address, slots_address=memory.address)
        two.connect("q", offer)
        (part,) = two.slices()
        (copy,) = two.ours.prepare("q", [part])
        with pytest.raises(TransportError, match="NIXL refuses the read"):
            two.ours.post(copy)
        with pytest.raises(TransportError, match="NIXL refuses the read"):
            two.ours.prepare_slot("q", 0)
