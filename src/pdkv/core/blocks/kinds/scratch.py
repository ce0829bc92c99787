"""Groups whose blocks are scratch of their request: nothing of them is ever hit, nothing comes from a peer."""

from __future__ import annotations

import numpy as np

from pdkv.core.blocks.groups import CrossGroup, ReferenceWindowGroup, RingGroup
from pdkv.core.blocks.holders import GroupHold, Holder
from pdkv.core.blocks.kinds.base import EMPTY, NEVER, Demand, Kind, Settings
from pdkv.core.blocks.pool import BlockPool
from pdkv.core.blocks.tables import NULL_BLOCK, TableStore
from pdkv.core.ports import BlockIds, BoolArray, Int64Array
from pdkv.core.scheduler.request import Request
from pdkv.units import cdiv


class ReferenceWindowKind(Kind):
    """R-SWA: the blocks between the prompt's last one and the window are given back."""

    def __init__(self, spec: ReferenceWindowGroup, group: int, pool: BlockPool, settings: Settings) -> None:
        super().__init__(spec, group, pool, settings)
        self._window = spec.window
        self.grows_in_bulk = False

    def may_drop(
        self, store: TableStore, rows: Int64Array, processed: Int64Array, prompt: Int64Array, ahead: int = 0
    ) -> BoolArray:
        """Whether the last block of the gap is still there."""
        assert not ahead, "the gap does not begin at the table's start"
        stop = np.minimum(np.maximum(prompt, processed - self._window) // self.block_size, store.lengths[rows])
        held = store.blocks[rows, stop - 1] != NULL_BLOCK
        wider: BoolArray = (stop > -(-prompt // self.block_size)) & held
        return wider

    def next_drop(self, store: TableStore, rows: Int64Array, ahead: int = 0) -> Int64Array:
        """At any time."""
        return np.zeros(len(rows), dtype=np.int64)

    def drop_skipped(self, holder: Holder, processed: int, num_prompt: int) -> None:
        """The gap grows at its right end, so a null entry there says that all of it is gone already."""
        table = holder.groups[self.group].table
        first = cdiv(num_prompt, self.block_size)
        stop = min(max(num_prompt, processed - self._window) // self.block_size, len(table))
        if stop > first and table[stop - 1]:
            self.pool.give_back(table.blank(first, stop)[::-1], holder.account)


class FixedKind(Kind):
    """Rings and cross attention: what a request has of such a group it gets at once, and keeps.

    One block for a ring, blocks for the encoder's output for cross attention.
    """

    def __init__(self, spec: RingGroup | CrossGroup, group: int, pool: BlockPool, settings: Settings) -> None:
        super().__init__(spec, group, pool, settings)
        self.recycles = self.registers = self.grows_in_bulk = False
        self._most_encoder_tokens = spec.encoder_tokens if isinstance(spec, CrossGroup) else None

    def resident_blocks(self, tokens: int) -> int:
        """However many tokens."""
        return 1 if self._most_encoder_tokens is None else cdiv(self._most_encoder_tokens, self.block_size)

    def peer_span(self, tokens: int, block_size: int | None = None) -> tuple[int, int]:
        """What the ring has not written yet goes along; what an encoder put out is not for peers."""
        return (0, 1) if self._most_encoder_tokens is None else (0, 0)

    def blocks_needed(self, hold: GroupHold | None, demand: Demand) -> int:
        """What is still missing of the fixed number."""
        return max(self._fixed(demand) - (len(hold.table) if hold else 0), 0)

    def adopt(self, holder: Holder, demand: Demand) -> None:
        """Nothing was hit."""

    def grow_external(self, holder: Holder, demand: Demand) -> None:
        """A ring is claimed with the load; the encoder's output comes with the first step."""
        if self._most_encoder_tokens is None and demand.total > demand.local:
            self._extend(holder, 1)

    def grow(self, holder: Holder, demand: Demand) -> BlockIds:
        """All of it the first time, nothing afterwards."""
        return self._extend(holder, self._fixed(demand))

    def capacity_tokens(self, lengths: Int64Array) -> Int64Array:
        """It never grows."""
        return np.full(len(lengths), NEVER)

    def first_draft(self, hold: GroupHold, main: int) -> int:
        """None of it is for drafts."""
        return len(hold.table)

    def register(self, hold: GroupHold, request: Request, tokens: int, boundaries: tuple[int, ...]) -> BlockIds:
        """Nothing can be hit."""
        return EMPTY

    def _fixed(self, demand: Demand) -> int:
        return 1 if self._most_encoder_tokens is None else cdiv(demand.encoder, self.block_size)
