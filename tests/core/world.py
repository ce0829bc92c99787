"""A prefill and a decode engine in virtual time, with a network and a mover that break in every way allowed to them.

Block contents are tags (`helpers.Cache`): a READ copies tags block by block at random times, also long after it was
cancelled, until it ends or its mover is killed. So KV that was freed, overwritten or never written shows at once, as a
row that attends to a tag its tokens do not say.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tests.core.helpers import Cache, assert_all_free, reference_output

from pdkv.core.config import STRICT, VLLM, EngineConfig, TransferPolicy
from pdkv.core.engine import Engine, Identity
from pdkv.core.ports import (
    Abort,
    Event,
    Finished,
    FinishReason,
    FromPeer,
    Heartbeat,
    InboxItem,
    Keepalive,
    LeaseGrant,
    LoadFailed,
    MoverRestarted,
    NewRequest,
    Peer,
    PeerMessage,
    Plan,
    PostRead,
    ReadEnded,
    RemoteSource,
    TokenSampled,
)

MS = 1_000_000
BLOCK = 4
MAX_LEN = 40


@dataclass(frozen=True)
class Weather:
    """How bad it is; shares in 0..1 of what happens to messages, reads and requests."""

    drop: float
    duplicate: float
    max_delay_ms: int
    read_ms: int  # a READ takes up to so long
    late: float  # of the reads: many times longer than that, beyond lease and deadline
    fail: float
    hang: float  # never ends by itself, and still writes now and then
    abort: float
    crash: float  # chance per second that the mover dies by itself
    mute: float  # share of D lives whose heartbeats never arrive

    @classmethod
    def draw(cls, rng: np.random.Generator, *, may_hang: bool) -> Weather:
        """Any weather, calm to awful."""
        bad = float(rng.choice([0.0, 0.5, 1.0]))
        return cls(
            drop=0.4 * bad * rng.random(),
            duplicate=0.4 * bad * rng.random(),
            max_delay_ms=int(rng.choice([2, 50, 700])),
            read_ms=int(rng.choice([10, 200, 900])),
            late=0.3 * bad * rng.random(),
            fail=0.3 * bad * rng.random(),
            hang=0.4 * bad * rng.random() if may_hang else 0.0,
            abort=float(rng.choice([0.0, 0.2])),
            crash=0.3 * bad * rng.random(),
            mute=float(rng.random() < 0.3),
        )


@dataclass
class Read:
    """A READ that the control thread was given."""

    post: PostRead
    life: int  # of the mover it was handed to; -1 while it is queued
    ended: bool = False


@dataclass
class Leg:
    """What a client asked of one engine."""

    new: NewRequest
    tokens: list[int] = field(default_factory=list)
    outcome: Finished | None = None
    failures: list[str] = field(default_factory=list)


class Node:
    """One engine with its device, and everything that its plans asked for."""

    def __init__(self, world: World, name: str, config: EngineConfig) -> None:
        self.world, self.name = world, name
        self.slots = np.zeros((8, 2), dtype=np.uint64)
        identity = Identity(engine_id=name, nonce=int(world.rng.integers(1, 2**40)), secret=name.encode() * 16)
        self.engine = Engine(config, identity, self.slots)
        self.cache = Cache(config.num_blocks, config.block_size)
        self.inbox: list[InboxItem] = []
        self.queue: deque[Plan] = deque()
        self.legs: dict[str, Leg] = {}
        self.reads: dict[int, Read] = {}
        self.keepalives: tuple[Keepalive, ...] = ()
        self.mover_life = 0
        self.busy = False
        self.alarm = 0  # number of the latest wake-up call
        self.events: list[Event] = []

    def deliver(self, item: InboxItem) -> None:
        self.inbox.append(item)
        self.wake()

    def wake(self) -> None:
        if not self.busy:
            self.busy = True
            self.world.after(0, self.begin)

    def submit(self, new: NewRequest) -> None:
        assert new.request_id not in self.legs
        self.engine.validate(new)
        self.legs[new.request_id] = Leg(new)
        self.deliver(new)

    # -------------------------------------------------------------------------------------------------- the engine

    def begin(self) -> None:
        inbox, self.inbox = self.inbox, []
        for item in inbox:
            if isinstance(item, NewRequest):
                self.cache.add(item)
        plan = self.engine.schedule(self.world.now, inbox)
        self.engine.check()
        self.check_deadlines()
        self.queue.append(plan)
        if plan.restart_mover:
            self.kill_mover()
        for post in plan.reads:
            assert post.handle not in self.reads, "a handle used twice"
            self.reads[post.handle] = Read(post, -1)
            self.world.after(self.world.rng.integers(0, 3 * MS), self.hand_over, self.reads[post.handle])
        for handle in plan.cancels:
            self.cancel(self.reads[handle])
        for message in plan.messages:
            self.world.send(message.peer, message.message)
        self.keepalives = plan.keepalives
        self.took(plan.events)
        self.world.after(self.world.rng.integers(1, 20 * MS), self.end, plan)

    def end(self, plan: Plan) -> None:
        depth = self.engine.config.max_outstanding_plans
        while len(self.queue) >= depth or (self.queue and len(plan.batch) == 0):
            oldest = self.queue.popleft()
            outputs = self.cache.run(oldest.batch)
            self.took(self.engine.complete(oldest.step_id, outputs, self.world.now))
            if len(oldest.batch):
                self.engine.check()
        self.busy = False
        if self.inbox or len(plan.batch) or self.queue:
            self.wake()
            return
        self.alarm += 1
        deadline = self.engine.next_deadline_ns()
        tick = self.world.now + 1000 * MS if self.engine.requests else None
        at = min((time for time in (deadline, tick) if time is not None), default=None)
        if at is not None:
            self.world.after(max(at - self.world.now, 0), self.ring, self.alarm)

    def ring(self, alarm: int) -> None:
        if alarm == self.alarm:
            self.wake()

    def took(self, events: tuple[Event, ...]) -> None:
        self.events += events
        for event in events:
            leg = self.legs.get(event.request_id)
            if isinstance(event, TokenSampled):
                assert leg is not None
                assert leg.outcome is None, "a token after the end"
                leg.tokens.append(event.token)
            elif isinstance(event, LoadFailed):
                self.legs[event.request_id].failures.append(event.cause)
            elif isinstance(event, Finished):
                assert leg is not None
                assert leg.outcome is None, f"{event.request_id} finished twice"
                leg.outcome = event
                self.world.finished(self, leg)

    def check_deadlines(self) -> None:
        """Every owner of memory that has a deadline is gone soon after it (a killed mover takes a moment)."""
        for holder in self.engine.memory().holders:
            slack = 1500 * MS if holder.account == "quarantine" else 0
            if holder.deadline_ns is not None:
                assert holder.deadline_ns + slack > self.world.now, f"{self.name}: {holder} is overdue"

    # --------------------------------------------------------------------------------------------------- the mover

    def hand_over(self, read: Read) -> None:
        """The mover gets the READ: from now on it may write at any time until it ends or the mover is killed."""
        if read.ended:
            return
        rng, weather = self.world.rng, self.world.weather
        read.life = self.mover_life
        lasts = int(rng.integers(1, weather.read_ms + 1)) * MS
        if rng.random() < weather.late:
            lasts *= 20
        fate = rng.random()
        hangs = fate < weather.hang
        fails = not hangs and fate < weather.hang + weather.fail
        for remote, local in zip(read.post.remote_blocks.tolist(), read.post.local_blocks.tolist(), strict=True):
            if (hangs or fails) and rng.random() < 0.3:
                continue
            self.world.after(rng.integers(0, (12_000 * MS) if hangs else lasts), self.copy, read, remote, local)
        if not hangs:
            self.world.after(lasts, self.read_over, read, fails)

    def copy(self, read: Read, remote: int, local: int) -> None:
        if not read.ended and read.life == self.mover_life:
            self.cache.tags[local] = self.world.p.cache.tags[remote]

    def read_over(self, read: Read, fails: bool) -> None:
        if read.ended or read.life != self.mover_life:
            return
        nonce, lease_id = (int(word) for word in self.world.p.slots[read.post.source.slot])
        self.report(read, None if fails else (nonce, lease_id))

    def report(self, read: Read, slot: tuple[int, int] | None) -> None:
        read.ended = True
        error = "the transfer broke" if slot is None else None
        self.deliver(ReadEnded(handle=read.post.handle, slot=slot, moved_bytes=1, seconds=0.1, error=error))

    def cancel(self, read: Read) -> None:
        """A hint: some movers end soon, some go on as if nothing had been said."""
        if self.world.rng.random() < 0.5 and not read.ended:
            self.world.after(self.world.rng.integers(0, 200 * MS), self.cancelled, read)

    def cancelled(self, read: Read) -> None:
        if not read.ended and read.life in (-1, self.mover_life) and self.world.rng.random() < 0.7:
            self.report(read, None)

    def kill_mover(self) -> None:
        """Everything it had been handed is fenced; what was still queued goes to the next one."""
        fenced = [handle for handle, read in self.reads.items() if not read.ended and read.life == self.mover_life]
        for handle in fenced:
            self.reads[handle].ended = True
        self.mover_life += 1
        self.world.restarts += 1
        self.world.after(self.world.rng.integers(1, 300 * MS), self.deliver, MoverRestarted(tuple(fenced)))


class World:
    """``run`` plays ``requests`` requests to the end and asserts every invariant on the way."""

    def __init__(self, seed: int, requests: int = 30) -> None:
        self.rng = np.random.default_rng(seed)
        self.now = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self.restarts = 0
        policy = self.draw_policy()
        self.weather = Weather.draw(self.rng, may_hang=policy.bounded_waits)
        self.muted = self.rng.random() < self.weather.mute
        self.p = Node(self, "P", self.draw_config(policy, small=12))
        self.d = Node(self, "D", self.draw_config(policy, small=11))
        self.prompts: dict[str, NewRequest] = {}
        self.open = requests
        self._arrivals(requests)
        self.after(self.d.engine.config.lease_ns // 6, self.beat)
        self.after(100 * MS, self.maybe_crash)

    def draw_policy(self) -> TransferPolicy:
        policy = STRICT if self.rng.random() < 0.75 else VLLM
        return replace(policy, load_failure=str(self.rng.choice(["recompute", "recompute", "fail"])))

    def draw_config(self, policy: TransferPolicy, small: int) -> EngineConfig:
        rng = self.rng
        return EngineConfig(
            num_blocks=int(rng.integers(small, 2 * small)),
            block_size=BLOCK,
            max_model_len=MAX_LEN,
            max_num_seqs=int(rng.integers(1, 7)),
            max_num_batched_tokens=int(rng.choice([8, 24, 64])),
            watermark=float(rng.choice([0.0, 0.1])),
            enable_prefix_caching=bool(rng.random() < 0.8),
            priority_scheduling=bool(rng.random() < 0.2),
            max_outstanding_plans=int(rng.integers(1, 3)),
            transfer=policy,
            kv_load_timeout_ns=int(rng.choice([100, 3000])) * MS,
            fence_timeout_ns=1000 * MS,
            lease_ns=1200 * MS,
            max_leased_fraction=float(rng.choice([0.4, 0.8])),
        )

    def _arrivals(self, requests: int) -> None:
        families = [self.rng.integers(0, 50, 48, dtype=np.int32) for _ in range(3)]
        for number in range(requests):
            prompt = families[int(self.rng.integers(3))][: int(self.rng.integers(1, 31))].copy()
            if self.rng.random() < 0.6:
                prompt[int(self.rng.integers(len(prompt)))] = 60 + number
            new = NewRequest(
                request_id=f"r{number}",
                prompt=prompt,
                max_tokens=int(self.rng.integers(1, 9)),
                priority=int(self.rng.integers(0, 2)),
                cache_salt="salt" if self.rng.random() < 0.1 else None,
            )
            self.prompts[new.request_id] = new
            at = int(self.rng.integers(0, 2500 * MS))
            self.after(at, self.p.submit, replace(new, produce=True, max_tokens=1))
            if self.rng.random() < self.weather.abort:
                node = self.p if self.rng.random() < 0.3 else self.d
                reason = FinishReason.STOP if self.rng.random() < 0.2 else FinishReason.ABORT
                self.after(at + self.rng.integers(0, 3000 * MS), node.deliver, Abort(new.request_id, reason))

    # ------------------------------------------------------------------------------------------------ time and wire

    def after(self, delay_ns: int, action: Callable[..., None], *args: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + int(delay_ns), self._sequence, action, args))

    def send(self, peer: Peer, message: PeerMessage) -> None:
        """To P, perhaps: late, twice, in any order, or not at all."""
        assert peer.engine_id == "P"
        if self.rng.random() < self.weather.drop:
            return
        for _ in range(2 if self.rng.random() < self.weather.duplicate else 1):
            self.after(self.rng.integers(1, self.weather.max_delay_ms * MS), self._receive, message)

    def _receive(self, message: PeerMessage) -> None:
        self.p.deliver(FromPeer(message, self.now))

    def beat(self) -> None:
        """D's control thread: heartbeats do not wait for steps."""
        if not self.muted:
            for keepalive in self.d.keepalives:
                self.send(keepalive.peer, Heartbeat(keepalive.tokens))
        if self.open:
            self.after(self.d.engine.config.lease_ns // 6, self.beat)

    def maybe_crash(self) -> None:
        if self.rng.random() < self.weather.crash / 10:
            self.d.kill_mover()
        if self.open:
            self.after(100 * MS, self.maybe_crash)

    # ------------------------------------------------------------------------------------------------------ router

    def finished(self, node: Node, leg: Leg) -> None:
        """P's answer goes on to D; D's answer is the client's."""
        outcome, request_id = leg.outcome, leg.new.request_id
        assert outcome is not None
        if node is self.d or outcome.reason in (FinishReason.ABORT, FinishReason.ERROR):
            self.open -= 1
            return
        source = None if outcome.lease is None else self._source(request_id, outcome.lease)
        new = replace(self.prompts[request_id], source=source)
        delay = self.rng.integers(0, self.weather.max_delay_ms * MS)
        self.after(delay, self.d.submit, new)

    def _source(self, request_id: str, lease: LeaseGrant) -> RemoteSource:
        assert lease.num_tokens == len(self.prompts[request_id].prompt)
        return RemoteSource(
            peer=Peer("P", "127.0.0.1", 1),
            request_id=request_id,
            block_ids=lease.block_ids,
            num_tokens=lease.num_tokens,
            slot=lease.slot,
            nonce=lease.nonce,
            lease_id=lease.lease_id,
            token=lease.token,
            cached_tokens=lease.cached_tokens,
        )

    # ---------------------------------------------------------------------------------------------------- the play

    def run(self) -> None:
        """To the end of all requests, and then of all leases and fences."""
        while self._heap:
            self.now, _, action, args = heapq.heappop(self._heap)
            assert self.now < 600_000 * MS, f"stuck: {[r.wait_cause for r in self.d.engine.requests.values()]}"
            action(*args)
        assert self.open == 0, f"{self.open} requests never ended"
        for node in (self.p, self.d):
            assert not node.engine.requests
            assert_all_free(node.engine)
            for leg in node.legs.values():
                assert leg.outcome is not None
        assert not self.p.slots[:, 1].any(), "a slot is still armed"
        for leg in self.d.legs.values():
            self.judge(leg)

    def judge(self, leg: Leg) -> None:
        """The tokens are those of the prompt, and an error has a cause."""
        outcome = leg.outcome
        assert outcome is not None
        expected = reference_output(self.prompts[leg.new.request_id], MAX_LEN)
        assert leg.tokens == expected[: len(leg.tokens)], f"{leg.new.request_id}: wrong tokens"
        assert outcome.output_tokens == len(leg.tokens)
        if outcome.reason is FinishReason.LENGTH:
            assert leg.tokens == expected
        if outcome.reason is FinishReason.ERROR:
            assert self.d.engine.config.transfer.load_failure == "fail"
            assert leg.failures
            assert leg.failures[-1] in str(outcome.error)
