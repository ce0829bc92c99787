"""The invariants of `Engine.check` after every event of a small system, at the cost of what the event has changed.

`Engine.check` recounts with arrays, which suits pools of any size; of thirty blocks, plain numbers are counted sooner.
And most events change no memory: what has been found right and is equal to the last bit need not be counted again.
The two are twins: an `Audit` calls the other one too, every so many changes, and a test plants the same bugs for both.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from pdkv.core.blocks.tables import NULL_BLOCK
from pdkv.core.ledger import Account

if TYPE_CHECKING:
    from pdkv.core.blocks.holders import Holder
    from pdkv.core.blocks.kinds.base import Kind
    from pdkv.core.engine import Engine

_TWIN_EVERY = 16  # changes of the memory

#: An owner's key, and of each group its table (block ids) and how many leading entries it has given back.
_Owner = tuple[str, list[tuple[list[int], int]]]


class Audit:
    """Watches one engine. ``recounts`` is how often the memory differed from the time before."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pool = engine.manager.pool
        self._seen: object = None
        self.recounts = 0

    def check(self) -> None:
        """As `Engine.check`: raises ``AssertionError`` when anything is wrong."""
        owners = self._engine.manager.tables()
        now = self._pool.fingerprint(), owners, self._engine.queues()
        if now != self._seen:
            self.recounts += 1
            if self.recounts % _TWIN_EVERY == 0:
                self._engine.check()
            self._count_blocks()
            self._count_claims(owners)
            self._engine.check_queues()
            self._seen = now
        scheduler = self._engine.scheduler
        scheduler.running.check_requests()
        self._expect_growth()
        if scheduler.encoder is not None:
            scheduler.encoder.cache.check()

    def _count_blocks(self) -> None:
        """Ledger and free queue, as `BlockPool.check`."""
        pool, ledger = self._pool, self._pool.ledger
        order, states = pool.free_order().tolist(), ledger.states()
        queued = set(order)
        assert len(order) == len(queued) == pool.num_free, "free queue: length differs, or a block stands twice"
        counts = [0] * len(Account)
        for block, state in enumerate(states):
            counts[state.account] += 1
            if (block in queued) != (state.owners == 0 and block != NULL_BLOCK):
                raise AssertionError("pool: free queue and holds disagree")
        assert counts == ledger.counts, "ledger: counts differ"
        assert states[NULL_BLOCK].account is Account.NULL, "ledger: block 0 is not the null block"
        assert all(map(int.__ge__, ledger.peaks, counts)), "ledger: a peak was missed"
        free = counts[Account.FREE] + counts[Account.CACHED]
        assert free == pool.num_free, "pool: the ledger's free blocks differ from the queue"

    def _count_claims(self, owners: list[_Owner]) -> None:
        """Tables of owners and holds of blocks, as `Owners.check`."""
        assert not self._pool.copies, "owners: a copy without an owner"
        claims = [0] * self._pool.num_blocks
        for key, tables in owners:
            for table, dropped in tables:
                assert not any(table[:dropped]), f"{key}: a block where none is needed any more"
            blocks = [block for block in chain.from_iterable(table for table, _ in tables) if block]
            assert len(set(blocks)) == len(blocks), f"{key} holds a block twice"
            for block in blocks:
                claims[block] += 1
        assert claims == [state.owners for state in self._pool.ledger.states()], "owners: owners and holds disagree"

    def _expect_growth(self) -> None:
        """As `RunningGrowth.check`: nothing is due to who runs where nothing was expected."""
        manager, running = self._engine.manager, self._engine.scheduler.running
        counters, rows = running.counters, running.columns.tolist()
        for row, (holder, idle_until) in zip(rows, manager.growth.expectations(rows), strict=True):
            computed = counters.num_computed.item(row)
            if computed < idle_until:
                processed = computed - counters.in_flight_tokens.item(row)
                final = min(computed + 1, counters.num_tokens.item(row))
                prompt = running.prompt.item(row)
                early = any(self._wants(kind, holder, computed, processed, final, prompt) for kind in manager.kinds)
                assert not early, f"growth: something is due to {holder.request_id} earlier than expected"

    def _wants(self, kind: Kind, holder: Holder, computed: int, processed: int, final: int, prompt: int) -> bool:
        """Whether one more token makes it grow, drop or register a block, by what single calls go by."""
        hold, size = holder.groups[kind.group], kind.block_size
        if computed >= len(hold.table) * size:
            return True
        if kind.recycles and kind.skipped_tokens(processed) // size > hold.num_dropped:
            return True
        if not kind.registers or not self._pool.enable_caching:
            return False
        end = self._engine.manager.boundaries.last_end(final)
        again = kind.keeps_prompt_end and end == kind.prompt_end(prompt)  # type: ignore[arg-type]
        return end // size > hold.num_hashed or bool(again)
