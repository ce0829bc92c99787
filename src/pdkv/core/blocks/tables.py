"""Block tables: the blocks of one owner, in token order, in an array that grows by doubling."""

from __future__ import annotations

import numpy as np

from pdkv.core.ports import Int32Array

#: Stands in a table where no block is needed (any more): never handed out, never freed.
NULL_BLOCK = 0


class BlockTable:
    """The blocks of one owner in token order; 0, the null block, where its tokens need none."""

    __slots__ = ("_buffer", "_len")

    def __init__(self) -> None:
        self._buffer = np.zeros(8, dtype=np.int32)
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self._len, f"block table: entry {index} of {self._len}"
        return int(self._buffer[index])

    @property
    def ids(self) -> Int32Array:
        """int32[len]: a view, valid until the next change; copy what is kept."""
        return self._buffer[: self._len]

    def extend(self, blocks: Int32Array) -> None:
        """Append ``blocks``."""
        end = self._len + len(blocks)
        if end > len(self._buffer):
            grown = np.zeros(max(end, 2 * len(self._buffer)), dtype=np.int32)
            grown[: self._len] = self.ids
            self._buffer = grown
        self._buffer[self._len : end] = blocks
        self._len = end

    def pad(self, length: int) -> None:
        """Append null blocks up to ``length`` entries."""
        if length > self._len:
            self.extend(np.zeros(length - self._len, dtype=np.int32))

    def replace(self, index: int, block: int) -> None:
        """Another block at ``index``."""
        assert 0 <= index < self._len
        self._buffer[index] = block

    def blank(self, start: int, stop: int) -> Int32Array:
        """Put null blocks at ``start:stop``; returns a copy of the blocks that stood there, null ones left out."""
        window = self._buffer[start : min(stop, self._len)]
        blocks: Int32Array = window[window != NULL_BLOCK]
        window[:] = NULL_BLOCK
        return blocks

    def cut(self, length: int) -> Int32Array:
        """Shorten to ``length``; returns a copy of the blocks cut off."""
        tail = self._buffer[length : self._len].copy()
        self._len = min(self._len, length)
        return tail
