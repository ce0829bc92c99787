"""What P answers to those who grant it memory, and when: the real core over a simulated mover, shared memory and NIXL.

D is played by the test, which says what an engine would (or should not), and sees its memory.
"""

from __future__ import annotations

import itertools
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.core.write_pair import accounts
from tests.nixl_here import needs_nixl
from tests.transfer.producers import calm_world, started
from tests.transfer.sides import BLOCKS, RealSide, Side, SimulatedSide, run

from pdkv.core.config import EngineConfig
from pdkv.core.engine import Engine
from pdkv.core.events import Event, LeaseReleased, WriteFinished
from pdkv.core.ports import FromProducer, Keepalive, NewRequest, Outputs, PostWrite, SendMessage
from pdkv.core.transfer.messages import (
    CancelGrant,
    Fenced,
    Noted,
    NotWritten,
    OfGrant,
    RegisterWrite,
    ToProducer,
    WriteGrant,
    Written,
)
from pdkv.core.transfer.proof import digest_tokens
from pdkv.simulate.weather import MS

TRIES = 20
LEASE_NS = 400 * MS
_MOST_S = 20.0
_ids = itertools.count(1)
Answer = Noted | Written | NotWritten | Fenced


class EngineP(ABC):
    """P: a real engine on ``side``. ``writes`` are the WRITEs it has posted, ``events`` what it says of itself."""

    side: Side
    engine: Engine
    block_size: int

    def __init__(self) -> None:
        self.writes: list[PostWrite] = []
        self.events: list[Event] = []

    @abstractmethod
    def take(self, new: NewRequest) -> None:
        """A request."""

    @abstractmethod
    def pump(self) -> None:
        """Let it work for a moment."""

    @abstractmethod
    def skip(self, duration_ns: int) -> None:
        """So much of its time goes by."""


class RealP(EngineP):
    """Its "KV" is what the pool is full of, its steps take no time."""

    block_size = 1

    def __init__(self, side: RealSide) -> None:
        super().__init__()
        self.side = side
        config = EngineConfig(
            num_blocks=BLOCKS, block_size=1, max_model_len=BLOCKS, max_num_seqs=8, max_num_batched_tokens=BLOCKS,
            max_leased_fraction=1.0, lease_ns=30 * 10**9, enable_prefix_caching=False,
        )  # fmt: skip
        self.engine = Engine(config, side.identity, side.slots)
        self._new: list[NewRequest] = []
        self._ahead_ns = 0

    def take(self, new: NewRequest) -> None:
        self._new.append(new)

    def pump(self) -> None:
        inbox: list[Any] = [*self._new]
        self._new.clear()
        while not self.side.half.inbox.empty():  # type: ignore[attr-defined]
            inbox.append(self.side.half.inbox.get())  # type: ignore[attr-defined]
        now_ns = time.monotonic_ns() + self._ahead_ns
        plan = self.engine.schedule(now_ns, inbox)
        self.side.submit(plan)
        self.writes += plan.writes
        outputs = Outputs(tokens=np.zeros(len(plan.batch), np.int32))
        self.events += (*plan.events, *self.engine.complete(plan.step_id, outputs, now_ns))
        self.engine.check()

    def skip(self, duration_ns: int) -> None:
        self._ahead_ns += max(duration_ns, self.engine.config.lease_ns)


class SimulatedP(EngineP):
    """It steps by itself, in virtual time."""

    def __init__(self, side: SimulatedSide) -> None:
        super().__init__()
        self.side, self.engine, self.block_size = side, side.life.engine, side.block_size
        life, do, tell = side.life, side.life._do, side.life._tell

        def noted(plan: Any) -> None:
            self.writes += plan.writes
            do(plan)

        def told(events: tuple[Event, ...]) -> None:
            self.events += events
            tell(events)

        life._do, life._tell = noted, told  # type: ignore[method-assign]

    def take(self, new: NewRequest) -> None:
        self.side.life.deliver(new)  # type: ignore[attr-defined]

    def pump(self) -> None:
        run(self.side.world, MS)  # type: ignore[attr-defined]

    def skip(self, duration_ns: int) -> None:
        run(self.side.world, duration_ns)  # type: ignore[attr-defined]


@dataclass
class Talk:
    """P, and D as the test plays it."""

    p: EngineP
    d: Side
    heard: list[OfGrant] = field(default_factory=list)

    def prompt(self, blocks: int) -> Any:
        """Nobody has seen it; so many blocks of KV."""
        return np.array([secrets.randbelow(900) for _ in range(blocks * self.p.block_size)], np.int32)

    def grant(self, prompt: Any, *, slot: int = 5) -> WriteGrant:
        """D's first blocks but block 0, for all of ``prompt``."""
        blocks = tuple(range(1, 1 + len(prompt) // self.p.block_size))
        grant = self.d.write_grant(blocks, grant_id=next(_ids), slot=slot)
        return msgspec.structs.replace(
            grant, num_tokens=len(prompt), prompt_digest=digest_tokens(prompt), first_token=0
        )

    def prefill(self, prompt: Any, transfer_id: str) -> None:
        """P's leg."""
        self.p.take(
            NewRequest(request_id=transfer_id, prompt=prompt, max_tokens=1, produce=True, transfer_id=transfer_id)
        )

    def say(self, message: ToProducer) -> None:
        """D tells P."""
        peer = self.p.side.peer
        if isinstance(self.d, SimulatedSide) and isinstance(message, CancelGrant):
            self.d.life._asked[message.grant_id] = peer  # its registration got lost: the answer is for D all the same
        self.d.say(messages=(SendMessage(peer, message),), keepalives=(Keepalive(peer, (), awaited=True),))

    def register(self, grant: WriteGrant, transfer_id: str) -> None:
        """Once."""
        peer = self.p.side.peer
        self.say(
            RegisterWrite(
                transfer_id=transfer_id, producer=peer.engine_id, consumer=self.d.peer, grant=grant, epoch=self.d.epoch
            )
        )

    def cancel(self, grant: WriteGrant, transfer_id: str) -> None:
        """Once."""
        self.say(CancelGrant(transfer_id, grant.nonce, grant.grant_id))

    def hear(self, *kinds: type[Answer]) -> Answer:
        """The next answer, which is one of these. That a registration has arrived is told at any time."""
        until = time.monotonic() + _MOST_S
        while True:
            assert time.monotonic() < until, "P does not answer"
            self.p.pump()
            self.heard += [one.message for one in self.d.taken() if isinstance(one, FromProducer)]
            while self.heard:
                answer = self.heard.pop(0)
                if isinstance(answer, kinds):
                    return answer
                assert isinstance(answer, Noted), answer
            self.d.pause(0)

    def until(self, condition: Any) -> None:
        """P works until then."""
        until = time.monotonic() + _MOST_S
        while not condition():
            assert time.monotonic() < until
            self.p.pump()
            self.d.pause(0)

    def free(self) -> bool:
        """Whether nobody holds a block of P's."""
        return accounts(self.p.engine) == {}

    def check_arrived(self, post: PostWrite) -> None:
        """What P has posted is in D's memory, and nothing else."""
        remote, local = post.remote_blocks.tolist(), post.local_blocks.tolist()
        assert np.array_equal(self.d.blocks[remote], self.p.side.blocks[local])
        assert not self.d.blocks[np.setdiff1d(np.arange(BLOCKS), remote)].any()

    def check_untouched(self) -> None:
        """Nothing is written any more, also when P's mover goes on to something else."""
        self.d.blocks[:] = 0
        prompt, name = self.prompt(2), secrets.token_hex(16)
        grant = self.grant(prompt, slot=9)
        self.prefill(prompt, name)
        self.register(grant, name)
        self.hear(Written)
        self.d.blocks[list(grant.block_ids)] = 0
        assert not self.d.blocks.any()
        self.p.writes.pop()


@contextmanager
def simulated(seed: int, *, shared_memory: bool) -> Iterator[Talk]:
    tokens = 4 * BLOCKS
    settings = {
        "max_model_len": tokens, "max_num_batched_tokens": tokens, "max_leased_fraction": 1.0, "lease_ns": LEASE_NS,
        "enable_prefix_caching": False,
    }  # fmt: skip
    world = calm_world(seed, shared_memory=shared_memory, **settings)
    d, p = started(world, "D", 1), started(world, "P", 2, heard=False)
    yield Talk(SimulatedP(p), d)


@contextmanager
def real(transport: str, mover: str) -> Iterator[Talk]:
    p, d = RealSide("P", transport, mover), RealSide("D", transport, "process" if transport == "nixl" else "thread")
    try:
        p.fill()
        yield Talk(RealP(p), d)
    finally:
        d.close()
        p.close()


KINDS = [
    *(
        pytest.param(lambda s=seed, m=shared: simulated(s, shared_memory=m), id=f"simulated-{name}-{seed}")
        for seed in range(2)
        for shared, name in ((True, "shm"), (False, "nixl"))
    ),
    pytest.param(lambda: real("shm", "thread"), id="shm"),
    pytest.param(lambda: real("nixl", "thread"), id="nixl", marks=needs_nixl),
]


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest) -> Iterator[Talk]:
    with request.param() as talk:
        yield talk


@pytest.fixture
def talk(shared: Talk) -> Iterator[Talk]:
    """Of all tests; D's memory is empty. Afterwards P holds nothing and has nothing more to say."""
    shared.d.blocks[:] = 0
    shared.p.writes.clear()
    shared.p.events.clear()
    yield shared
    shared.until(shared.free)
    told = [*shared.heard, *(one.message for one in shared.d.pending() if isinstance(one, FromProducer))]
    assert all(isinstance(one, Noted | Fenced) for one in told)
    shared.heard.clear()


@pytest.mark.parametrize("first", ["prefill", "registration"])
def test_prefill_and_registration_in_either_order(talk: Talk, first: str) -> None:
    prompt, name = talk.prompt(20), secrets.token_hex(16)
    grant = talk.grant(prompt)
    if first == "prefill":
        talk.prefill(prompt, name)
        talk.until(lambda: accounts(talk.p.engine) == {"retained": 20})
        talk.register(grant, name)
    else:
        talk.register(grant, name)
        assert talk.hear(Noted) == Noted(grant.nonce, grant.grant_id, False)
        talk.prefill(prompt, name)
    assert talk.hear(Noted) == Noted(grant.nonce, grant.grant_id, True)
    assert talk.hear(Written) == Written(grant.nonce, grant.grant_id, 20 * talk.d.block_bytes)
    (post,) = talk.p.writes
    talk.check_arrived(post)


def test_a_grant_is_served_once_and_every_late_word_is_answered(talk: Talk) -> None:
    """Registrations and cancellations that come late, and twice: nothing is written again, and what was, still is."""
    prompt, name = talk.prompt(3), secrets.token_hex(16)
    grant = talk.grant(prompt)
    talk.prefill(prompt, name)
    talk.register(grant, name)
    written = talk.hear(Written)
    talk.d.blocks[:] = 0
    for _ in range(2):
        talk.register(grant, name)
        assert talk.hear(Written) == written
    for _ in range(2):
        talk.cancel(grant, name)
        assert talk.hear(Written) == written
    talk.register(grant, name)
    talk.hear(Written)
    assert len(talk.p.writes) == 1
    talk.check_untouched()


def test_a_grant_that_was_cancelled_before_it_was_known_is_never_served(talk: Talk) -> None:
    """The registration is overtaken by its cancellation; another grant under the same id is served."""
    prompt, name = talk.prompt(3), secrets.token_hex(16)
    grant = talk.grant(prompt)
    talk.cancel(grant, name)
    assert talk.hear(Fenced) == Fenced(grant.nonce, grant.grant_id)
    talk.register(grant, name)
    talk.hear(Fenced)
    talk.prefill(prompt, name)
    talk.until(lambda: accounts(talk.p.engine) == {"retained": 3})
    talk.register(grant, name)
    talk.hear(Fenced)
    assert talk.p.writes == []
    assert not talk.d.blocks.any()
    talk.register(talk.grant(prompt, slot=6), name)
    talk.hear(Written)


def test_a_cancelled_write_is_fenced_when_not_a_byte_comes_any_more(talk: Talk) -> None:
    """D uses the memory for something else at once. The KV itself is still wanted: its lease goes on."""
    for _ in range(TRIES):
        prompt, name = talk.prompt(BLOCKS - 10), secrets.token_hex(16)
        grant = talk.grant(prompt)
        talk.prefill(prompt, name)
        talk.register(grant, name)
        talk.until(talk.d.arrived)
        talk.cancel(grant, name)
        cut_off = isinstance(talk.hear(Written, Fenced), Fenced)  # either says that nothing is under way
        reused = talk.d.blocks.copy()
        talk.p.pump()
        assert np.array_equal(talk.d.blocks, reused)
        expired = any(isinstance(event, LeaseReleased) and event.expired for event in talk.p.events)
        if cut_off and not expired:
            assert accounts(talk.p.engine) == {"retained": BLOCKS - 10}
        talk.p.skip(LEASE_NS)
        talk.until(talk.free)
        talk.check_untouched()
        if cut_off:
            assert talk.d.arrived() < BLOCKS - 10
            return
    raise AssertionError("every WRITE was quicker")


def test_a_lease_that_ends_before_the_registration_is_told(talk: Talk) -> None:
    prompt, name = talk.prompt(3), secrets.token_hex(16)
    talk.prefill(prompt, name)
    talk.until(lambda: accounts(talk.p.engine) == {"retained": 3})
    talk.p.skip(LEASE_NS)
    talk.until(talk.free)
    talk.register(talk.grant(prompt), name)
    answer = talk.hear(NotWritten)
    assert isinstance(answer, NotWritten)
    assert "expired" in answer.reason
    assert talk.p.writes == []
    assert not talk.d.blocks.any()


def test_a_lease_that_ends_in_the_middle_keeps_the_sources_until_the_write_has_ended(talk: Talk) -> None:
    for _ in range(TRIES):
        prompt, name = talk.prompt(BLOCKS - 10), secrets.token_hex(16)
        grant = talk.grant(prompt)
        talk.d.blocks[:] = 0
        talk.prefill(prompt, name)
        talk.register(grant, name)
        talk.until(talk.d.arrived)
        talk.p.skip(LEASE_NS)
        talk.p.pump()
        deferred = accounts(talk.p.engine) == {"deferred": BLOCKS - 10}
        talk.hear(Written)
        talk.check_arrived(talk.p.writes.pop())
        talk.until(talk.free)
        if deferred:
            names = [type(event) for event in talk.p.events if isinstance(event, LeaseReleased | WriteFinished)]
            assert names[-2:] == [LeaseReleased, WriteFinished]
            return
    raise AssertionError("every WRITE was quicker")


@pytest.mark.parametrize(
    "change",
    [{"prompt_digest": b"x" * 16}, {"num_tokens": 1}, {"first_token": 1 << 20}, {"block_ids": (1, 2)}],
    ids=["another prompt", "another length", "a beginning beyond the end", "too few blocks"],
)
def test_a_grant_that_does_not_fit_is_refused_and_pins_nothing(talk: Talk, change: dict[str, Any]) -> None:
    prompt, name = talk.prompt(3), secrets.token_hex(16)
    grant = msgspec.structs.replace(talk.grant(prompt), **change)
    talk.prefill(prompt, name)
    talk.until(lambda: accounts(talk.p.engine) == {"retained": 3})
    for _ in range(2):
        talk.register(grant, name)
        talk.hear(NotWritten)
    talk.until(talk.free)
    assert talk.p.writes == []
    assert not talk.d.blocks.any()
