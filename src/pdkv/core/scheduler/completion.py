"""After the step: sampled tokens join their requests, what has become full is hashed, and some requests end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pdkv.core.blocks.hashing import HashFunction
from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.events import FinishReason, TokenSampled
from pdkv.core.journal import Journal
from pdkv.core.ports import Int32Array, Outputs
from pdkv.core.scheduler.request import Request
from pdkv.core.scheduler.running import Columns, PlanRows, RunningSet


class Completion:
    """Takes in what a plan's rows have sampled; ``finish`` ends a request.

    Without drafts each row has one token and all are taken together; rows whose drafts were checked are taken one by
    one, which comes to the same where there are none.
    """

    def __init__(
        self,
        config: EngineConfig,
        manager: KVCacheManager,
        running: RunningSet,
        journal: Journal,
        hash_function: HashFunction,
        finish: Callable[[Request, FinishReason], None],
    ) -> None:
        self._config = config
        self._manager = manager
        self._running = running
        self._journal = journal
        self._hash_function = hash_function
        self._finish = finish
        self._hash_tokens = config.sizes.hash_tokens
        self._asynchronous = config.max_outstanding_plans > 1

    def take(self, rows: PlanRows, outputs: Outputs) -> None:
        """``rows`` have been computed, with these ``outputs``."""
        if not len(rows):
            return
        sampled = self._running.settle(rows)
        if not len(sampled):
            return
        if self._config.speculation is not None:
            self._take_singly(rows, sampled, outputs)
            return
        requests = rows.requests if len(sampled) == len(rows) else [rows.requests[at] for at in sampled.tolist()]
        columns, tokens = rows.columns[sampled], outputs.tokens[sampled]
        self._running.append_tokens(requests, columns, tokens)
        if self._manager.pool.enable_caching:
            self._hash(requests, columns)
        self._tell(requests, columns, tokens)

    # ----------------------------------------------------------------------------------------------------- together

    def _hash(self, requests: Sequence[Request], columns: Columns) -> None:
        """Hash what has become full; register blocks that a plan filled before their tokens were known."""
        counters = self._running.counters
        full = counters.num_tokens[columns] % self._hash_tokens == 0
        for at in full.nonzero()[0].tolist():
            requests[at].extend_hashes(self._hash_function)
        if self._asynchronous:
            final = counters.num_computed[columns] - counters.placeholders[columns]
            for at in self._manager.growth.unregistered(columns, final):
                self._manager.cache_blocks(requests[at], int(final[at]))

    def _tell(self, requests: Sequence[Request], columns: Columns, tokens: Int32Array) -> None:
        """An event for each token; a request ends right behind its last one."""
        now_ns, told = self._journal.now_ns, 0
        events = [
            TokenSampled(request_id=request.request_id, at_ns=now_ns, token=token)
            for request, token in zip(requests, tokens.tolist(), strict=True)
        ]
        for at in self._running.may_end(columns, tokens).tolist():
            reason = requests[at].ended_by(events[at].token, self._manager.max_request_tokens)
            if reason is not None:
                self._journal.extend(events[told : at + 1])
                told = at + 1
                self._finish(requests[at], reason)
        self._journal.extend(events[told:])

    # -------------------------------------------------------------------------------------------------- with drafts

    def _take_singly(self, rows: PlanRows, sampled: Columns, outputs: Outputs) -> None:
        for at in sampled.tolist():
            request, drafts = rows.requests[at], rows.drafts[at]
            tokens = outputs.tokens[at : at + 1]
            if len(drafts):
                tokens = np.concatenate((tokens, outputs.more[at]))
                refused = 1 + len(drafts) - len(tokens)
                request.num_computed -= refused
                request.placeholders -= refused
            reason = self._append(request, tokens)
            if reason is not None:
                self._finish(request, reason)
            elif outputs.drafts and not self._asynchronous:
                request.drafts = outputs.drafts[at]

    def _append(self, request: Request, tokens: Int32Array) -> FinishReason | None:
        """The request's new tokens, as far as none of them ends it; the reason when one does."""
        reason: FinishReason | None = None
        for index, token in enumerate(tokens.tolist()):
            request.append(tokens[index : index + 1])
            request.placeholders -= 1
            self._journal.emit(TokenSampled(request_id=request.request_id, at_ns=self._journal.now_ns, token=token))
            reason = request.ended_by(token, self._manager.max_request_tokens)
            if reason is not None:
                break
        if self._manager.pool.enable_caching:
            request.extend_hashes(self._hash_function)
            if self._asynchronous:  # blocks that a plan filled before their tokens were known
                self._manager.cache_blocks(request, request.num_computed - request.placeholders)
        return reason
