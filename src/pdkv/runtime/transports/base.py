"""What the mover asks of a transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdkv.runtime.device_memory import DeviceMemory
from pdkv.runtime.geometry import Geometry
from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.wire import NixlOffer, PeerMemory

SLICE_BYTES = 16 << 20
SLOT_BYTES = 16  # little-endian uint64 nonce, uint64 lease id


class TransportError(Exception):
    """A slice, or what must come before it, failed; the text names the peer and the cause.

    When it comes out of ``done`` or ``post``, nothing of *that* copy can arrive any more.
    """


#: int64[n, 3]: segments as (offset in the peer's pool, offset in ours, bytes), each contiguous on both sides.
Slice = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """This instance's pool and slots as the mover reaches them: mapped, or on a GPU of its process."""

    pool: SharedMemory | DeviceMemory
    slots: SharedMemory
    geometry: Geometry
    num_slots: int


@dataclass(frozen=True, slots=True)
class Permit:
    """Under which grant a peer lets us write: the two ``words`` that its slot ``slot`` must hold."""

    slot: int
    words: tuple[int, int]


class Copy(Protocol):
    """One slice, or one lease slot, from `prepare` to its end."""


class Transport(Protocol):
    """One-sided reads and writes. All calls come from one thread. They return at once, but for `post` (one slice at
    most) and for those that find out about a failure (a second or so, to make sure that nothing lands after they have
    told it).
    """

    @property
    def name(self) -> str:
        """``shm`` or ``nixl``."""

    @property
    def offer(self) -> NixlOffer | None:
        """What peers need to read from here, beyond what the memory files say."""

    def connect(self, peer: str, memory: PeerMemory) -> None:
        """Get ready to reach ``peer``; replaces what was known of it. Raises `TransportError`."""

    def forget(self, peer: str) -> None:
        """Drop what is held for ``peer``; unknown peers are ignored."""

    def check_peer(self, peer: str) -> None:
        """Raise `TransportError` at once when ``peer`` is known to be gone."""

    def prepare(self, peer: str, parts: Sequence[Slice], permit: Permit | None = None) -> list[Copy]:
        """Get ready to copy slices into the pool: all that can be done before. Nothing moves yet.

        With a ``permit`` from the pool into the peer's; then `post` may raise because the permit is over.
        """

    def prepare_slot(self, peer: str, slot: int) -> Copy:
        """Get ready to read one lease slot into memory that nothing else uses."""

    def post(self, copy: Copy) -> None:
        """Begin a prepared copy, once."""

    def discard(self, copy: Copy) -> None:
        """Let go of a copy that is not under way: one that will not be posted, or whose value nobody wants."""

    def done(self, copy: Copy) -> bool:
        """Whether the copy is over; raises `TransportError` when it is over and failed."""

    def slot_value(self, copy: Copy) -> tuple[int, int]:
        """(nonce, lease id) as read by a finished copy of `prepare_slot`; called once per copy."""

    def progress(self) -> None:
        """Help peers that read from here (cheap when there are none)."""

    def close(self) -> None:
        """Let go of everything; nothing lands after it. Raises `RuntimeError` when that cannot be promised."""


def check_ends(peer: str, segments: Slice, remote_bytes: int, local_bytes: int) -> None:
    """Raise `TransportError` for segments that reach outside either pool."""
    ends = (segments[:, :2] + segments[:, 2:]).max(axis=0).tolist()
    if ends[0] > remote_bytes or ends[1] > local_bytes:
        raise TransportError(f"peer {peer}: a segment reaches outside the pool")
