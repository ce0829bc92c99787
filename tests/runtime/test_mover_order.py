"""The order that the mover keeps, whatever its transport does: slots after data, reports after everything has ended."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from benchmarks.plain_pool import plain
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.runtime.mover import Mover
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.transports.base import SLICE_BYTES, Copy, Permit, Slice, TransferMemory, TransportError
from pdkv.runtime.wire import Cancel, Connect, Ended, FrameBuffer, PeerMemory, Post, Ready, decode_from_mover, pack

BLOCK_BYTES = SLICE_BYTES // 2
NUM_BLOCKS = 64
SLOT = (5, 7)


@dataclass(eq=False)
class Scripted:
    """A copy that ends when it is told to."""

    part: Slice | None
    state: str = "prepared"  # posted, over, failed; or discarded


class ScriptedTransport:
    """Knows what is under way, and complains when its rules are broken."""

    name = "scripted"
    offer = None

    def __init__(self) -> None:
        self.copies: list[Scripted] = []
        self.refuse: set[str] = set()

    def connect(self, peer: str, memory: PeerMemory) -> None: ...

    def forget(self, peer: str) -> None: ...

    def check_peer(self, peer: str) -> None: ...

    def progress(self) -> None: ...

    def close(self) -> None: ...

    def prepare(self, peer: str, parts: Sequence[Slice], permit: Permit | None = None) -> list[Copy]:
        if "prepare" in self.refuse:
            raise TransportError("prepare refused")
        made = [Scripted(part) for part in parts]
        self.copies += made
        return list(made)

    def prepare_slot(self, peer: str, slot: int) -> Copy:
        made = Scripted(None)
        self.copies.append(made)
        return made

    def post(self, copy: Copy) -> None:
        assert isinstance(copy, Scripted)
        assert copy.state == "prepared"
        if copy.part is None:
            assert all(other.state == "over" for other in self.copies if other is not copy), "the slot is read last"
        copy.state = "posted"
        if "post" in self.refuse:
            copy.state = "failed"
            raise TransportError("post refused")
        assert len(self.under_way()) <= 2

    def discard(self, copy: Copy) -> None:
        assert isinstance(copy, Scripted)
        assert copy.state != "posted", "it is under way"
        if copy.state == "prepared":
            copy.state = "discarded"

    def done(self, copy: Copy) -> bool:
        assert isinstance(copy, Scripted)
        if copy.state == "failed":
            raise TransportError("the copy failed")
        return copy.state == "over"

    def slot_value(self, copy: Copy) -> tuple[int, int]:
        return SLOT

    def under_way(self) -> list[Scripted]:
        return [copy for copy in self.copies if copy.state == "posted"]


class Bench:
    """A mover that is stepped by hand, with one READ."""

    def __init__(self, blocks: int) -> None:
        self.transport = ScriptedTransport()
        self.sock, theirs = socket.socketpair()
        self.theirs = theirs
        self.sock.setblocking(False)
        slots = SharedMemory(4096)
        memory = TransferMemory(slots, slots, plain(NUM_BLOCKS, BLOCK_BYTES), 4)
        self.mover = Mover(theirs, self.transport, memory)
        self.frames = FrameBuffer()
        described = PeerMemory(geometry=plain(NUM_BLOCKS, BLOCK_BYTES), num_slots=4)
        ids = np.arange(blocks, dtype="<i4")
        post = Post(handle=1, peer="p", remote_blocks=ids.tobytes(), local_blocks=ids[::-1].tobytes(), slot=2)
        self.tell(Connect(peer="p", memory=described))
        self.tell(post)

    def tell(self, message: Connect | Post | Cancel) -> None:
        self.sock.sendall(pack(message))
        self.mover._receive(0)

    def step(self) -> Ended | None:
        self.mover._advance_all()
        return self.report()

    def report(self) -> Ended | None:
        try:
            data = self.sock.recv(4096)
        except BlockingIOError:
            return None
        (ended,) = (decode_from_mover(frame) for frame in self.frames.feed(data))
        assert isinstance(ended, Ended)
        assert not self.transport.under_way(), "reported while something may still arrive"
        assert all(copy.state != "prepared" for copy in self.transport.copies), "kept for nothing"
        return ended

    def close(self) -> None:
        self.sock.close()
        self.theirs.close()


def test_ready_is_said_first() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        memory = TransferMemory(SharedMemory(64), SharedMemory(64), plain(1, 64), 4)
        Mover(theirs, ScriptedTransport(), memory, closing=lambda: True).run()
        (frame,) = FrameBuffer().feed(ours.recv(4096))
        assert decode_from_mover(frame) == Ready(offer=None)


def test_the_next_slice_is_under_way_when_one_ends() -> None:
    bench = Bench(blocks=8)  # four slices
    assert bench.step() is None
    assert bench.step() is None
    assert len(bench.transport.under_way()) == 2
    assert bench.step() is None
    assert len(bench.transport.under_way()) == 2
    bench.transport.under_way()[0].state = "over"
    bench.step()
    assert [copy.state for copy in bench.transport.copies[:4]] == ["over", "posted", "posted", "prepared"]
    bench.close()


@pytest.mark.parametrize("how", ["failure", "cancel"])
def test_what_else_is_under_way_is_waited_for(how: str) -> None:
    bench = Bench(blocks=8)
    bench.step()
    bench.step()
    first, second = bench.transport.under_way()
    if how == "failure":
        first.state = "failed"
    else:
        bench.tell(Cancel(handle=1))
        first.state = "over"
    for _ in range(3):
        assert bench.step() is None
        assert bench.transport.under_way() == [second]
    second.state = "over"
    ended = bench.step()
    assert ended is not None
    assert ended.slot is None
    assert ended.error == ("the copy failed" if how == "failure" else "cancelled")
    bench.close()


@pytest.mark.parametrize("call", ["prepare", "post"])
def test_a_refusal_in_the_middle_waits_for_what_is_under_way(call: str) -> None:
    bench = Bench(blocks=40)  # twenty slices: more than are prepared at once
    bench.step()
    bench.step()
    bench.transport.refuse = {call}
    (read,) = bench.mover._moves
    while read.stop is None:
        bench.transport.under_way()[0].state = "over"
        assert bench.step() is None
    (last,) = bench.transport.under_way()
    assert bench.step() is None
    last.state = "over"
    ended = bench.step()
    assert ended is not None
    assert (ended.slot, ended.error) == (None, f"{call} refused")
    bench.close()


@settings(deadline=None, max_examples=150)
@given(blocks=st.integers(0, 40), data=st.data())
def test_any_order_of_events_keeps_the_rules(blocks: int, data: st.DataObject) -> None:
    """Random ends, failures and cancels; the assertions are in the transport and in `Bench.report`."""
    bench = Bench(blocks)
    cancelled = failed = False
    ended = bench.report()
    for _ in range(400):
        if ended is not None:
            break
        event = data.draw(st.sampled_from(["step", "step", "end", "end", "end", "fail", "cancel"]))
        under_way = bench.transport.under_way()
        if event == "cancel" and not cancelled and data.draw(st.booleans()):
            bench.tell(Cancel(handle=1))
            cancelled = True
        elif event in ("end", "fail") and under_way:
            copy = data.draw(st.sampled_from(under_way))
            fails = event == "fail" and data.draw(st.integers(0, 9)) == 0
            copy.state = "failed" if fails else "over"
            failed = failed or fails
        ended = bench.step()
    while ended is None:
        for copy in bench.transport.under_way():
            copy.state = "over"
        ended = bench.step()
    if ended.error is None:
        assert not failed
        assert ended.slot == SLOT
        assert ended.moved_bytes == blocks * BLOCK_BYTES
        assert all(copy.state == "over" for copy in bench.transport.copies)
    else:
        assert ended.slot is None
        assert cancelled or failed
    assert not bench.mover._moves
    bench.close()
