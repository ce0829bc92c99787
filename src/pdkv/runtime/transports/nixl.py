"""Reads and writes through NIXL with its UCX backend: between hosts, and on one host through the kernel (CMA).

No progress thread: the wrapper starts it with a delay of 0, so it burns a core, and reads were slower with it. The
mover's loop calls `progress` instead, promptly while somebody may be reading from here. So all of NIXL and UCX runs in
calls made from here, and nothing can be written into the pool outside them.

NIXL's own cancel is no fence (design 1): a READ that was released, or reported an error for one of its descriptors, may
still have others under way. Only destroying the agent ends them. So a failed slice is answered by exactly that: the
agent is replaced (other READs get a second to end before, what they still have under way is posted again to the new
one), and then the failure is reported.
Python destroys an agent with its last reference, so every fence checks that the agent is really gone.
Nothing of NIXL's that is pickled is used: descriptors are made from plain addresses on both sides.

A pool may be in a GPU (VRAM) on either side, each with its own device index; slots are host memory (DRAM) always. UCX
moves VRAM by GPUDirect RDMA, CUDA IPC or staged copies. Its report that a READ is done says that the data is in the
GPU's memory for every kernel launched afterwards, which is when the engine first uses it (after `ReadEnded`).
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.transports.base import SLOT_BYTES, Copy, LocalMemory, Permit, Slice, TransportError, check_ends
from pdkv.runtime.transports.nixl_api import Descriptors, descriptors, import_nixl, text
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
    """One request. ``handle`` is NIXL's, of the agent of now; None once it is over, or when that agent has gone."""

    peer: str
    local: Descriptors
    remote: Descriptors
    operation: str = "READ"
    local_kind: MemoryKind = "DRAM"
    remote_kind: MemoryKind = "DRAM"
    cell: int | None = None
    handle: Any = None
    over: bool = False
    error: str | None = None


@dataclass(slots=True)
class _Agent:
    """One life of a NIXL agent and the remote agents it has loaded, with the peers that use each."""

    api: Any
    loaded: dict[str, set[str]] = field(default_factory=dict)


class NixlTransport:
    """One-sided READs and WRITEs over UCX. Raises `TransportError` when NIXL is missing or its agent cannot be made."""

    name = "nixl"

    def __init__(self, agent_name: str, memory: LocalMemory) -> None:
        # UCX listens on every interface unless told; like every other port of pdkv it stays on loopback by default.
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        os.environ.setdefault("UCX_LOG_LEVEL", "error")  # a fence drops requests on purpose: no warnings about it
        self._api = import_nixl()
        self._memory = memory
        self._agent_name = agent_name
        self._renewals = 0
        # Slots are read into memory that no peer can read and no kernel uses.
        self._scratch = SharedMemory(_SCRATCH_SLOTS * SLOT_BYTES, "pdkv-scratch")
        self._scratch_words = self._scratch.array(_WORD, (_SCRATCH_SLOTS, 2))
        self._cells = list(range(_SCRATCH_SLOTS))
        self._peers: dict[str, _Peer] = {}
        self._prepared: list[_Flight] = []  # not posted yet
        self._flights: list[_Flight] = []  # posted, not over
        self._doomed: list[weakref.ref[Any]] = []  # agents that were dropped and must be gone
        self._agent = self._make_agent()

    @property
    def offer(self) -> NixlOffer:
        """The agent of now; changes when a failure made a new one necessary."""
        return self._offer

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
            self._load(peer)
        except TransportError:
            del self._peers[peer]
            raise

    def _load(self, peer: str) -> None:
        offer = self._peers[peer].offer
        users = self._agent.loaded.get(offer.agent)
        if users is None:
            try:
                name = self._agent.api.add_remote_agent(offer.metadata)
            except Exception as error:  # NIXL's exceptions share no base class of their own
                raise TransportError(f"{peer}: NIXL does not take its agent ({error})") from error
            if text(name) != offer.agent:
                raise TransportError(f"{peer}: its metadata is that of agent {text(name)!r}, not {offer.agent!r}")
            users = self._agent.loaded[offer.agent] = set()
        users.add(peer)

    def forget(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is None:
            return
        users = self._agent.loaded.get(known.offer.agent, set())
        users.discard(peer)
        if not users and self._agent.loaded.pop(known.offer.agent, None) is not None:
            try:
                self._agent.api.remove_remote_agent(known.offer.agent)
            except Exception as error:
                log.warning("%s: NIXL did not let go of its agent: %s", peer, str(error))

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
        segments = np.concatenate(parts)
        check_ends(peer, segments, source.pool_bytes, pool.nbytes)
        offer = source.offer
        local = descriptors(segments[:, 1] + pool.address, segments[:, 2], pool.device)
        remote = descriptors(segments[:, 0] + offer.pool_address, segments[:, 2], offer.pool_device)
        copies: list[Copy] = []
        at = 0
        try:
            for part in parts:
                rows = slice(at, at + len(part))
                at += len(part)
                flight = _Flight(peer, local[rows], remote[rows], operation, pool.kind, offer.pool_kind)
                copies.append(self._make_ready(flight))
        except TransportError:
            for copy in copies:
                self.discard(copy)
            raise
        return copies

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
        del self._scratch_words
        self._scratch.close()

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
            self._over(flight, None)
        elif status != "PROC":
            self._fence(flight, f"{flight.peer}: the {flight.operation.lower()} failed: {status}")

    def _over(self, flight: _Flight, error: str | None) -> None:
        flight.over, flight.error, flight.handle = True, error, None
        if flight in self._flights:
            self._flights.remove(flight)
        if error is not None:
            self._free_cell(flight)

    def _free_cell(self, flight: _Flight) -> None:
        cell, flight.cell = flight.cell, None
        if cell is not None:
            self._cells.append(cell)

    # ------------------------------------------------------------------------------------------------------ fences

    def _fence(self, flight: _Flight, error: str) -> None:
        """End ``flight`` for certain: replace the agent, and post again what others had under way."""
        self._peers[flight.peer].failed = error
        self._drain([other for other in self._flights if other is not flight])
        others = [other for other in self._flights if other is not flight]
        self._drop_agent()
        self._over(flight, error)
        self._flights.clear()
        self._renewals += 1
        try:
            self._agent = self._make_agent()
        except TransportError as failure:
            raise RuntimeError(str(failure)) from failure  # this mover ends: that is a fence as well
        for peer, known in self._peers.items():
            if known.failed is None:
                try:
                    self._load(peer)
                except TransportError as failure:
                    known.failed = str(failure)
        for other in others:
            failed = self._peers[other.peer].failed
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
                    self._peers[other.peer].failed = f"{other.peer}: the read failed: {status}"
            time.sleep(_DRAIN_POLL_S)

    def _make_agent(self) -> _Agent:
        name = f"{self._agent_name}-{self._renewals}"
        pool, slots = self._memory.pool, self._memory.slots
        try:
            config = self._api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            api = self._api.nixl_agent(name, config)
            # Pool and slots are what peers may read; the scratch is registered because NIXL writes to it.
            api.register_memory([(pool.address, pool.nbytes, pool.device, "")], pool.kind)
            api.register_memory([(m.address, m.nbytes, m.device, "") for m in (slots, self._scratch)], "DRAM")
            metadata = api.get_agent_metadata()
        except Exception as error:
            raise TransportError(f"NIXL cannot make its UCX agent for {pool.kind} memory ({error})") from error
        self._offer = NixlOffer(
            agent=name,
            metadata=metadata,
            pool_kind=pool.kind,
            pool_device=pool.device,
            pool_address=pool.address,
            slots_address=slots.address,
        )
        return _Agent(api)

    def _drop_agent(self) -> None:
        """Destroy the agent: UCX's workers go, and with them everything under way.

        Raises `RuntimeError` when it, or one before it, lives on: then nothing is promised.
        """
        if self._agent.api is not None:
            self._doomed.append(weakref.ref(self._agent.api.agent))
        for flight in (*self._flights, *self._prepared):
            self._release(flight)
        self._agent.loaded.clear()
        self._agent.api = None  # the last reference
        if self._any_alive():
            gc.collect()  # unless it is part of a cycle
            if self._any_alive():
                raise RuntimeError("NIXL's agent lives on, something still refers to it: its reads may go on")

    def _release(self, flight: _Flight) -> None:
        handle, flight.handle = flight.handle, None
        if handle is None:
            return
        try:
            handle.release()
        except Exception as error:
            handle._released = True  # still active: it goes with the agent
            log.debug("NIXL keeps a request until its agent goes: %s", str(error))  # a log may keep `error`

    def _any_alive(self) -> bool:
        self._doomed = [agent for agent in self._doomed if agent() is not None]
        return bool(self._doomed)
