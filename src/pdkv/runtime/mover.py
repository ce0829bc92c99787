"""What moves KV: it alone owns the transport, and ending it is the last fence (design 1, 3.2).

On CPU pools it is a process: ``python -m pdkv.runtime.mover FD PARENT_PID`` talks to the control thread over the
inherited socket ``FD``, imports neither torch nor transformers, maps the instance's pool and slots from inherited
descriptors, and dies with its parent. On GPU pools `MoverThread` runs the same `Mover` on a thread.

A READ or WRITE is moved in slices, round robin, with at most `_UNDER_WAY` of each under way, so that the next is there
when one ends. Some slices at a time are prepared before the first of them is posted: just after megabytes went through
the caches every small thing takes several times as long. A READ's lease slot is posted when all data have arrived. A
handle is reported as ended only when nothing of it can touch the destination any more; one that cannot end (its peer is
stopped) is not reported at all: the core's deadline then has this process killed.
"""

from __future__ import annotations

import logging
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from pdkv.runtime.geometry import unlike
from pdkv.runtime.parent_death import die_with_parent, leave_stops_to_the_parent
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.transports.base import SLOT_BYTES, Copy, Permit, Slice, TransferMemory, Transport, TransportError
from pdkv.runtime.transports.segments import Mapping
from pdkv.runtime.wire import (
    Broken,
    Cancel,
    Connect,
    Ended,
    Forget,
    FrameBuffer,
    Post,
    Ready,
    Serve,
    Start,
    ToMover,
    decode_to_mover,
    pack,
)

log = logging.getLogger("pdkv.mover")

_SERVING_POLL_S = 0.001  # a peer's transfer needs our help to set its connection up: at most this late
_IDLE_POLL_S = 0.2
_UNDER_WAY = 2
_PREPARED_AHEAD = 8
# Between two looks at a copy that is under way: (after so many fruitless looks, wait so long). Most are over at once; a
# stopped peer must not cost us a core.
_WAITS_S = ((2000, 0.001), (200, 0.0001), (0, 0.0))


@dataclass(slots=True)
class _Move:
    """One READ or WRITE: ``slices`` to come, copies ``prepared`` and ``posted`` (with their bytes), oldest first.

    ``last``, of a READ, reads the lease slot, when all data have arrived. A WRITE has a ``permit`` instead.
    ``complete``: there is nothing left to post. ``stop`` says why no further copy is posted; it is over when those that
    were have ended.
    """

    handle: int
    peer: str
    started_s: float
    slices: Iterator[Slice]
    permit: Permit | None = None
    last: Copy | None = None
    prepared: deque[tuple[Copy, int]] = field(default_factory=deque)
    posted: deque[tuple[Copy, int]] = field(default_factory=deque)
    complete: bool = False
    moved_bytes: int = 0
    stop: str | None = None
    cut_off: bool = False  # something was posted whose end is not known


@dataclass(slots=True)
class _Peer:
    inward: Mapping | None  # from its pool to ours; None: nothing can be moved, because of ``error``
    outward: Mapping | None = None
    num_slots: int = 0
    error: str = ""


class Mover:
    """Serves one control socket until it closes, or until ``closing()``. Single-threaded."""

    def __init__(
        self,
        sock: socket.socket,
        transport: Transport,
        memory: TransferMemory,
        *,
        closing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._sock = sock
        self._poll = select.poll()  # not select(): in an instance's process descriptors pass 1024
        self._poll.register(sock, select.POLLIN)
        self._closing = closing
        self._transport = transport
        self._memory = memory
        self._frames = FrameBuffer()
        self._peers: dict[str, _Peer] = {}
        self._moves: deque[_Move] = deque()
        self._serve_until_s = 0.0
        self._quiet_rounds = 0
        self._offer = transport.offer

    def run(self) -> None:
        """Work until the control thread closes its end (whatever it sent before is still begun)."""
        self._sock.sendall(pack(Ready(offer=self._offer)))
        while not self._closing() and self._receive(self._wait_s()):
            moved = self._advance_all()
            self._quiet_rounds = 0 if moved else self._quiet_rounds + 1
            self._transport.progress()
            if self._transport.offer is not self._offer:
                self._offer = self._transport.offer
                self._sock.sendall(pack(Ready(offer=self._offer)))

    def _wait_s(self) -> float:
        """How long to wait for a message before looking at the transport again."""
        if self._moves:
            return next(wait_s for rounds, wait_s in _WAITS_S if self._quiet_rounds >= rounds)
        return _SERVING_POLL_S if time.monotonic() < self._serve_until_s else _IDLE_POLL_S

    def _receive(self, timeout_s: float) -> bool:
        """Take what the control thread sent; False at its end of file."""
        if 0 < timeout_s < 0.001:  # poll counts in milliseconds
            time.sleep(timeout_s)
            timeout_s = 0
        if not self._poll.poll(timeout_s * 1000):
            return True
        data = self._sock.recv(1 << 20)
        if not data:
            return False
        for frame in self._frames.feed(data):
            self._handle(decode_to_mover(frame))
        return True

    def _handle(self, message: ToMover) -> None:
        match message:
            case Post():
                self._begin(message)
            case Cancel():
                for move in self._moves:
                    if move.handle == message.handle:
                        move.stop = move.stop or "cancelled"
            case Connect():
                self._connect(message)
            case Forget():
                self._peers.pop(message.peer, None)
                self._transport.forget(message.peer)
            case Serve():
                self._serve_until_s = time.monotonic() + message.for_ns / 1e9
            case Start():
                raise AssertionError("a second start")

    def _connect(self, message: Connect) -> None:
        theirs, ours = message.memory.geometry, self._memory.geometry
        problem = unlike(theirs, ours)
        try:
            if problem is not None:
                raise TransportError(f"peer {message.peer}: {problem}")
            self._transport.connect(message.peer, message.memory)
        except TransportError as error:
            self._peers[message.peer] = _Peer(None, error=str(error))
        else:
            inward, outward = Mapping(theirs, ours), Mapping(theirs, ours, writes=True)
            self._peers[message.peer] = _Peer(inward, outward, message.memory.num_slots)

    def _begin(self, post: Post) -> None:
        permit = None if post.grant is None else Permit(post.slot, post.grant)
        move = _Move(post.handle, post.peer, time.monotonic(), iter(()), permit)
        try:
            move.slices = self._slices(post)
            self._transport.check_peer(post.peer)
            self._prepare(move)
            if permit is None:
                move.last = self._transport.prepare_slot(post.peer, post.slot)
        except TransportError as error:
            self._end(move, error=str(error))
        else:
            self._moves.append(move)

    def _slices(self, post: Post) -> Iterator[Slice]:
        """What ``post`` asks for. Raises `TransportError` for what there is not."""
        peer = self._peers.get(post.peer)
        if peer is None:
            raise TransportError(f"peer {post.peer} is not connected")
        if peer.inward is None or peer.outward is None:
            raise TransportError(peer.error)
        remote = np.frombuffer(post.remote_blocks, dtype="<i4")
        local = np.frombuffer(post.local_blocks, dtype="<i4")
        if len(remote) != len(local):
            raise TransportError(f"{len(remote)} remote and {len(local)} local blocks")
        _check_units("remote", remote, "peer", peer.inward.peer_units)
        _check_units("local", local, "pool", peer.inward.own_units)
        if not 0 <= post.slot < peer.num_slots:
            raise TransportError(f"slot {post.slot} outside the peer's {peer.num_slots} slots")
        mapping = peer.inward if post.grant is None else peer.outward
        return mapping.slices(remote, local)

    def _prepare(self, move: _Move) -> None:
        """Have the next slices ready; none is added when there are no more."""
        parts = list(islice(move.slices, _PREPARED_AHEAD))
        if parts:
            sizes = (part.nbytes for part in parts)
            move.prepared.extend(zip(self._transport.prepare(move.peer, parts, move.permit), sizes, strict=True))

    def _advance_all(self) -> bool:
        """One step of everything that moves; True when any of it got further."""
        moved = False
        for _ in range(len(self._moves)):
            move = self._moves.popleft()
            ended, posted = self._collect(move), self._post_next(move)
            moved = moved or ended or posted
            if not self._end_if_over(move):
                self._moves.append(move)
        return moved

    def _collect(self, move: _Move) -> bool:
        """Take note of what has ended, oldest first; True when something had."""
        before = len(move.posted)
        while move.posted:
            copy, nbytes = move.posted[0]
            try:
                if not self._transport.done(copy):
                    break
                move.moved_bytes += nbytes
            except TransportError as error:  # it has ended, too
                move.stop, move.cut_off = move.stop or str(error), True
            move.posted.popleft()
        return len(move.posted) < before

    def _post_next(self, move: _Move) -> bool:
        """Post one more copy if it is time; True when there was one."""
        if move.stop is not None or len(move.posted) >= _UNDER_WAY:
            return False
        try:
            if not move.prepared:
                self._prepare(move)
            if move.prepared:
                copy, nbytes = move.prepared.popleft()
            elif move.posted or move.complete:
                return False
            else:
                move.complete = True
                if move.last is None:
                    return True
                copy, nbytes = move.last, 0  # all data are here: this order makes the slot's value mean something
            self._transport.post(copy)
        except TransportError as error:
            move.stop, move.cut_off = str(error), True
            return True
        move.posted.append((copy, nbytes))
        self._collect(move)  # some transports copy in `post`
        return True

    def _end_if_over(self, move: _Move) -> bool:
        if move.posted or not (move.complete or move.stop is not None):
            return False
        last = None if move.stop is not None else move.last
        self._end(move, slot=None if last is None else self._transport.slot_value(last), error=move.stop)
        return True

    def _end(self, move: _Move, *, slot: tuple[int, int] | None = None, error: str | None) -> None:
        """Report it. Nothing of it is under way any more; what was only prepared is let go."""
        if error is not None:
            for copy in [*(copy for copy, _ in move.prepared), *filter(None, (move.last,))]:
                self._transport.discard(copy)
        seconds = time.monotonic() - move.started_s
        ended = Ended(
            handle=move.handle, slot=slot, moved_bytes=move.moved_bytes, seconds=seconds, error=error,
            cut_off=move.cut_off,
        )  # fmt: skip
        self._sock.sendall(pack(ended))


def _check_units(side: str, units: npt.NDArray[np.int32], whose: str, count: int) -> None:
    if len(units) and not 0 <= int(units.min()) <= int(units.max()) < count:
        raise TransportError(f"{side} block ids {units.min()}..{units.max()} outside the {whose}'s {count} blocks")


def make_transport(name: str, agent: str, memory: TransferMemory) -> Transport:
    """The transport ``nixl`` (its agent gets that name) or ``shm``. Raises `TransportError` if it cannot work here."""
    if name == "nixl":
        from pdkv.runtime.transports.nixl import NixlTransport

        return NixlTransport(agent, memory)
    from pdkv.runtime.transports.shm import ShmTransport

    return ShmTransport(memory)


def _read_start(sock: socket.socket) -> Start | None:
    frames = FrameBuffer()
    while data := sock.recv(4096):
        for frame in frames.feed(data):
            message = decode_to_mover(frame)
            assert isinstance(message, Start)
            return message
    return None


def main(argv: list[str]) -> int:
    """Entry point of the process; exit code 1 when the transport cannot start (said over the socket before)."""
    fd, parent_pid = int(argv[1]), int(argv[2])
    die_with_parent(parent_pid)
    leave_stops_to_the_parent()
    sock = socket.socket(fileno=fd)
    start = _read_start(sock)
    if start is None:
        return 0
    memory = TransferMemory(
        pool=SharedMemory.attach(start.pool_fd, start.geometry.nbytes),
        slots=SharedMemory.attach(start.slots_fd, start.num_slots * SLOT_BYTES),
        geometry=start.geometry,
        num_slots=start.num_slots,
    )
    try:
        transport = make_transport(start.transport, start.agent, memory)
    except TransportError as error:
        sock.sendall(pack(Broken(reason=str(error))))
        return 1
    try:
        Mover(sock, transport, memory).run()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the control thread is gone; so are we
    finally:
        transport.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
