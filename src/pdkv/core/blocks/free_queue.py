"""The order in which free blocks are handed out: a ring of blocks, and where in it each block stands."""

from __future__ import annotations

import numpy as np

from pdkv.core.ports import BlockIds, BoolArray, Int32Array, Int64Array

_OUT = -1  # nowhere in the ring


class FreeQueue:
    """Free blocks, next to be handed out first. Head, tail and removal by block all cost O(blocks touched).

    An entry of the ring is valid while its block says that it stands there: taking a block out of the middle (a prefix
    hit) only changes the block's place. When an end of the ring is reached it is rewritten around its middle, without
    the entries that are valid no more, which is O(1) amortised.

    That no block is freed twice is the ledger's to say (`Ledger.release`); `check` recounts it.
    """

    def __init__(self, blocks: Int32Array, num_blocks: int) -> None:
        self._place = np.full(num_blocks, _OUT, dtype=np.int32)
        self._capacity = 2 * num_blocks + 16
        self._ring = np.zeros(self._capacity, dtype=np.int32)
        self._all_places = np.arange(self._capacity, dtype=np.int32)
        # the same memory: for one block this is faster than numpy
        self._single_place, self._single_ring = self._place.data, self._ring.data
        self._head = self._tail = self._capacity // 2
        self._len = 0
        self.append(blocks)

    def __len__(self) -> int:
        return self._len

    def append(self, blocks: BlockIds) -> None:
        """Put ``blocks`` at the tail, in order: they are handed out last."""
        if not len(blocks):
            return
        self._make_room(len(blocks))
        self._enter(self._tail, blocks)
        self._tail += len(blocks)

    def prepend(self, blocks: BlockIds) -> None:
        """Put ``blocks`` at the head, in order: ``blocks[0]`` is handed out next."""
        if not len(blocks):
            return
        self._make_room(len(blocks))
        self._head -= len(blocks)
        self._enter(self._head, blocks)

    def remove(self, blocks: BlockIds) -> None:
        """Take queued ``blocks`` out, wherever they stand."""
        if not len(blocks):
            return
        places = self._place[blocks]
        queued = (places >= self._head) & (places < self._tail)
        queued &= self._ring.take(places, mode="clip") == blocks
        assert np.count_nonzero(queued) == len(blocks), "free queue: removal of a block that is not free"
        self._place[blocks] = _OUT
        self._len -= len(blocks)

    def pop(self, count: int) -> Int64Array:
        """int64[count] from the head; the caller has checked that there are that many."""
        assert count <= self._len, f"free queue: {count} blocks asked, {self._len} free"
        if count == 1:
            return self._pop_one()
        if not count or self._tail - self._head == self._len:  # every entry is valid
            out = self._ring[self._head : self._head + count].astype(np.int64)
            self._head += count
        else:
            out = self._pop_valid(count)
        self._len -= count
        return out

    def _pop_valid(self, missing: int) -> Int64Array:
        taken: list[Int64Array] = []
        while missing:
            start, stop = self._head, min(self._head + max(missing, 16), self._tail)
            entries = np.flatnonzero(self._valid(start, stop))[:missing]
            taken.append(self._ring[start:stop][entries].astype(np.int64))
            missing -= len(entries)
            self._head = stop if missing else start + int(entries[-1]) + 1
        return taken[0] if len(taken) == 1 else np.concatenate(taken)

    def _pop_one(self) -> Int64Array:
        ring, place, head = self._single_ring, self._single_place, self._head
        while place[ring[head]] != head:
            head += 1
        self._head = head + 1
        self._len -= 1
        return np.asarray([ring[head]], dtype=np.int64)

    def order(self) -> Int32Array:
        """int32[len]: a copy of the queue, head first."""
        blocks: Int32Array = self._ring[self._head : self._tail][self._valid(self._head, self._tail)]
        return blocks

    def fingerprint(self) -> object:
        """Equal to that of another time when the queue is the same."""
        return self._head, self._tail, self._len, self._place.tobytes(), self._ring.tobytes()

    def _valid(self, start: int, stop: int) -> BoolArray:
        valid: BoolArray = self._place.take(self._ring[start:stop]) == self._all_places[start:stop]
        return valid

    def _enter(self, start: int, blocks: BlockIds) -> None:
        """Write ``blocks`` to the ring from ``start`` on."""
        if len(blocks) == 1:
            block = blocks.item()
            self._single_ring[start], self._single_place[block] = block, start
        else:
            end = start + len(blocks)
            self._ring[start:end] = blocks
            self._place[blocks] = self._all_places[start:end]
        self._len += len(blocks)

    def _make_room(self, count: int) -> None:
        """Rewrite the ring around its middle when either end would run out."""
        if self._head - count >= 0 and self._tail + count <= self._capacity:
            return
        valid = self._tail - self._head == self._len  # every entry is
        order = self._ring[self._head : self._tail].copy() if valid else self.order()
        self._head = (self._capacity - len(order)) // 2
        self._tail = self._head + len(order)
        self._ring[self._head : self._tail] = order
        self._place[order] = self._all_places[self._head : self._tail]

    def check(self) -> None:
        """Recount; raises ``AssertionError`` on any difference."""
        assert len(self.order()) == self._len, "free queue: length differs"
