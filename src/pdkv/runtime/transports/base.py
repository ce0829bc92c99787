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
Int64Array = npt.NDArray[np.int64]

SLOT_BYTES = 16  # little-endian uint64 nonce, uint64 lease id


class TransportError(Exception):
    """A slice, or what must come before it, failed; the text names the peer and the cause.

    When it comes out of ``done`` or ``post``, nothing of *that* copy can arrive any more.
    """


@dataclass(frozen=True, slots=True)
class Grid:
    """How a segment is repeated: once for every plane (a layer's K, V or latent) and token.

    ``peer``, ``own`` and ``image`` are the bytes from one plane, and from one token, to the next: in the peer's pool,
    in ours, and in an image (`Images`).
    """

    planes: int
    tokens: int
    peer: tuple[int, int]
    own: tuple[int, int]
    image: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """All that a slice concerns of the peer's pool, packed: ``pieces`` (int64[m], offsets there) of ``size`` bytes, one
    behind the other. ``places``, int64[n], are where the slice's segments begin in it.
    """

    pieces: Int64Array
    size: int
    places: Int64Array

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return len(self.pieces) * self.size


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """What to copy at a time: ``segments``, int64[n, 3], as (offset in the peer's pool, offset in ours, bytes).

    With a ``grid`` each of them stands for many copies of so many bytes; then ``images`` say how to move the same
    without telling heads apart. Without one each is contiguous on both sides.
    """

    segments: Int64Array
    grid: Grid | None = None
    images: Images | None = None

    @property
    def copies(self) -> int:
        """How many there are of them."""
        return len(self.segments) * (1 if self.grid is None else self.grid.planes * self.grid.tokens)

    @property
    def nbytes(self) -> int:
        """Of all copies."""
        return int(self.segments[:, 2].sum()) * self.copies // len(self.segments)

    def expanded(self) -> Int64Array:
        """int64[m, 3]: every copy as a segment."""
        grid = self.grid
        if grid is None:
            return self.segments
        cells = np.stack(np.divmod(np.arange(grid.planes * grid.tokens), grid.tokens), axis=1)
        starts = (self.segments[:, None, :2] + cells @ np.array([grid.peer, grid.own]).T).reshape(-1, 2)
        return np.column_stack((starts, np.full(len(starts), self.segments[0, 2])))


@dataclass(frozen=True, slots=True)
class TransferMemory:
    """What peers read and what transfers fill: the pool (of all ranks, as ``geometry`` says) and the lease slots
    (little-endian uint64[num_slots, 2]). Mapped in this process, or on a GPU of it.
    """

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
    """One-sided reads and writes. All calls come from one thread. They return at once, but for

    - `post`, which may copy one slice, or regroup one that is to be written (`segments.REGROUPED_BYTES` at most);
    - `done`, which may put the heads of a slice that was regrouped where they belong (as many bytes at most);
    - those that find out about a failure: a second or so, to make sure that nothing lands after they have told it.
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
        """Get ready to copy slices into the pool. Nothing moves yet.

        Between like pools all that can be done before is done; of a slice between unlike pools NIXL's descriptors are
        made when it is posted, because only then it is known whether there is a buffer to regroup it in.

        With a ``permit`` from the pool into the peer's; then `post` may raise because the permit is over.
        """

    def prepare_slot(self, peer: str, slot: int) -> Copy:
        """Get ready to read one lease slot into memory that nothing else uses."""

    def post(self, copy: Copy) -> None:
        """Begin a prepared copy, once."""

    def discard(self, copy: Copy) -> None:
        """Let go of a copy that is not under way: one that will not be posted, or whose value nobody wants."""

    def done(self, copy: Copy) -> bool:
        """Whether the copy is over, every byte in its place; raises `TransportError` when it is over and failed."""

    def slot_value(self, copy: Copy) -> tuple[int, int]:
        """(nonce, lease id) as read by a finished copy of `prepare_slot`; called once per copy."""

    def progress(self) -> None:
        """Help peers that read from here (cheap when there are none)."""

    def close(self) -> None:
        """Let go of everything; nothing lands after it. Raises `RuntimeError` when that cannot be promised."""


def check_ends(peer: str, part: Slice, peer_bytes: int, own_bytes: int) -> None:
    """Raise `TransportError` for a slice that reaches outside either pool."""
    ends = (part.segments[:, :2] + part.segments[:, 2:]).max(axis=0)
    grid = part.grid
    if grid is not None:
        ends = ends + np.array([grid.peer, grid.own]) @ [grid.planes - 1, grid.tokens - 1]
    if ends[0] > peer_bytes or ends[1] > own_bytes:
        raise TransportError(f"peer {peer}: a segment reaches outside the pool")
