"""Chunked local attention: blocks of finished chunks are given back; a hit looks at the current chunk only."""

from __future__ import annotations

import numpy as np

from pdkv.core.blocks.groups import ChunkedGroup
from pdkv.core.blocks.hashing import HashChain
from pdkv.core.blocks.kinds.base import JointIndex, Kind, Settings, unit_hashes
from pdkv.core.blocks.pool import BlockPool
from pdkv.core.blocks.tables import TableStore
from pdkv.core.ports import Int32Array, Int64Array
from pdkv.units import cdiv


class ChunkedKind(Kind):
    """Rules of a chunked-local group."""

    def __init__(self, spec: ChunkedGroup, group: int, pool: BlockPool, settings: Settings) -> None:
        super().__init__(spec, group, pool, settings)
        self._chunk = spec.chunk
        most = min(spec.chunk + settings.max_in_flight_tokens, settings.max_model_len)
        self.admission_cap = cdiv(most, self.block_size)

    def skipped_tokens(self, computed: int) -> int:
        """All chunks before that of the next token."""
        return computed // self._chunk * self._chunk

    def next_drop(self, store: TableStore, rows: Int64Array, ahead: int = 0) -> Int64Array:
        """At the end of the chunk in which one more block ends."""
        ends = (store.dropped[rows] + 1 + ahead) * self.block_size
        return -(-ends // self._chunk) * self._chunk

    def resident_blocks(self, tokens: int) -> int:
        """The blocks of one chunk, which need not begin where a block does."""
        return min(cdiv(tokens, self.block_size), cdiv(self._chunk, self.block_size) + 1)

    def find(
        self, cached: JointIndex, hashes: HashChain, max_tokens: int, *, drop: bool = False
    ) -> tuple[list[Int32Array], int]:
        """Blocks before the chunk of token ``max_tokens`` count as hit, null; inside it left to right until a miss."""
        assert not drop, "a drafter with chunked attention is refused at the start"
        size = self.block_size
        before = max_tokens // self._chunk * self._chunk // size
        keys = unit_hashes(hashes, self.settings.sizes.hash_tokens, size)
        inside = cached.prefix(keys[before : max_tokens // size])
        tables = [np.concatenate((nulls, blocks)) for nulls, blocks in zip(cached.tables(before), inside, strict=True)]
        return tables, len(tables[0]) * size
