"""The answering side of the side channel: who may read from here. It has no sockets, so all of it can be fuzzed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pdkv.core.engine import Identity
from pdkv.core.transfer.messages import Heartbeat, ToProducer
from pdkv.core.transfer.proof import proof_key
from pdkv.runtime.shown import quoted, readable
from pdkv.runtime.transports.base import TransferMemory
from pdkv.runtime.wire import Answer, Hello, HelloReply, PeerMemory, Question, Refused

_SHOWN_FACTS = 20  # of a list that a stranger sent
_LOOK_NS = 10**9  # between two looks at the lease slots
_READING_NS = 3 * 10**9  # somebody may be reading for so long after a look that found a lease


@dataclass(frozen=True)
class PeerIdentity:
    """One life of an instance as peers meet it: who it is, and the ``facts`` that must be equal on both sides."""

    core: Identity
    facts: dict[str, str]


def differing_facts(our_name: str, ours: Mapping[str, str], their_name: str, theirs: Mapping[str, str]) -> str | None:
    """Every fact that differs, with both values, or None. The text is read on both sides: it calls each by its name."""
    we, they = readable(our_name), readable(their_name)
    differences = [
        f"{readable(name)}: {we} has {quoted(ours.get(name))}, {they} has {quoted(theirs.get(name))}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    if not differences:
        return None
    return (
        "; ".join(differences[:_SHOWN_FACTS])
        + ". A decode instance reads a prefill instance's KV byte for byte: start both with the same model, dtype and "
        "transport"
    )


@dataclass
class Doorkeeper:
    """Answers `Hello`, and knows for how long somebody may be reading from here.

    ``describe()`` gives the memory as it can be read now and its epoch. ``now_ns`` is the engine's clock.
    """

    identity: PeerIdentity
    facts: Mapping[str, str]
    memory: TransferMemory
    lease_ns: int
    describe: Callable[[], tuple[PeerMemory, int]]
    now_ns: Callable[[], int] = time.monotonic_ns
    _readers_until_ns: int | None = None
    _look_at_ns: int = 0

    def answer(self, question: Question) -> Answer | ToProducer:
        """The reply to send back, or the message itself when it is one for the engine."""
        match question:
            case Hello():
                return self._hello(question)
            case Heartbeat():
                if self._readers_until_ns is None:  # a READ may begin, of a lease granted just now
                    self._look_at_ns = 0
                return question
            case _:
                return question

    def readers_until_ns(self, now_ns: int) -> int | None:
        """Until when somebody may be reading from here at least; None when no lease stands. Ask every second.

        The slots tell. They are looked at once a second, and when a heartbeat comes while nobody was known to read.
        """
        if now_ns >= self._look_at_ns:
            self._look_at_ns = now_ns + _LOOK_NS
            slots = self.memory.slots.array(np.dtype("<u8"), (self.memory.num_slots, 2))
            self._readers_until_ns = now_ns + _READING_NS if slots[:, 1].any() else None
        return self._readers_until_ns

    def _hello(self, hello: Hello) -> Answer:
        core = self.identity.core
        if hello.target != core.engine_id:
            reason: str | None = f"engine {quoted(hello.target)} is gone, {core.engine_id!r} answers there now"
        else:
            reason = differing_facts(core.engine_id, self.facts, hello.engine_id, hello.facts)
        if reason is not None:
            return Refused(seq=hello.seq, reason=reason)
        memory, epoch = self.describe()
        return HelloReply(
            seq=hello.seq,
            engine_id=core.engine_id,
            nonce=core.nonce,
            grant_key=proof_key(core.secret),
            epoch=epoch,
            lease_ns=self.lease_ns,
            clock_ns=self.now_ns(),
            facts=dict(self.facts),
            memory=memory,
        )
