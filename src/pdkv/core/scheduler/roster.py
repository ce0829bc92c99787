"""Where every request of an instance is, and every way in which one leaves its place."""

from __future__ import annotations

from collections import deque

from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.events import Finished, FinishReason, LoadFailed, Preempted
from pdkv.core.journal import Journal
from pdkv.core.ledger import Account
from pdkv.core.scheduler.encoder import EncoderWork
from pdkv.core.scheduler.queues import FcfsQueue, PriorityQueue, WaitingQueue
from pdkv.core.scheduler.request import NO_DRAFTS, Request, Status
from pdkv.core.scheduler.running import RunningSet
from pdkv.core.transfer.consumer import Consumer
from pdkv.core.transfer.messages import Grant
from pdkv.core.transfer.producer import Producer

#: What leaves these accounts makes room without anybody's giving way.
_PASSING = (
    Account.RETAINED, Account.DRAFT, Account.RUNNING, Account.DEFERRED, Account.LOADING, Account.QUARANTINE,
)  # fmt: skip


class Roster:
    """The queues and the running set. What leaves them takes its blocks to their next account."""

    def __init__(
        self, config: EngineConfig, manager: KVCacheManager, producer: Producer, consumer: Consumer, journal: Journal
    ) -> None:
        self._config = config
        self._manager = manager
        self._producer = producer
        self._consumer = consumer
        self._journal = journal
        self.running = RunningSet(manager)
        self.waiting: WaitingQueue = PriorityQueue() if config.priority_scheduling else FcfsQueue()
        self.holding: deque[Request] = deque()  # waiting with blocks held (loading, loaded): always tried first
        self.completed_step = -1
        self.blocked_by: Request | None = None  # all that keeps the others out: it did not fit, and nothing ended since
        self.encoder: EncoderWork | None = None
        if config.encoder is not None:
            lookahead, begins = config.prefill_lookahead_tokens, config.transfer.frees_encoder
            self.encoder = EncoderWork(config.encoder, lookahead, begins_items=begins)
        self._deferred: deque[tuple[int, str]] = deque()  # (fence step, owner key)
        self._ended: list[Request] = []

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request in whatever state it is; every block it held goes to its next account."""
        lease: Grant | None = None
        status = request.status
        self.blocked_by = None  # its end may make room
        if status is not Status.RUNNING:
            (self.holding if request in self.holding else self.waiting).remove(request)
        if self._config.transfer.skipped_go_first:
            self._manager.drop_skipped(request)
        if status is Status.LOADING and self._consumer.is_loading(request):
            self._consumer.abandon(request, f"request ended ({reason.value}) while loading")
        else:
            if status is Status.RUNNING and self._keeps_kv(request, reason):
                lease = self._keep(request)
            if lease is None:
                self._let_go(request)
        if status is Status.RUNNING:
            self.running.remove(request)  # only now, for blocks that are gone need not be taken along
        self._consumer.forget(request)
        if self.encoder is not None:
            self.encoder.release(request)
        if lease is None and request.new.produce:
            self._producer.announcements.ended(request.new.transfer_id, f"the prefill ended ({error or reason.value})")
        kept = lease is not None and not request.produces
        request.move_to(Status.FINISHED)
        self._ended.append(request)
        self._journal.emit(
            Finished(
                request_id=request.request_id,
                at_ns=self._journal.now_ns,
                reason=reason,
                prompt_tokens=request.num_prompt,
                output_tokens=request.num_outputs,
                cached_tokens=request.cached_tokens,
                error=error,
                lease=lease,
                kept_until_ns=self._journal.now_ns + self._config.kept_ttl_ns if kept else None,
            )
        )

    def take_ended(self) -> list[Request]:
        """Requests that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _keeps_kv(self, request: Request, reason: FinishReason) -> bool:
        """A peer may only be given KV that is all there: prompt prefilled, and no plan left that still writes."""
        wanted = (request.produces or request.new.keep_turn) and reason in (FinishReason.STOP, FinishReason.LENGTH)
        return wanted and request.num_outputs > 0 and not self._in_flight(request)

    def _keep(self, request: Request) -> Grant | None:
        """Under a lease, or ``None`` where there can be none, or nobody wants it."""
        if not request.produces:
            return self._producer.keep_turn(request)
        return self._producer.grant(request) if self._producer.may_keep(request) else None

    def offer_failed(self, request: Request, cause: str) -> None:
        """The KV that a waiting request was promised will not come: it is computed here, or ends (by policy).

        A prefill for a peer was only offered the turn before, which it can do without whatever the policy. Whoever made
        the offer is told, who may be alive and only no peer for us.
        """
        self._consumer.forget(request)
        failed = LoadFailed(request_id=request.request_id, at_ns=self._journal.now_ns, handle=None, cause=cause)
        self._journal.emit(failed)
        if self._config.transfer.load_failure == "fail" and not request.new.produce:
            self.finish(request, FinishReason.ERROR, f"KV transfer failed: {cause}")
        else:
            request.wait_cause = f"KV transfer failed ({cause}); to be computed here"

    def load_ended(self, request: Request, failure: str | None) -> None:
        """A load is over: the request may run, starts afresh without it, or ends in error (as in `offer_failed`)."""
        if failure is None and request.num_computed:
            request.move_to(Status.LOADED)
            request.wait_cause = "loaded; waiting for a running slot"
        elif failure is not None and self._config.transfer.load_failure == "fail" and not request.new.produce:
            self.finish(request, FinishReason.ERROR, f"KV transfer failed: {failure}")
        else:
            self.start_over(request, f"KV transfer failed ({failure or 'bad blocks'}); to be computed here")

    def start_over(self, request: Request, cause: str) -> None:
        """Its load is good for nothing: it is to be computed, and its blocks come back, now or later by policy."""
        self._lose_load(request, cause)
        if self._config.transfer.failure_frees_at_once:
            self._leave_holding(request)
            self.waiting.put_back(request)
            self.blocked_by = None

    def put_off(self, request: Request, cause: str) -> None:
        """Its load, not begun, has given way: it waits on behind all others, so that one of them gets the memory."""
        self._lose_load(request, cause)
        self._leave_holding(request)
        self.waiting.append(request)
        request.gave_way = True

    def announced(self, request: Request) -> None:
        """Its KV is there. Who had stood back for others goes first now: a lease at its producer waits for it."""
        if request.gave_way:
            request.gave_way = False
            self.blocked_by = None
            self.waiting.remove(request)
            self.waiting.put_back(request)

    def _lose_load(self, request: Request, cause: str) -> None:
        request.num_computed = 0
        request.move_to(Status.LOAD_FAILED)
        request.loaded_deadline_ns = None
        request.wait_cause = cause

    def _leave_holding(self, request: Request) -> None:
        """It holds nothing any more; where it waits from now on is up to the caller."""
        self.holding.remove(request)
        self._start_afresh(request)

    def give_back_overdue(self) -> None:
        """Loaded requests that found no place in time: they wait on without memory, and hit what is still cached."""
        deadline_ns = self.next_deadline_ns()
        if deadline_ns is None or deadline_ns > self._journal.now_ns:
            return
        for request in reversed(tuple(self.holding)):  # the first is put back last, so that it stays the first
            if request.loaded_deadline_ns is not None and request.loaded_deadline_ns <= self._journal.now_ns:
                self._give_back_loaded(request, "loaded, but there was no place for it in time: its blocks went back")

    def _give_back_loaded(self, request: Request, cause: str) -> None:
        self.holding.remove(request)
        self._settle_loaded(request)
        self._take_blocks(request, cause)

    def break_loaded_up(self) -> bool:
        """The first loaded request lacks blocks: where only others like it hold any, the last one gives its own back.

        What windows need beyond a prompt is not reserved while it is loaded (spec scheduler 3.2), so they can keep each
        other out (strict: else they wait for their deadlines). Returns whether one did.
        """
        counts = self._manager.pool.ledger.counts
        if not self._config.transfer.bounded_waits or any(counts[account] for account in _PASSING):
            return False
        self._give_back_loaded(self.holding[-1], "loaded, but its blocks went to another loaded request")
        return True

    def next_deadline_ns(self) -> int | None:
        """When the next loaded request must have found a place."""
        if not self.holding:
            return None
        times = (request.loaded_deadline_ns for request in self.holding)
        return min((time for time in times if time is not None), default=None)

    def preempt_all(self) -> None:
        """Take the blocks of all that run, newest first: they stand in the waiting queue in the order of before."""
        self.blocked_by = None
        while self.running:
            self._preempt(self.running[-1])

    def _preempt(self, victim: Request) -> int:
        """Take its blocks and its place; returns how many tokens it had been given in this step."""
        given = int(self.running.scheduled[victim.column])
        if given:
            self._manager.forget_from(victim, victim.num_computed)
        self._take_blocks(victim, "preempted: its blocks went to another request")
        self.running.remove(victim)
        return given

    def _take_blocks(self, victim: Request, cause: str) -> None:
        """Take all blocks away; the request is computed again later, as far as its blocks cannot be hit."""
        self._manager.release(victim.request_id)
        if self.encoder is not None:
            self.encoder.release(victim)
        victim.move_to(Status.PREEMPTED)
        victim.wait_cause = cause
        self._journal.emit(
            Preempted(request_id=victim.request_id, at_ns=self._journal.now_ns, lost_tokens=victim.num_computed)
        )
        victim.num_computed = 0
        victim.drafts = NO_DRAFTS
        victim.num_preemptions += 1
        self.waiting.put_back(victim)

    def _let_go(self, request: Request) -> None:
        """Free the blocks, now or once the last plan that uses them has run."""
        if not self._in_flight(request):
            self._manager.release(request.request_id)
        elif self._manager.num_blocks_of(request.request_id):
            key = f"deferred:{request.request_id}:{request.sequence}"
            self._manager.rename(request.request_id, key)
            self._manager.move(key, Account.DEFERRED, f"freed; plan {request.last_step} may still use it")
            self._deferred.append((request.last_step, key))

    def _in_flight(self, request: Request) -> bool:
        return request.last_step > self.completed_step

    def _settle_loaded(self, request: Request) -> None:
        """Loaded blocks can be hit from now on; the last known token is recomputed, to sample from it."""
        self._manager.cache_blocks(request, request.num_computed)
        if request.num_computed == request.num_tokens:
            request.num_computed -= 1

    def _start_afresh(self, request: Request) -> None:
        """A failed load's blocks come back when the request is next looked at: from then on it is a fresh one."""
        self._manager.release(request.request_id)
        request.move_to(Status.WAITING)
