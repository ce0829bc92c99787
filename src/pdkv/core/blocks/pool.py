"""Block pool: reference counts, the free queue's order, and what free blocks still hold (spec block-pool 1-2)."""

from __future__ import annotations

import numpy as np

from pdkv.core.blocks.free_queue import FreeQueue
from pdkv.core.blocks.prefix_index import DictPrefixIndex, PrefixIndex
from pdkv.core.ledger import Account, Ledger
from pdkv.core.ports import Int32Array

NULL_BLOCK = 0


class BlockPool:
    """All blocks of one instance. Block 0 is the null block: never handed out, never freed.

    A block is in the free queue exactly when nobody holds it. Free blocks may still carry a hash; they lose it when
    they are handed out again.
    """

    def __init__(self, num_blocks: int, *, enable_caching: bool = True) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.ledger = Ledger(num_blocks)
        self.index: PrefixIndex = DictPrefixIndex(num_blocks)
        self._queue = FreeQueue(np.arange(1, num_blocks, dtype=np.int32), num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._queue)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that somebody holds, 0..1 (`vllm:kv_cache_usage_perc`)."""
        usable = self.num_blocks - 1
        return 1 - self.num_free / usable if usable else 0.0

    def take(self, count: int, account: Account) -> Int32Array:
        """int32[count] new blocks from the head of the free queue; they lose their hashes."""
        blocks = self._queue.pop(count)
        self.unregister(blocks)
        self.ledger.hold(blocks, account)
        return blocks

    def unregister(self, blocks: Int32Array) -> None:
        """The content of ``blocks`` can no longer be hit."""
        hashed = blocks[self.ledger.hashed(blocks)]
        if len(hashed):
            self.index.drop(hashed.tolist())
            self.ledger.set_hashed(hashed, False)

    def touch(self, blocks: Int32Array, account: Account) -> None:
        """One more holder of cached ``blocks`` (a prefix hit); free ones leave the queue."""
        self._queue.remove(blocks[self.ledger.holders(blocks) == 0])
        self.ledger.hold(blocks, account)

    def give_back(self, blocks: Int32Array, account: Account) -> None:
        """One holder fewer, in the given order (callers pass a request's blocks deepest first).

        Those that nobody holds any more go to the head of the queue when they carry no hash (reused first), else to
        its tail (evicted last).
        """
        self.ledger.release(blocks, account)
        idle = blocks[self.ledger.holders(blocks) == 0]
        hashed = self.ledger.hashed(idle)
        self._queue.prepend(idle[~hashed])
        self._queue.append(idle[hashed])

    def insert(self, hashes: list[bytes], blocks: Int32Array) -> None:
        """The content of ``blocks`` can be hit from now on."""
        self.index.insert(hashes, blocks)
        self.ledger.set_hashed(blocks, True)

    def num_idle(self, blocks: Int32Array) -> int:
        """How many of ``blocks`` nobody holds: a hit on them takes free capacity."""
        return int((self.ledger.holders(blocks) == 0).sum())

    def free_order(self) -> Int32Array:
        """int32[num_free]: the free queue, next to be handed out first."""
        return self._queue.order()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. False (and nothing done) while any block is held."""
        if self.num_free != self.num_blocks - 1:
            return False
        self.index.clear()
        self.ledger.set_hashed(np.arange(1, self.num_blocks, dtype=np.int32), False)
        return True

    def check(self) -> None:
        """Recount the pool from scratch; raises ``AssertionError`` on any difference."""
        self._queue.check()
        self.ledger.check()
        everything = np.arange(1, self.num_blocks, dtype=np.int32)
        idle = everything[self.ledger.holders(everything) == 0]
        assert np.array_equal(np.sort(self.free_order()), idle), "pool: free queue and holds disagree"
        free = int(self.ledger.counts[Account.FREE] + self.ledger.counts[Account.CACHED])
        assert free == self.num_free, "pool: the ledger's free blocks differ from the queue"
