"""What the mover asks of a transport, and how a READ is cut into slices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdkv.runtime.device_memory import DeviceMemory
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.wire import NixlOffer, PeerMemory

SLICE_BYTES = 16 << 20
SLOT_BYTES = 16  # little-endian uint64 nonce, uint64 lease id


class TransportError(Exception):
    """A slice, or what must come before it, failed; the text names the peer and the cause.

    When it comes out of ``done`` or ``post``, nothing of *that* slice can arrive any more.
    """


@dataclass(frozen=True, slots=True)
class Segment:
    """``nbytes`` contiguous bytes from ``remote`` (offset in the peer's pool) to ``local`` (offset in ours)."""

    remote: int
    local: int
    nbytes: int


Slice = tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """This instance's pool and slots as the mover reaches them: mapped, or on a GPU of its process."""

    pool: SharedMemory | DeviceMemory
    slots: SharedMemory
    bytes_per_block: int
    num_blocks: int
    num_slots: int


class Copy(Protocol):
    """One slice (or one slot) under way."""


class Transport(Protocol):
    """One-sided reads. All calls come from one thread. They return at once, but for `post` (one slice at most) and for
    those that find out about a failure (a second or so, to make sure that nothing lands after they have told it).
    """

    @property
    def name(self) -> str:
        """``shm`` or ``nixl``."""

    @property
    def offer(self) -> NixlOffer | None:
        """What peers need to read from here, beyond what the memory files say."""

    def connect(self, peer: str, memory: PeerMemory) -> None:
        """Get ready to read from ``peer``; replaces what was known of it. Raises `TransportError`."""

    def forget(self, peer: str) -> None:
        """Drop what is held for ``peer``; unknown peers are ignored."""

    def check_peer(self, peer: str) -> None:
        """Raise `TransportError` at once when ``peer`` is known to be gone."""

    def post(self, peer: str, part: Slice) -> Copy:
        """Begin one slice into the pool."""

    def post_slot(self, peer: str, slot: int) -> Copy:
        """Begin reading one lease slot into memory that nothing else uses."""

    def done(self, copy: Copy) -> bool:
        """Whether the copy is over; raises `TransportError` when it is over and failed."""

    def slot_value(self, copy: Copy) -> tuple[int, int]:
        """(nonce, lease id) as read by a finished `post_slot`; called once per copy."""

    def progress(self) -> None:
        """Help peers that read from here (cheap when there are none)."""

    def close(self) -> None:
        """Let go of everything; nothing lands after it. Raises `RuntimeError` when that cannot be promised."""


def cut_slices(
    remote_blocks: npt.NDArray[np.int32],
    local_blocks: npt.NDArray[np.int32],
    bytes_per_block: int,
    slice_bytes: int = SLICE_BYTES,
) -> Iterator[Slice]:
    """Slices of at most ``slice_bytes`` that cover all block pairs in order.

    Pairs that are adjacent on both sides become one segment: large segments are what makes transports fast. A block
    (or run) that crosses a slice's end is cut at the byte.
    """
    count = len(remote_blocks)
    if count == 0:
        return
    breaks = np.flatnonzero((np.diff(remote_blocks) != 1) | (np.diff(local_blocks) != 1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), count]
    part: list[Segment] = []
    room = slice_bytes
    for start, end in zip(starts, ends, strict=True):
        remote = int(remote_blocks[start]) * bytes_per_block
        local = int(local_blocks[start]) * bytes_per_block
        left = (end - start) * bytes_per_block
        while left:
            nbytes = min(left, room)
            part.append(Segment(remote, local, nbytes))
            remote, local, left, room = remote + nbytes, local + nbytes, left - nbytes, room - nbytes
            if room == 0:
                yield tuple(part)
                part, room = [], slice_bytes
    if part:
        yield tuple(part)
