"""The order in which free blocks are handed out: a ring of (block, stamp) with lazy removal."""

from __future__ import annotations

import numpy as np

from pdkv.core.ports import BoolArray, Int32Array


class FreeQueue:
    """Free blocks, next to be handed out first. Head, tail and removal by block all cost O(blocks touched).

    A ring entry is valid while its stamp equals the block's stamp; taking a block out from the middle (a prefix hit)
    only bumps the stamp. When stale entries fill the ring it is rewritten without them, which is O(1) amortised.
    """

    def __init__(self, blocks: Int32Array, num_blocks: int) -> None:
        self._stamp = np.zeros(num_blocks, dtype=np.int64)
        self._queued = np.zeros(num_blocks, dtype=np.bool_)
        self._capacity = 4 * num_blocks + 4
        self._blocks = np.zeros(self._capacity, dtype=np.int32)
        self._stamps = np.full(self._capacity, -1, dtype=np.int64)
        self._head = self._tail = self._capacity // 2
        self._len = 0
        self.append(blocks)

    def __len__(self) -> int:
        return self._len

    def append(self, blocks: Int32Array) -> None:
        """Put ``blocks`` at the tail, in order: they are handed out last."""
        self._make_room(len(blocks))
        at = slice(self._tail, self._tail + len(blocks))
        self._tail += len(blocks)
        self._enter(at, blocks)

    def prepend(self, blocks: Int32Array) -> None:
        """Put ``blocks`` at the head, in order: ``blocks[0]`` is handed out next."""
        self._make_room(len(blocks))
        at = slice(self._head - len(blocks), self._head)
        self._head -= len(blocks)
        self._enter(at, blocks)

    def remove(self, blocks: Int32Array) -> None:
        """Take queued ``blocks`` out, wherever they stand."""
        assert bool(self._queued[blocks].all()), "free queue: removal of a block that is not free"
        self._stamp[blocks] += 1
        self._queued[blocks] = False
        self._len -= len(blocks)

    def pop(self, count: int) -> Int32Array:
        """int32[count] from the head; the caller has checked that there are that many."""
        assert count <= self._len, f"free queue: {count} blocks asked, {self._len} free"
        taken: list[Int32Array] = []
        missing = count
        while missing:
            window = slice(self._head, min(self._head + max(missing, 16), self._tail))
            blocks = self._blocks[window]
            valid = np.flatnonzero(self._valid(window))[:missing]
            taken.append(blocks[valid].copy())
            missing -= len(valid)
            self._head = window.stop if missing else window.start + int(valid[-1]) + 1
        out = np.concatenate(taken) if taken else np.empty(0, dtype=np.int32)
        self._stamp[out] += 1
        self._queued[out] = False
        self._len -= count
        return out

    def order(self) -> Int32Array:
        """int32[len]: a copy of the queue, head first."""
        window = slice(self._head, self._tail)
        return self._blocks[window][self._valid(window)].copy()

    def _valid(self, window: slice) -> BoolArray:
        blocks = self._blocks[window]
        valid: BoolArray = (self._stamps[window] == self._stamp[blocks]) & self._queued[blocks]
        return valid

    def _enter(self, at: slice, blocks: Int32Array) -> None:
        assert not self._queued[blocks].any(), "free queue: a block freed twice"
        self._blocks[at] = blocks
        self._stamps[at] = self._stamp[blocks]
        self._queued[blocks] = True
        self._len += len(blocks)

    def _make_room(self, count: int) -> None:
        """Rewrite the ring around its middle when either end would run out."""
        if self._head - count >= 0 and self._tail + count <= self._capacity:
            return
        order = self.order()
        self._head = (self._capacity - len(order)) // 2
        self._tail = self._head + len(order)
        window = slice(self._head, self._tail)
        self._blocks[window] = order
        self._stamps[window] = self._stamp[order]

    def check(self) -> None:
        """Recount; raises ``AssertionError`` on any difference."""
        order = self.order()
        assert len(order) == self._len == int(self._queued.sum()), "free queue: length differs"
        assert len(np.unique(order)) == len(order), "free queue: a block stands twice"
