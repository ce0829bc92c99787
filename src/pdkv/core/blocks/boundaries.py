"""Where a prefix hit can end, and so what is worth registering (spec block-pool 4 and 5)."""

from __future__ import annotations

from typing import TypeVar

from pdkv.core.blocks.groups import Drafting, Granularity
from pdkv.core.blocks.kinds.base import Kind
from pdkv.core.ports import Int64Array

Tokens = TypeVar("Tokens", int, Int64Array)


class Boundaries:
    """Rules that all groups of a model have in common."""

    def __init__(self, sizes: Granularity, drafting: Drafting, num_groups: int) -> None:
        self._drafting = drafting
        self._alone = num_groups == 1
        self._anywhere = self._alone or sizes.fine_hits
        self._unit = sizes.scheduler_tokens

    def replay(self, num_prompt: int) -> tuple[int, ...]:
        """Where a request that begins with this prompt can resume: it computes its last token at least.

        With a drafter that drops the end of hits, a resend and a longer prompt may resume one block apart.
        """
        if not self._drafting.groups:
            return (num_prompt - 1,)
        ends = ((num_prompt - 1) // self._unit * self._unit, num_prompt // self._unit * self._unit)
        return tuple(sorted({max(end - self._unit, 0) for end in ends}))

    def cacheable(self, kind: Kind, num_tokens: int) -> int:
        """The tokens, of ``num_tokens``, up to which a hit can look at blocks of this kind."""
        settled = max(0, num_tokens - self._drafting.unsettled_tokens)
        if self._alone:
            return settled
        aligned = self.last_end(num_tokens)
        if not kind.drops or aligned == 0:
            return aligned
        return min(settled, self.last_end(settled) + kind.block_size)  # the block it will lose

    def last_end(self, tokens: Tokens) -> Tokens:
        """The last place below ``tokens`` where a hit can end; of one group alone, that is up to its kind."""
        return tokens if self._anywhere else tokens - tokens % self._unit

    def next_end(self, tokens: Tokens) -> Tokens:
        """The first place from ``tokens`` on where a hit can end."""
        return tokens if self._anywhere else -(-tokens // self._unit) * self._unit
