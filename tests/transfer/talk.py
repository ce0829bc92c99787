"""P with a real engine, and D as a test plays it: for test_write_messages."""

from __future__ import annotations

import itertools
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from tests.core.write_pair import accounts
from tests.transfer.pairs import real_pair, simulated_pair
from tests.transfer.sides import BLOCKS, RealSide, Side, SimulatedSide, run

from pdkv.core.config import EngineConfig
from pdkv.core.engine import Engine
from pdkv.core.events import Event
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
        self.say(CancelGrant(transfer_id, self.p.side.peer.engine_id, grant.nonce, grant.grant_id))

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

        def write() -> Sequence[int]:
            prompt, name = self.prompt(2), secrets.token_hex(16)
            grant = self.grant(prompt, slot=9)
            self.prefill(prompt, name)
            self.register(grant, name)
            self.hear(Written)
            self.p.writes.pop()
            return grant.block_ids

        self.d.check_untouched(write)


@contextmanager
def simulated(seed: int, *, shared_memory: bool) -> Iterator[Talk]:
    """In virtual time."""
    tokens = 4 * BLOCKS
    settings = {
        "max_model_len": tokens, "max_num_batched_tokens": tokens, "max_leased_fraction": 1.0, "lease_ns": LEASE_NS,
        "enable_prefix_caching": False,
    }  # fmt: skip
    p, d = simulated_pair(seed, shared_memory=shared_memory, p_hears=True, **settings)
    yield Talk(SimulatedP(p), d)


@contextmanager
def real(transport: str) -> Iterator[Talk]:
    """Over real memory."""
    with real_pair(transport, "thread") as (p, d):
        p.fill()
        yield Talk(RealP(p), d)
