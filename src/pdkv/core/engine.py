"""One instance that decides: ``schedule`` -> plan, ``complete`` -> events. No I/O, no clock, no torch (design 1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from pdkv.core import stride
from pdkv.core.blocks.hashing import HashFunction, raw_sha256
from pdkv.core.blocks.kv_events import KvEvent
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.blocks.residency import Eviction, Residency
from pdkv.core.config import EngineConfig
from pdkv.core.events import Event, FinishReason
from pdkv.core.journal import Journal
from pdkv.core.peer_news import PeerNews
from pdkv.core.ports import (
    Abort,
    Batch,
    BoolArray,
    EncoderInput,
    GrammarReady,
    InboxItem,
    Int32Array,
    MemoryView,
    NewRequest,
    Outputs,
    Plan,
)
from pdkv.core.scheduler.limits import PauseState
from pdkv.core.scheduler.request import Request, Status
from pdkv.core.scheduler.running import PlanRows
from pdkv.core.scheduler.scheduler import Scheduler
from pdkv.core.transfer.consumer import Consumer
from pdkv.core.transfer.lease import LeaseSlots, SlotArray
from pdkv.core.transfer.messages import Peer
from pdkv.core.transfer.pairs import unlike_blocks
from pdkv.core.transfer.producer import Producer
from pdkv.core.transfer.quarantine import LastFence
from pdkv.core.transfer.rendezvous import Announcements
from pdkv.core.transfer.writes import Writes
from pdkv.core.validation import check_request
from pdkv.errors import BlocksInUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One life of one instance: ``nonce`` and ``secret`` are drawn afresh at every start, by the caller."""

    engine_id: str
    nonce: int
    secret: bytes


class Engine:
    """The memory and the schedule of one instance. Both roles are always there: P grants leases, D reads by them.

    ``slots`` is the uint64[n, 2] array that peers read (registered memory in `serve`, a plain array elsewhere).
    Plans are completed in the order in which they were made, at most ``max_outstanding_plans`` behind.
    """

    def __init__(
        self,
        config: EngineConfig,
        identity: Identity,
        slots: SlotArray,
        *,
        hash_function: HashFunction = raw_sha256,
    ) -> None:
        self.config = config
        self.identity = identity
        self._journal = Journal()
        self.manager = KVCacheManager(
            num_blocks=config.num_blocks,
            groups=config.groups,
            sizes=config.sizes,
            max_model_len=config.max_model_len,
            watermark=config.watermark,
            enable_caching=config.enable_prefix_caching,
            max_in_flight_tokens=config.max_in_flight_tokens,
            retention_interval=config.prefix_cache_retention_interval,
            drafting=config.drafting,
            step_tokens=config.step_tokens,
            shared_prefix_checkpoints=config.stops_at_junctions,
        )
        if config.kv_events:
            self.manager.pool.events = []
        if config.kv_metrics_sample is not None:
            self.manager.pool.residency = Residency(
                config.kv_metrics_sample, identity.nonce, lambda: self._journal.now_ns
            )
        lease_slots = LeaseSlots(
            slots, nonce=identity.nonce, secret=identity.secret, block_size=self.manager.paged_block_size
        )
        handles, self._last_fence = count(1), LastFence()
        writes = Writes(config, identity.engine_id, self.manager, handles, self._last_fence, self._journal)
        announcements = Announcements(config, identity.engine_id, writes, self._journal)
        self.producer = Producer(config, self.manager, lease_slots, announcements, writes, self._journal)
        self.consumer = Consumer(
            config, identity.engine_id, self.manager, lease_slots, handles, self._last_fence, self._journal
        )
        self.scheduler = Scheduler(config, self.manager, self.producer, self.consumer, self._journal, hash_function)
        self._news = PeerNews(config, self.manager, self.producer, self.consumer, self.scheduler, self._last_fence)
        self.hash_function = hash_function
        self.requests: dict[str, Request] = {}
        self._outstanding: deque[tuple[int, PlanRows]] = deque()
        self._replays = config.replay_tokens > 0
        self._no_batch = _no_batch(len(config.groups))
        self._next_step = 0
        self._sequence = 0
        self._last_arrival_ns = -1

    def accept_writes(self, here: Peer) -> None:
        """From now on this instance grants its memory to producers that are asked to WRITE, and find it at ``here``.

        Without this call it has them announce what they keep, and reads it.
        """
        self.consumer.grants.here = here

    # ------------------------------------------------------------------------------------------------ the two calls

    def validate(self, new: NewRequest) -> None:
        """Refuse what can never be served: raises `BadRequest` or `DoesNotFit`; changes nothing, any thread."""
        check_request(new, self.config, self.manager)

    def schedule(self, now_ns: int, inbox: Sequence[InboxItem] = ()) -> Plan:
        """Take in what happened, let timers act, and plan the next step (its batch may be empty)."""
        assert len(self._outstanding) < self.config.max_outstanding_plans, "too many plans outstanding"
        self._set_time(now_ns)
        for item in inbox:
            self._take_in(item)
        self._news.run_timers()
        step_id, self._next_step = self._next_step, self._next_step + 1
        rows = self.scheduler.schedule(step_id)
        self._news.make_way()
        copies = self.scheduler.take_copies(step_id)
        encoder = self.scheduler.encoder
        self._outstanding.append((step_id, rows))
        return Plan(
            step_id=step_id,
            batch=self._batch(
                rows, copies, *((encoder.take_inputs(), encoder.cache.take_evicted()) if encoder else ())
            ),
            reads=self.consumer.take_reads(),
            writes=self.producer.writes.take_posts(),
            cancels=self.consumer.take_cancels() + self.producer.writes.take_cancels(),
            revoked=self.consumer.grants.withdrawn.revoked(),
            messages=self.consumer.take_messages(),
            replies=self.producer.announcements.take_replies(),
            keepalives=self.consumer.keepalives(),
            restart_mover=self._last_fence.take(),
            evict=self.consumer.grants.withdrawn.take_evicted(),
            next_deadline_ns=now_ns if self.scheduler.owes_a_step and not len(rows) else self.next_deadline_ns(),
            events=self._take_events(),
        )

    def complete(self, step_id: int, outputs: Outputs, now_ns: int) -> tuple[Event, ...]:
        """The oldest outstanding plan has run on the device; returns what follows from its tokens."""
        self._set_time(now_ns)
        expected, rows = self._outstanding.popleft()
        assert step_id == expected, f"plan {step_id} completed out of order; {expected} is the oldest outstanding"
        assert len(outputs.tokens) == len(rows), f"{len(outputs.tokens)} outputs for {len(rows)} rows"
        self.scheduler.complete(step_id, rows, outputs)
        return self._take_events()

    # ------------------------------------------------------------------------------------------------- quiet steps

    def quiet_steps(self, limit: int) -> int:
        """For how many steps (at most ``limit``) nothing can be decided, timers and new arrivals aside.

        Nobody is admitted, ends by length, or fails to get a block. The caller stops at ``next_deadline_ns`` himself,
        for only he knows how long steps take, and at the next thing he would put into the inbox.
        """
        return 0 if self._outstanding else stride.quiet_steps(self.scheduler, self.manager, self.config, limit)

    def advance(self, tokens: Int32Array, now_ns: int) -> None:
        """Take ``k`` quiet steps at once: ``tokens`` int32[k, running], sampled in that order; ends at ``now_ns``.

        Afterwards the state equals that of k times schedule and complete (no events are made). Raises
        ``AssertionError`` when k exceeds `quiet_steps` or a token is a stop token of its request.
        """
        self._set_time(now_ns)
        steps = len(tokens)
        assert steps <= self.quiet_steps(steps), "advance beyond the quiet steps"
        stride.advance(self.scheduler, self.manager, self.hash_function, tokens, self._next_step)
        self._next_step += steps
        self.scheduler.completed_step = self._next_step - 1

    def pause(self, state: PauseState) -> None:
        """Stop computing, or letting in who holds no memory yet, or go on, from the next ``schedule`` on.

        `Scheduler.num_unfinished` tells when all that goes on under a pause has ended (spec scheduler 3).
        """
        self.scheduler.pause(state)

    def reset_prefix_cache(self, now_ns: int, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached content (weights have changed, say); called with no plan outstanding.

        Returns False, and has done nothing, while anybody holds a block. ``reset_running_requests`` first preempts all
        that run, newest first, so that they resume in order, and lets go what is kept for next turns. Raises
        `BlocksInUse` when blocks are held even then: KV in flight, loaded, or leased (spec block-pool 2, scheduler 7).
        """
        assert not self._outstanding, "reset of the prefix cache while a plan is outstanding"
        self._set_time(now_ns)
        if reset_running_requests:
            self.scheduler.preempt_all()
            self.producer.drop_turns()
        done = self.manager.pool.reset_prefix_cache()
        if reset_running_requests and not done:
            held = ", ".join(f"{one.request_id} ({one.blocks}, {one.account})" for one in self.manager.holders())
            count = self.config.num_blocks - 1 - self.manager.pool.num_free
            raise BlocksInUse(
                f"the prefix cache cannot be reset: {count} blocks are still held, by {held}. "
                "Try again when these transfers and leases have ended"
            )
        return done

    def reset_encoder_cache(self) -> None:
        """Forget all outputs of the encoder (its weights have changed, say); who still needs some has them made anew.

        Called with no plan outstanding.
        """
        assert not self._outstanding, "reset of the encoder's cache while a plan is outstanding"
        if self.scheduler.encoder is not None:
            self.scheduler.encoder.cache.reset()

    # ----------------------------------------------------------------------------------------------------- looking

    def next_deadline_ns(self) -> int | None:
        """When the engine must be stepped again at the latest, for a lease, a load, a loaded request or a fence."""
        rules = (self.producer, self.consumer, self.scheduler)
        return min([time for rule in rules if (time := rule.next_deadline_ns()) is not None], default=None)

    def memory(self) -> MemoryView:
        """The ledger and every owner, now."""
        ledger = self.manager.pool.ledger
        return MemoryView(
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            accounts=ledger.as_dict(),
            peaks=ledger.peaks_as_dict(),
            holders=tuple(self.manager.holders()),
            awaiting=self.consumer.waits.views(),
        )

    def take_kv_events(self) -> tuple[KvEvent, ...]:
        """What entered and left the prefix cache since the last call; empty unless ``kv_events``."""
        events = self.manager.pool.events
        if not events:
            return ()
        self.manager.pool.events = []
        return tuple(events)

    def take_evictions(self) -> tuple[Eviction, ...]:
        """Times of sampled blocks whose life ended since the last call; empty unless ``kv_metrics_sample``."""
        residency = self.manager.pool.residency
        return residency.take() if residency is not None else ()

    def check(self) -> None:
        """Recount everything; raises ``AssertionError`` on any difference."""
        self.manager.check()
        self.scheduler.running.check()
        if self.scheduler.encoder is not None:
            self.scheduler.encoder.cache.check()
        self.check_queues()

    def queues(self) -> tuple[list[Request], ...]:
        """Who waits, who waits and holds memory, who runs, and all there are: each in order."""
        scheduler = self.scheduler
        return list(scheduler.waiting), list(scheduler.holding), list(scheduler.running), list(self.requests.values())

    def check_queues(self) -> None:
        """Each request stands in one queue, and who waits there holds no memory."""
        waiting = {request.request_id for request in self.scheduler.waiting}
        others = {request.request_id for request in (*self.scheduler.running, *self.scheduler.holding)}
        assert waiting | others == self.requests.keys(), "engine: queues and requests disagree"
        for request_id in self.manager.owners_among(waiting):
            assert self.manager.num_blocks_of(request_id) == 0, f"{request_id} waits and holds blocks"

    # ----------------------------------------------------------------------------------------------------- helpers

    def _set_time(self, now_ns: int) -> None:
        self._journal.now_ns = self.manager.now_ns = now_ns

    def _take_in(self, item: InboxItem) -> None:
        match item:
            case NewRequest():
                self._add(item)
            case Abort():
                request = self.requests.get(item.request_id)
                if request is not None and request.status is not Status.FINISHED:  # ended by an earlier item: no news
                    self.scheduler.finish(request, item.reason)
                    del self.requests[item.request_id]
                elif item.reason is FinishReason.ABORT:
                    self.producer.on_undelivered(item.request_id)
            case GrammarReady():
                request = self.requests.get(item.request_id)
                if request is not None and request.awaits_grammar and request.status is not Status.FINISHED:
                    self.scheduler.grammar_ready(request, item.error)
            case _:
                self._news.take_in(item)

    def _add(self, new: NewRequest) -> None:
        self.validate(new)
        assert new.request_id not in self.requests, f"request id {new.request_id} is in use"
        if new.produce and self.manager.leaves_last_token:
            short = len(new.prompt) == 1  # nothing that a consumer would not compute itself
            new = replace(new, produce=False) if short else replace(new, prompt=new.prompt[:-1])
        arrival_ns = new.arrival_ns
        if arrival_ns is None:  # requests taken in together keep their order
            arrival_ns = self._last_arrival_ns = max(self._journal.now_ns, self._last_arrival_ns + 1)
        request = Request(
            new, arrival_ns=arrival_ns, sequence=self._sequence, hash_tokens=self.config.sizes.hash_tokens
        )
        self._sequence += 1
        self.requests[new.request_id] = request
        self.scheduler.add(request)
        if new.source is not None and new.source.expires_ns is None:
            unlike = unlike_blocks(self.manager, new.source.grant.block_size)
            if unlike is not None:
                self.scheduler.offer_failed(request, f"the KV offered lies in {unlike}")

    def _take_events(self) -> tuple[Event, ...]:
        for request in self.scheduler.take_ended():
            if self.requests.get(request.request_id) is request:  # an aborted one may have a successor of that name
                del self.requests[request.request_id]
        return self._journal.take()

    def _batch(
        self,
        rows: PlanRows,
        copies: Int32Array,
        encode: tuple[EncoderInput, ...] = (),
        dropped: tuple[str, ...] = (),
    ) -> Batch:
        """The batch's arrays, all its own (those without entries are shared)."""
        if not len(rows) and not len(copies) and not encode and not dropped:
            return self._no_batch
        num_drafts = rows.num_drafts
        pending = rows.start + rows.tokens - num_drafts > rows.known
        tables = tuple(self.manager.growth.tables(rows.columns, group) for group in range(len(self.config.groups)))
        return Batch(
            request_ids=tuple([request.request_id for request in rows.requests]),
            num_scheduled=rows.tokens.astype(np.int32),
            num_computed=rows.start.astype(np.int32),
            tokens=_input_tokens(rows, num_drafts, pending),
            pending=pending,
            block_tables=tables[0],
            group_tables=tables,
            copies=copies,
            num_drafts=num_drafts,
            samples=rows.samples,
            replay_ends=_replay_ends(rows) if self._replays else _NO_REPLAYS,
            encode=encode,
            dropped=dropped,
        )


_NO_REPLAYS = np.empty(0, dtype=np.int32)


def _replay_ends(rows: PlanRows) -> Int32Array:
    """int32[n]: where what a row's request computes a second time ends; 0 where it has."""
    ends = np.fromiter((request.replay_end for request in rows.requests), dtype=np.int32, count=len(rows))
    return np.where(rows.start < ends, ends, 0).astype(np.int32)


def _no_batch(num_groups: int) -> Batch:
    """What a step computes in which nobody runs."""
    numbers, flags = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.bool_)
    table = np.empty((0, 0), dtype=np.int32)
    return Batch(
        request_ids=(), num_scheduled=numbers, num_computed=numbers, tokens=numbers, pending=flags,
        block_tables=table, group_tables=(table,) * num_groups, samples=flags,
    )  # fmt: skip


def _input_tokens(rows: PlanRows, num_drafts: Int32Array, pending: BoolArray) -> Int32Array:
    """int32[sum(rows.tokens)]: what all rows compute, one behind the other, 0 where a token is not known yet."""
    single = (rows.tokens == 1) & (rows.start >= rows.known - 1)
    newest = np.where(pending, 0, rows.last_token).astype(np.int32)
    if np.count_nonzero(single) == len(single):
        return newest
    ends = rows.tokens.cumsum()
    tokens = np.zeros(int(ends[-1]), dtype=np.int32)
    tokens[ends[single] - 1] = newest[single]
    for at in np.flatnonzero(~single).tolist():
        first, end = int(ends[at] - rows.tokens[at]), int(ends[at])
        known = rows.requests[at].tokens[rows.start[at] : rows.start[at] + rows.tokens[at]]
        tokens[first : first + len(known)] = known
        if num_drafts[at]:
            tokens[end - num_drafts[at] : end] = rows.drafts[at]
    return tokens
