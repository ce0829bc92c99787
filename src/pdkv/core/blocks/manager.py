"""The only way in to the blocks: lookup, and allocation in vLLM's exact order (owners and release: `blocks/owners`).

What a kind of layer decides is in `blocks/kinds`; here is what holds for all groups together (spec block-pool 4-7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pdkv.core.blocks.boundaries import Boundaries
from pdkv.core.blocks.groups import NO_DRAFTING, CrossGroup, Drafting, Granularity, Group, is_paged
from pdkv.core.blocks.growth import RunningGrowth
from pdkv.core.blocks.holders import Hit, Holder, no_hit
from pdkv.core.blocks.kinds import index_for, kind_of
from pdkv.core.blocks.kinds.base import Demand, Settings, StateDemand
from pdkv.core.blocks.kinds.state import StateKind
from pdkv.core.blocks.lookup import PrefixLookup
from pdkv.core.blocks.owners import Owners
from pdkv.core.blocks.pool import BlockPool
from pdkv.core.ledger import Account
from pdkv.core.ports import BlockIds
from pdkv.core.scheduler.request import Request, Status
from pdkv.units import cdiv

if TYPE_CHECKING:
    from pdkv.core.scheduler.running import RunningSet


_NOT_RUNNING = (Status.WAITING, Status.PREEMPTED, Status.LOADED)


class KVCacheManager(Owners):
    """Blocks of one instance: all groups share the pool."""

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
        shared_prefix_checkpoints: bool = False,
    ) -> None:
        indexes = [index_for(spec, num_blocks) for spec in groups]
        pool = BlockPool(num_blocks, enable_caching=enable_caching, indexes=indexes)
        self.sizes = sizes
        self.max_model_len = max_model_len
        self.watermark_blocks = int(watermark * num_blocks)
        settings = Settings(
            sizes=sizes,
            max_model_len=max_model_len,
            max_in_flight_tokens=max_model_len if max_in_flight_tokens is None else max_in_flight_tokens,
            retention_interval=retention_interval,
            drafting=drafting.over(groups),
            junction_checkpoints=shared_prefix_checkpoints,
        )
        self._looks_at_prefill_end = retention_interval == 0
        self._step_tokens = step_tokens
        super().__init__(pool, [kind_of(spec, number, pool, settings) for number, spec in enumerate(groups)])
        self.block_size = groups[0].block_size
        paged = (group.block_size for group in groups if is_paged(group))
        self.paged_block_size = next(paged, self.block_size)  # by which peers tell each other how large blocks are
        self._states = [kind for kind in self.kinds if isinstance(kind, StateKind)]
        self._demand = StateDemand if self._states else Demand
        self._lookup = PrefixLookup(self.kinds)
        self.nothing = no_hit(len(groups))
        crossing = [group.encoder_tokens for group in groups if isinstance(group, CrossGroup)]
        self.most_encoder_tokens = max(crossing, default=0)
        self.boundaries = Boundaries(sizes, settings.drafting, len(groups))
        self.growth = RunningGrowth(self.pool, self.kinds, self.boundaries)
        # Where a request ends by length at the latest: the model's length, or what a pool smaller than that holds. The
        # last token is sampled, never computed, hence the one beyond the pool. Without this bound a request that
        # outgrows the whole pool would preempt itself and wait for ever, with everybody behind it.
        resident = self._most_tokens(
            lambda tokens: sum(kind.resident_blocks(min(tokens + step_tokens, max_model_len)) for kind in self.kinds)
        )
        self.max_request_tokens = min(max_model_len, resident + 1)
        self._gate_tokens = self._most_tokens(self.blocks_for)

    def _most_tokens(self, blocks: Callable[[int], int]) -> int:
        """The most tokens of which ``blocks`` says that they fit the pool, at most the model's length."""
        low, high = 0, self.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if blocks(middle) <= self.pool.num_blocks - 1 else (low, middle - 1)
        return low

    # ---------------------------------------------------------------------------------------------------- looking

    def lookup(self, request: Request) -> Hit:
        """The longest cached prefix of the request, at most ``num_tokens - 1`` tokens."""
        if not self.pool.enable_caching or request.new.skip_reading_prefix_cache:
            return self.nothing
        hit = self._lookup.find(request.hashes, request.num_tokens - 1)
        if hit.tokens and request.new.report_hits and self.pool.events is not None:
            for kind in self.kinds:
                if len(hit.blocks[kind.group]):
                    kind.note_hit(request, len(hit.blocks[kind.group]))
        return hit

    def lookup_for_load(self, request: Request) -> tuple[Hit, bool]:
        """`lookup` for a request whose rest a peer supplies, and whether only that makes the hit whole.

        Of models of full attention and states the state that the request goes on from comes with the load, so a hit may
        be as long as full attention's (spec block-pool 5, connector variant).
        """
        usable = self.pool.enable_caching and not request.new.skip_reading_prefix_cache
        if not usable or not self._lookup.states_may_lag:
            return self.lookup(request), False
        return self._lookup.find_for_load(request.hashes, request.num_tokens - 1)

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
        return not self._keeps_all

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
        if isinstance(whole, StateDemand):
            whole.prefill_end = self._prefill_end(request)
        return max(self._blocks_needed(self._holders.get(request.request_id), whole), 0)

    def _whole(self, tokens: int, computed: int = 0, *, encoder: int) -> Demand:
        tokens = min(tokens, self.max_model_len)
        return self._demand(
            slots=tokens, main=tokens, local=computed, total=computed, hit=self.nothing, whole=True, encoder=encoder
        )

    @property
    def shares_prefixes(self) -> bool:
        """Whether all that one request computes or loads can be hit by the next one."""
        return self.pool.enable_caching and self._keeps_all

    @property
    def step_blocks(self) -> int:
        """Blocks that a request's first speculative step takes, beside those of states: a load must leave them free."""
        attention = [kind for kind in self.kinds if not isinstance(kind, StateKind)]
        return sum(cdiv(self._step_tokens, kind.block_size) for kind in attention)

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
    ) -> tuple[BlockIds, ...] | None:
        """Blocks for ``new_tokens`` behind what the request has, its ``hit`` blocks and its external tokens.

        Returns one int[n] a group, the entries appended now (neither hit nor external ones, as in vLLM), or ``None``
        when they do not fit; then nothing has changed but that blocks no token looks at any more were given back.
        Raises ``ValueError`` when nothing at all is asked for.
        """
        if hit is None:
            hit = self.nothing
        if new_tokens == 0 and external_tokens == 0 and hit.tokens == 0:
            raise ValueError("allocate_slots: no new, external or cached tokens")
        known, encoder = request.num_tokens, request.new.encoder_tokens
        local = request.num_computed + hit.tokens
        total = min(local + external_tokens, self.max_model_len)
        watermark = self.watermark_blocks if has_scheduled and request.status in _NOT_RUNNING else 0
        holder = self._holders.get(request.request_id)
        if full_sequence_must_fit:
            slots = min(known, self.max_model_len)
            whole = self._demand(
                slots=slots, main=slots, local=local, total=total, hit=hit, whole=True, encoder=encoder
            )
            if isinstance(whole, StateDemand):
                whole.prefill_end = self._prefill_end(request)
            if self._blocks_needed(holder, whole) + watermark > self.pool.num_free:
                return None
        main = total + new_tokens
        slots = min(main + lookahead_tokens, self.max_model_len)
        demand = self._demand(slots=slots, main=main, local=local, total=total, hit=hit, encoder=encoder)
        if isinstance(demand, StateDemand):
            demand.prefill_end = self._prefill_end(request)
        if holder is not None:
            for kind in self._recycling:
                kind.drop_skipped(holder, max(0, total - request.in_flight_tokens), request.num_prompt)
        if self._blocks_needed(holder, demand) + watermark > self.pool.num_free - reserved_blocks:
            return None
        if holder is None:
            holder = self._open(request.request_id, Account.LOADING if delay_cache else Account.RUNNING)
        else:
            self._undraft(holder)
        if hit or external_tokens:
            for kind in self.kinds:  # every group's hit first: a new block must not evict another group's hit
                kind.adopt(holder, demand)
            for kind in self.kinds:
                kind.grow_external(holder, demand)
        new = tuple(kind.grow(holder, demand) for kind in self.kinds)
        if self.pool.copies:
            self._own_copies(request.request_id)
        if lookahead_tokens:
            self._mark_drafts(holder, main)
        if not delay_cache:
            self.cache_blocks(request, min(main, known))
        return new

    def _prefill_end(self, request: Request) -> int:
        """Where the computation of what is known ends; 0 where states are kept at the end of every chunk."""
        return max(request.num_prompt, request.num_tokens - 1) if self._looks_at_prefill_end else 0

    def _mark_drafts(self, holder: Holder, main: int) -> None:
        """Blocks behind the first ``main`` tokens' are only there for what a drafter writes ahead."""
        for kind, hold in zip(self.kinds, holder.groups, strict=True):
            first = min(kind.first_draft(hold, main), len(hold.table))
            hold.drafts = slice(first, len(hold.table))
            self.pool.ledger.move(hold.table.ids[hold.drafts], holder.account, Account.DRAFT)

    def _blocks_needed(self, holder: Holder | None, demand: Demand) -> int:
        needed = 0
        for kind in self.kinds:
            needed += kind.blocks_needed(holder.groups[kind.group] if holder else None, demand)
        return needed

    # -------------------------------------------------------------------------------------------- many running ones

    def seat(self, key: str, column: int) -> None:
        """The owner joins the running set: from now on its tables are row ``column`` of arrays."""
        self.growth.seat(self._holders[key], column)

    def unseat(self, column: int) -> None:
        """The owner in ``column`` leaves the running set; it may have been released already."""
        self.growth.unseat(column)

    def grow_by_one(self, running: RunningSet, first: int = 0, count: int | None = None) -> int:
        """``allocate_slots(request, 1)`` for ``count`` running requests from number ``first`` on, in that order.

        For requests that are past their prompt. Returns how many were served: all, or those before the first one that
        does not fit, for which nothing was done.
        """
        last = len(running) if count is None else first + count
        return self.growth.grow(running, first, last, lambda request: self.allocate_slots(request, 1) is not None)

    def grow_by(self, running: RunningSet, steps: int) -> None:
        """``steps`` times `grow_by_one` for all, who compute a token in between.

        They must fit (`RunningGrowth.steps_with_room`), and their tokens must be known.
        """
        computed = running.counters.num_computed
        if self.growth.can_stride:
            self.growth.stride(running, steps)
            computed[running.columns] += steps
            return
        for _ in range(steps):
            served = self.grow_by_one(running)
            assert served == len(running), "grow_by: beyond the steps with room"
            computed[running.columns] += 1

    # ------------------------------------------------------------------------------------------------- registering

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Register in the prefix index what the request has below ``num_tokens``, as far as a hit can end there."""
        if not self.pool.enable_caching:
            return
        holder = self._holders[request.request_id]
        boundaries = self.boundaries.replay(request.num_prompt)
        if request.shared_boundary:
            boundaries += (request.shared_boundary,)
        for kind in self.kinds:
            kind.register(holder.groups[kind.group], request, self.boundaries.cacheable(kind, num_tokens), boundaries)
