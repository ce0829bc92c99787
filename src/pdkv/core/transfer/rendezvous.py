"""Push mode, late: P announces that a prefill has finished, and only then does D allocate and read (design 3).

Both legs of a request begin at once. D registers the request's ``transfer_id`` with P and holds no memory while it
waits; P answers with the grant as soon as there is one, whichever of the two came first. What the reference leaves
hanging (spec pd-transfer 9) has a way out here: registrations are repeated until they are answered, so a lost message
costs one repetition; an id that is over is answered `Gone`, never parked; and D's wait has a deadline.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from pdkv.core.config import EngineConfig
from pdkv.core.events import Announced, Registered
from pdkv.core.journal import Journal
from pdkv.core.ports import AwaitingView, Reply, SendMessage
from pdkv.core.scheduler.request import Request
from pdkv.core.transfer.messages import Announce, Awaited, Gone, Grant, Peer, Register, Withdraw

_MOST_PARKED = 4096  # registrations of ids not heard of yet: their requests may come a moment later
_MOST_OVER = 16384  # ids remembered as over


@dataclass(slots=True)
class Registration:
    """A consumer that waits: where to answer, and until when it counts unless it registers again."""

    origin: bytes
    deadline_ns: int


class Announcements:
    """P's side: which ids are being computed, kept or over, and who has registered for them."""

    def __init__(self, config: EngineConfig, engine_id: str, journal: Journal) -> None:
        self._journal = journal
        self._engine_id = engine_id
        # A consumer repeats itself every sixth of a lease; one that has been silent for a whole one is gone.
        self._patience_ns = config.lease_ns
        self._expected: set[str] = set()
        self._kept: dict[str, Announce] = {}
        self._over: OrderedDict[str, str] = OrderedDict()
        self._registered: OrderedDict[str, Registration] = OrderedDict()
        self._replies: list[Reply] = []

    def expect(self, request: Request) -> None:
        """A prefill has arrived."""
        transfer_id = request.new.transfer_id
        if transfer_id is not None and transfer_id not in self._over:
            self._expected.add(transfer_id)

    def wanted(self, request: Request) -> bool:
        """False when the consumer has withdrawn: then its KV need not be kept."""
        return request.new.transfer_id not in self._over

    def granted(self, request: Request, grant: Grant) -> None:
        """A prefill has finished and is kept: tell whoever waits."""
        transfer_id = request.new.transfer_id
        if transfer_id is None:
            return
        self._expected.discard(transfer_id)
        self._kept[transfer_id] = Announce(transfer_id, request.request_id, grant)
        self._tell(transfer_id, self._kept[transfer_id])

    def ended(self, transfer_id: str | None, reason: str) -> None:
        """Nothing stands under this id any more, however it came."""
        if transfer_id is None or transfer_id in self._over:
            return
        self._expected.discard(transfer_id)
        self._kept.pop(transfer_id, None)
        self._over[transfer_id] = reason
        while len(self._over) > _MOST_OVER:
            self._over.popitem(last=False)
        self._tell(transfer_id, Gone(transfer_id, reason))
        self._registered.pop(transfer_id, None)

    def on_register(self, message: Register, origin: bytes) -> None:
        """Somebody waits: answered at once when there is an answer, else as soon as there is one."""
        transfer_id = message.transfer_id
        if message.producer != self._engine_id:
            self._replies.append(Reply(origin, Gone(transfer_id, f"engine {message.producer[:80]!r} is not here")))
        elif transfer_id in self._over:
            self._replies.append(Reply(origin, Gone(transfer_id, self._over[transfer_id])))
        elif transfer_id in self._kept:
            self._replies.append(Reply(origin, self._kept[transfer_id]))
        else:
            self._registered[transfer_id] = Registration(origin, self._journal.now_ns + self._patience_ns)
            self._registered.move_to_end(transfer_id)
            self._drop_stale()

    def on_withdraw(self, message: Withdraw) -> Announce | None:
        """Nobody waits any more; what was kept for it, if it was (the caller ends that lease).

        Its request may be still to come, as both legs begin at once: then it is not kept either.
        """
        transfer_id = message.transfer_id
        self._registered.pop(transfer_id, None)
        kept = self._kept.get(transfer_id)
        if kept is None:
            self.ended(transfer_id, "withdrawn by its consumer")
        return kept

    def take_replies(self) -> tuple[Reply, ...]:
        """Answers to send, once."""
        replies, self._replies = tuple(self._replies), []
        return replies

    def _tell(self, transfer_id: str, message: Announce | Gone) -> None:
        registration = self._registered.get(transfer_id)
        if registration is not None and registration.deadline_ns > self._journal.now_ns:
            self._replies.append(Reply(registration.origin, message))

    def _drop_stale(self) -> None:
        """The oldest registration is the first of the list; the silent ones, and those beyond the bound, go."""
        while self._registered:
            transfer_id, oldest = next(iter(self._registered.items()))
            if oldest.deadline_ns > self._journal.now_ns and len(self._registered) <= _MOST_PARKED:
                return
            del self._registered[transfer_id]


@dataclass(slots=True)
class Wait:
    """A request at D whose KV is still to be announced."""

    request: Request
    awaited: Awaited
    since_ns: int
    deadline_ns: int
    next_register_ns: int


class Waits:
    """D's side: requests that wait for an announcement, without memory."""

    def __init__(self, config: EngineConfig, journal: Journal, outbox: list[SendMessage]) -> None:
        self._config, self._journal, self._outbox = config, journal, outbox
        self._waits: dict[str, Wait] = {}  # by transfer id

    def arrive(self, request: Request) -> None:
        """Register from now on. One announcement serves one request: the id's second is computed here instead."""
        awaited = request.awaited
        assert awaited is not None
        if awaited.transfer_id in self._waits:
            request.awaited = None
            return
        now_ns = self._journal.now_ns
        wait = Wait(request, awaited, now_ns, now_ns + self._config.push_registration_timeout_ns, now_ns)
        self._waits[awaited.transfer_id] = wait
        self._register(wait)
        self._journal.emit(Registered(request_id=request.request_id, at_ns=now_ns, producer=awaited.peer.engine_id))

    def announced(self, request: Request) -> None:
        """Its wait is over, and not in vain."""
        assert request.awaited is not None
        waited_ns = self._journal.now_ns - self._waits[request.awaited.transfer_id].since_ns
        self.drop(request, tell=False)
        self._journal.emit(Announced(request_id=request.request_id, at_ns=self._journal.now_ns, waited_ns=waited_ns))

    def decline(self, awaited: Awaited) -> None:
        """Tell the producer that nobody waits: the request was refused before it became one."""
        self._outbox.append(SendMessage(awaited.peer, Withdraw(awaited.transfer_id)))

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
        return tuple(dict.fromkeys(wait.awaited.peer for wait in self._waits.values()))

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
        """Register again where no answer has come for a sixth of a lease."""
        for wait in self._waits.values():
            if wait.next_register_ns <= self._journal.now_ns:
                self._register(wait)

    def next_deadline_ns(self) -> int | None:
        """When somebody is to be registered again, or has waited long enough."""
        times = [wait.next_register_ns for wait in self._waits.values()]
        if self._config.transfer.bounded_waits:
            times += [wait.deadline_ns for wait in self._waits.values()]
        return min(times, default=None)

    def _register(self, wait: Wait) -> None:
        """Tell the producer. As often, and not in every step, it is seen whether the KV is here by now."""
        wait.request.look_for_hits = True
        wait.next_register_ns = self._journal.now_ns + self._config.lease_ns // 6
        peer = wait.awaited.peer
        self._outbox.append(SendMessage(peer, Register(wait.awaited.transfer_id, peer.engine_id)))
