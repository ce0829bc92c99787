"""Mamba and linear attention: the newest state is all that is needed; states at block ends can be hit (``aligned``)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pdkv.core.blocks.groups import StateGroup
from pdkv.core.blocks.hashing import HashChain
from pdkv.core.blocks.holders import GroupHold, Holder
from pdkv.core.blocks.kinds.base import (
    EMPTY,
    Demand,
    JointIndex,
    Kind,
    Settings,
    StateDemand,
    resume_point,
    unit_hashes,
)
from pdkv.core.blocks.pool import BlockPool
from pdkv.core.blocks.tables import NULL_BLOCK, TableStore
from pdkv.core.ports import BlockIds, BoolArray, Int32Array, Int64Array
from pdkv.core.scheduler.request import Request
from pdkv.units import cdiv


class StateKind(Kind):
    """Rules of a state group.

    ``aligned``: a step takes a new block when it ends in another block than the one before; the table has the running
    state at its end, the drafts' behind it, and null entries where no state is kept. Else blocks are as many as the
    tokens need, which is one for life when a block spans the model's length, and the drafts' (mode none).
    """

    def __init__(self, spec: StateGroup, group: int, pool: BlockPool, settings: Settings) -> None:
        super().__init__(spec, group, pool, settings)
        self.grows_in_bulk = False
        self.keeps_prompt_end = self._aligned = spec.aligned
        self._spec = spec
        self._drafts = spec.speculative_blocks
        self._drafted = bool(settings.drafting.groups)
        self._fresh: set[bytes] = set()  # hashes registered in this step: their states are not computed yet

    def new_step(self) -> None:
        """What was registered before is computed by the time this step runs."""
        self._fresh.clear()

    def skipped_tokens(self, computed: int) -> int:
        """All but the last token: its state stands for everything before."""
        return computed - 1

    def resident_blocks(self, tokens: int) -> int:
        """The running state, the one it started from, and the drafts'."""
        return min(cdiv(tokens, self.block_size), 2) + self._drafts

    def find(
        self, cached: JointIndex, hashes: HashChain, max_tokens: int, *, drop: bool = False
    ) -> tuple[list[Int32Array], int]:
        """Right to left for one state; everything before it is null. Drafters have no states, so nothing is dropped."""
        sizes, size = self.settings.sizes, self.block_size
        unit = sizes.hit_tokens if sizes.hit_tokens < size else size
        keys = unit_hashes(hashes, sizes.hash_tokens, unit)
        for position in range(min(max_tokens // unit, len(keys)), 0, -1):
            if position * unit % sizes.hit_tokens:
                continue
            blocks = cached.find(keys[position - 1])
            if blocks is not None:
                tables = cached.tables(cdiv(position * unit, size))
                for table, block in zip(tables, blocks, strict=True):
                    table[-1] = block
                return tables, position * unit
        return cached.tables(0), 0

    @property
    def dropped_tokens(self) -> int:
        """A state is hit where it is."""
        return 0

    def drop_skipped(self, holder: Holder, processed: int, num_prompt: int) -> None:
        """Give back states before the running one, and the state that the last step started from."""
        super().drop_skipped(holder, processed, num_prompt)
        if not self._aligned:
            return
        hold = holder.groups[self.group]
        entry = hold.last_state
        if entry is not None and entry < cdiv(processed, self.block_size) - 1:
            self.pool.give_back(hold.table.blank(entry, entry + 1), holder.account)
            hold.last_state = None

    def next_drop(self, store: TableStore, rows: Int64Array, ahead: int = 0) -> Int64Array:
        """When one more block's end has been passed, or that of the block which the last step started from."""
        entries = store.dropped[rows] + ahead
        if self._aligned:
            started = store.last_state[rows]
            entries = np.where(started >= 0, np.minimum(entries, started), entries)
        return (entries + 1) * self.block_size + 1

    def capacity_tokens(self, lengths: Int64Array) -> Int64Array:
        """The drafts' blocks stand behind the running state's."""
        return (lengths - self._drafts) * self.block_size

    def blocks_needed(self, hold: GroupHold | None, demand: Demand) -> int:
        """At most one block a step, the drafts' at first, one for a copy; more than there are while a hit is fresh."""
        hit = demand.hit.blocks[self.group]
        if len(hit) and self._fresh and self.pool.indexes[self.group].keys_of(int(hit[-1]))[0] in self._fresh:
            return self.pool.num_blocks + 1
        if not self._aligned:
            return super().blocks_needed(hold, self._with_drafts(demand))
        new = cdiv(demand.main, self.block_size) + self._drafts - len(hit) - (len(hold.table) if hold else 0)
        copy = self.ends_inside(demand) or (hold is not None and hold.partial is not None)
        if copy:
            new = max(new, 0) + 1
        checkpoint = self._spec.checkpoint_blocks and self._checkpoint(hold, demand)
        if checkpoint and not demand.whole:
            assert isinstance(demand, StateDemand)
            demand.checkpoints = (demand.checkpoints or {}) | {self.group: checkpoint}
        if new > 0:
            first = hold is None or not hold.has_state
            new = min(new, 1 + copy + bool(checkpoint) + (self._drafts if first else 0))
        return new + self._idle(hit)

    def _checkpoint(self, hold: GroupHold | None, demand: Demand) -> tuple[int, int] | None:
        """(tokens, entry) of a state inside the chunk that gets the column in front of the chunk's last one."""
        start, end = demand.total, demand.main
        position = resume_point(end, self.settings.sizes.hit_tokens, drafted=self._drafted)
        assert isinstance(demand, StateDemand)
        fits = self._spec.checkpoint_fits(start, end, position, hash_tokens=self.settings.sizes.hash_tokens)
        if not fits or end < demand.prefill_end:
            return None
        entry = cdiv(end, self.block_size) - 2
        if hold is not None and entry < len(hold.table) and hold.table[entry] != NULL_BLOCK:
            scratch = hold.has_state and entry >= len(hold.table) - self._drafts
            if not scratch:
                return None
        return position, entry

    def grow(self, holder: Holder, demand: Demand) -> BlockIds:
        """Null entries up to the block in which this step ends, then blocks for the running state and the drafts'.

        Returns int[n]: what was appended, null entries included (as in vLLM), behind a private copy of a hit state.
        """
        if not self._aligned:
            return super().grow(holder, self._with_drafts(demand))
        hold = holder.groups[self.group]
        table, before = hold.table, len(hold.table)
        required = cdiv(demand.main, self.block_size) + self._drafts
        assert isinstance(demand, StateDemand)
        hold.checkpoint = demand.checkpoints.get(self.group) if demand.checkpoints else None
        if required <= before and hold.partial is None and hold.checkpoint is None:
            hold.has_state = True
            return EMPTY
        if hold.has_state:
            hold.last_state = before - 1 - self._drafts
        elif before > 0:
            hold.last_state = before - 1
        running = required - self._drafts - 1
        nulls = running - (hold.checkpoint is not None)  # its column is written, too
        table.pad(nulls)
        if hold.has_state:
            for entry in range(before - self._drafts, min(before, nulls)):
                table.extend(table.blank(entry, entry + 1))  # a draft's block serves again, further on
        new = self.pool.take(max(required - len(table), 0) + (hold.partial is not None), holder.account)
        appended = table.ids[before:].copy()
        if hold.partial is not None:
            own, new = int(new[0]), new[1:]
            if self._split_partial(holder, own):
                appended = np.concatenate((np.asarray([own], dtype=np.int32), appended))
        table.extend(new)
        hold.has_state = True
        return np.concatenate((appended, new))

    def first_draft(self, hold: GroupHold, main: int) -> int:
        """The states of drafts are at the table's end."""
        return len(hold.table) - self._drafts

    def _with_drafts(self, demand: Demand) -> Demand:
        return replace(demand, slots=demand.slots + self._drafts * self.block_size) if self._drafts else demand

    def _split_partial(self, holder: Holder, own: int) -> bool:
        """Part the request's state from the one that can be hit inside its block; True when ``own`` enters the table.

        A request that runs on in its own block leaves the copy to the index; one that has hit the state of another
        takes the copy itself.
        """
        hold = holder.groups[self.group]
        assert hold.partial is not None
        entry, source = hold.partial
        hold.partial = None
        self.pool.pin_copy(self.group, source, own)
        if not hold.has_state:
            hold.table.replace(entry, own)
            self.pool.give_up(source, holder.account)
            return True
        assert hold.table[entry] == source, "state: the running block moved"
        self.pool.move_hashes(source, own)
        self._fresh.update(self.pool.indexes[self.group].keys_of(own)[:1])  # the copy is filled by this step
        self.pool.give_up(own, holder.account)
        return False

    def register(self, hold: GroupHold, request: Request, tokens: int, boundaries: tuple[int, ...]) -> BlockIds:
        """States at block ends; and the one at the prompt's last hash boundary, if this step ends right there."""
        index = self.pool.indexes[self.group]
        new = super().register(hold, request, tokens, boundaries)
        if hold.checkpoint is not None:
            self._register_checkpoint(hold, request)
            self._fresh.update(key for block in new.tolist() for key in index.keys_of(block)[:1])
            return new
        self._fresh.update(index.keys_of(block)[0] for block in new.tolist())
        unit = self.settings.sizes.hash_tokens
        if not self._aligned or tokens <= 0 or not self._ends_where_resumed(request, tokens):
            return new
        entry = cdiv(tokens, self.block_size) - 1
        if entry >= len(hold.table) or hold.table[entry] == 0:
            return new
        block = hold.table[entry]
        self.register_partial(request, block, tokens)
        self._fresh.add(request.hashes[tokens // unit - 1])
        if tokens % self.block_size:
            hold.partial = (entry, block)  # the next step writes on in this block
            hold.num_hashed = entry
        return new

    def _ends_where_resumed(self, request: Request, tokens: int) -> bool:
        """Whether a later request resumes behind ``tokens`` tokens: the place in this prompt, or a junction in it."""
        if tokens == resume_point(request.num_prompt, self.settings.sizes.hash_tokens, drafted=self._drafted):
            return True
        junction = self.settings.junction_checkpoints and tokens == request.shared_boundary
        unit = self.settings.sizes.hash_tokens
        return junction and tokens % unit == 0 and request.num_computed < tokens <= request.num_prompt

    def _register_checkpoint(self, hold: GroupHold, request: Request) -> None:
        """The column that a chunk writes inside holds that state, and not what its place in the table says."""
        assert hold.checkpoint is not None
        (tokens, entry), hold.checkpoint = hold.checkpoint, None
        block, sizes = hold.table[entry], self.settings.sizes
        kept = tokens == resume_point(request.num_prompt, sizes.hit_tokens, drafted=self._drafted)
        kept |= tokens == request.shared_boundary
        if not kept and tokens % self.block_size == 0:
            last = tokens // self.block_size
            mask = self.reachable(last - 1, last, ())
            kept = mask is None or bool(mask[0])
        whole = tokens == (entry + 1) * self.block_size and len(self.pool.indexes[self.group].keys_of(block)) > 0
        if kept and whole:
            return
        self.pool.unregister(np.asarray([block], dtype=np.int32))
        if kept:
            self.register_partial(request, block, tokens)
            self._fresh.add(request.hashes[tokens // sizes.hash_tokens - 1])

    def reachable(self, first: int, last: int, boundaries: tuple[int, ...]) -> BoolArray | None:
        """The state that ends at each place where a hit can end: all, one an interval, or the boundaries only."""
        size, align = self.block_size, self.settings.sizes.hit_tokens
        interval = self.settings.retention_interval
        if interval is None or 0 < interval <= size:
            return None
        ends = np.arange(first, last) + 1
        mask: BoolArray = ends % (interval // size) == 0 if interval else np.zeros(last - first, dtype=np.bool_)
        for boundary in boundaries:
            mask |= ends == boundary // align * align // size
        return mask
