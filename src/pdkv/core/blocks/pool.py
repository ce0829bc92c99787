"""Block pool: reference counts, the free queue's order, and what free blocks still hold (spec block-pool 1-2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdkv.core.blocks.free_queue import FreeQueue
from pdkv.core.blocks.hashing import HashChain
from pdkv.core.blocks.kv_events import AllBlocksCleared, BlockRemoved, KvEvent
from pdkv.core.blocks.prefix_index import PrefixIndex
from pdkv.core.blocks.residency import Residency
from pdkv.core.blocks.tables import without_null
from pdkv.core.ledger import Account, Ledger
from pdkv.core.ports import BlockIds, BoolArray, Int32Array, Int64Array


class BlockPool:
    """All blocks of one instance, shared by its groups. Block 0 is the null block: never handed out, never freed.

    A block is in the free queue exactly when nobody holds it. Free blocks may still carry a hash; they lose it when
    they are handed out again. Block arrays passed in never contain the null block.
    """

    def __init__(self, num_blocks: int, *, enable_caching: bool = True, indexes: Sequence[PrefixIndex]) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.ledger = Ledger(num_blocks)
        self.indexes = tuple(indexes)  # by group
        self.events: list[KvEvent] | None = None  # KV events since they were last taken; None: nobody wants them
        self.residency: Residency | None = None
        self.copies: list[
            tuple[int, int, int]
        ] = []  # (group, source, target) pinned for the next plan, not yet handed to it
        self._group = np.zeros(num_blocks, dtype=np.uint8)  # of hashed blocks: whose content it is
        self._partial: dict[int, int] = {}  # of hashed blocks that are not full: tokens up to the end of the content
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

    def take(self, count: int, account: Account) -> Int64Array:
        """int64[count] new blocks from the head of the free queue; they lose their hashes."""
        blocks = self._queue.pop(count)
        self._forget(self.ledger.claim(blocks, account))
        if self.residency is not None:
            self.residency.allocated(blocks)
        return blocks

    def unregister(self, blocks: BlockIds) -> BlockIds:
        """The content of ``blocks`` can no longer be hit; returns those of which it could."""
        hashed = self.ledger.set_hashed(blocks, False)
        self._forget(hashed)
        return hashed

    def _forget(self, hashed: BlockIds) -> None:
        """What ``hashed`` blocks held is not to be found any more."""
        if not len(hashed):
            return
        if self.events is not None:
            for block in hashed.tolist():
                group = self._group.item(block)
                self.events += [BlockRemoved(group=group, key=key) for key in self.indexes[group].keys_of(block)]
        if len(self.indexes) == 1:
            self.indexes[0].drop(hashed)
        else:
            groups = self._group[hashed]
            for group in np.flatnonzero(np.bincount(groups)).tolist():
                self.indexes[group].drop(hashed[groups == group])
        if self._partial:
            for block in hashed.tolist():
                self._partial.pop(block, None)

    def touch(self, blocks: BlockIds, account: Account) -> None:
        """One more holder of cached ``blocks`` (a prefix hit); free ones leave the queue."""
        self._queue.remove(self.ledger.idle(blocks))
        self.ledger.hold(blocks, account)
        if self.residency is not None:
            self.residency.accessed(blocks)

    def give_back(self, blocks: BlockIds, account: Account) -> None:
        """One holder fewer, in the given order (callers pass a request's blocks deepest first).

        Those that nobody holds any more go to the head of the queue when they carry no hash (reused first), else to
        its tail (evicted last).
        """
        empty, cached = self.ledger.release(blocks, account)
        self._queue.prepend(empty)
        self._queue.append(cached)

    def insert(self, group: int, hashes: HashChain, first: int, blocks: BlockIds, before: int) -> BlockIds:
        """``blocks[i]``, unless null, is full: its content, that of ``hashes[first + i]``, can be hit from now on.

        ``before`` is the sequence's block in front of them, null at its start. A block that carried the hash of a part
        of its content, before it was full, loses that one. Returns int[n], those that are not null.
        """
        held = without_null(blocks)
        if len(held):
            self._forget(self.ledger.set_hashed(held, True))
            self.indexes[group].insert(hashes, first, blocks, before)
            if len(self.indexes) > 1:
                self._group[held] = group
        return held

    def insert_each(
        self, group: int, chains: Sequence[HashChain], first: Int64Array, counts: Int64Array, blocks: BlockIds,
        before: BlockIds,
    ) -> None:  # fmt: skip
        """`insert` for many sequences, in that order; none of the blocks is null.

        The next ``counts[i]`` of ``blocks`` hold what ``chains[i]`` says from ``first[i]`` on; ``before[i]`` is the
        block in front of them in their own sequence, null at the start.
        """
        self._forget(self.ledger.set_hashed(blocks, True))
        self.indexes[group].insert_each(chains, first, counts, blocks, before)
        if len(self.indexes) > 1:
            self._group[blocks] = group

    def insert_partial(self, group: int, key: bytes, block: int, covered: int) -> bool:
        """``block``'s content up to token ``covered``, inside the block, can be hit too; False when that was known."""
        blocks = np.asarray([block], dtype=np.int32)
        known = self.indexes[group].keys_of(block)
        if key in known:
            return False
        if known and self._partial.get(block, covered) < covered:
            self.unregister(blocks)
            known = ()
        self.indexes[group].add_alias(key, block)
        if not known:
            self._group[block] = group
            self._partial[block] = covered
            self.ledger.set_hashed(blocks, True)
        return True

    def move_hashes(self, source: int, target: int) -> None:
        """``target`` holds from now on what ``source`` held: hits find it under the same hashes."""
        blocks = np.asarray([source, target], dtype=np.int32)
        if not len(self.ledger.set_hashed(blocks[:1], False)):
            return
        group = self._group.item(source)
        keys = self.indexes[group].keys_of(source)
        self.indexes[group].drop(blocks[:1])
        for key in keys:
            self.indexes[group].add_alias(key, target)
        self._group[target] = group
        if source in self._partial:
            self._partial[target] = self._partial.pop(source)
        self.ledger.set_hashed(blocks[1:], True)

    def pin_copy(self, group: int, source: int, target: int) -> None:
        """The next plan copies ``source`` to ``target`` before it computes: neither may go until that has run."""
        self.ledger.hold(np.asarray([source, target], dtype=np.int32), Account.RUNNING)
        self.copies.append((group, source, target))

    def give_up(self, block: int, account: Account) -> None:
        """One holder fewer of a block that others hold too (so it does not become free)."""
        self.ledger.release(np.asarray([block], dtype=np.int32), account)

    def only_held_empty(self, blocks: BlockIds) -> BoolArray:
        """bool[n]: which of ``blocks`` have one holder and no content: given back, they stand at the queue's head."""
        alone: BoolArray = self.ledger.holders(blocks) == 1
        return alone & ~self.ledger.hashed(blocks)

    def num_idle(self, blocks: BlockIds) -> int:
        """How many of ``blocks`` nobody holds: a hit on them takes free capacity."""
        return len(self.ledger.idle(blocks))

    def free_order(self) -> Int32Array:
        """int32[num_free]: the free queue, next to be handed out first."""
        return self._queue.order()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. False (and nothing done) while any block is held."""
        if self.num_free != self.num_blocks - 1:
            return False
        for index in self.indexes:
            index.clear()
        self._partial.clear()
        self.ledger.set_hashed(np.arange(1, self.num_blocks, dtype=np.int32), False)
        if self.events is not None:
            self.events.append(AllBlocksCleared())
        if self.residency is not None:
            self.residency.reset()
        return True

    def fingerprint(self) -> object:
        """Equal to that of another time when holds and free queue are the same."""
        return self.ledger.fingerprint(), self._queue.fingerprint(), len(self.copies)

    def check(self) -> None:
        """Recount the pool from scratch; raises ``AssertionError`` on any difference."""
        order = self.free_order()
        assert len(order) == self.num_free, "free queue: length differs"
        self.ledger.check()
        for index in self.indexes:
            index.check()
        idle = self.ledger.all_holders() == 0
        idle[0] = False
        queued = np.bincount(order, minlength=self.num_blocks)  # a block that stands twice differs, too
        assert not np.count_nonzero(queued != idle), "pool: free queue and holds disagree"
        free = self.ledger.counts[Account.FREE] + self.ledger.counts[Account.CACHED]
        assert free == self.num_free, "pool: the ledger's free blocks differ from the queue"
