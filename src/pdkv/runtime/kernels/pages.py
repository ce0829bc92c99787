"""Memory in huge pages: weights are read once per step, and with pages of 4 KiB the CPU waits for page tables."""

from __future__ import annotations

import mmap

import torch

from pdkv.units import MIB, cdiv

_HUGE_PAGE = 2 * MIB
_ALIGNMENT = 64  # a cache line


def room(nbytes: int) -> int:
    """What `Arena.empty` takes for a tensor of ``nbytes``."""
    return cdiv(nbytes, _ALIGNMENT) * _ALIGNMENT


class Arena:
    """``nbytes`` of zeroed memory that tensors are cut from, in huge pages where the system has them.

    Memory is taken when it is first written, a huge page at a time, and given back when the last tensor is gone.
    """

    def __init__(self, nbytes: int) -> None:
        size = cdiv(nbytes, _HUGE_PAGE) * _HUGE_PAGE + _HUGE_PAGE  # one more, to begin where a page does
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            try:
                mapped.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # a kernel without them: ordinary pages do as well
                pass
            self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
        else:
            self._memory = torch.empty(size, dtype=torch.uint8)
        self._next = -self._memory.data_ptr() % _HUGE_PAGE
        self._end = self._next + nbytes

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor that begins with a cache line. Raises ValueError when the arena is too small."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if self._next + nbytes > self._end:
            raise ValueError(f"a tensor of {nbytes} bytes asked for, {self._end - self._next} are left of the arena")
        cut = self._memory[self._next : self._next + nbytes]
        self._next += room(nbytes)
        return cut.view(dtype).view(shape)
