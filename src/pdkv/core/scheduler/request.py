"""A request inside the engine: its tokens, how far its KV goes, and the one table of legal state changes."""

from __future__ import annotations

import enum

import numpy as np

from pdkv.core.blocks.extra_keys import ContentKeys
from pdkv.core.blocks.hashing import HashChain, HashFunction, extend_hashes
from pdkv.core.events import FinishReason
from pdkv.core.ports import Int32Array, NewRequest
from pdkv.core.scheduler.counters import Counter, Counters
from pdkv.core.transfer.messages import Awaited, RemoteSource
from pdkv.core.transfer.proof import bind

NO_DRAFTS: Int32Array = np.empty(0, dtype=np.int32)


class Status(enum.Enum):
    """Where a request is (spec scheduler section 2)."""

    WAITING = enum.auto()
    LOADING = enum.auto()  # WAITING_FOR_REMOTE_KVS: blocks held, KV in flight
    LOADED = enum.auto()  # KV arrived; waits for a running slot with its blocks held, until `loaded_deadline_ns`
    LOAD_FAILED = enum.auto()  # KV did not arrive; its blocks come back when it is next looked at
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


LEGAL: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.LOADING, Status.RUNNING, Status.FINISHED}),
    Status.LOADING: frozenset({Status.LOADED, Status.LOAD_FAILED, Status.FINISHED}),
    Status.LOAD_FAILED: frozenset({Status.WAITING, Status.FINISHED}),
    Status.LOADED: frozenset({Status.RUNNING, Status.PREEMPTED, Status.LOAD_FAILED, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.PREEMPTED, Status.FINISHED}),
    Status.PREEMPTED: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


class Request:
    """A request's tokens and progress.

    Its numbers (`Counters`) stand in a column of arrays, which it shares with the others while it runs; ``hashes`` are
    one per ``hash_tokens`` tokens, ``drafts`` int32[k] are to be checked in its next step. ``shared_boundary`` is where
    the prefix ends that others share and not every group has kept (`Hit.boundary`).
    """

    num_tokens = Counter()
    last_token = Counter()
    num_computed = Counter()
    placeholders = Counter()
    in_flight_tokens = Counter()
    last_step = Counter()

    def __init__(self, new: NewRequest, *, arrival_ns: int, sequence: int, hash_tokens: int) -> None:
        self.new = new
        self.request_id = new.request_id
        self.arrival_ns = arrival_ns
        self.sequence = sequence
        self.status = Status.WAITING
        self.num_prompt = len(new.prompt)
        room = min(new.max_tokens, self.num_prompt + 16)  # for outputs no longer than the prompt
        self._hold(np.empty(self.num_prompt + room, dtype=np.int32))
        self.counters, self.column = Counters(), 0
        self.append(new.prompt)
        self.shared_boundary = 0
        self.replay_end = 0  # tokens before this one that are computed again are so for replayed windows only
        self.drafts = NO_DRAFTS
        self.prefilling = False  # its newest chunk ended before its last known token
        self.skipped = False  # has been passed over since it last ran; kept up where prompts are paced
        self.gave_way = False  # stands behind all others, for the memory granted for it went to one of them
        self.num_preemptions = 0
        self.cached_tokens = 0
        self.hashes = HashChain()
        self.extra_keys = ContentKeys(cache_salt=new.cache_salt, lora=new.lora, multimodal=new.items)
        self.source: RemoteSource | None = new.source
        self.awaited: Awaited | None = new.awaited
        self.awaits_grammar = new.awaits_grammar
        self.look_for_hits = True  # while it waits for an announcement: what others have cached may do meanwhile
        if new.source is not None:
            self.source = bind(new.source, new.prompt)
        self.loaded_deadline_ns: int | None = None
        self.produces = new.produce  # its KV is to be kept; given up where that would have to wait for itself
        self.wait_cause = "queued"
        self._hash_tokens = hash_tokens

    @property
    def tokens(self) -> Int32Array:
        """int32[num_tokens]: prompt and output; a view, valid until the next append."""
        return self._buffer[: self.num_tokens]

    @property
    def num_outputs(self) -> int:
        """Tokens sampled so far."""
        return self.num_tokens - self.num_prompt

    @property
    def resumed(self) -> bool:
        """Was preempted and not admitted again since."""
        return self.status is Status.PREEMPTED

    def move_to(self, status: Status) -> None:
        """Change state; an illegal change is our own bug."""
        assert status in LEGAL[self.status], f"{self.request_id}: {self.status.name} -> {status.name} is not legal"
        self.status = status

    def move_counters(self, counters: Counters, column: int) -> None:
        """From now on its numbers are column ``column`` of ``counters``."""
        self.counters.copy_column(self.column, counters, column)
        self.counters, self.column = counters, column

    def leave_counters(self) -> None:
        """From now on its numbers are its own again."""
        self.counters, self.column = self.counters.alone(self.column), 0

    def append(self, tokens: Int32Array) -> None:
        """Add tokens, at least one."""
        start = self.num_tokens
        self.write(start, tokens)
        self.num_tokens, self.last_token = start + len(tokens), int(tokens[-1])

    def write(self, start: int, tokens: Int32Array) -> None:
        """``tokens`` stand from ``start`` on; that they are known is the caller's to count."""
        end = start + len(tokens)
        while end > len(self._buffer):
            self.widen()
        self._buffer[start:end] = tokens

    def widen(self) -> None:
        """Room for twice as many tokens as there was."""
        before = self._buffer
        self._hold(np.empty(2 * len(before), dtype=np.int32))
        self._buffer[: len(before)] = before

    def _hold(self, buffer: Int32Array) -> None:
        self._buffer = buffer  # the first num_tokens are set
        self.memory = buffer.data  # the same, of which a single entry is written faster; longer than num_tokens or full

    def extend_hashes(self, function: HashFunction) -> None:
        """Hash the units that have become full since the last call."""
        tokens = self.tokens
        if len(tokens) // self._hash_tokens > len(self.hashes):
            extend_hashes(self.hashes, tokens, self._hash_tokens, function, self.extra_keys)

    def end_tokens(self, max_tokens: int) -> int:
        """With how many tokens it ends by length: its own maximum, or ``max_tokens`` in all."""
        return min(self.num_prompt + self.new.max_tokens, max_tokens)

    def ended_by(self, token: int, max_tokens: int) -> FinishReason | None:
        """Whether the request ends with ``token``, just appended; it has at most ``max_tokens`` with its prompt."""
        if self.num_outputs >= self.new.min_tokens and token in self.new.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens >= self.end_tokens(max_tokens) else None

    def tokens_left(self, max_tokens: int, *, certain: bool = False) -> int:
        """Tokens until it has ``max_tokens`` in all or its own maximum, those being sampled counted as there.

        ``certain``: of those, count only what comes even if no draft is accepted.
        """
        known = self.num_tokens + (min(self.placeholders, 1) if certain else self.placeholders)
        return self.end_tokens(max_tokens) - known
