"""Reads and writes through NIXL with its UCX backend: between hosts, and on one host through the kernel (CMA).

No progress thread: the wrapper starts it with a delay of 0, so it burns a core, and reads were slower with it. The
mover's loop calls `progress` instead, promptly while somebody may be reading from here. So all of NIXL and UCX runs in
calls made from here, and nothing can be written into the pool outside them.

NIXL's own cancel is no fence (design 1): a READ that was released, or reported an error for one of its descriptors, may
still have others under way. Only destroying the agent ends them. So a failed slice is answered by exactly that: the
agent is replaced (other transfers get a second to end before; what READs still have under way is posted again to the
new one), and then the failure is reported.
Python destroys an agent with its last reference, so every fence checks that the agent is really gone.
Nothing of NIXL's that is pickled is used: descriptors are made from plain addresses on both sides.

A pool may be in a GPU (VRAM) on either side, each with its own device index; slots are host memory (DRAM) always. UCX
moves VRAM by GPUDirect RDMA, CUDA IPC or staged copies. Its report that a READ is done says that the data is in the
GPU's memory for every kernel launched afterwards, which is when the engine first uses it (after `ReadEnded`).
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.transports.base import (
    SLOT_BYTES,
    Copy,
    Int64Array,
    Permit,
    Slice,
    TransferMemory,
    TransportError,
    check_ends,
)
from pdkv.runtime.transports.bounce import BounceBuffers
from pdkv.runtime.transports.nixl_agent import NixlAgent
from pdkv.runtime.transports.nixl_api import NO_DESCRIPTORS, Descriptors, descriptors
from pdkv.runtime.wire import MemoryKind, NixlOffer, PeerMemory

log = logging.getLogger("pdkv.mover")

_SCRATCH_SLOTS = 16 * mmap.PAGESIZE // SLOT_BYTES  # one for each READ that the mover has
_MAX_METADATA_BYTES = 1 << 20
_DRAIN_S = 1.0
_DRAIN_POLL_S = 0.0005
_WORD = np.dtype("<u8")


@dataclass(slots=True)
class _Peer:
    offer: NixlOffer
    pool_bytes: int
    num_slots: int
    failed: str | None = None


@dataclass(slots=True, eq=False)
class _Flight:
    """One request. ``handle`` is NIXL's, of the agent of now; None once it is over, or when that agent has gone.

    A ``part`` between unlike pools gets its descriptors when it is posted: those of a buffer at ``bounce``, or, where
    that is None, of all its copies.
    """

    peer: str
    local: Descriptors
    remote: Descriptors
    operation: str = "READ"
    local_kind: MemoryKind = "DRAM"
    remote_kind: MemoryKind = "DRAM"
    part: Slice | None = None
    bounce: int | None = None
    cell: int | None = None
    handle: Any = None
    over: bool = False
    error: str | None = None


class NixlTransport:
    """One-sided READs and WRITEs over UCX. Raises `TransportError` when NIXL is missing or its agent cannot be made."""

    name = "nixl"

    def __init__(self, agent_name: str, memory: TransferMemory) -> None:
        # UCX listens on every interface unless told; like every other port of pdkv it stays on loopback by default.
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        os.environ.setdefault("UCX_LOG_LEVEL", "error")  # a fence drops requests on purpose: no warnings about it
        self._memory = memory
        # Slots are read into memory that no peer can read and no kernel uses.
        self._scratch = SharedMemory(_SCRATCH_SLOTS * SLOT_BYTES, "pdkv-scratch")
        self._scratch_words = self._scratch.array(_WORD, (_SCRATCH_SLOTS, 2))
        self._cells = list(range(_SCRATCH_SLOTS))
        # Only the CPU regroups: a pool in a GPU has no use for buffers.
        self._bounce = BounceBuffers(memory.pool) if isinstance(memory.pool, SharedMemory) else None
        self._peers: dict[str, _Peer] = {}
        self._prepared: list[_Flight] = []  # not posted yet
        self._flights: list[_Flight] = []  # posted, not over
        own = (self._scratch,) if self._bounce is None else (self._scratch, self._bounce.memory)
        try:
            self._agent = NixlAgent(agent_name, memory, own)
        except TransportError:
            self._close_memory()
            raise

    @property
    def offer(self) -> NixlOffer:
        """The agent of now; changes when a failure made a new one necessary."""
        return self._agent.offer

    # ------------------------------------------------------------------------------------------------------- peers

    def connect(self, peer: str, memory: PeerMemory) -> None:
        self.forget(peer)
        offer = memory.nixl
        if offer is None:
            raise TransportError(f"{peer} offers no NIXL agent")
        if len(offer.metadata) > _MAX_METADATA_BYTES:
            raise TransportError(f"{peer}: agent metadata of {len(offer.metadata)} bytes")
        self._peers[peer] = _Peer(offer, memory.geometry.nbytes, memory.num_slots)
        try:
            self._agent.load(peer, offer)
        except TransportError:
            del self._peers[peer]
            raise

    def forget(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            self._agent.unload(peer, known.offer)

    def check_peer(self, peer: str) -> None:
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"{peer} is not connected")
        if known.failed is not None:
            raise TransportError(known.failed)

    # ------------------------------------------------------------------------------------------------------ copies

    def prepare(self, peer: str, parts: Sequence[Slice], permit: Permit | None = None) -> list[Copy]:
        self.check_peer(peer)
        operation = "READ" if permit is None else "WRITE"
        source, pool = self._peers[peer], self._memory.pool
        for part in parts:
            check_ends(peer, part, source.pool_bytes, pool.nbytes)
        if any(part.grid is not None for part in parts):
            flights = [_Flight(peer, NO_DESCRIPTORS, NO_DESCRIPTORS, operation, part=part) for part in parts]
            self._prepared += flights
            return list(flights)
        local, remote = self._direct(peer, np.concatenate([part.segments for part in parts]))
        copies: list[Copy] = []
        at = 0
        try:
            for part in parts:
                rows = slice(at, at + len(part.segments))
                at += len(part.segments)
                flight = _Flight(peer, local[rows], remote[rows], operation, pool.kind, source.offer.pool_kind)
                copies.append(self._make_ready(flight))
        except TransportError:
            for copy in copies:
                self.discard(copy)
            raise
        return copies

    def _direct(self, peer: str, segments: Int64Array) -> tuple[Descriptors, Descriptors]:
        """(ours, the peer's) of ``segments``, int64[n, 3] as those of a slice."""
        pool, offer = self._memory.pool, self._peers[peer].offer
        return (
            descriptors(segments[:, 1] + pool.address, segments[:, 2], pool.device),
            descriptors(segments[:, 0] + offer.pool_address, segments[:, 2], offer.pool_device),
        )

    def _lay_out(self, flight: _Flight, part: Slice) -> None:
        """Decide how ``part`` is moved: regrouped by the CPU where that is quicker and there is a buffer for it."""
        pool, offer, images = self._memory.pool, self._peers[flight.peer].offer, part.images
        flight.remote_kind = offer.pool_kind
        flight.bounce = None if self._bounce is None else self._bounce.take(part)
        if flight.bounce is None:
            flight.local_kind = pool.kind
            flight.local, flight.remote = self._direct(flight.peer, part.expanded())
            return
        assert images is not None
        assert self._bounce is not None
        if flight.operation == "WRITE":
            self._bounce.gather(flight.bounce, part)
        first = self._bounce.memory.address + flight.bounce
        flight.local = descriptors(first + np.arange(len(images.pieces)) * images.size, images.size)
        flight.remote = descriptors(images.pieces + offer.pool_address, images.size, offer.pool_device)

    def prepare_slot(self, peer: str, slot: int) -> Copy:
        self.check_peer(peer)
        source = self._peers[peer]
        if not 0 <= slot < source.num_slots:
            raise TransportError(f"{peer} has no slot {slot}")
        if not self._cells:
            raise TransportError(f"more than {_SCRATCH_SLOTS} READs at once")
        cell = self._cells.pop()
        self._scratch_words[cell] = 0
        local = descriptors(np.array([self._scratch.address + cell * SLOT_BYTES]), SLOT_BYTES)
        remote = descriptors(np.array([source.offer.slots_address + slot * SLOT_BYTES]), SLOT_BYTES)
        return self._make_ready(_Flight(peer, local, remote, cell=cell))

    def post(self, copy: Copy) -> None:
        assert isinstance(copy, _Flight)
        self._prepared.remove(copy)
        failed = self._peers[copy.peer].failed
        if failed is not None:
            self._over(copy, failed)
        else:
            if copy.part is not None:
                self._lay_out(copy, copy.part)
            self._submit(copy)
        if copy.error is not None:  # nothing of it can arrive any more
            raise TransportError(copy.error)

    def discard(self, copy: Copy) -> None:
        assert isinstance(copy, _Flight)
        if copy in self._prepared:
            self._prepared.remove(copy)
            self._release(copy)
        self._free_cell(copy)

    def done(self, copy: Copy) -> bool:
        assert isinstance(copy, _Flight)
        if not copy.over:
            self._took(copy, self._status("check_xfer_state", copy))
        if copy.error is not None:
            raise TransportError(copy.error)
        return copy.over

    def slot_value(self, copy: Copy) -> tuple[int, int]:
        assert isinstance(copy, _Flight)
        assert copy.cell is not None
        nonce, lease_id = (int(word) for word in self._scratch_words[copy.cell])
        self._free_cell(copy)
        return nonce, lease_id

    def progress(self) -> None:
        if not self._flights:  # looking at those makes progress, too
            self._agent.api.get_new_notifs()  # the notifications themselves mean nothing here

    def close(self) -> None:
        self._drop_agent()
        self._close_memory()

    def _close_memory(self) -> None:
        """Give back what is ours; no agent may know it any more."""
        del self._scratch_words
        self._scratch.close()
        if self._bounce is not None:
            self._bounce.close()

    def _make_ready(self, flight: _Flight) -> _Flight:
        try:
            self._prepare(flight)
        except TransportError:
            self._over(flight, "never posted")
            raise
        self._prepared.append(flight)
        return flight

    def _prepare(self, flight: _Flight) -> None:
        api = self._agent.api
        try:
            local = api.get_xfer_descs(flight.local, flight.local_kind)
            remote = api.get_xfer_descs(flight.remote, flight.remote_kind)
            flight.handle = api.initialize_xfer(flight.operation, local, remote, self._peers[flight.peer].offer.agent)
        except Exception as error:  # nothing has been posted: no fence is needed
            raise TransportError(f"{flight.peer}: NIXL refuses the {flight.operation.lower()}: {error}") from None

    def _submit(self, flight: _Flight) -> None:
        if flight.handle is None:  # the agent for which it was prepared is gone
            try:
                self._prepare(flight)
            except TransportError as error:
                self._over(flight, str(error))
                return
        self._flights.append(flight)
        self._took(flight, self._status("transfer", flight))

    def _status(self, call: str, flight: _Flight) -> str:
        """``DONE``, ``PROC``, or what went wrong. No exception leaves here: its frames would keep the agent alive."""
        try:
            status = getattr(self._agent.api, call)(flight.handle)
        except Exception as error:
            return str(error) or type(error).__name__
        return status if status in ("DONE", "PROC") else f"NIXL says {status}"

    def _took(self, flight: _Flight, status: str) -> None:
        if status == "DONE":
            self._release(flight)
            if flight.bounce is not None and flight.operation == "READ":
                assert flight.part is not None
                assert self._bounce is not None
                self._bounce.scatter(flight.bounce, flight.part)
            self._over(flight, None)
        elif status != "PROC":
            self._fence(flight, _failure(flight, status))

    def _over(self, flight: _Flight, error: str | None) -> None:
        flight.over, flight.error, flight.handle = True, error, None
        if flight in self._flights:
            self._flights.remove(flight)
        if flight.bounce is not None:
            assert self._bounce is not None
            self._bounce.give_back(flight.bounce)
            flight.bounce = None
        if error is not None:
            self._free_cell(flight)

    def _free_cell(self, flight: _Flight) -> None:
        cell, flight.cell = flight.cell, None
        if cell is not None:
            self._cells.append(cell)

    # ------------------------------------------------------------------------------------------------------ fences

    def _fence(self, flight: _Flight, error: str) -> None:
        """End ``flight`` for certain: replace the agent, and post again what READs had under way.

        Not what WRITEs had: over TCP it may still arrive, long after it would have been written once more.
        """
        self._peers[flight.peer].failed = error
        self._drain([other for other in self._flights if other is not flight])
        others = [other for other in self._flights if other is not flight]
        self._drop_agent()
        self._over(flight, error)
        self._flights.clear()
        try:
            self._agent.renew()
        except TransportError as failure:
            raise RuntimeError(str(failure)) from failure  # this mover ends: that is a fence as well
        for peer, known in self._peers.items():
            if known.failed is None:
                try:
                    self._agent.load(peer, known.offer)
                except TransportError as failure:
                    known.failed = str(failure)
        for other in others:
            failed = self._peers[other.peer].failed
            if failed is None and other.operation == "WRITE":
                failed = f"{other.peer}: the write was cut off: {error}"
            if failed is not None:
                self._over(other, failed)
            elif not other.over:
                self._submit(other)

    def _drain(self, others: list[_Flight]) -> None:
        """Let what others have under way come to its end, for a moment.

        UCX in a peer's process was seen to abort when the connection was reset while it was sending.
        """
        until_s = time.monotonic() + _DRAIN_S
        while others and time.monotonic() < until_s:
            for other in list(others):
                status = self._status("check_xfer_state", other)
                if status == "PROC":
                    continue
                others.remove(other)
                if status == "DONE":
                    self._took(other, status)
                else:  # it is over once the agent is gone
                    self._peers[other.peer].failed = _failure(other, status)
            time.sleep(_DRAIN_POLL_S)

    def _drop_agent(self) -> None:
        """End everything under way for certain. Raises `RuntimeError` when that cannot be promised."""
        for flight in (*self._flights, *self._prepared):
            self._release(flight)
        self._agent.drop()

    def _release(self, flight: _Flight) -> None:
        handle, flight.handle = flight.handle, None
        if handle is None:
            return
        try:
            handle.release()
        except Exception as error:
            handle._released = True  # still active: it goes with the agent
            log.debug("NIXL keeps a request until its agent goes: %s", str(error))  # a log may keep `error`


def _failure(flight: _Flight, status: str) -> str:
    return f"{flight.peer}: the {flight.operation.lower()} failed: {status}"
