"""One step: running requests first, then waiting ones (spec scheduler section 3)."""

from __future__ import annotations

from collections import deque

import numpy as np

from pdkv.core.blocks.hashing import HashFunction
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.events import Admitted, Finished, FinishReason, LoadFailed, Preempted
from pdkv.core.journal import Journal
from pdkv.core.ledger import Account
from pdkv.core.ports import Int32Array, Outputs
from pdkv.core.scheduler.admission import Admission, Admitter, Rows, Verdict, awaits, cap_chunk, fit_chunk
from pdkv.core.scheduler.completion import Completion
from pdkv.core.scheduler.preemption import choose_victim
from pdkv.core.scheduler.queues import FcfsQueue, PriorityQueue, WaitingQueue, priority_key
from pdkv.core.scheduler.request import NO_DRAFTS, Request, Status
from pdkv.core.scheduler.running import PlanRows, RunningSet
from pdkv.core.transfer.consumer import Consumer
from pdkv.core.transfer.messages import Grant
from pdkv.core.transfer.producer import Producer


class Scheduler:
    """Owns the queues and the order of things; blocks belong to the manager, transfers to producer and consumer."""

    def __init__(
        self,
        config: EngineConfig,
        manager: KVCacheManager,
        producer: Producer,
        consumer: Consumer,
        journal: Journal,
        hash_function: HashFunction,
    ) -> None:
        self._config = config
        self._manager = manager
        self._producer = producer
        self._consumer = consumer
        self._journal = journal
        self._hash = hash_function
        self._admitter = Admitter(config, manager, producer, consumer)
        self.running = RunningSet(manager)
        self._completion = Completion(config, manager, self.running, journal, hash_function, self.finish)
        self.waiting: WaitingQueue = PriorityQueue() if config.priority_scheduling else FcfsQueue()
        self.holding: deque[Request] = deque()  # waiting with blocks held (loading, loaded): always tried first
        self.completed_step = -1
        self.blocked_by: Request | None = None  # all that keeps the others out: it did not fit, and nothing ended since
        self.short_of_memory = False  # the last step preempted, or did not let in whom it looked at last
        self.owes_a_step = False  # the last step preempted, so nobody was admitted: the next one may, without any news
        self._deferred: deque[tuple[int, str]] = deque()  # (fence step, owner key)
        self._ended: list[Request] = []
        self._alone = False  # one request at most when this step began: nobody to leave a part of the budget to
        self._max_tokens = manager.max_request_tokens
        self._drafting_slots = config.speculation.drafting_slots if config.speculation else 0

    # --------------------------------------------------------------------------------------------------- one step

    def add(self, request: Request) -> None:
        """A new arrival."""
        if self._manager.pool.enable_caching:
            request.extend_hashes(self._hash)
        self._consumer.arrive(request)
        if request.new.produce:
            self._producer.announcements.expect(request)
        self.waiting.append(request)

    def schedule(self, step_id: int) -> PlanRows:
        """Rows of plan ``step_id``, in vLLM's order; their blocks are allocated."""
        self._manager.new_step()
        self._alone = len(self.running) + len(self.waiting) + len(self.holding) <= 1
        budget, preempted = self._schedule_running(self._config.max_num_batched_tokens)
        self.blocked_by = None
        self.owes_a_step = self.short_of_memory = preempted
        if not preempted:
            self._schedule_waiting(budget)
        rows = self.running.commit(step_id)
        if self._config.speculation is not None:
            self._commit_drafts(rows)
        return rows

    def _schedule_running(self, budget: int) -> tuple[int, bool]:
        """Returns what is left of ``budget``, and whether anybody was preempted.

        Requests that only decode are taken together, as far as they fit; the others each by itself.
        """
        running, index, any_preempted = self.running, 0, False
        slots, lookahead = self._drafting_slots, self._config.lookahead_tokens
        together = self._config.speculation is None
        while index < len(running) and budget > slots:
            count = running.decoding(index, budget) if together else 0
            if count:
                served = self._manager.grow_by_one(running, index, count)
                running.scheduled[running.columns[index : index + served]] = 1
                budget, index = budget - served, index + served
                if served == count:
                    continue
            request = running[index]
            tokens = min(self._wanted_tokens(request), budget - slots)
            tokens = fit_chunk(request, tokens, self._config, start=request.num_computed)
            if tokens <= 0:
                index += 1
                continue
            fits = True
            while self._manager.allocate_slots(request, tokens, lookahead_tokens=lookahead) is None:
                if self._producer.give_way():
                    continue
                victim = choose_victim(running, priority_scheduling=self._config.priority_scheduling)
                if self._in_flight(victim):
                    return budget, any_preempted  # its blocks cannot come back now: stall a step instead
                if running.index(victim) < index:
                    index -= 1
                given = self._preempt(victim)
                budget += given + slots if given else 0
                any_preempted = True
                if victim is request:
                    fits = False
                    break
            if not fits:
                break
            running.scheduled[request.column] = tokens
            budget -= tokens + slots
            index += 1
        return budget, any_preempted

    def _wanted_tokens(self, request: Request) -> int:
        """Tokens the request could compute now, capped by threshold and model length (not by the budget)."""
        if request.placeholders and (request.new.produce or self._tokens_left(request) <= 0):
            return 0
        tokens = request.num_tokens + len(request.drafts) + request.placeholders - request.num_computed
        tokens = cap_chunk(tokens, self._config, alone=self._alone)
        if self._manager.outgrown(request):
            tokens = min(tokens, self._config.sizes.scheduler_tokens)
        return min(tokens, self._max_tokens - 1 - request.num_computed)

    def _tokens_left(self, request: Request) -> int:
        """Tokens still to come for certain: drafts under way may all be refused."""
        return request.tokens_left(self._max_tokens, certain=self._config.speculation is not None)

    def _schedule_waiting(self, budget: int) -> None:
        rows, slots = self._rows_so_far(), self._drafting_slots
        skipped_holding: list[Request] = []
        skipped_waiting: list[Request] = []
        share_used_up = False
        while budget > slots and (self.holding or self.waiting):
            if len(self.running) >= self._config.max_num_seqs:
                break
            from_holding = bool(self.holding)
            if not from_holding:
                skipped_waiting += self.waiting.pop_while(self._admitter.passed_over if share_used_up else awaits)
                if not self.waiting:
                    break
            request = self.holding[0] if from_holding else self.waiting.head()
            if request.status is Status.LOADING:
                skipped_holding.append(self.holding.popleft())
                continue
            if request.status is Status.LOADED:
                self._settle_loaded(request)
            elif request.status is Status.LOAD_FAILED:
                self._start_afresh(request)
            admission = self._admitter.admit(
                request, budget - slots, self.running, (*self.holding, *skipped_holding), alone=self._alone, rows=rows
            )
            if admission.verdict is Verdict.STOP:
                self.blocked_by = None if skipped_waiting else request
                self.short_of_memory = True
                break
            _ = self.holding.popleft() if from_holding else self.waiting.pop()
            if admission.verdict is Verdict.SKIP:
                share_used_up = share_used_up or admission.share_used_up
                skipped_waiting.append(request)
            elif admission.verdict is Verdict.LOAD:
                self._start_load(request, admission)
                skipped_holding.append(request)
            else:
                self._start_running(request, admission)
                self.running.scheduled[request.column] = admission.tokens
                budget -= admission.tokens + slots
        self.holding.extendleft(reversed(skipped_holding))
        if self._config.priority_scheduling:
            self.holding = deque(sorted(self.holding, key=priority_key))
        self.waiting.put_all_back(skipped_waiting)

    def _rows_so_far(self) -> Rows:
        """Only asked for where drafts may be added to make rows alike."""
        if self._config.speculation is None:
            return Rows.MIXED
        chosen = [request for request in self.running if self.running.scheduled[request.column]]
        if not chosen:
            return Rows.NONE
        return Rows.MIXED if any(request.prefilling for request in chosen) else Rows.DECODE

    def _settle_loaded(self, request: Request) -> None:
        """Loaded blocks can be hit from now on; the last known token is recomputed, to sample from it."""
        self._manager.cache_blocks(request, request.num_computed)
        if request.num_computed == request.num_tokens:
            request.num_computed -= 1

    def _start_afresh(self, request: Request) -> None:
        """A failed load's blocks come back when the request is next looked at: from then on it is a fresh one."""
        self._manager.release(request.request_id)
        request.move_to(Status.WAITING)

    def _start_load(self, request: Request, admission: Admission) -> None:
        request.num_computed = admission.local_tokens + admission.external_tokens
        request.move_to(Status.LOADING)
        self._emit_admitted(request, admission)
        self._consumer.begin(request, admission.local_tokens, admission.external_tokens)

    def _start_running(self, request: Request, admission: Admission) -> None:
        request.num_computed += admission.local_tokens
        if request.status is not Status.LOADED:
            self._emit_admitted(request, admission)
            self._consumer.forget(request)
        else:
            self._manager.move(request.request_id, Account.RUNNING, "running")
        request.move_to(Status.RUNNING)
        request.drafts = np.full(admission.padding, -1, dtype=np.int32) if admission.padding else NO_DRAFTS
        self.running.append(request)

    def _emit_admitted(self, request: Request, admission: Admission) -> None:
        if not request.resumed:
            request.cached_tokens = admission.local_tokens
            if request.new.produce:  # what the turn before supplies is not computed here either
                request.cached_tokens += admission.external_tokens
            elif request.source is not None and admission.external_tokens:
                request.cached_tokens = max(request.cached_tokens, request.source.grant.cached_tokens)
        self._journal.emit(
            Admitted(
                request_id=request.request_id,
                at_ns=self._journal.now_ns,
                prompt_tokens=request.num_prompt,
                local_tokens=admission.local_tokens,
                external_tokens=admission.external_tokens,
                resumed=request.resumed,
            )
        )

    def _commit_drafts(self, rows: PlanRows) -> None:
        """Of each row's tokens the last may be drafts, to be checked: a placeholder more for each."""
        assert self._config.speculation is not None
        unknown = np.full(self._config.speculation.num_tokens, -1, dtype=np.int32)
        asynchronous = self._config.max_outstanding_plans > 1
        for request, beyond, samples in zip(rows.requests, rows.beyond.tolist(), rows.samples.tolist(), strict=True):
            drafts = request.drafts[: max(beyond, 0)]
            rows.drafts.append(drafts)
            request.prefilling = not samples
            request.placeholders += len(drafts)
            request.drafts = unknown if samples and asynchronous else NO_DRAFTS

    def take_copies(self, step_id: int) -> Int32Array:
        """int32[n, 2] (source, target): what plan ``step_id`` copies before it computes; both ends stay until then."""
        copies, owners = self._manager.take_copies()
        for owner in owners:
            if self._config.max_outstanding_plans > 1:
                self._deferred.append((step_id, owner))
            else:  # nothing is allocated before the plan has run
                self._manager.release(owner)
        return copies

    # -------------------------------------------------------------------------------------------- after the step

    def complete(self, step_id: int, rows: PlanRows, outputs: Outputs) -> None:
        """The plan has run: its fences pass, its tokens join their requests, and some of those end."""
        self.completed_step = step_id
        while self._deferred and self._deferred[0][0] <= step_id:
            self._manager.release(self._deferred.popleft()[1], joined=True)
            self.blocked_by = None
        self._completion.take(rows, outputs)

    # ------------------------------------------------------------------------------------------------ ways out

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
        if failure is None:
            request.move_to(Status.LOADED)
            request.wait_cause = "loaded; waiting for a running slot"
        elif self._config.transfer.load_failure == "fail" and not request.new.produce:
            self.finish(request, FinishReason.ERROR, f"KV transfer failed: {failure}")
        else:
            request.num_computed = 0
            request.move_to(Status.LOAD_FAILED)
            request.wait_cause = f"KV transfer failed ({failure}); to be computed here"
            if self._config.transfer.failure_frees_at_once:
                self.holding.remove(request)
                self._start_afresh(request)
                self.waiting.put_back(request)

    def put_off(self, request: Request, cause: str) -> None:
        """Its load, not begun, has given way: it waits on behind all others, so that one of them gets the memory."""
        self.holding.remove(request)
        request.num_computed = 0
        request.move_to(Status.LOAD_FAILED)
        self._start_afresh(request)
        request.wait_cause = cause
        self.waiting.append(request)

    def give_back_overdue(self) -> None:
        """Loaded requests that found no place in time: they wait on without memory, and hit what is still cached."""
        deadline_ns = self.next_deadline_ns()
        if deadline_ns is None or deadline_ns > self._journal.now_ns:
            return
        for request in reversed(tuple(self.holding)):  # the first is put back last, so that it stays the first
            if request.loaded_deadline_ns is None or request.loaded_deadline_ns > self._journal.now_ns:
                continue
            self.holding.remove(request)
            self._settle_loaded(request)
            self._take_blocks(request, "loaded, but there was no place for it in time: its blocks went back")

    def next_deadline_ns(self) -> int | None:
        """When the next loaded request must have found a place."""
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
