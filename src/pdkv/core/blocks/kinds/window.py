"""Sliding window: blocks wholly behind the window are given back; a hit needs a window's worth of blocks in a row."""

from __future__ import annotations

import numpy as np

from pdkv.core.blocks.groups import WindowGroup
from pdkv.core.blocks.hashing import HashChain
from pdkv.core.blocks.holders import GroupHold
from pdkv.core.blocks.kinds.base import EMPTY, JointIndex, Kind, Settings, unit_hashes
from pdkv.core.blocks.pool import BlockPool
from pdkv.core.blocks.tables import TableStore
from pdkv.core.ports import BlockIds, BoolArray, Int32Array, Int64Array
from pdkv.core.scheduler.request import Request
from pdkv.units import cdiv


class WindowKind(Kind):
    """Rules of a sliding-window group."""

    def __init__(self, spec: WindowGroup, group: int, pool: BlockPool, settings: Settings) -> None:
        super().__init__(spec, group, pool, settings)
        self._window = spec.window
        self.registers = not spec.replayed
        self._kept = spec.window - 1 + spec.extra  # tokens before the next one that are kept
        self._run = cdiv(spec.window - 1, spec.block_size)  # blocks in a row that a hit needs, before it loses its end
        most = min(self._kept + settings.max_in_flight_tokens, settings.max_model_len)
        self.admission_cap = cdiv(most, self.block_size) + 1  # a window need not begin where a block does

    def skipped_tokens(self, computed: int) -> int:
        """All but the window of the next token (spec block-pool 6.2)."""
        return max(0, computed - self._kept)

    def next_drop(self, store: TableStore, rows: Int64Array, ahead: int = 0) -> Int64Array:
        """When the window has left one more block."""
        return (store.dropped[rows] + 1 + ahead) * self.block_size + self._kept

    def resident_blocks(self, tokens: int) -> int:
        """The window's blocks, and the one it reaches into."""
        return min(cdiv(tokens, self.block_size), cdiv(self._kept, self.block_size) + 1)

    def find(
        self, cached: JointIndex, hashes: HashChain, max_tokens: int, *, drop: bool = False
    ) -> tuple[list[Int32Array], int]:
        """Right to left for enough hits in a row that end on a hit boundary; a run from block 0 counts as it is.

        One that loses its last block needs one more, and ends on the boundary without it.
        """
        size, align = self.block_size, self.settings.sizes.hit_tokens
        keys = unit_hashes(hashes, self.settings.sizes.hash_tokens, size)
        tables = cached.tables(max_tokens // size)
        run, length = 0, 0
        for entry in range(max_tokens // size - 1, -1, -1):
            blocks = cached.find(keys[entry])
            if blocks is None:
                run = 0
                continue
            if run == 0 and (entry + 1 - drop) * size % align:
                continue
            for table, block in zip(tables, blocks, strict=True):
                table[entry] = block
            run += 1
            if run >= self._run + drop:
                length = entry + run
                break
        else:
            length = run
            while length * size % align:
                length -= 1
        if drop and length:
            length -= 1
            while length * size % align:
                length -= 1
        return [table[:length] for table in tables], length * size

    def register(self, hold: GroupHold, request: Request, tokens: int, boundaries: tuple[int, ...]) -> BlockIds:
        """Nothing, where a hit has its window replayed."""
        return super().register(hold, request, tokens, boundaries) if self.registers else EMPTY

    def reachable(self, first: int, last: int, boundaries: tuple[int, ...]) -> BoolArray | None:
        """The run of blocks before every place where a hit can end: all, one an interval, or the boundaries only.

        (spec block-pool 4: ``None`` dense, 0 boundaries, N > 0 one run every N tokens as well)
        """
        size, align = self.block_size, self.settings.sizes.hit_tokens
        interval = self.settings.retention_interval
        if align % size:
            return None  # a hit can end inside a block: any block may serve
        segment = (align if interval is None else interval) // size
        run = self._run + self.drops
        if segment and run >= segment:
            return None
        entries = np.arange(first, last) - self.drops  # the block that a hit loses lies behind its boundary
        mask: BoolArray = np.zeros(last - first, dtype=np.bool_)
        if segment:
            mask = (entries >= 0) & (entries % segment >= segment - run)
        if interval is not None:
            for boundary in boundaries:
                end = boundary // align * align // size
                mask |= (entries >= end - run) & (entries < end)
        return mask
