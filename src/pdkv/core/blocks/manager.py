"""The only way in to the blocks: who holds which, lookup, allocation in vLLM's exact order, release.

First form: one group of uniform full-attention layers. Rules: spec block-pool sections 4-7.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pdkv.core.blocks.pool import NULL_BLOCK, BlockPool
from pdkv.core.blocks.tables import BlockTable
from pdkv.core.ledger import Account
from pdkv.core.ports import HolderView, Int32Array
from pdkv.core.scheduler.request import Request, Status
from pdkv.units import cdiv

_EMPTY = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class Holder:
    """One owner of blocks: a request, a lease, a quarantined transfer, a deferred free."""

    request_id: str
    account: Account
    cause: str
    since_ns: int
    deadline_ns: int | None = None
    table: BlockTable = field(default_factory=BlockTable)
    num_hashed: int = 0  # leading blocks of a request that are registered in the prefix index


class KVCacheManager:
    """Blocks of one instance by owner. Keys are request ids for requests and private strings for the rest."""

    def __init__(
        self, *, num_blocks: int, block_size: int, max_model_len: int, watermark: float, enable_caching: bool
    ) -> None:
        self.pool = BlockPool(num_blocks, enable_caching=enable_caching)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.watermark_blocks = int(watermark * num_blocks)
        self.now_ns = 0
        self._holders: dict[str, Holder] = {}

    # ---------------------------------------------------------------------------------------------------- looking

    def blocks_of(self, key: str) -> Int32Array:
        """int32[n]: the owner's blocks in token order; a view, empty for an unknown owner."""
        holder = self._holders.get(key)
        return holder.table.ids if holder else _EMPTY

    def num_blocks_of(self, key: str) -> int:
        """How many blocks the owner holds."""
        holder = self._holders.get(key)
        return len(holder.table) if holder else 0

    def lookup(self, request: Request) -> Int32Array:
        """int32[m]: cached blocks of the longest prefix of the request, at most ``num_tokens - 1`` tokens."""
        if not self.pool.enable_caching:
            return _EMPTY
        limit = (request.num_tokens - 1) // self.block_size
        return self.pool.index.lookup(request.hashes[:limit])

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens (never more than the model's length)."""
        return cdiv(min(tokens, self.max_model_len), self.block_size)

    def holders(self) -> Iterator[HolderView]:
        """Every owner, as shown to the operator."""
        for holder in self._holders.values():
            yield HolderView(
                request_id=holder.request_id,
                account=holder.account.name.lower(),
                blocks=len(holder.table),
                cause=holder.cause,
                since_ns=holder.since_ns,
                deadline_ns=holder.deadline_ns,
            )

    # ------------------------------------------------------------------------------------------------- allocating

    def allocate_slots(
        self,
        request: Request,
        new_tokens: int,
        *,
        hit: Int32Array = _EMPTY,
        external_tokens: int = 0,
        lookahead_tokens: int = 0,
        delay_cache: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled: bool = False,
    ) -> Int32Array | None:
        """Blocks for ``new_tokens`` behind what the request has, its ``hit`` blocks and its external tokens.

        Returns int32[n], the blocks allocated now (neither hit nor external ones, as in vLLM), or ``None`` when they
        do not fit, with nothing changed. Raises ``ValueError`` when nothing at all is asked for.
        """
        if new_tokens == 0 and external_tokens == 0 and len(hit) == 0:
            raise ValueError("allocate_slots: no new, external or cached tokens")
        local = request.num_computed + len(hit) * self.block_size
        total = min(local + external_tokens, self.max_model_len)
        waiting = request.status in (Status.WAITING, Status.PREEMPTED, Status.LOADED)
        watermark = self.watermark_blocks if has_scheduled and waiting else 0
        held = self.num_blocks_of(request.request_id)
        idle_hits = self.pool.num_idle(hit) if len(hit) else 0
        free = self.pool.num_free
        if full_sequence_must_fit:
            full = max(self.blocks_for(request.num_tokens) - held - len(hit), 0) + idle_hits
            if full + watermark > free:
                return None
        slots = total + new_tokens + lookahead_tokens
        need = max(self.blocks_for(slots) - held - len(hit), 0) + idle_hits
        if need + watermark > free - reserved_blocks:
            return None
        account = Account.LOADING if delay_cache else Account.RUNNING
        holder = self._open(request.request_id, account)
        if len(hit):
            self.pool.touch(hit, account)
            holder.table.extend(hit)
            holder.num_hashed = len(holder.table)
        if external_tokens:
            self._grow(holder, self.blocks_for(total))
        new = self._grow(holder, self.blocks_for(slots))
        if not delay_cache:
            self.cache_blocks(request, min(total + new_tokens, request.num_tokens))
        return new

    def _open(self, request_id: str, account: Account) -> Holder:
        holder = self._holders.get(request_id)
        if holder is None:
            holder = Holder(request_id, account, account.name.lower(), self.now_ns)
            self._holders[request_id] = holder
        return holder

    def _grow(self, holder: Holder, length: int) -> Int32Array:
        missing = length - len(holder.table)
        if missing <= 0:
            return _EMPTY
        blocks = self.pool.take(missing, holder.account)
        holder.table.extend(blocks)
        return blocks

    def grow_all(self, requests: list[Request], at: list[int]) -> None:
        """One more block for ``requests[i]`` for each i in ``at``, in that order: one bulk pop (engine.advance)."""
        blocks = self.pool.take(len(at), Account.RUNNING)
        for order, index in enumerate(at):
            self._holders[requests[index].request_id].table.extend(blocks[order : order + 1])

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Register the request's full blocks below ``num_tokens`` in the prefix index."""
        holder = self._holders[request.request_id]
        full = num_tokens // self.block_size
        if not self.pool.enable_caching or full <= holder.num_hashed:
            return
        self.pool.insert(request.hashes[holder.num_hashed : full], holder.table.ids[holder.num_hashed : full].copy())
        holder.num_hashed = full

    # --------------------------------------------------------------------------------------- changing hands, ending

    def move(self, key: str, account: Account, cause: str, deadline_ns: int | None = None) -> None:
        """The same owner, another account (LOADING -> LOADED_WAITING -> RUNNING, RETAINED -> DEFERRED ...)."""
        holder = self._holders[key]
        self.pool.ledger.move(holder.table.ids, holder.account, account)
        holder.account, holder.cause, holder.deadline_ns, holder.since_ns = account, cause, deadline_ns, self.now_ns

    def set_deadline(self, key: str, deadline_ns: int) -> None:
        """When the owner must have let go, as shown to the operator."""
        self._holders[key].deadline_ns = deadline_ns

    def rename(self, key: str, new_key: str) -> None:
        """The blocks outlive the request under another key (lease, quarantine, deferred free)."""
        assert new_key not in self._holders, f"holder {new_key} exists"
        self._holders[new_key] = self._holders.pop(key)

    def trim(self, key: str, length: int) -> None:
        """Give back all but the first ``length`` blocks."""
        holder = self._holders[key]
        self.pool.give_back(holder.table.cut(length)[::-1], holder.account)
        holder.num_hashed = min(holder.num_hashed, length)

    def release_head(self, key: str, length: int) -> None:
        """Give back the first ``length`` blocks and keep the rest (whose positions shift)."""
        holder = self._holders[key]
        rest = holder.table.cut(length)
        self.pool.give_back(holder.table.cut(0)[::-1], holder.account)
        holder.table.extend(rest)
        holder.num_hashed = 0

    def forget_from(self, request: Request, num_tokens: int) -> None:
        """Unregister blocks that hold tokens from ``num_tokens`` on: a step that was to write them is not run."""
        holder = self._holders[request.request_id]
        first = num_tokens // self.block_size
        if holder.num_hashed > first:
            blocks = holder.table.ids[first : holder.num_hashed].copy()
            self.pool.unregister(blocks)
            holder.num_hashed = first

    def release(self, key: str) -> int:
        """Give back all blocks, deepest first; returns how many. An unknown owner holds none."""
        holder = self._holders.pop(key, None)
        if holder is None:
            return 0
        self.pool.give_back(holder.table.ids[::-1].copy(), holder.account)
        return len(holder.table)

    def check(self) -> None:
        """Recount pool, ledger and owners; raises ``AssertionError`` on any difference."""
        self.pool.check()
        claims = np.zeros(self.pool.num_blocks, dtype=np.int64)
        for key, holder in self._holders.items():
            ids = holder.table.ids
            assert len(np.unique(ids)) == len(ids), f"{key} holds a block twice"
            assert not (ids == NULL_BLOCK).any(), f"{key} holds the null block"
            claims[ids] += 1
        everything = np.arange(self.pool.num_blocks, dtype=np.int32)
        assert np.array_equal(claims, self.pool.ledger.holders(everything)), "manager: owners and holds disagree"
