"""Block tables: the blocks of one owner, in token order, in an array that grows by doubling."""

from __future__ import annotations

import numpy as np

from pdkv.core.ports import Int32Array


class BlockTable:
    """The blocks of one owner in token order."""

    __slots__ = ("_buffer", "_len")

    def __init__(self) -> None:
        self._buffer = np.zeros(8, dtype=np.int32)
        self._len = 0

    def __len__(self) -> int:
        return self._len

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

    def cut(self, length: int) -> Int32Array:
        """Shorten to ``length``; returns a copy of the blocks cut off."""
        tail = self._buffer[length : self._len].copy()
        self._len = min(self._len, length)
        return tail
