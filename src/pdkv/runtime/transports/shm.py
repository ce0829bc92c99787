"""Reads and writes between processes of one host: map the peer's memory files and copy.

The peer does nothing for a copy, so it may be busy, stopped, or have lost its mover. Its mapped memory stays valid even
after it has died; the lease slot, which lies in the same memory, decides whether what was read may be used. What may be
written, and how the peer knows that nothing will be any more, is `transports.grant_locks`.
"""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pdkv.runtime.device_memory import DeviceMemory
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.transports import grant_locks
from pdkv.runtime.transports.base import SLOT_BYTES, Copy, Permit, Slice, TransferMemory, TransportError, check_ends
from pdkv.runtime.transports.bounce import copy_cells
from pdkv.runtime.wire import PeerMemory, ShmOffer

_WORD = np.dtype("<u8")
CPU_ONLY = "shared memory moves CPU pools only; use --transport nixl"


def boot_id() -> str:
    """Names this boot of this host: two processes with the same one share a kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def shm_offer(pool: SharedMemory, slots: SharedMemory) -> ShmOffer:
    """Where peers on this host find these memory files; the calling process must keep them open."""
    return ShmOffer(
        boot_id=boot_id(),
        pid=os.getpid(),
        pool_fd=pool.fd,
        pool_inode=os.fstat(pool.fd).st_ino,
        slots_fd=slots.fd,
        slots_inode=os.fstat(slots.fd).st_ino,
    )


@dataclass(slots=True)
class _Peer:
    pidfd: int
    pool: SharedMemory
    slots: SharedMemory
    memory: PeerMemory
    offer: ShmOffer
    target: SharedMemory | None = None  # its pool once more, to write to; mapped when first needed


@dataclass(slots=True)
class _Copy:
    """``part`` is what to copy into the pool, or out of it with a ``permit``.

    None for a lease slot, whose ``value`` is there once it was read.
    """

    peer: str
    part: Slice | None = None
    permit: Permit | None = None
    slot: int = 0
    value: tuple[int, int] | None = None


class ShmTransport:
    """One-sided copies through mapped memory files. They happen inside ``post``: a slice is over when it returns.

    Raises `TransportError` for a pool that is not host memory.
    """

    name = "shm"
    offer = None

    def __init__(self, memory: TransferMemory) -> None:
        if memory.pool.kind != "DRAM":
            raise TransportError(CPU_ONLY)
        self._local = memory
        self._peers: dict[str, _Peer] = {}

    def connect(self, peer: str, memory: PeerMemory) -> None:
        self.forget(peer)
        offer = memory.shm
        if offer is None:
            raise TransportError(f"peer {peer} offers no shared memory")
        if offer.boot_id != boot_id():
            raise TransportError(
                f"peer {peer} runs on another host (boot id {offer.boot_id}, here {boot_id()}): "
                "shared memory reaches one host only, start both with --transport nixl"
            )
        try:
            pidfd = os.pidfd_open(offer.pid)
        except OSError as error:
            raise TransportError(f"peer {peer} is gone (no process {offer.pid} here)") from error
        try:
            pool = _map(peer, offer.pid, offer.pool_fd, offer.pool_inode, memory.geometry.nbytes)
            slots = _map(peer, offer.pid, offer.slots_fd, offer.slots_inode, memory.num_slots * SLOT_BYTES)
        except TransportError:
            os.close(pidfd)
            raise
        self._peers[peer] = _Peer(pidfd, pool, slots, memory, offer)

    def forget(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            os.close(known.pidfd)
            known.pool.close()
            known.slots.close()
            if known.target is not None:
                known.target.close()

    def check_peer(self, peer: str) -> None:
        known = self._peer(peer)
        if select.select([known.pidfd], [], [], 0)[0]:
            raise TransportError(f"peer {peer} is gone (process {known.offer.pid} ended)")

    def prepare(self, peer: str, parts: Sequence[Slice], permit: Permit | None = None) -> list[Copy]:
        known = self._peer(peer)
        for part in parts:
            check_ends(peer, part, known.pool.nbytes, self._local.pool.nbytes)
        if permit is not None and known.target is None:
            offer, nbytes = known.offer, known.memory.geometry.nbytes
            known.target = _map(peer, offer.pid, offer.pool_fd, offer.pool_inode, nbytes, writable=True)
        return [_Copy(peer, part, permit) for part in parts]

    def prepare_slot(self, peer: str, slot: int) -> Copy:
        return _Copy(peer, slot=slot)

    def post(self, copy: Copy) -> None:
        assert isinstance(copy, _Copy)
        known = self._peer(copy.peer)
        if copy.part is None:
            words = known.slots.array(_WORD, known.slots.nbytes // _WORD.itemsize)
            copy.value = (int(words[2 * copy.slot]), int(words[2 * copy.slot + 1]))
            return
        if copy.permit is not None:
            self._write(known, copy.part, copy.permit)
            return
        _move(copy.part, known.pool, self._local.pool, outward=False)

    def _write(self, known: _Peer, part: Slice, permit: Permit) -> None:
        assert known.target is not None
        with grant_locks.writing(known.slots, permit):
            _move(part, known.target, self._local.pool, outward=True)

    def discard(self, copy: Copy) -> None:
        pass

    def done(self, copy: Copy) -> bool:
        return True

    def slot_value(self, copy: Copy) -> tuple[int, int]:
        assert isinstance(copy, _Copy)
        assert copy.value is not None
        return copy.value

    def progress(self) -> None:
        pass

    def close(self) -> None:
        for peer in list(self._peers):
            self.forget(peer)

    def _peer(self, peer: str) -> _Peer:
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"peer {peer} is not connected")
        return known


def _move(part: Slice, peer: SharedMemory, own: SharedMemory | DeviceMemory, *, outward: bool) -> None:
    """Copy what ``part`` says between the two pools, from the peer's unless ``outward``."""
    assert isinstance(own, SharedMemory)
    source, target, columns = (own, peer, [1, 0]) if outward else (peer, own, [0, 1])
    grid = part.grid
    if grid is None:
        for at, to, nbytes in part.segments[:, [*columns, 2]].tolist():
            ctypes.memmove(target.address + to, source.address + at, nbytes)
        return
    strides = (grid.own, grid.peer) if outward else (grid.peer, grid.own)
    one, other = (memory.array(np.uint8, memory.nbytes) for memory in (source, target))
    copy_cells(one, other, part.segments[:, columns], strides, grid, int(part.segments[0, 2]))


def _map(peer: str, pid: int, fd: int, inode: int, nbytes: int, *, writable: bool = False) -> SharedMemory:
    """The peer's memory file; refused when it is not the very file that the peer announced."""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        opened = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(
            f"peer {peer}: cannot open {path} ({error.strerror}): shared memory needs the same user and the same "
            "pid namespace on both sides, else use --transport nixl"
        ) from error
    try:
        if os.fstat(opened).st_ino != inode:
            raise ValueError("another file than the one announced (not the same pid namespace?)")
        return SharedMemory.attach(opened, nbytes, writable=writable)
    except (OSError, ValueError) as error:
        os.close(opened)
        raise TransportError(f"peer {peer}: {path}: {error}") from error
