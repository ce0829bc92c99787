"""The only way in to the blocks: who holds which, lookup, allocation in vLLM's exact order, release.

What a kind of layer decides is in `blocks/kinds`; here is what holds for all groups together (spec block-pool 4-7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pdkv.core.blocks.groups import NO_DRAFTING, CrossGroup, Drafting, FullGroup, Granularity, Group, is_cacheable
from pdkv.core.blocks.growth import BulkGrowth, Step
from pdkv.core.blocks.holders import GroupHold, Hit, Holder, no_hit
from pdkv.core.blocks.kinds import index_for, kind_of
from pdkv.core.blocks.kinds.base import Demand, Kind, Settings
from pdkv.core.blocks.kinds.state import StateKind
from pdkv.core.blocks.lookup import PrefixLookup
from pdkv.core.blocks.pool import BlockPool
from pdkv.core.blocks.tables import NULL_BLOCK, TableStore
from pdkv.core.ledger import Account
from pdkv.core.ports import HolderView, Int32Array, Int64Array
from pdkv.core.scheduler.request import Request, Status
from pdkv.units import cdiv

if TYPE_CHECKING:
    from pdkv.core.scheduler.running import Columns, RunningSet

_EMPTY = np.empty(0, dtype=np.int32)


class KVCacheManager:
    """Blocks of one instance by owner. Keys are request ids for requests and private strings for the rest.

    All groups share the pool. Strides work on models of one group of full attention only (`plain`).
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        groups: Sequence[Group],
        sizes: Granularity,
        max_model_len: int,
        watermark: float = 0.0,
        enable_caching: bool = True,
        max_in_flight_tokens: int | None = None,
        retention_interval: int | None = 0,
        drafting: Drafting = NO_DRAFTING,
        step_tokens: int = 0,
    ) -> None:
        indexes = [index_for(spec, num_blocks) for spec in groups]
        self.pool = BlockPool(num_blocks, enable_caching=enable_caching, indexes=indexes)
        self.sizes = sizes
        self.max_model_len = max_model_len
        self.watermark_blocks = int(watermark * num_blocks)
        self.now_ns = 0
        settings = Settings(
            sizes=sizes,
            max_model_len=max_model_len,
            max_in_flight_tokens=max_model_len if max_in_flight_tokens is None else max_in_flight_tokens,
            retention_interval=retention_interval,
            drafting=drafting.over(groups),
        )
        self._drafting = settings.drafting
        self._step_tokens = step_tokens
        self.kinds = tuple(kind_of(spec, number, self.pool, settings) for number, spec in enumerate(groups))
        self.plain = len(groups) == 1 and isinstance(groups[0], FullGroup)
        self.block_size = groups[0].block_size
        self._recycling = [kind for kind in self.kinds if kind.recycles]
        self._states = [kind for kind in self.kinds if isinstance(kind, StateKind)]
        self._lookup = PrefixLookup(self.kinds)
        self._nothing = no_hit(len(groups))
        crossing = [group.encoder_tokens for group in groups if isinstance(group, CrossGroup)]
        self.most_encoder_tokens = max(crossing, default=0)
        self._holders: dict[str, Holder] = {}
        self._running = tuple(TableStore(0) for _ in groups)  # the tables of running requests, by group
        self._bulk = BulkGrowth(self.pool, self.kinds, self._running, sizes)
        # Where a request ends by length at the latest: the model's length, or what a pool smaller than that holds. The
        # last token is sampled, never computed, hence the one beyond the pool. Without this bound a request that
        # outgrows the whole pool would preempt itself and wait for ever, with everybody behind it.
        resident = self._most_tokens(
            lambda tokens: sum(kind.resident_blocks(min(tokens + step_tokens, max_model_len)) for kind in self.kinds)
        )
        self.max_request_tokens = min(max_model_len, resident + 1)
        self._gate_tokens = self._most_tokens(self.blocks_for)
        self._copies: list[tuple[int, str, int, int]] = []  # (group, owner key, source, target) for the next plan
        self._num_copies = 0

    def _most_tokens(self, blocks: Callable[[int], int]) -> int:
        """The most tokens of which ``blocks`` says that they fit the pool, at most the model's length."""
        low, high = 0, self.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if blocks(middle) <= self.pool.num_blocks - 1 else (low, middle - 1)
        return low

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

    def lookup(self, request: Request) -> Hit:
        """The longest cached prefix of the request, at most ``num_tokens - 1`` tokens."""
        if not self.pool.enable_caching or request.new.skip_reading_prefix_cache:
            return self._nothing
        hit = self._lookup.find(request.hashes, request.num_tokens - 1)
        if hit.tokens and request.new.report_hits and self.pool.events is not None:
            for kind in self.kinds:
                if len(hit.blocks[kind.group]):
                    kind.note_hit(request, len(hit.blocks[kind.group]))
        return hit

    def shorten(self, hit: Hit, tokens: int) -> Hit:
        """The part of ``hit`` before token ``tokens``, a multiple of every block size; states may be missing there."""
        blocks = tuple(hit.blocks[kind.group][: tokens // kind.block_size] for kind in self.kinds)
        return Hit(tokens, blocks, hit.boundary)

    @property
    def leaves_last_token(self) -> bool:
        """Whether a producer must leave the prompt's last token to its consumer.

        The consumer computes that one anyway, to sample from it; what a window or a state looks back at from there is
        gone once the token itself has been computed (pd-transfer 3: the backoff, of one token).
        """
        return bool(self._recycling)

    def blocks_for(self, tokens: int, encoder_tokens: int | None = None) -> int:
        """Blocks that ``tokens`` tokens (never more than the model's length) take at most at once, over all groups.

        ``encoder_tokens`` default to the most that a request may have.
        """
        encoder = self.most_encoder_tokens if encoder_tokens is None else encoder_tokens
        return self._blocks_needed(None, self._whole(tokens, encoder=encoder))

    def outgrown(self, request: Request) -> bool:
        """Whether the admission gate could never let the request in again, though what it holds at once fits.

        Windows hold few blocks while they decode, but the gate allows for whole batches in flight. The reference lets
        such a request wait for ever once it is preempted; here it is computed again in small chunks, without the gate.
        """
        return request.num_tokens > self._gate_tokens

    def blocks_missing(self, request: Request) -> int:
        """Blocks that the request still needs for all its known tokens."""
        whole = self._whole(request.num_tokens, request.num_computed, encoder=request.new.encoder_tokens)
        whole.slots += self._step_tokens
        return max(self._blocks_needed(self._holders.get(request.request_id), whole), 0)

    def _whole(self, tokens: int, computed: int = 0, *, encoder: int) -> Demand:
        tokens = min(tokens, self.max_model_len)
        return Demand(
            slots=tokens, main=tokens, local=computed, total=computed, hit=self._nothing, whole=True, encoder=encoder
        )

    @property
    def shares_prefixes(self) -> bool:
        """Whether all that one request computes or loads can be hit by the next one."""
        return self.pool.enable_caching and not self._recycling

    @property
    def step_blocks(self) -> int:
        """Blocks that a request's first speculative step takes, beside those of states: a load must leave them free."""
        attention = [kind for kind in self.kinds if not isinstance(kind, StateKind)]
        return sum(cdiv(self._step_tokens, kind.block_size) for kind in attention)

    def holders(self) -> Iterator[HolderView]:
        """Every owner, as shown to the operator."""
        for holder in self._holders.values():
            yield HolderView(
                request_id=holder.request_id,
                account=holder.account.name.lower(),
                blocks=holder.num_blocks,
                cause=holder.cause,
                since_ns=holder.since_ns,
                deadline_ns=holder.deadline_ns,
            )

    # ------------------------------------------------------------------------------------------------- allocating

    def new_step(self) -> None:
        """A step begins: states registered before it are computed when it runs, so they may be hit."""
        for kind in self._states:
            kind.new_step()

    def allocate_slots(
        self,
        request: Request,
        new_tokens: int,
        *,
        hit: Hit | None = None,
        external_tokens: int = 0,
        lookahead_tokens: int = 0,
        delay_cache: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled: bool = False,
    ) -> tuple[Int32Array, ...] | None:
        """Blocks for ``new_tokens`` behind what the request has, its ``hit`` blocks and its external tokens.

        Returns one int32[n] a group, the entries appended now (neither hit nor external ones, as in vLLM), or ``None``
        when they do not fit; then nothing has changed but that blocks no token looks at any more were given back.
        Raises ``ValueError`` when nothing at all is asked for.
        """
        hit = hit or self._nothing
        if new_tokens == 0 and external_tokens == 0 and hit.tokens == 0:
            raise ValueError("allocate_slots: no new, external or cached tokens")
        local = request.num_computed + hit.tokens
        total = min(local + external_tokens, self.max_model_len)
        waiting = request.status in (Status.WAITING, Status.PREEMPTED, Status.LOADED)
        watermark = self.watermark_blocks if has_scheduled and waiting else 0
        holder = self._holders.get(request.request_id)
        if full_sequence_must_fit:
            known = min(request.num_tokens, self.max_model_len)
            encoder = request.new.encoder_tokens
            whole = Demand(slots=known, main=known, local=local, total=total, hit=hit, whole=True, encoder=encoder)
            if self._blocks_needed(holder, whole) + watermark > self.pool.num_free:
                return None
        main = total + new_tokens
        demand = Demand(
            slots=min(main + lookahead_tokens, self.max_model_len),
            main=main,
            local=local,
            total=total,
            hit=hit,
            encoder=request.new.encoder_tokens,
        )
        if holder is not None:
            for kind in self._recycling:
                kind.drop_skipped(holder, max(0, total - request.in_flight_tokens), request.num_prompt)
        if self._blocks_needed(holder, demand) + watermark > self.pool.num_free - reserved_blocks:
            return None
        holder = self._open(request.request_id, Account.LOADING if delay_cache else Account.RUNNING)
        self._undraft(holder)
        if hit or external_tokens:
            for kind in self.kinds:  # every group's hit first: a new block must not evict another group's hit
                kind.adopt(holder, demand)
            for kind in self.kinds:
                kind.grow_external(holder, demand)
        new = tuple(kind.grow(holder, demand) for kind in self.kinds)
        self._own_copies(request.request_id)
        if lookahead_tokens:
            self._mark_drafts(holder, main)
        if not delay_cache:
            self.cache_blocks(request, min(total + new_tokens, request.num_tokens))
        return new

    def _mark_drafts(self, holder: Holder, main: int) -> None:
        """Blocks behind the first ``main`` tokens' are only there for what a drafter writes ahead."""
        for kind, hold in zip(self.kinds, holder.groups, strict=True):
            first = min(kind.first_draft(hold, main), len(hold.table))
            hold.drafts = slice(first, len(hold.table))
            self.pool.ledger.move(hold.table.ids[hold.drafts], holder.account, Account.DRAFT)

    def _undraft(self, holder: Holder) -> None:
        """All blocks are in the holder's own account again."""
        for hold in holder.groups:
            if hold.drafts is not None:
                self.pool.ledger.move(hold.table.ids[hold.drafts], Account.DRAFT, holder.account)
                hold.drafts = None

    def _blocks_needed(self, holder: Holder | None, demand: Demand) -> int:
        needed = 0
        for kind in self.kinds:
            needed += kind.blocks_needed(holder.groups[kind.group] if holder else None, demand)
        return needed

    def _open(self, request_id: str, account: Account) -> Holder:
        holder = self._holders.get(request_id)
        if holder is None:
            groups = tuple(GroupHold() for _ in self.kinds)
            holder = Holder(request_id, account, account.name.lower(), self.now_ns, groups)
            self._holders[request_id] = holder
        return holder

    # -------------------------------------------------------------------------------------------- many running ones

    def seat(self, key: str, column: int) -> None:
        """The owner joins the running set: from now on its tables are row ``column`` of arrays (`grow_by_one`)."""
        for hold, store in zip(self._holders[key].groups, self._running, strict=True):
            hold.table.seat(store, column)

    def unseat(self, key: str) -> None:
        """The owner leaves the running set."""
        for hold in self._holders[key].groups:
            hold.table.unseat()

    def grow_by_one(self, running: RunningSet, first: int = 0, count: int | None = None) -> int:
        """``allocate_slots(request, 1)`` for ``count`` running requests from number ``first`` on, in that order.

        For requests that are past their prompt. Returns how many were served: all, or those before the first one that
        does not fit, for which nothing was done.
        """
        last = len(running) if count is None else first + count
        columns, counters = running.columns[first:last], running.counters
        computed = counters.num_computed[columns]
        step = Step(
            requests=running[first:last],
            rows=columns,
            prompt=running.prompt[columns],
            computed=computed,
            processed=computed - counters.in_flight_tokens[columns],
            final=np.minimum(computed + 1, counters.num_tokens[columns]),
        )
        return self._bulk.grow(step, lambda request: self.allocate_slots(request, 1) is not None)

    def steps_with_room(self, running: RunningSet, steps: int) -> int:
        """For how many steps, at most ``steps``, free blocks cover the growth of all, whatever comes back meanwhile."""
        columns = running.columns
        return self._bulk.steps_with_room(columns, running.counters.num_computed[columns], steps)

    def grow_by(self, running: RunningSet, steps: int) -> None:
        """``steps`` times `grow_by_one` for all, who compute a token in between. They must fit (`steps_with_room`)."""
        columns, counters = running.columns, running.counters
        computed = counters.num_computed[columns]
        if self._bulk.can_stride:
            self._bulk.stride(columns, computed, steps, running)
            counters.num_computed[columns] = computed + steps
            return
        for _ in range(steps):
            served = self.grow_by_one(running)
            assert served == len(columns), "grow_by: beyond the steps with room"
            counters.num_computed[columns] += 1

    def unregistered(self, columns: Columns, final: Int64Array) -> Columns:
        """int[m]: for which of these running requests `cache_blocks` has something to do below ``final`` tokens."""
        found = np.zeros(len(columns), dtype=np.bool_)
        for kind in self.kinds:
            if kind.registers:
                found |= self._bulk.unregistered(kind.group, columns, final)
        return np.flatnonzero(found)

    def running_tables(self, columns: Columns, group: int) -> Int32Array:
        """int32[n, longest]: a copy of the tables of running requests, null beyond each one's end."""
        return self._running[group].padded(columns)

    # ------------------------------------------------------------------------------------------------- registering

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Register in the prefix index what the request has below ``num_tokens``, as far as a hit can end there."""
        if not self.pool.enable_caching:
            return
        holder = self._holders[request.request_id]
        boundaries = self._replay_boundaries(request.num_prompt)
        if request.shared_boundary:
            boundaries += (request.shared_boundary,)
        for kind in self.kinds:
            kind.register(holder.groups[kind.group], request, self._cacheable(kind, num_tokens), boundaries)

    def _replay_boundaries(self, num_prompt: int) -> tuple[int, ...]:
        """Where a request that begins with this prompt can resume: it computes its last token at least.

        With a drafter that drops the end of hits, a resend and a longer prompt may resume one block apart.
        """
        if not self._drafting.groups:
            return (num_prompt - 1,)
        block = self.sizes.scheduler_tokens
        ends = ((num_prompt - 1) // block * block, num_prompt // block * block)
        return tuple(sorted({max(end - block, 0) for end in ends}))

    def _cacheable(self, kind: Kind, num_tokens: int) -> int:
        """The tokens, of ``num_tokens``, up to which a hit can look at blocks of this kind."""
        settled = max(0, num_tokens - self._drafting.unsettled_tokens)
        if len(self.kinds) == 1:
            return settled
        aligned = self._where_hits_end(num_tokens)
        if not kind.drops or aligned == 0:
            return aligned
        return min(settled, self._where_hits_end(settled) + kind.block_size)  # the block it will lose

    def _where_hits_end(self, num_tokens: int) -> int:
        return num_tokens if self.sizes.fine_hits else num_tokens - num_tokens % self.sizes.scheduler_tokens

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

    def keep_for_peer(self, key: str, tokens: int) -> tuple[tuple[int, ...], ...]:
        """Give back all but what a peer needs to go on behind ``tokens`` tokens; returns that, block ids by group."""
        holder = self._holders[key]
        self._undraft(holder)
        kept = []
        for hold, (first, stop) in zip(holder.groups, self.peer_spans(tokens), strict=True):
            tail = hold.table.cut(stop)[::-1]
            self.pool.give_back(tail[tail != NULL_BLOCK], holder.account)
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

    def release(self, key: str, *, joined: bool = False) -> int:
        """Give back all blocks, deepest first; returns how many. An unknown owner holds none.

        Group by group; ``joined``: as one batch, last group first (the order in which deferred frees come back).
        """
        holder = self._holders.pop(key, None)
        if holder is None:
            return 0
        self._undraft(holder)
        if joined:
            blocks = holder.blocks[::-1]
            self.pool.give_back(blocks, holder.account)
            return len(blocks)
        count = 0
        for hold in holder.groups:
            ids = hold.table.ids[::-1]
            blocks = ids[ids != NULL_BLOCK]
            self.pool.give_back(blocks, holder.account)
            count += len(blocks)
        return count

    def check(self) -> None:
        """Recount pool, ledger and owners; raises ``AssertionError`` on any difference."""
        self.pool.check()
        assert not self.pool.copies, "manager: a copy without an owner"
        claims = np.zeros(self.pool.num_blocks, dtype=np.int64)
        for key, holder in self._holders.items():
            blocks = holder.blocks
            assert len(np.unique(blocks)) == len(blocks), f"{key} holds a block twice"
            claims[blocks] += 1
            for hold in holder.groups:
                assert not hold.table.ids[: hold.num_dropped].any(), f"{key}: a block where none is needed any more"
        everything = np.arange(self.pool.num_blocks, dtype=np.int32)
        assert np.array_equal(claims, self.pool.ledger.holders(everything)), "manager: owners and holds disagree"
