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
        self._sizes = sizes
        self._drafting = drafting
        self._alone = num_groups == 1

    def replay(self, num_prompt: int) -> tuple[int, ...]:
        """Where a request that begins with this prompt can resume: it computes its last token at least.

        With a drafter that drops the end of hits, a resend and a longer prompt may resume one block apart.
        """
        if not self._drafting.groups:
            return (num_prompt - 1,)
        block = self._sizes.scheduler_tokens
        ends = ((num_prompt - 1) // block * block, num_prompt // block * block)
        return tuple(sorted({max(end - block, 0) for end in ends}))

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
        if self._alone or self._sizes.fine_hits:
            return tokens
        return tokens - tokens % self._sizes.scheduler_tokens
