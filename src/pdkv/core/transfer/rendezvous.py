"""Push mode: P announces that a prefill has finished, and only then does D allocate and read (late push, design 3).

Both legs of a request begin at once. D registers the request's ``transfer_id`` with P and holds no memory while it
waits; P answers with the grant as soon as there is one, whichever of the two came first. What the reference leaves
hanging (spec pd-transfer 9) has a way out here: registrations are repeated until they are answered, so a lost message
costs one repetition; an id that is over is answered `Gone`, never parked; and D's wait has a deadline.

Where P is to WRITE, D's registration carries a grant of its memory once it has some (`transfer.grants`), and what P has
is written instead of announced (`transfer.writes`). Who waits in D's queue registers without one, so that it is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from pdkv.core.config import EngineConfig
from pdkv.core.events import Announced, Registered
from pdkv.core.journal import Journal
from pdkv.core.ports import AwaitingView, Reply, SendMessage
from pdkv.core.scheduler.request import Request
from pdkv.core.transfer.grants import WriteGrants
from pdkv.core.transfer.messages import (
    Announce,
    Awaited,
    Gone,
    Grant,
    Peer,
    Register,
    RegisterWrite,
    Withdraw,
    WriteGrant,
)
from pdkv.core.transfer.writes import Writes

_MOST_PARKED = 4096  # registrations of ids not heard of yet: their requests may come a moment later
_MOST_OVER = 16384  # ids remembered as over


@dataclass(slots=True)
class Registration:
    """A consumer that waits: where to answer, and until when it counts unless it registers again (`None`: for good)."""

    message: Register | RegisterWrite
    origin: bytes
    deadline_ns: int | None


@dataclass(slots=True)
class Kept:
    """A finished prefill: where to announce it, once somebody has registered, and when `offer_kept` last did."""

    announce: Announce
    origin: bytes | None = None
    offered_ns: int | None = None


def _grant_of(message: Register | RegisterWrite) -> WriteGrant | None:
    """The memory that who registers has granted for the KV."""
    return message.grant if isinstance(message, RegisterWrite) else None


class Announcements:
    """P's side: which ids are being computed, kept or over, and who has registered for them."""

    def __init__(self, config: EngineConfig, engine_id: str, writes: Writes, journal: Journal) -> None:
        self._journal = journal
        self._engine_id = engine_id
        self._writes = writes
        self._answers = config.transfer.push_answers
        # A consumer repeats itself every sixth of a lease; one that has been silent for a whole one is gone.
        self._patience_ns = config.lease_ns
        self._expected: set[str] = set()
        self._registration_ns = config.registration_ns
        self._kept: dict[str, Kept] = {}
        self._over: OrderedDict[str, str] = OrderedDict()
        self._registered: OrderedDict[str, Registration] = OrderedDict()

    def expect(self, request: Request) -> None:
        """A prefill has arrived."""
        transfer_id = request.new.transfer_id
        if transfer_id is not None and transfer_id not in self._over:
            self._expected.add(transfer_id)

    def wanted(self, request: Request) -> bool:
        """False when the consumer has withdrawn: then its KV need not be kept."""
        return request.new.transfer_id not in self._over

    def has_memory(self, request: Request) -> bool:
        """Whether a consumer has granted memory that this prefill's KV can be written to at once."""
        waiting = self._registered.get(request.new.transfer_id or "")
        return waiting is not None and _grant_of(waiting.message) is not None and self._counts(waiting)

    def _counts(self, waiting: Registration) -> bool:
        """Whether who registered is still there, as far as is known."""
        return waiting.deadline_ns is None or waiting.deadline_ns > self._journal.now_ns

    def granted(self, request: Request, grant: Grant) -> Registration | None:
        """A prefill has finished and is kept: tell whoever waits, or return who has granted memory to write it to."""
        transfer_id = request.new.transfer_id
        if transfer_id is None:
            return None
        self._expected.discard(transfer_id)
        announce = Announce(transfer_id, request.request_id, grant)
        waiting = self._registered.get(transfer_id)
        if waiting is None or not self._counts(waiting):
            self._kept[transfer_id] = Kept(announce)
            return None
        self._kept[transfer_id] = Kept(announce, waiting.origin)
        if isinstance(waiting.message, RegisterWrite):
            if waiting.message.grant is None:
                return None
            return self._registered.pop(transfer_id)  # `Writes` answers from now on
        self._reply(waiting.origin, announce)
        return None

    def offer_kept(self) -> None:
        """Announce what consumers have no memory for yet, even if it was announced or is to be written.

        Again only as often as they register.
        """
        now_ns = self._journal.now_ns
        for kept in self._kept.values():
            is_due = kept.offered_ns is None or kept.offered_ns + self._registration_ns <= now_ns
            if kept.origin is not None and is_due:
                kept.offered_ns = now_ns
                self._reply(kept.origin, kept.announce)

    def ended(self, transfer_id: str | None, reason: str) -> None:
        """Nothing stands under this id any more, however it came."""
        if transfer_id is None or transfer_id in self._over:
            return
        self._expected.discard(transfer_id)
        self._kept.pop(transfer_id, None)
        self._over[transfer_id] = reason
        while len(self._over) > _MOST_OVER:
            self._over.popitem(last=False)
        waiting = self._registered.get(transfer_id)
        if waiting is not None and self._is_answered(waiting.message):
            del self._registered[transfer_id]
            if self._counts(waiting):
                self._refuse(waiting.message, waiting.origin, reason)

    def on_register(self, message: Register | RegisterWrite, origin: bytes) -> Announce | None:
        """Somebody waits: told at once that nothing will come, else kept in mind; returns what is there already."""
        transfer_id = message.transfer_id
        over, elsewhere = self._over.get(transfer_id), message.producer != self._engine_id
        if elsewhere:  # it may have been here, and have begun to write
            over = f"engine {message.producer[:80]!r} is not here"
        if over is not None and self._is_answered(message):
            self._refuse(message, origin, over, cut_off=elsewhere)
            return None
        grant = _grant_of(message)
        kept = self._kept.get(transfer_id) if over is None else None
        if kept is not None:
            kept.origin = origin
            if isinstance(message, Register) or (grant is None and kept.offered_ns is not None):
                self._reply(origin, kept.announce)
            if grant is not None:
                self._registered.pop(transfer_id, None)  # `Writes` answers from now on
            return kept.announce
        self._keep_in_mind(message, origin)
        if grant is not None:
            self._writes.note(grant, origin, writing=False)
        return None

    def _keep_in_mind(self, message: Register | RegisterWrite, origin: bytes) -> None:
        deadline_ns = self._journal.now_ns + self._patience_ns if self._is_answered(message) else None
        self._registered[message.transfer_id] = Registration(message, origin, deadline_ns)
        self._registered.move_to_end(message.transfer_id)
        self._drop_stale()

    def on_cancel(self, transfer_id: str, nonce: int, grant_id: int) -> None:
        """This grant is not waited for any more; another one under the same id may be."""
        waiting = self._registered.get(transfer_id)
        grant = _grant_of(waiting.message) if waiting is not None else None
        if grant is not None and (grant.nonce, grant.grant_id) == (nonce, grant_id):
            del self._registered[transfer_id]

    def _is_answered(self, message: Register | RegisterWrite) -> bool:
        """The reference has no word for a WRITE that will not come (spec pd-transfer 9): it parks its registration."""
        return self._answers or isinstance(message, Register)

    def _refuse(self, message: Register | RegisterWrite, origin: bytes, reason: str, *, cut_off: bool = False) -> None:
        grant = _grant_of(message)
        if grant is not None:
            self._writes.refuse(grant, origin, reason, cut_off=cut_off)
        else:
            self._reply(origin, Gone(message.transfer_id, reason))

    def on_withdraw(self, message: Withdraw) -> Announce | None:
        """Nobody waits any more; what was kept for it, if it was (the caller ends that lease).

        Its request may be still to come, as both legs begin at once: then it is not kept either.
        """
        transfer_id = message.transfer_id
        self._registered.pop(transfer_id, None)
        kept = self._kept.get(transfer_id)
        if kept is None:
            self.ended(transfer_id, "withdrawn by its consumer")
            return None
        return kept.announce

    def take_replies(self) -> tuple[Reply, ...]:
        """Answers to send, once."""
        replies = tuple(self._writes.replies)
        self._writes.replies.clear()
        return replies

    def _reply(self, origin: bytes, message: Announce | Gone) -> None:
        self._writes.replies.append(Reply(origin, message))

    def _drop_stale(self) -> None:
        """The oldest registration is the first of the list; the silent ones, and those beyond the bound, go."""
        while self._registered:
            transfer_id, oldest = next(iter(self._registered.items()))
            if self._counts(oldest) and len(self._registered) <= _MOST_PARKED:
                return
            del self._registered[transfer_id]


@dataclass(slots=True)
class Wait:
    """A request at D whose KV is still to be announced."""

    request: Request
    awaited: Awaited
    since_ns: int
    deadline_ns: int


class Waits:
    """D's side: requests that wait for an announcement, without memory."""

    def __init__(self, config: EngineConfig, journal: Journal, outbox: list[SendMessage], grants: WriteGrants) -> None:
        self._config, self._journal, self._outbox, self._grants = config, journal, outbox, grants
        self._waits: dict[str, Wait] = {}  # by transfer id
        self._next_beat_ns = 0  # when all of them are registered again

    def arrive(self, request: Request) -> None:
        """Register from now on. One announcement serves one request: the id's second is computed here instead.

        Where no memory can be granted to be written to, it is announced and read.
        """
        awaited = request.awaited
        assert awaited is not None
        if awaited.transfer_id in self._waits or self._grants.names(awaited.transfer_id):
            request.awaited = None
            return
        if awaited.write and self._grants.here is None:
            request.awaited = awaited = msgspec.structs.replace(awaited, write=False)
        self.resume(request, self._journal.now_ns + self._config.push_registration_timeout_ns)

    def resume(self, request: Request, deadline_ns: int) -> None:
        """Register, and wait until then."""
        awaited, now_ns = request.awaited, self._journal.now_ns
        assert awaited is not None
        if not self._waits:
            self._next_beat_ns = now_ns + self._config.registration_ns
        wait = self._waits[awaited.transfer_id] = Wait(request, awaited, now_ns, deadline_ns)
        self._register(wait)
        self._journal.emit(Registered(request_id=request.request_id, at_ns=now_ns, producer=awaited.peer.engine_id))

    def announced(self, request: Request) -> None:
        """Its wait is over, and not in vain."""
        assert request.awaited is not None
        waited_ns = self._journal.now_ns - self._waits[request.awaited.transfer_id].since_ns
        self.drop(request, tell=False)
        self._journal.emit(Announced(request_id=request.request_id, at_ns=self._journal.now_ns, waited_ns=waited_ns))

    def admitted(self, request: Request) -> None:
        """It has memory now, which its producer is to write to: `WriteGrants` goes on."""
        assert request.awaited is not None
        del self._waits[request.awaited.transfer_id]

    def decline(self, awaited: Awaited) -> None:
        """Tell the producer that nobody waits: the request was refused before it became one."""
        if self._registers(awaited):
            self._outbox.append(SendMessage(awaited.peer, Withdraw(awaited.transfer_id)))

    def _registers(self, awaited: Awaited) -> bool:
        """Whether its producer hears of it before memory is granted: of what it is to write not in the reference."""
        return self._config.transfer.push_answers or not awaited.write

    def drop(self, request: Request, *, tell: bool) -> None:
        """It no longer waits; ``tell`` its producer, unless that is where the news came from."""
        awaited, request.awaited = request.awaited, None
        if awaited is None:
            return
        self._waits.pop(awaited.transfer_id, None)
        if tell:
            self.decline(awaited)

    def find(self, transfer_id: str, engine_id: str) -> Request | None:
        """The request that waits for this id at that producer."""
        wait = self._waits.get(transfer_id)
        return wait.request if wait is not None and wait.awaited.peer.engine_id == engine_id else None

    def at(self, peer: Peer) -> list[Request]:
        """The requests that wait for ``peer``."""
        return [wait.request for wait in self._waits.values() if wait.awaited.peer == peer]

    def peers(self) -> tuple[Peer, ...]:
        """Who is waited for, each once."""
        return tuple({wait.awaited.peer: None for wait in self._waits.values()})

    def views(self) -> tuple[AwaitingView, ...]:
        """Everybody who waits, for people."""
        bounded = self._config.transfer.bounded_waits
        return tuple(
            AwaitingView(
                request_id=wait.request.request_id,
                producer=wait.awaited.peer.engine_id,
                cause=wait.request.wait_cause,
                since_ns=wait.since_ns,
                deadline_ns=wait.deadline_ns if bounded else None,
            )
            for wait in self._waits.values()
        )

    def overdue(self) -> list[Request]:
        """Requests that have waited beyond their deadline."""
        if not self._config.transfer.bounded_waits:
            return []
        return [wait.request for wait in self._waits.values() if wait.deadline_ns <= self._journal.now_ns]

    def sweep(self) -> None:
        """Register again, every sixth of a lease; all together, so that the engine is not woken for each."""
        if not self._waits or self._journal.now_ns < self._next_beat_ns:
            return
        self._next_beat_ns = self._journal.now_ns + self._config.registration_ns
        for wait in self._waits.values():
            if self._registers(wait.awaited):
                self._register(wait)

    def next_deadline_ns(self) -> int | None:
        """When somebody is to be registered again, or has waited long enough."""
        if not self._waits:
            return None
        registers = any(self._registers(wait.awaited) for wait in self._waits.values())
        times = [self._next_beat_ns] if registers else []
        if self._config.transfer.bounded_waits:
            times += [wait.deadline_ns for wait in self._waits.values()]
        return min(times, default=None)

    def _register(self, wait: Wait) -> None:
        """Tell the producer. As often, and not in every step, it is seen whether the KV is here by now."""
        wait.request.look_for_hits = True
        awaited = wait.awaited
        if not self._registers(awaited):
            return
        message: Register | RegisterWrite = Register(awaited.transfer_id, awaited.peer.engine_id)
        if awaited.write:
            message = self._grants.registration(awaited, None)
        self._outbox.append(SendMessage(awaited.peer, message))
