"""One step: running requests first, then waiting ones (spec scheduler section 3)."""

from __future__ import annotations

from collections import deque

import numpy as np

from pdkv.core.blocks.hashing import HashFunction
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.events import Admitted, FinishReason
from pdkv.core.journal import Journal
from pdkv.core.ledger import Account
from pdkv.core.ports import Int32Array, Outputs
from pdkv.core.scheduler.admission import Admission, Admitter, Verdict, awaits, fit_chunk
from pdkv.core.scheduler.bad_blocks import BadBlocks
from pdkv.core.scheduler.completion import Completion
from pdkv.core.scheduler.limits import (
    AdaptersOfStep,
    Budget,
    PauseState,
    PrefillPace,
    Rows,
    StepRules,
    long_prefill_threshold,
)
from pdkv.core.scheduler.preemption import choose_victim
from pdkv.core.scheduler.queues import priority_key
from pdkv.core.scheduler.request import NO_DRAFTS, Request, Status
from pdkv.core.scheduler.roster import Roster
from pdkv.core.scheduler.running import PlanRows
from pdkv.core.transfer.consumer import Consumer
from pdkv.core.transfer.producer import Producer
from pdkv.units import NS_PER_S


class Scheduler(Roster):
    """The order of things; blocks belong to the manager, transfers to producer and consumer."""

    def __init__(
        self,
        config: EngineConfig,
        manager: KVCacheManager,
        producer: Producer,
        consumer: Consumer,
        journal: Journal,
        hash_function: HashFunction,
    ) -> None:
        super().__init__(config, manager, producer, consumer, journal)
        self._hash = hash_function
        self._admitter = Admitter(config, manager, producer, consumer, self.encoder)
        self._completion = Completion(config, manager, self.running, journal, hash_function, self.finish)
        self.short_of_memory = False  # the last step preempted, or did not let in whom it looked at last
        self.owes_a_step = False  # the last step preempted, so nobody was admitted: the next one may, without any news
        self._bad_blocks = BadBlocks(config, manager, self)
        self.pace = PrefillPace(config.prefill_schedule_interval)
        self.pause_state = PauseState.UNPAUSED
        self._rules = StepRules(0)
        self._max_tokens = manager.max_request_tokens
        self._grammars: deque[tuple[int, Request]] = deque()  # (deadline, who waits for one), or has waited

    # --------------------------------------------------------------------------------------------------- one step

    def add(self, request: Request) -> None:
        """A new arrival."""
        if self._manager.pool.enable_caching:
            request.extend_hashes(self._hash)
        self._consumer.arrive(request)
        if request.new.produce:
            self._producer.announcements.expect(request)
        if request.awaits_grammar and self._config.transfer.bounded_waits:
            self._grammars.append((self._journal.now_ns + self._config.grammar_timeout_ns, request))
        self.waiting.append(request)

    def grammar_ready(self, request: Request, error: str | None) -> None:
        """The request waits for its grammar no more."""
        request.awaits_grammar = False
        if error is not None:
            self.finish(request, FinishReason.ERROR, f"its grammar cannot be compiled: {error}")

    def give_up_grammars(self) -> None:
        """Who has waited too long for its grammar ends: it waits without memory, but its producer keeps some for it."""
        while self._grammars:
            deadline_ns, request = self._grammars[0]
            waits = request.awaits_grammar and request.status is not Status.FINISHED
            if waits and deadline_ns > self._journal.now_ns:
                break
            self._grammars.popleft()
            if waits:
                seconds = self._config.grammar_timeout_ns // NS_PER_S
                self.finish(request, FinishReason.ERROR, f"its grammar was not compiled within {seconds} s")

    def next_deadline_ns(self) -> int | None:
        """When the next loaded request must have found a place, or the next grammar must be compiled."""
        deadline_ns = super().next_deadline_ns()
        if not self._grammars:
            return deadline_ns
        grammar_ns = self._grammars[0][0]
        return grammar_ns if deadline_ns is None else min(deadline_ns, grammar_ns)

    def pause(self, state: PauseState) -> None:
        """How much goes on from the next step on."""
        self.pause_state, self.blocked_by = state, None

    @property
    def admits_new(self) -> bool:
        """Whether a waiting request that holds nothing can come in."""
        return self.pause_state is PauseState.UNPAUSED

    @property
    def num_unfinished(self) -> int:
        """Requests that go on to their end under the pause there is."""
        if self.pause_state is PauseState.PAUSED_ALL:
            return 0
        return len(self.running) + len(self.holding) + (len(self.waiting) if self.admits_new else 0)

    def schedule(self, step_id: int) -> PlanRows:
        """Rows of plan ``step_id``, in vLLM's order; their blocks are allocated."""
        self._manager.new_step()
        threshold = 0
        if self._config.long_prefill_token_threshold:
            everyone = len(self.running) + len(self.waiting) + len(self.holding)
            threshold = long_prefill_threshold(self._config, everyone)
        paused = self.pause_state is PauseState.PAUSED_ALL
        self._rules = StepRules(threshold, self.pace.active and self.pace.next_step(self.running))
        budget = Budget(self._config, paused=paused)
        if self.encoder is not None:
            self.encoder.new_step()
        preempted = self._schedule_running(budget)
        self.blocked_by = None
        self.owes_a_step = self.short_of_memory = preempted
        if not preempted and not paused:
            self._schedule_waiting(budget)
        rows = self.running.commit(step_id)
        if self.encoder is not None and self.encoder.lacks_room and not len(rows):
            self._free_encoder()
        if self._config.speculation is not None:
            self._commit_drafts(rows)
        elif self.pace.active:
            for request, samples in zip(rows.requests, rows.samples.tolist(), strict=True):
                request.prefilling = not samples
        return rows

    def _schedule_running(self, budget: Budget) -> bool:
        """Gives of ``budget`` to those who run; returns whether anybody was preempted.

        Requests that only decode are taken together, as far as they fit; the others each by itself.
        """
        running, index, any_preempted = self.running, 0, False
        lookahead = self._config.lookahead_tokens
        together = self._config.speculation is None
        while index < len(running) and (left := budget.left) > 0:
            count = running.decoding(index, left) if together else 0
            if count and self._rules.decode_only:  # a prompt's last token looks like a decode
                count = self._before_prefill(index, count)
            if count:
                served = self._manager.grow_by_one(running, index, count)
                running.scheduled[running.columns[index : index + served]] = 1
                budget.take(served, served)
                index += served
                if served == count:
                    continue
            request = running[index]
            tokens = min(self._wanted_tokens(request), budget.left)
            start = request.num_computed
            tokens, share = fit_chunk(request, tokens, self._config, start=start, encoder=self.encoder)
            if tokens <= 0:
                index += 1
                continue
            fits = True
            while self._manager.allocate_slots(request, tokens, lookahead_tokens=lookahead) is None:
                if self._producer.give_way():
                    continue
                victim = choose_victim(running, priority_scheduling=self._config.priority_scheduling)
                if self._in_flight(victim):
                    return any_preempted  # its blocks cannot come back now: stall a step instead
                if running.index(victim) < index:
                    index -= 1
                given = self._preempt(victim)
                if given:
                    budget.give_back(given)
                any_preempted = True
                if victim is request:
                    fits = False
                    break
            if not fits:
                break
            running.scheduled[request.column] = tokens
            budget.take(tokens)
            if share is not None and self.encoder is not None:
                self.encoder.take(request, share)
            index += 1
        return any_preempted

    def _free_encoder(self) -> None:
        """Nobody computes anything, for each needs room in the encoder's cache that the others hold: one keeps it.

        A drafter reads ahead, so a request may hold one item until it has computed a part of the next one.
        """
        if not self._config.transfer.frees_encoder or any(map(self._in_flight, self.running)):
            return
        holders = [one for one in self.running if self.encoder is not None and self.encoder.cache.holds(one)]
        while len(holders) > 1:
            victim = choose_victim(holders, priority_scheduling=self._config.priority_scheduling)
            holders.remove(victim)
            self._preempt(victim)
            self.owes_a_step, self.blocked_by = True, None

    def _before_prefill(self, first: int, count: int) -> int:
        """How many of ``count`` running requests from number ``first`` on stand before one that computes its prompt."""
        requests = self.running[first : first + count]
        return next((at for at, request in enumerate(requests) if request.prefilling), count)

    def _wanted_tokens(self, request: Request) -> int:
        """Tokens the request could compute now, capped by threshold and model length (not by the budget)."""
        if request.placeholders and (request.new.produce or self._tokens_left(request) <= 0):
            return 0
        if self._rules.decode_only and request.prefilling:
            return 0
        tokens = request.num_tokens + len(request.drafts) + request.placeholders - request.num_computed
        tokens = self._rules.cap(tokens)
        if self._manager.outgrown(request):
            tokens = min(tokens, self._config.sizes.scheduler_tokens)
        return min(tokens, self._max_tokens - 1 - request.num_computed)

    def _tokens_left(self, request: Request) -> int:
        """Tokens still to come for certain: drafts under way may all be refused."""
        return request.tokens_left(self._max_tokens, certain=self._config.speculation is not None)

    def _schedule_waiting(self, budget: Budget) -> None:
        rows, adapters = self._rows_so_far(), None
        if self._config.max_loras is not None:
            every = self._config.transfer.counts_all_adapters
            adapters = AdaptersOfStep(self._config.max_loras, self.running, every=every)
        skipped_holding: list[Request] = []
        skipped_waiting: list[Request] = []
        share_used_up = False
        while (left := budget.left) > 0 and (self.holding or (self.waiting and self.admits_new)):
            if len(self.running) >= self._config.active_limit:
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
            if adapters is not None and not adapters.takes(request):
                request.wait_cause = "as many adapters as fit one step (max_loras) are in use"
                if from_holding:
                    skipped_holding.append(self.holding.popleft())
                else:
                    skipped_waiting.append(self.waiting.pop())
                continue
            others = (*self.holding, *skipped_holding)
            admission = self._admitter.admit(request, left, self.running, others, rules=self._rules, rows=rows)
            if request.produces and (admission.lacks_memory or admission.share_used_up) and not self.running:
                self._producer.make_way_for(request)
            if admission.verdict is Verdict.LATER:
                break
            if admission.verdict is Verdict.STOP:
                self.blocked_by = None if skipped_waiting else request
                self.short_of_memory = admission.lacks_memory
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
                if adapters is not None:
                    adapters.add(request)
                self.running.scheduled[request.column] = admission.tokens
                if self.encoder is not None:
                    share = admission.share or self.encoder.nothing()
                    self.encoder.take(request, share, request.new.encoder_tokens)
                budget.take(admission.tokens)
        self.holding.extendleft(reversed(skipped_holding))
        if self._config.priority_scheduling:
            self.holding = deque(sorted(self.holding, key=priority_key))
        self.waiting.put_all_back(skipped_waiting)
        if self.short_of_memory and self.holding and self.holding[0].status is Status.LOADED and self.break_loaded_up():
            self.owes_a_step, self.blocked_by = True, None
        if self.pace.active:
            for request in (*skipped_holding, *skipped_waiting):
                request.skipped = True
            if not self._rules.decode_only:
                self.pace.let_in((*self.holding, *self.waiting))

    def _rows_so_far(self) -> Rows:
        """Only asked for where drafts may be added to make rows alike."""
        if self._config.speculation is None:
            return Rows.MIXED
        chosen = [request for request in self.running if self.running.scheduled[request.column]]
        if not chosen:
            return Rows.NONE
        return Rows.MIXED if any(request.prefilling for request in chosen) else Rows.DECODE

    def _start_load(self, request: Request, admission: Admission) -> None:
        request.num_computed = admission.local_tokens + admission.external_tokens
        request.move_to(Status.LOADING)
        self._emit_admitted(request, admission)
        self._consumer.begin(request, admission.local_tokens, admission.external_tokens)

    def _start_running(self, request: Request, admission: Admission) -> None:
        request.num_computed += admission.local_tokens - admission.replay
        if request.status is not Status.LOADED:
            self._emit_admitted(request, admission)
            self._consumer.forget(request)
        else:
            self._manager.move(request.request_id, Account.RUNNING, "running")
        request.move_to(Status.RUNNING)
        request.skipped = False
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
        failed = self._bad_blocks.take(outputs.invalid_blocks, rows) if outputs.invalid_blocks else ()
        if self.encoder is not None and self.encoder.cache:
            self._pass_items(rows, outputs)
        self._completion.take(rows, outputs)
        for request in failed:
            self.finish(request, FinishReason.ERROR, "KV transfer failed: some of its blocks did not arrive")
        if self.encoder is not None:
            for request, error in self.encoder.take_confused():
                if request.status is not Status.FINISHED:
                    self.finish(request, FinishReason.ERROR, error)
        if self.pace.active and not self.num_unfinished:
            self.pace.idle()

    def _pass_items(self, rows: PlanRows, outputs: Outputs) -> None:
        """Items in front of what is computed for good are needed no more (before that is known of this plan's tokens).

        Without plans outstanding that is what the plan has computed; else nothing that is being sampled counts.
        """
        assert self.encoder is not None
        present = (self.running.sequence[rows.columns] == rows.sequence).tolist()
        for at, request in enumerate(rows.requests):
            if not present[at] or not self.encoder.cache.holds(request):
                continue
            if self._config.max_outstanding_plans > 1:
                unsure = request.placeholders
            else:
                unsure = len(rows.drafts[at]) - len(outputs.more[at]) if rows.drafts and len(rows.drafts[at]) else 0
            self.encoder.passed(request, request.num_computed - unsure)
