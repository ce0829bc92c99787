"""A running instance: the engine's thread, its executor, its pool and its side channel, started and stopped as one."""

from __future__ import annotations

import logging
import secrets
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdkv.core.engine import Engine
from pdkv.core.events import Event, Finished, FinishReason
from pdkv.core.ports import Abort, Batch, Decline, InboxItem, MemoryView, NewRequest, Outputs
from pdkv.core.transfer.messages import Awaited, RemoteSource
from pdkv.errors import BadRequest, PdkvError
from pdkv.runtime.control import Control
from pdkv.runtime.executor import Executor, StepResult
from pdkv.runtime.profiler import MemoryProfile
from pdkv.runtime.sampler import SamplingParams, TokenLogprobs
from pdkv.runtime.shown import quoted
from pdkv.runtime.transfer_stats import TransferStats
from pdkv.runtime.trouble_log import TroubleLog

log = logging.getLogger("pdkv.instance")

_TICK_S = 1.0  # an idle engine still steps this often, so that the control thread sees it alive
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceInfo:
    """Facts of a started instance that never change. Bytes are per rank (of ``tensor_parallel_size``); ``transport``
    is what moves KV.

    ``without_nixl`` says why that is not NIXL, where NIXL was tried and could not start. ``bidirectional``: answers are
    kept here for the next turn, and read where they were kept.
    """

    role: str
    engine_id: str
    model_name: str
    num_blocks: int
    bytes_per_block: int
    block_size: int
    tensor_parallel_size: int
    max_model_len: int
    transport: str
    side_channel_host: str
    side_channel_port: int
    memory_profile: MemoryProfile | None
    without_nixl: str | None = None
    bidirectional: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """What one step did to one request, in order; ``logprobs`` belong to the token sampled in it."""

    request_id: str
    events: tuple[Event, ...]
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """Gauges at one instant. ``waiting`` includes the loading ones, as vLLM counts."""

    running: int
    waiting: int
    loading: int
    transfer: TransferStats


Sink = Callable[[Update], None]


@dataclass(slots=True)
class _Served:
    sampling: SamplingParams
    sink: Sink


class Instance:
    """The engine loop on a thread of its own. Every public method may be called from any thread and returns at once."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        control: Control,
        info: InstanceInfo,
        *,
        on_events: Callable[[tuple[Event, ...]], None] | None = None,
        debug: bool = False,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.executor = executor
        self.control = control
        self.info = info
        self.failed: BaseException | None = None
        self._on_events = on_events
        self._debug = debug
        self._on_close = on_close
        self._inbox: deque[InboxItem] = deque()
        self._served: dict[str, _Served] = {}
        self._wake = threading.Condition()
        self._engine_lock = threading.Lock()
        self._last_step_ns = time.monotonic_ns()
        self._closing = False
        self._troubles = TroubleLog(log)
        self._thread = threading.Thread(target=self._run, name="pdkv-engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread (the control thread is running already)."""
        self._thread.start()

    # ----------------------------------------------------------------------------------------------- other threads

    @property
    def model(self) -> Any:
        """The loaded model (tokenizer, eos ids, vocabulary)."""
        return self.executor.model

    @property
    def last_step_ns(self) -> int:
        """When the engine last began a step."""
        return self._last_step_ns

    def submit(self, request: NewRequest, sampling: SamplingParams, sink: Sink) -> None:
        """Queue a request; ``sink`` gets its updates on the engine's thread, the last one with its `Finished`.

        Raises `BadRequest` or `DoesNotFit` for what can never be served, `PdkvError` when the instance has failed.
        """
        self._require_alive()
        sampling.validate()
        self.engine.validate(request)
        vocab = self.executor.model.vocab_size
        if int(request.prompt.min()) < 0 or int(request.prompt.max()) >= vocab:
            raise BadRequest(f"the prompt holds a token id outside 0..{vocab - 1}, the vocabulary of this model")
        with self._wake:
            self._require_alive()  # again: from now on `_end_all` finds it
            if request.request_id in self._served:
                raise BadRequest(f"request id {quoted(request.request_id)} is in use; give every request its own")
            self._served[request.request_id] = _Served(sampling, sink)
            self._inbox.append(request)
            self._wake.notify()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request; unknown and finished ones are ignored. Its sink still gets the one `Finished`."""
        self.deliver(Abort(request_id, reason))

    def release(self, offer: RemoteSource | Awaited) -> None:
        """Tell the producer that the grant that was offered, or promised, will not be used."""
        self.deliver(Decline(offer))

    def deliver(self, item: InboxItem) -> None:
        """Put something into the engine's inbox."""
        with self._wake:
            self._inbox.append(item)
            self._wake.notify()

    def fail(self, error: BaseException) -> None:
        """Serve nobody any more: everyone gets an error, `failed` says why. Called by the control thread."""
        with self._wake:
            self.failed = self.failed or error
            self._wake.notify()

    def memory(self) -> MemoryView:
        """The ledger and every owner of blocks, now."""
        with self._engine_lock:
            return self.engine.memory()

    def stats(self) -> Stats:
        """Queue lengths and transfer counters, now."""
        with self._engine_lock:
            scheduler = self.engine.scheduler
            waiting = len(scheduler.waiting) + len(scheduler.holding)
            loading = sum(1 for request in scheduler.holding if request.status.name == "LOADING")
            running = len(scheduler.running)
        return Stats(running, waiting, loading, self.control.stats())

    def close(self) -> None:
        """Stop both threads, the other ranks and the mover, end what is being served, give the memory back.

        Raises `FenceLost`, and keeps the memory, when something may still write to it.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)
        self.executor.close()
        try:
            self.control.close()
        finally:
            self._end_all("the instance was stopped")
        self._on_close()

    # ------------------------------------------------------------------------------------------- the engine's thread

    def _run(self) -> None:
        try:
            idle, deadline_ns = True, None
            while not self._closing and self.failed is None:
                inbox = self._drain(idle, deadline_ns)
                idle, deadline_ns = self._step(inbox)
        except BaseException as error:  # whatever it is, clients and /health must learn of it
            log.exception("the engine's thread failed")
            self.fail(error)
        if self.failed is not None:
            self._end_all(f"the engine failed: {self.failed!r}; see this instance's log")

    def _drain(self, idle: bool, deadline_ns: int | None) -> list[InboxItem]:
        """Everything that came in; an idle engine waits for something, for its next deadline, or for the next tick."""
        with self._wake:
            if idle and not self._inbox and not self._closing and self.failed is None:
                until_s = _TICK_S
                if deadline_ns is not None:
                    until_s = min(until_s, max((deadline_ns - time.monotonic_ns()) / 1e9, 0.0))
                self._wake.wait(until_s)
            inbox = list(self._inbox)
            self._inbox.clear()
        return inbox

    def _step(self, inbox: list[InboxItem]) -> tuple[bool, int | None]:
        for item in inbox:
            if isinstance(item, NewRequest):
                self._admit(item)
        self._last_step_ns = time.monotonic_ns()
        with self._engine_lock:
            plan = self.engine.schedule(self._last_step_ns, inbox)
        self.control.submit(plan)
        self._publish(plan.events, {})
        result = self._execute(plan.batch)
        with self._engine_lock:
            events = self.engine.complete(plan.step_id, result.outputs, time.monotonic_ns())
            if self._debug:
                self.engine.check()
        self._publish(events, result.logprobs)
        self._troubles.tick(self._last_step_ns)
        return len(plan.batch) == 0, plan.next_deadline_ns

    def _admit(self, request: NewRequest) -> None:
        served = self._served[request.request_id]
        self.executor.add_request(
            request.request_id,
            request.prompt,
            served.sampling,
            min_tokens=request.min_tokens,
            stop_token_ids=request.stop_token_ids,
        )

    def _execute(self, batch: Batch) -> StepResult:
        if len(batch) == 0:
            return StepResult(Outputs(np.zeros(0, dtype=np.int32)), {})
        return self.executor.execute(batch)

    def _publish(self, events: tuple[Event, ...], logprobs: dict[str, TokenLogprobs]) -> None:
        if not events:
            return
        self._troubles.take(events, time.monotonic_ns())
        if self._on_events is not None:
            try:
                self._on_events(events)
            except Exception:  # what counts events must not stop the tokens
                log.exception("the listener to events failed")
        by_request: dict[str, list[Event]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, own in by_request.items():
            served = self._served.get(request_id)
            if served is None:  # leases and fences outlive their requests
                continue
            if any(isinstance(event, Finished) for event in own):
                self.executor.remove_request(request_id)
                with self._wake:
                    del self._served[request_id]
            self._tell(served, Update(request_id, tuple(own), logprobs.get(request_id)))

    def _tell(self, served: _Served, update: Update) -> None:
        try:
            served.sink(update)
        except Exception:  # a front end's fault must not stop everybody else's tokens
            log.exception("the receiver of %s failed", quoted(update.request_id))

    def _end_all(self, error: str) -> None:
        """Everyone still served gets an outcome."""
        with self._wake:
            served, self._served = dict(self._served), {}
        self._tell_ended(served.items(), error)

    def _tell_ended(self, served: Iterable[tuple[str, _Served]], error: str) -> None:
        now_ns = time.monotonic_ns()
        for request_id, one in served:
            ended = Finished(
                request_id=request_id,
                at_ns=now_ns,
                reason=FinishReason.ERROR,
                prompt_tokens=0,
                output_tokens=0,
                cached_tokens=0,
                error=error,
            )
            self._tell(one, Update(request_id, (ended,)))

    def _require_alive(self) -> None:
        if self.failed is not None:
            raise PdkvError(f"this instance has failed ({self.failed!r}); restart it and see its log for the cause")
        if self._closing:
            raise PdkvError("this instance is stopping; send the request to another one")


def new_engine_id(role: str) -> str:
    """An id that no other start has had."""
    return f"{role}-{uuid.uuid4()}"


def new_boot_secret() -> tuple[int, bytes]:
    """(nonce, secret) of one start: a random non-zero 63-bit word and 32 random bytes."""
    return secrets.randbits(62) + 1, secrets.token_bytes(32)
