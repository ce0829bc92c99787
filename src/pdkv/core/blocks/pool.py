"""Block pool: reference counts, the free queue's order, and what free blocks still hold (spec block-pool 1-2)."""

from __future__ import annotations

import numpy as np

from pdkv.core.blocks.free_queue import FreeQueue
from pdkv.core.blocks.kv_events import AllBlocksCleared, BlockRemoved, KvEvent
from pdkv.core.blocks.prefix_index import DictPrefixIndex, PrefixIndex
from pdkv.core.blocks.residency import Residency
from pdkv.core.ledger import Account, Ledger
from pdkv.core.ports import Int32Array


class BlockPool:
    """All blocks of one instance, shared by its groups. Block 0 is the null block: never handed out, never freed.

    A block is in the free queue exactly when nobody holds it. Free blocks may still carry a hash; they lose it when
    they are handed out again. Block arrays passed in never contain the null block.
    """

    def __init__(self, num_blocks: int, *, enable_caching: bool = True, num_groups: int = 1) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.ledger = Ledger(num_blocks)
        self.indexes: tuple[PrefixIndex, ...] = tuple(DictPrefixIndex(num_blocks) for _ in range(num_groups))
        self.events: list[KvEvent] | None = None  # KV events since they were last taken; None: nobody wants them
        self.residency: Residency | None = None
        self.copies: list[
            tuple[int, int, int]
        ] = []  # (group, source, target) pinned for the next plan, not yet handed to it
        self._group = np.zeros(num_blocks, dtype=np.uint8)  # of hashed blocks: whose content it is
        self._covered = np.zeros(num_blocks, dtype=np.int32)  # of hashed blocks: tokens up to the end of the content
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
        if self.residency is not None:
            self.residency.allocated(blocks)
        return blocks

    def unregister(self, blocks: Int32Array) -> None:
        """The content of ``blocks`` can no longer be hit."""
        hashed = blocks[self.ledger.hashed(blocks)]
        if not len(hashed):
            return
        if len(self.indexes) == 1:
            self._note_removed(0, self.indexes[0].drop(hashed.tolist()))
        else:
            for block, group in zip(hashed.tolist(), self._group[hashed].tolist(), strict=True):
                self._note_removed(group, self.indexes[group].drop((block,)))
        self.ledger.set_hashed(hashed, False)

    def touch(self, blocks: Int32Array, account: Account) -> None:
        """One more holder of cached ``blocks`` (a prefix hit); free ones leave the queue."""
        self._queue.remove(blocks[self.ledger.holders(blocks) == 0])
        self.ledger.hold(blocks, account)
        if self.residency is not None:
            self.residency.accessed(blocks)

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

    def insert(self, group: int, hashes: list[bytes], blocks: Int32Array, covered: Int32Array) -> None:
        """The content of ``blocks``, up to token ``covered[i]`` of a sequence, can be hit from now on.

        A block that carried the hash of a part of its content, before it was full, loses that one.
        """
        self.unregister(blocks)
        self.indexes[group].insert(hashes, blocks)
        self._group[blocks] = group
        self._covered[blocks] = covered
        self.ledger.set_hashed(blocks, True)

    def insert_partial(self, group: int, key: bytes, block: int, covered: int) -> bool:
        """``block``'s content up to token ``covered``, inside the block, can be hit too; False when that was known."""
        blocks = np.asarray([block], dtype=np.int32)
        known = self.indexes[group].keys_of(block)
        if key in known:
            return False
        if known and self._covered[block] < covered:
            self.unregister(blocks)
            known = ()
        self.indexes[group].add_alias(key, block)
        if not known:
            self._group[block] = group
            self._covered[block] = covered
            self.ledger.set_hashed(blocks, True)
        return True

    def move_hashes(self, source: int, target: int) -> None:
        """``target`` holds from now on what ``source`` held: hits find it under the same hashes."""
        blocks = np.asarray([source, target], dtype=np.int32)
        if not self.ledger.hashed(blocks[:1])[0]:
            return
        group = int(self._group[source])
        for key in self.indexes[group].drop((source,)):
            self.indexes[group].add_alias(key, target)
        self._group[target], self._covered[target] = group, self._covered[source]
        self.ledger.set_hashed(blocks[:1], False)
        self.ledger.set_hashed(blocks[1:], True)

    def pin_copy(self, group: int, source: int, target: int) -> None:
        """The next plan copies ``source`` to ``target`` before it computes: neither may go until that has run."""
        self.ledger.hold(np.asarray([source, target], dtype=np.int32), Account.RUNNING)
        self.copies.append((group, source, target))

    def give_up(self, block: int, account: Account) -> None:
        """One holder fewer of a block that others hold too (so it does not become free)."""
        self.ledger.release(np.asarray([block], dtype=np.int32), account)

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
        for index in self.indexes:
            index.clear()
        self.ledger.set_hashed(np.arange(1, self.num_blocks, dtype=np.int32), False)
        if self.events is not None:
            self.events.append(AllBlocksCleared())
        if self.residency is not None:
            self.residency.reset()
        return True

    def _note_removed(self, group: int, keys: tuple[bytes, ...]) -> None:
        if self.events is not None:
            self.events += [BlockRemoved(group=group, key=key) for key in keys]

    def check(self) -> None:
        """Recount the pool from scratch; raises ``AssertionError`` on any difference."""
        self._queue.check()
        self.ledger.check()
        everything = np.arange(1, self.num_blocks, dtype=np.int32)
        idle = everything[self.ledger.holders(everything) == 0]
        assert np.array_equal(np.sort(self.free_order()), idle), "pool: free queue and holds disagree"
        free = int(self.ledger.counts[Account.FREE] + self.ledger.counts[Account.CACHED])
        assert free == self.num_free, "pool: the ledger's free blocks differ from the queue"
