"""Full attention and MLA: every block stays, and a prefix is hit from the left to the first miss."""

from __future__ import annotations

from operator import attrgetter

import numpy as np

from pdkv.core.blocks.groups import FullGroup
from pdkv.core.blocks.hashing import HashChain
from pdkv.core.blocks.holders import GroupHold
from pdkv.core.blocks.kinds.base import JointIndex, Kind, Settings, unit_hashes
from pdkv.core.blocks.pool import BlockPool
from pdkv.core.ports import BlockIds, Int32Array, Int64Array
from pdkv.core.scheduler.request import Request
from pdkv.units import cdiv

_HASHES = attrgetter("hashes")


class FullKind(Kind):
    """Rules of a full-attention group."""

    def __init__(self, spec: FullGroup, group: int, pool: BlockPool, settings: Settings) -> None:
        super().__init__(spec, group, pool, settings)
        self.recycles = False

    def find(
        self, cached: JointIndex, hashes: HashChain, max_tokens: int, *, drop: bool = False
    ) -> tuple[list[Int32Array], int]:
        """Left to right until the first miss; with fine-grained hits then as far as possible into the next block."""
        sizes, size = self.settings.sizes, self.block_size
        blocks = cached.prefix(unit_hashes(hashes, sizes.hash_tokens, size), max_tokens // size)
        tokens = len(blocks[0]) * size
        if sizes.hit_tokens < size:
            blocks, tokens = self._into_next_block(cached, hashes, max_tokens, blocks, tokens)
        if not tokens:
            return blocks, 0
        if drop:
            tokens -= min(sizes.hit_tokens, size)
        tokens -= tokens % sizes.hit_tokens
        return [found[: cdiv(tokens, size)] for found in blocks], tokens

    def _into_next_block(
        self, cached: JointIndex, hashes: HashChain, max_tokens: int, blocks: list[Int32Array], tokens: int
    ) -> tuple[list[Int32Array], int]:
        """The hit of ``tokens`` tokens in whole ``blocks``, and the longest cached part of the block behind them."""
        unit = self.settings.sizes.hash_tokens
        last = min((tokens + self.block_size) // unit - 1, max_tokens // unit, len(hashes))
        for position in range(last, tokens // unit, -1):
            tail = cached.find(hashes[position - 1])
            if tail is not None:
                table = cached.tables(len(blocks[0]) + 1)
                for whole, part, block in zip(table, blocks, tail, strict=True):
                    whole[:-1], whole[-1] = part, block
                return table, position * unit
        return blocks, tokens

    @property
    def dropped_tokens(self) -> int:
        """One hash unit where hits end inside blocks, else one block."""
        return min(self.settings.sizes.hit_tokens, self.block_size)

    def register_each(self, requests: list[Request], entries: Int64Array, blocks: BlockIds, before: BlockIds) -> None:
        """Every block, and none is null."""
        chains = list(map(_HASHES, requests))
        self.pool.insert_each(self.group, chains, entries, np.ones_like(entries), blocks, before)

    def register(self, hold: GroupHold, request: Request, tokens: int, boundaries: tuple[int, ...]) -> BlockIds:
        """Every full block; and the prompt's last hash boundary when that lies inside a block."""
        new = super().register(hold, request, tokens, boundaries)
        unit = self.settings.sizes.hash_tokens
        if self.block_size != unit:
            end = (request.num_prompt - (not self.drops)) // unit * unit  # a hit that loses its end may begin with all
            entry = end // self.block_size
            if 0 < end <= tokens and end % self.block_size and entry < len(hold.table):
                self.register_partial(request, hold.table[entry], end)
        return new
