"""Strided copies by the CPU, and the memory in which slices between unlike pools are regrouped for NIXL.

Where ranks or block sizes differ, a slice is made of many small copies. As NIXL descriptors these cost microseconds
each, whatever they move. So the peer's side is moved in few large pieces, into (or out of) a bounce buffer of ours, and
the CPU puts the heads where they belong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pdkv.runtime.shared_memory import SharedMemory
from pdkv.runtime.transports.base import Grid, Int64Array, Slice
from pdkv.runtime.transports.segments import REGROUPED_BYTES

_BUFFERS = 8  # two slices of a transfer are under way; those of the fifth, if four peers stand still, go without
_DESCRIPTOR_BYTES = 8 << 10
"""What the CPU copies in about the time that one more descriptor costs."""


class BounceBuffers:
    """A few buffers for one slice each of ``pool``, ours. Their pages are committed as they are first written."""

    def __init__(self, pool: SharedMemory) -> None:
        self._pool = pool
        self.memory = SharedMemory(_BUFFERS * REGROUPED_BYTES, "pdkv-bounce")
        self._bytes = self.memory.array(np.uint8, self.memory.nbytes)
        self._free = list(range(0, self.memory.nbytes, REGROUPED_BYTES))

    def take(self, part: Slice) -> int | None:
        """Where a free buffer begins; None when there is none, or ``part`` is better copied directly."""
        images = part.images
        if images is None or not self._free or images.nbytes > REGROUPED_BYTES:
            return None
        saved = (part.copies - len(images.pieces)) * _DESCRIPTOR_BYTES
        return self._free.pop() if saved > part.nbytes else None

    def give_back(self, at: int) -> None:
        """Nothing uses the buffer at ``at`` any more."""
        self._free.append(at)

    def scatter(self, at: int, part: Slice) -> None:
        """Copy ``part`` from the images in the buffer at ``at`` to its places in our pool."""
        assert part.images is not None
        assert part.grid is not None
        starts = np.column_stack((at + part.images.places, part.segments[:, 1]))
        strides = part.grid.image, part.grid.own
        copy_cells(self._bytes, _bytes_of(self._pool), starts, strides, part.grid, int(part.segments[0, 2]))

    def gather(self, at: int, part: Slice) -> None:
        """Make the images of ``part`` out of our pool, in the buffer at ``at``."""
        assert part.images is not None
        assert part.grid is not None
        starts = np.column_stack((part.segments[:, 1], at + part.images.places))
        strides = part.grid.own, part.grid.image
        copy_cells(_bytes_of(self._pool), self._bytes, starts, strides, part.grid, int(part.segments[0, 2]))

    def close(self) -> None:
        """Give the memory back."""
        del self._bytes
        self.memory.close()


def _bytes_of(memory: SharedMemory) -> npt.NDArray[np.uint8]:
    array: npt.NDArray[np.uint8] = memory.array(np.uint8, memory.nbytes)
    return array


def copy_cells(
    source: npt.NDArray[np.uint8],
    target: npt.NDArray[np.uint8],
    starts: Int64Array,
    strides: tuple[tuple[int, int], tuple[int, int]],
    grid: Grid,
    nbytes: int,
) -> None:
    """Copy ``nbytes`` for each plane and token of ``grid``, from each of ``starts`` (int64[n, 2]: source, target) on.

    ``strides`` are the bytes from one plane, and one token, to the next, of the source and the target.
    """
    shape = grid.planes, grid.tokens, nbytes
    (source_strides, target_strides) = ((*each, 1) for each in strides)
    one: Any
    other: Any
    for at, to in starts.tolist():
        one = np.ndarray(shape, np.uint8, source, at, source_strides)
        other = np.ndarray(shape, np.uint8, target, to, target_strides)
        other[...] = one
