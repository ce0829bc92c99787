"""D's side of WRITE push: memory granted to a producer before the KV exists, and taken back for certain (design 3.2).

A request is admitted, its blocks are allocated, and a registration that grants them goes to the producer, which writes
when its prefill has finished. D believes the end of it only from the producer asked, under the grant's own numbers.
Policy ``vllm`` reproduces the reference (spec pd-transfer 6, 9): one registration, no deadline, no way to take a grant
back.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.events import LoadFailed, LoadFinished, LoadOverdue, LoadStarted
from pdkv.core.journal import Journal
from pdkv.core.ledger import Account
from pdkv.core.ports import SendMessage
from pdkv.core.scheduler.request import Request
from pdkv.core.transfer.lease import LeaseSlots
from pdkv.core.transfer.messages import (
    Awaited,
    Fenced,
    Noted,
    NotWritten,
    OfGrant,
    Peer,
    RegisterWrite,
    Withdraw,
    WriteGrant,
)
from pdkv.core.transfer.proof import digest_tokens
from pdkv.core.transfer.quarantine import Quarantine
from pdkv.core.transfer.withdrawn import WithdrawnGrants
from pdkv.units import NS_PER_S


@dataclass(slots=True)
class Promise:
    """A request whose blocks a producer may write to."""

    request: Request
    awaited: Awaited
    grant: WriteGrant
    since_ns: int
    deadline_ns: int
    next_register_ns: int
    noted: bool = False  # the producer knows of it
    writing: bool = False
    overdue: bool = False  # told so (policy vllm)
    recalled_until_ns: int | None = None  # asked back, for others need the memory: until then its producer may answer

    @property
    def first(self) -> int:
        """Tokens the request had already: the prefix hit."""
        return self.grant.first_token

    @property
    def num_tokens(self) -> int:
        """With how many tokens the request goes on."""
        return self.grant.num_tokens


class WriteGrants:
    """Every grant of this instance's memory that a request waits for; ``withdrawn`` are those that were given up."""

    def __init__(
        self,
        config: EngineConfig,
        manager: KVCacheManager,
        slots: LeaseSlots,
        quarantine: Quarantine,
        journal: Journal,
        outbox: list[SendMessage],
    ) -> None:
        self._config, self._manager, self._slots = config, manager, slots
        self._journal, self._outbox = journal, outbox
        self._promises: dict[int, Promise] = {}  # by grant id
        self.withdrawn = WithdrawnGrants(config, slots, quarantine, journal, outbox)
        self.here: Peer | None = None  # where a producer finds this instance; without it nothing can be granted

    # ----------------------------------------------------------------------------------------------------- opening

    @property
    def has_room(self) -> bool:
        """Whether one more grant can be made."""
        return self._slots.num_free > 0

    def names(self, transfer_id: str) -> bool:
        """Whether a request of that id waits for a WRITE."""
        return any(promise.awaited.transfer_id == transfer_id for promise in self._promises.values())

    def expected_tokens(self, request: Request) -> int:
        """Tokens of the prompt that its producer computes."""
        return request.num_prompt - self._manager.leaves_last_token

    def open(self, request: Request, local_tokens: int, tokens: int) -> None:
        """Grant the request's blocks behind its first ``local_tokens`` tokens to the producer it waits for."""
        awaited = request.awaited
        assert awaited is not None
        num_tokens, now_ns = self.expected_tokens(request), self._journal.now_ns
        spans = self._manager.peer_spans(num_tokens, local_tokens)
        blocks = [
            self._manager.blocks_of(request.request_id, group)[first:stop].tolist()
            for group, (first, stop) in enumerate(spans)
        ]
        slot, grant_id = self._slots.arm()
        grant = WriteGrant(
            nonce=self._slots.nonce,
            grant_id=grant_id,
            slot=slot,
            block_ids=tuple(block for group in blocks for block in group),
            group_blocks=tuple(map(len, blocks)) if len(blocks) > 1 else (),
            block_size=self._manager.paged_block_size,
            num_tokens=num_tokens,
            first_token=local_tokens,
            prompt_digest=digest_tokens(request.tokens[:num_tokens]),
        )
        deadline_ns = now_ns + self._config.push_registration_timeout_ns
        promise = Promise(request, awaited, grant, now_ns, deadline_ns, now_ns)
        self._promises[grant_id] = promise
        self._show(promise, f"granted to {awaited.peer.engine_id[:80]}, which is to write it when it has prefilled")
        self._register(promise)
        self._journal.emit(
            LoadStarted(
                request_id=request.request_id,
                at_ns=now_ns,
                handle=grant_id,
                blocks=len(grant.block_ids),
                tokens=tokens,
            )
        )

    def _show(self, promise: Promise, cause: str) -> None:
        shown = promise.deadline_ns if self._config.transfer.bounded_waits else None
        self._manager.move(promise.request.request_id, Account.LOADING, cause, shown)

    def _register(self, promise: Promise) -> None:
        assert self.here is not None
        promise.next_register_ns = self._journal.now_ns + self._config.registration_ns
        self._outbox.append(SendMessage(promise.awaited.peer, self.registration(promise.awaited, promise.grant)))

    def registration(self, awaited: Awaited, grant: WriteGrant | None) -> RegisterWrite:
        """What tells the producer that somebody waits; without ``grant``: still in the queue here."""
        assert self.here is not None
        return RegisterWrite(
            transfer_id=awaited.transfer_id, producer=awaited.peer.engine_id, consumer=self.here, grant=grant
        )

    # ------------------------------------------------------------------------------------------- what producers say

    def on_message(self, message: OfGrant, peer: Peer) -> tuple[Request, str | None] | None:
        """(request, None): its KV is here; (request, cause): it will not come; ``None``: nothing for the scheduler."""
        if message.nonce != self._slots.nonce or self.withdrawn.on_message(message, peer):
            return None
        promise = self._promises.get(message.grant_id)
        if promise is None or promise.awaited.peer != peer:
            return None
        if isinstance(message, Noted):
            self._on_noted(promise, writing=message.writing)
            return None
        if isinstance(message, NotWritten | Fenced):
            cause = message.reason if isinstance(message, NotWritten) else "the producer has fenced the grant off"
            self._fail(promise, cause)
            if message.cut_off:
                self.put_off(promise, cause, cut_off=True)
            else:
                self._close(promise)
            return promise.request, cause
        self._close(promise)
        if promise.recalled_until_ns is not None:  # then its producer may keep it, to be asked for again
            self._outbox.append(SendMessage(peer, Withdraw(promise.awaited.transfer_id)))
        now_ns = self._journal.now_ns
        self._journal.emit(
            LoadFinished(
                request_id=promise.request.request_id,
                at_ns=now_ns,
                handle=message.grant_id,
                blocks=len(promise.grant.block_ids),
                moved_bytes=message.moved_bytes,
                seconds=(now_ns - promise.since_ns) / 1e9,
            )
        )
        return promise.request, None

    def _on_noted(self, promise: Promise, *, writing: bool) -> None:
        promise.noted = True
        if not writing or promise.writing:
            return
        promise.writing, promise.since_ns = True, self._journal.now_ns
        promise.deadline_ns = self._journal.now_ns + self._config.kv_load_timeout_ns
        self._show(promise, f"being written by {promise.awaited.peer.engine_id[:80]}")

    def _close(self, promise: Promise) -> None:
        """Its producer is done with it."""
        self._slots.clear(promise.grant.slot)
        del self._promises[promise.grant.grant_id]

    # -------------------------------------------------------------------------------------------------- taking back

    def find(self, request: Request) -> Promise | None:
        """The grant that this request waits for."""
        return next((promise for promise in self._promises.values() if promise.request is request), None)

    def _is_idle(self, promise: Promise) -> bool:
        """A lease's time old, and no write is known to have begun under it."""
        return not promise.writing and promise.since_ns <= self._journal.now_ns - self._config.lease_ns

    def shareable(self, *, only_begun: bool) -> list[Promise]:
        """What others with the same prefix may wait for; ``only_begun``: who waits has KV kept for it already.

        Not what is idle, nor that: its prefill may be waiting itself, for the lease of who would wait here to be over.
        """
        return [one for one in self._promises.values() if one.writing or not (only_begun or self._is_idle(one))]

    def recall_idle(self, pressed_by: Collection[Peer]) -> None:
        """Ask back the newest grant that is a lease's time old, and under which no write is known to have begun.

        One to a producer that presses (`Consumer.press`) is asked back however old it is.

        While somebody here waits for memory it goes (`strict`), one at a time, each when the one before is fenced. Else
        two instances can wait for each other: grants of D for prefills that P cannot begin, as its leases pin their
        share for requests that D has no memory for.

        Whether its producer has heard of the grant does not matter: one that has not answers `Fenced`, too.
        It is asked back, not taken: its producer may have written it by now, and a write that had ended when the CANCEL
        came is used. One under way is stopped, and answered `Fenced` like one that has not begun.
        """
        if not self._config.transfer.bounded_waits or self.withdrawn:
            return
        if any(one.recalled_until_ns is not None for one in self._promises.values()):
            return
        idle = [
            one
            for one in self._promises.values()
            if self._is_idle(one) or (not one.writing and one.awaited.peer in pressed_by)
        ]
        if idle:
            idle[-1].recalled_until_ns = self._journal.now_ns + self._config.fence_timeout_ns
            self._show(idle[-1], f"asked back from {idle[-1].awaited.peer.engine_id[:80]}: others wait for memory")
            self._repeat(idle[-1])

    def unanswered(self) -> list[Promise]:
        """Grants that were asked back in vain: they are taken."""
        promises, now_ns = self._promises.values(), self._journal.now_ns
        return [one for one in promises if one.recalled_until_ns is not None and one.recalled_until_ns <= now_ns]

    def given_back(self, message: OfGrant, peer: Peer) -> Promise | None:
        """The grant that was asked back, and that ``message`` returns: nothing was, or will be, written under it."""
        promise = self._promises.get(message.grant_id)
        if promise is None or promise.recalled_until_ns is None:
            return None
        if not isinstance(message, Fenced) or message.cut_off:
            return None
        if message.nonce != self._slots.nonce or promise.awaited.peer != peer:
            return None
        self._close(promise)
        return promise

    def take_back(self, promise: Promise, cause: str) -> None:
        """Nobody waits for it any more."""
        self._fail(promise, cause)
        self.put_off(promise, cause)

    def put_off(self, promise: Promise, cause: str, *, cut_off: bool = False) -> None:
        """Its request has this memory no more: it stays in quarantine until nothing can be written any more."""
        del self._promises[promise.grant.grant_id]
        self.withdrawn.add(promise.request, promise.awaited, promise.grant, cause, cut_off=cut_off)

    def _repeat(self, promise: Promise) -> None:
        """Tell its producer that somebody waits, or that it is asked back."""
        if promise.recalled_until_ns is None:
            self._register(promise)
        else:
            promise.next_register_ns = self.withdrawn.cancel(promise.awaited, promise.grant)

    def _fail(self, promise: Promise, cause: str) -> None:
        failed = LoadFailed(
            request_id=promise.request.request_id,
            at_ns=self._journal.now_ns,
            handle=promise.grant.grant_id,
            cause=cause,
        )
        self._journal.emit(failed)

    # ----------------------------------------------------------------------------------------------------- deadlines

    def peers(self) -> tuple[Peer, ...]:
        """Who may write, or still has to say that it has stopped."""
        return (*(promise.awaited.peer for promise in self._promises.values()), *self.withdrawn.peers())

    def lost(self, peer: Peer) -> list[Request]:
        """Requests that wait in vain for ``peer``, which is gone; the reference sees it before it has registered."""
        return [
            promise.request
            for promise in self._promises.values()
            if promise.awaited.peer == peer and (self._config.transfer.push_answers or not promise.noted)
        ]

    def overdue(self) -> list[tuple[Request, str]]:
        """Requests that have waited beyond their deadline, and what for; policy vllm only says so."""
        if not self._promises:
            return []
        late = [one for one in self._promises.values() if one.deadline_ns <= self._journal.now_ns and not one.overdue]
        found = [(promise.request, self._lateness(promise)) for promise in late]
        if self._config.transfer.bounded_waits:
            return found
        for promise, (request, cause) in zip(late, found, strict=True):
            promise.overdue = True
            self._journal.emit(LoadOverdue(request_id=request.request_id, at_ns=self._journal.now_ns, cause=cause))
        return []

    def _lateness(self, promise: Promise) -> str:
        config = self._config
        if promise.writing:
            return f"not there {config.kv_load_timeout_ns // NS_PER_S} s after its WRITE was begun (--kv-load-timeout)"
        seconds = config.push_registration_timeout_ns // NS_PER_S
        return f"not written within {seconds} s of its registration (--push-registration-timeout)"

    def sweep(self) -> None:
        """Register and cancel again; have whoever may still write ended when a fence takes too long."""
        if not self._config.transfer.push_answers:
            return
        for promise in self._promises.values():
            if promise.next_register_ns <= self._journal.now_ns:
                self._repeat(promise)
        self.withdrawn.sweep()

    def next_deadline_ns(self) -> int | None:
        """When `overdue` or `sweep` is wanted next."""
        if not self._promises and not self.withdrawn:
            return None
        times = [promise.deadline_ns for promise in self._promises.values() if not promise.overdue]
        if self._config.transfer.bounded_waits:
            turns = [one.since_ns + self._config.lease_ns for one in self._promises.values() if not one.writing]
            times += [turn for turn in turns if turn > self._journal.now_ns]
        if self._config.transfer.push_answers:
            times += [promise.next_register_ns for promise in self._promises.values()]
            times += self.withdrawn.deadlines_ns()
        return min(times, default=None)
