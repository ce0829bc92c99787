"""Who holds which blocks, and how blocks change hands and come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

import numpy as np

from pdkv.core.blocks.groups import FullGroup, is_cacheable
from pdkv.core.blocks.holders import GroupHold, Holder
from pdkv.core.blocks.kinds.base import Kind
from pdkv.core.blocks.pool import BlockPool
from pdkv.core.blocks.tables import NULL_BLOCK, without_null
from pdkv.core.ledger import Account
from pdkv.core.ports import HolderView, Int32Array
from pdkv.core.scheduler.request import Request

_EMPTY = np.empty(0, dtype=np.int32)
_NO_COPIES = np.empty((0, 2), dtype=np.int32)
_CAUSES = [account.name.lower() for account in Account]  # unless somebody says more


def _view(holder: Holder) -> HolderView:
    return HolderView(
        request_id=holder.request_id,
        account=holder.account.name.lower(),
        blocks=holder.num_blocks,
        cause=holder.cause,
        since_ns=holder.since_ns,
        deadline_ns=holder.deadline_ns,
    )


class Owners:
    """Blocks of one instance by owner. Keys are request ids for requests and private strings for the rest."""

    def __init__(self, pool: BlockPool, kinds: Sequence[Kind]) -> None:
        self.pool = pool
        self.kinds = tuple(kinds)
        self._keeps_all = all(isinstance(kind.spec, FullGroup) for kind in kinds)
        self.plain = len(kinds) == 1 and self._keeps_all
        self.now_ns = 0
        self._recycling = [kind for kind in kinds if kind.recycles]
        self._holders: dict[str, Holder] = {}
        self._copies: list[tuple[int, str, int, int]] = []  # (group, owner key, source, target) for the next plan
        self._num_copies = 0

    # ---------------------------------------------------------------------------------------------------- looking

    def blocks_of(self, key: str, group: int = 0) -> Int32Array:
        """int32[n]: the owner's blocks in token order, null where none is needed; a view, empty if unknown."""
        holder = self._holders.get(key)
        return holder.groups[group].table.ids if holder else _EMPTY

    def num_blocks_of(self, key: str) -> int:
        """How many blocks the owner holds, over all groups."""
        holder = self._holders.get(key)
        if holder is None:
            return 0
        return len(holder.groups[0].table) if self.plain else holder.num_blocks

    def owners_among(self, keys: Set[str]) -> set[str]:
        """Those of ``keys`` that stand for an owner."""
        return self._holders.keys() & keys

    def holders(self) -> Iterator[HolderView]:
        """Every owner, as shown to the operator."""
        return map(_view, self._holders.values())

    def tables(self) -> list[tuple[str, list[tuple[list[int], int]]]]:
        """Every owner's key, and of each group its table (block ids) and how many leading entries it has given back."""
        return [(key, [hold.table.plain() for hold in holder.groups]) for key, holder in self._holders.items()]

    def overdue(self) -> list[HolderView]:
        """Every owner that names a deadline which has come."""
        return [
            _view(holder)
            for holder in self._holders.values()
            if holder.deadline_ns is not None and holder.deadline_ns <= self.now_ns
        ]

    def _open(self, request_id: str, account: Account) -> Holder:
        groups = tuple([GroupHold() for _ in self.kinds])
        holder = self._holders[request_id] = Holder(request_id, account, _CAUSES[account], self.now_ns, groups)
        return holder

    def _undraft(self, holder: Holder) -> None:
        """All blocks are in the holder's own account again."""
        for hold in holder.groups:
            if hold.drafts is not None:
                self.pool.ledger.move(hold.table.ids[hold.drafts], Account.DRAFT, holder.account)
                hold.drafts = None

    # ------------------------------------------------------------------------------------------------ copies on write

    def _own_copies(self, request_id: str) -> None:
        """Both ends of a copy get an owner of their own, for the request may lose its blocks before the copy runs."""
        for group, source, target in self.pool.copies:
            key = f"copy:{self._num_copies}"
            self._num_copies += 1
            hold = GroupHold()
            hold.table.extend(np.asarray([source, target], dtype=np.int32))
            self._holders[key] = Holder(request_id, Account.RUNNING, "copied by the next plan", self.now_ns, (hold,))
            self._copies.append((group, key, source, target))
        self.pool.copies.clear()

    def take_copies(self) -> tuple[Int32Array, list[str]]:
        """int32[n, 2] (source, target) that the plan being made must copy first, and the owners to release after it."""
        if not self._copies:
            return _NO_COPIES, []
        copies, self._copies = sorted(self._copies, key=lambda copy: copy[0]), []
        pairs = np.asarray([copy[2:] for copy in copies], dtype=np.int32).reshape(-1, 2)
        return pairs, [copy[1] for copy in copies]

    # --------------------------------------------------------------------------------------- changing hands, ending

    def move(self, key: str, account: Account, cause: str, deadline_ns: int | None = None) -> None:
        """The same owner, another account (LOADING -> LOADED_WAITING -> RUNNING, RETAINED -> DEFERRED ...)."""
        holder = self._holders[key]
        self._undraft(holder)
        self.pool.ledger.move(holder.blocks, holder.account, account)
        holder.account, holder.cause, holder.deadline_ns, holder.since_ns = account, cause, deadline_ns, self.now_ns

    def set_deadline(self, key: str, deadline_ns: int) -> None:
        """When the owner must have let go, as shown to the operator."""
        self._holders[key].deadline_ns = deadline_ns

    def rename(self, key: str, new_key: str) -> None:
        """The blocks outlive the request under another key (lease, quarantine, deferred free)."""
        assert new_key not in self._holders, f"holder {new_key} exists"
        self._holders[new_key] = self._holders.pop(key)

    def drop_skipped(self, request: Request) -> None:
        """Give back what only tokens that have been computed looked at."""
        holder = self._holders.get(request.request_id)
        if holder is not None:
            processed = max(0, request.num_computed - request.in_flight_tokens)
            for kind in self._recycling:
                kind.drop_skipped(holder, processed, request.num_prompt)

    def peer_spans(self, tokens: int, local: int = 0) -> tuple[tuple[int, int], ...]:
        """(first, stop) by group: the table entries that a peer supplies to go on behind ``tokens`` tokens.

        The first ``local`` of them, a multiple of every block size, are there already.
        """
        spans = []
        for kind in self.kinds:
            first, stop = kind.peer_span(tokens)
            there = local // kind.block_size if is_cacheable(kind.spec) else 0
            spans.append((max(first, there), max(stop, there)))
        return tuple(spans)

    def never_hit(self, key: str, group: int, entry: int) -> None:
        """The block of table entry ``entry``, the first that is not null, is not registered: it is not whole."""
        hold = self._holders[key].groups[group]
        hold.num_hashed = max(hold.num_hashed, entry + 1)

    def keep_for_peer(self, key: str, tokens: int) -> tuple[tuple[int, ...], ...]:
        """Give back all but what a peer needs to go on behind ``tokens`` tokens; returns that, block ids by group."""
        holder = self._holders[key]
        self._undraft(holder)
        kept = []
        for hold, (first, stop) in zip(holder.groups, self.peer_spans(tokens), strict=True):
            self.pool.give_back(without_null(hold.table.cut(stop)), holder.account)
            self.pool.give_back(hold.table.blank(0, first)[::-1], holder.account)
            hold.num_hashed, hold.num_dropped = min(hold.num_hashed, stop), max(hold.num_dropped, first)
            kept.append(tuple(hold.table.ids[first:].tolist()))
        return tuple(kept)

    def release_hits(self, key: str, local: int) -> None:
        """Give back the blocks of the first ``local`` tokens, a multiple of every block size, and keep the rest."""
        holder = self._holders[key]
        for kind, hold in zip(self.kinds, holder.groups, strict=True):
            stop = local // kind.block_size if is_cacheable(kind.spec) else 0
            self.pool.give_back(hold.table.blank(0, stop)[::-1], holder.account)
            hold.num_dropped = max(hold.num_dropped, stop)

    def forget_from(self, request: Request, num_tokens: int) -> None:
        """Unregister blocks that hold tokens from ``num_tokens`` on: a step that was to write them is not run."""
        for kind, hold in zip(self.kinds, self._holders[request.request_id].groups, strict=True):
            first = num_tokens // kind.block_size
            blocks = hold.table.ids[first:]
            self.pool.unregister(blocks[blocks != NULL_BLOCK])
            hold.num_hashed = min(hold.num_hashed, first)

    def forget_behind(self, bad: Int32Array) -> None:
        """Unregister ``bad`` blocks and what lies behind them, computed on them (groups that keep all blocks).

        Of free blocks nobody knows what they lie behind, so where a bad one could be hit all of those go.
        """
        if len(self.pool.unregister(bad)):
            self.pool.unregister(self.pool.free_order())
        for holder in self._holders.values():
            for hold in holder.groups:
                blocks = hold.table.ids
                if (found := np.isin(blocks, bad)).any():
                    self.pool.unregister(without_null(blocks[int(found.argmax()) :].copy()))

    def release(self, key: str, *, joined: bool = False) -> int:
        """Give back all blocks, deepest first; returns how many. An unknown owner holds none.

        Group by group; ``joined``: as one batch, last group first (the order in which deferred frees come back).
        """
        holder = self._holders.pop(key, None)
        if holder is None:
            return 0
        self._undraft(holder)
        batches = [hold.table.cut(0) for hold in holder.groups]
        holder.groups = ()  # nothing to take along when the request leaves the running set
        if joined:
            batches = [np.concatenate(batches[::-1])]
        count = 0
        for batch in batches:
            blocks = without_null(batch)
            self.pool.give_back(blocks, holder.account)
            count += len(blocks)
        return count

    def check(self) -> None:
        """Recount pool, ledger and owners; raises ``AssertionError`` on any difference."""
        self.pool.check()
        assert not self.pool.copies, "owners: a copy without an owner"
        tables, sizes = [_EMPTY], []
        for key, holder in self._holders.items():
            size = 0
            for hold in holder.groups:
                ids, dropped = hold.table.ids, hold.num_dropped
                assert not dropped or not ids[:dropped].any(), f"{key}: a block where none is needed any more"
                tables.append(ids)
                size += len(ids)
            sizes.append(size)
        blocks = np.concatenate(tables)
        claims = np.bincount(blocks, minlength=self.pool.num_blocks)
        claims[NULL_BLOCK] = 0
        assert not np.count_nonzero(claims != self.pool.ledger.all_holders()), "owners: owners and holds disagree"
        if np.count_nonzero(claims > 1):  # of blocks with several holds none may be an owner's twice
            pairs = np.repeat(np.arange(len(sizes)), sizes) * self.pool.num_blocks + blocks
            pairs = np.sort(pairs[blocks != NULL_BLOCK])
            twice = pairs[1:][pairs[1:] == pairs[:-1]] // self.pool.num_blocks
            assert not len(twice), f"{list(self._holders)[twice.item(0)]} holds a block twice"
