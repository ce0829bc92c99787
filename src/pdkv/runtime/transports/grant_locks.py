"""The fence of WRITEs through shared memory: how D knows that nothing is written under a grant any more.

P's mover writes into D's memory by itself, so neither D's mover nor D's death can stop it, and P may be stopped
(SIGSTOP) in the middle of a slice. What they share is D's file of slots, and a lock on each slot's bytes of it:

    P's mover, for each slice:   lock the slot, shared   ->  its words are the grant's?  ->  copy  ->  unlock
    D, to take a grant back:     clear the words         ->  lock the slot, exclusive    ->  unlock: nothing will come

The kernel orders the two locks. Where P's came first, D's is not given before P has unlocked, that is, has copied.
Where D's came first, P reads the words after D had cleared them, and does not copy. They do not come back: ids never
recur, and a slot is given to no other grant before it is fenced. A P that is stopped before it has locked writes
nothing when it goes on; one that is stopped while it copies keeps the lock, and D the quarantine. If it keeps it for
too long, D ends the process that holds it (`evict`); its instance starts another. The kernel unlocks for a process that
dies, and a process that is dead copies nothing.

The locks are those of open files (F_OFD_SETLK): each side has opened the file for itself, and no other descriptor that
is closed meanwhile takes them away, as it would those of processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.transports.base import SLOT_BYTES, Permit, TransportError

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid
_WORD = np.dtype("<u8")
_ENDED_MS = 5000  # a killed process is gone at once, but for a slice that it is copying


def _lock(slots: SharedMemory, slot: int, kind: int) -> bool:
    """Whether the slot's bytes are locked (unlocked) now; never waits."""
    request = _FLOCK.pack(kind, os.SEEK_SET, slot * SLOT_BYTES, SLOT_BYTES, 0)
    try:
        fcntl.fcntl(slots.fd, fcntl.F_OFD_SETLK, request)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def writing(slots: SharedMemory, permit: Permit) -> Iterator[None]:
    """P: inside, the peer, whose ``slots`` these are, waits before it gives the memory to anybody else.

    Raises `TransportError` where the permit is over.
    """
    over = TransportError("the grant is over: its consumer has taken the memory back")
    if not _lock(slots, permit.slot, fcntl.F_RDLCK):  # it is being taken back right now
        raise over
    try:
        words = slots.array(_WORD, slots.nbytes // _WORD.itemsize)[2 * permit.slot : 2 * permit.slot + 2]
        if tuple(words.tolist()) != permit.words:
            raise over
        yield
    finally:
        _lock(slots, permit.slot, fcntl.F_UNLCK)


def passed(slots: SharedMemory, slot: int) -> bool:
    """D, whose slot has been cleared: whether nobody writes under it any more, or will."""
    if not _lock(slots, slot, fcntl.F_WRLCK):
        return False
    _lock(slots, slot, fcntl.F_UNLCK)
    return True


def evict(slots: SharedMemory, slot: int) -> list[int]:
    """D: SIGKILL the processes that hold the slot's lock; their ids. Waits until they are gone (5 s at most).

    None is killed that was not seen to hold it while its pidfd was open, so a recycled pid harms nobody. This process
    itself is spared.
    """
    inode = os.fstat(slots.fd).st_ino
    killed = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if _holds(entry, inode, slot) and _kill(entry, inode, slot):
                killed.append(int(entry.name))
    return killed


def _holds(process: Path, inode: int, slot: int) -> bool:
    """Whether the process has the file of slots open with that lock on it (proc(5), fdinfo)."""
    place = [f":{inode}", str(slot * SLOT_BYTES), str((slot + 1) * SLOT_BYTES - 1)]
    for entry in (process / "fdinfo").iterdir():
        with contextlib.suppress(OSError):
            for line in entry.read_text().splitlines():
                fields = line.split()
                if fields[:1] == ["lock:"] and [fields[-3][fields[-3].rfind(":") :], *fields[-2:]] == place:
                    return True
    return False


def _kill(process: Path, inode: int, slot: int) -> bool:
    pidfd = os.pidfd_open(int(process.name))
    try:
        if not _holds(process, inode, slot):
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        ended.poll(_ENDED_MS)
        return True
    finally:
        os.close(pidfd)
