"""What is kept for a peer under a lease, until that is done or the lease runs out (design 3.1).

P keeps finished prefills, for the decode instance; in bidirectional mode D keeps ended answers, for the next turn's
prefill. The latter stand for a fixed time, and give way to whoever needs memory here (policy strict).
"""

from __future__ import annotations

from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.events import LeaseGranted, LeaseReleased, LeaseRenewed
from pdkv.core.journal import Journal
from pdkv.core.ledger import Account
from pdkv.core.ports import MoverRestarted, WriteEnded
from pdkv.core.scheduler.request import Request
from pdkv.core.transfer.lease import Lease, LeaseSlots
from pdkv.core.transfer.messages import CancelGrant, Done, Grant, Heartbeat, Register, RegisterWrite, Withdraw
from pdkv.core.transfer.proof import digest_tokens
from pdkv.core.transfer.rendezvous import Announcements
from pdkv.core.transfer.writes import Writes


class Producer:
    """Grants, renews and releases leases. `_release` is the only way a lease ends: slot first, then blocks."""

    def __init__(
        self,
        config: EngineConfig,
        manager: KVCacheManager,
        slots: LeaseSlots,
        announcements: Announcements,
        writes: Writes,
        journal: Journal,
    ) -> None:
        self._config = config
        self._manager = manager
        self._slots = slots
        self._journal = journal
        self._by_token: dict[bytes, Lease] = {}
        self._turns: dict[bytes, Lease] = {}  # kept for next turns, by token; the oldest ends first
        self._turn_blocks = 0  # of these; those that several hold are counted by each
        self.announcements = announcements
        self.writes = writes

    def may_prefill(self, request: Request, in_flight: int, in_flight_blocks: int) -> bool:
        """Whether one more prompt may be computed for a peer without pinning more than the allowed share.

        The ``in_flight`` prefills for peers will want a slot each and their ``in_flight_blocks``. A prompt larger than
        the whole share is let in when nothing else is leased. (The scheduler lets no other prefill for a peer pass one
        that waits here, so its turn comes. Nobody waits here for leases of its own answer: `NewRequest.answer_id`.)

        Where a consumer has granted memory to write it to, it is let in whatever is pinned: that is soon over, and
        what pins the share may be waiting for that very memory.
        """
        while self._slots.num_free <= in_flight and self.give_way():
            pass
        pinned = int(self._manager.pool.ledger.counts[Account.RETAINED])
        if self._turns:
            pinned = min(pinned, sum(lease.blocks for lease in self._by_token.values()))
        pinned += in_flight_blocks
        limit = int(self._config.max_leased_fraction * (self._config.num_blocks - 1))
        needed = self._manager.blocks_for(request.num_prompt)
        fits = pinned == 0 or pinned + needed <= limit or self.announcements.has_memory(request)
        return self._slots.num_free > in_flight and fits

    def make_way_for(self, request: Request) -> None:
        """A prefill finds no room here, and nothing under way will leave any (strict).

        Its consumer has granted memory for it: then what leases keep may be waiting for that very memory, as a consumer
        grants in its own order. So that is announced (again): it presses (`Consumer.press`).
        """
        if self._config.transfer.push_answers and self.announcements.has_memory(request) and not self.writes.under_way:
            self.announcements.offer_kept()

    def grant(self, request: Request) -> Grant:
        """Keep the prompt's blocks for a consumer; the request's other blocks go back. Needs a free slot."""
        grant = self._lease(request, self._config.lease_ns, next_turn=False)
        waiting = self.announcements.granted(request, grant)
        if waiting is not None:
            self._write(self._by_token[grant.token], waiting.message, waiting.origin)
        return grant

    def keep_turn(self, request: Request) -> Grant | None:
        """Keep the KV of prompt and answer for the next turn; ``None`` when there is no room or slot for it.

        Under policy strict the oldest kept turns make room for it.
        """
        limit = int(self._config.max_kept_fraction * (self._config.num_blocks - 1))
        needed = self._manager.num_blocks_of(request.request_id)
        if needed > limit:
            return None
        while self._turn_blocks + needed > limit or not self._slots.num_free:
            if not self.give_way():
                return None
        return self._lease(request, self._config.kept_ttl_ns, next_turn=True)

    def _lease(self, request: Request, lasts_ns: int, *, next_turn: bool) -> Grant:
        computed = min(request.num_computed, request.num_tokens - 1)  # the last token was only sampled
        blocks = self._manager.keep_for_peer(request.request_id, computed)
        mark_tokens = 0
        if next_turn:  # of windows and states all of it is used or nothing: one mark tells
            mark_tokens = computed if self._manager.leaves_last_token else self._config.block_size
        tokens = request.tokens[:computed]
        grant = self._slots.grant(blocks, tokens, request.cached_tokens, mark_tokens=mark_tokens)
        deadline_ns = self._journal.now_ns + lasts_ns
        lease = Lease(
            request_id=request.request_id,
            transfer_id=request.new.transfer_id,
            answer_id=request.new.answer_id,
            lease_id=grant.lease_id,
            slot=grant.slot,
            token=grant.token,
            blocks=len(grant.block_ids),
            num_tokens=computed,
            prompt_digest=digest_tokens(tokens) if request.new.transfer_id is not None else b"",
            deadline_ns=deadline_ns,
            next_turn=next_turn,
        )
        (self._turns if next_turn else self._by_token)[lease.token] = lease
        self._turn_blocks += lease.blocks if next_turn else 0
        self._manager.rename(request.request_id, lease.key)
        cause = "kept for the conversation's next turn" if next_turn else "leased to a consumer"
        self._manager.move(lease.key, Account.RETAINED, cause, deadline_ns)
        self._journal.emit(
            LeaseGranted(
                request_id=request.request_id,
                at_ns=self._journal.now_ns,
                lease_id=lease.lease_id,
                blocks=lease.blocks,
                deadline_ns=deadline_ns,
                next_turn=next_turn,
            )
        )
        return grant

    def give_way(self) -> bool:
        """Let the oldest kept turn go, as somebody here needs its memory; False when none does (policy vllm: never)."""
        oldest = self._oldest_turn()
        if oldest is None or not self._config.transfer.kept_gives_way:
            return False
        self._release(oldest, expired=False, gave_way=True)
        return True

    def drop_turns(self) -> None:
        """Let all kept turns go: what they hold is not to be used any more."""
        for lease in list(self._turns.values()):
            self._release(lease, expired=False, gave_way=True)

    def may_keep(self, request: Request) -> bool:
        """Whether a lease can be granted now, and its consumer, as far as is known, still wants it."""
        return self._slots.num_free > 0 and self.announcements.wanted(request)

    def keeps_for(self, answer_id: str) -> bool:
        """Whether a lease stands for another request of the same answer."""
        return any(lease.answer_id == answer_id for lease in self._by_token.values())

    def on_undelivered(self, request_id: str) -> None:
        """The client left before it was told that its request had finished: nobody else knows of the lease."""
        leases = (*self._by_token.values(), *self._turns.values())
        for lease in [lease for lease in leases if lease.request_id == request_id]:
            self._release(lease, expired=False)

    def on_withdraw(self, message: Withdraw) -> None:
        """The consumer no longer waits: what is kept for it goes back."""
        kept = self.announcements.on_withdraw(message)
        if kept is not None:
            self._release(self._by_token[kept.grant.token], expired=False)

    def on_heartbeat(self, message: Heartbeat, received_ns: int) -> None:
        """Move deadlines to max(old, arrival + lease * 2 // 3); unknown tokens are ignored."""
        for token in message.tokens:
            lease = self._by_token.get(token)
            if lease is not None:
                self._renew(lease, received_ns)

    def _renew(self, lease: Lease, received_ns: int) -> None:
        deadline_ns = received_ns + self._config.lease_extension_ns
        if deadline_ns <= lease.deadline_ns:
            return
        lease.deadline_ns = deadline_ns
        self._manager.set_deadline(lease.key, deadline_ns)
        self._journal.emit(
            LeaseRenewed(
                request_id=lease.request_id,
                at_ns=self._journal.now_ns,
                lease_id=lease.lease_id,
                deadline_ns=deadline_ns,
            )
        )

    # ------------------------------------------------------------------------------------------------------- push

    def on_register(self, message: Register | RegisterWrite, origin: bytes, received_ns: int) -> Lease | None:
        """A consumer waits for this KV: that renews its lease, which is returned, if it is there."""
        kept = self.announcements.on_register(message, origin)
        if kept is None:
            return None
        lease = self._by_token[kept.grant.token]
        self._renew(lease, received_ns)
        return lease

    def on_register_write(self, message: RegisterWrite, origin: bytes, received_ns: int) -> None:
        """A consumer waits for this KV to be written: that renews its lease, and begins the WRITE if it is there."""
        known = self.writes.known(message.grant, origin) if message.grant is not None else False
        if isinstance(known, Lease):
            if known.token in self._by_token:
                self._renew(known, received_ns)
            return
        if known:
            return
        lease = self.on_register(message, origin, received_ns)
        if lease is not None and message.grant is not None:
            self._write(lease, message, origin)

    def _write(self, lease: Lease, message: Register | RegisterWrite, origin: bytes) -> None:
        if not self.writes.start(lease, message, origin):
            self._release(lease, expired=False)

    def on_cancel(self, message: CancelGrant, origin: bytes) -> None:
        """A consumer takes a grant back."""
        self.announcements.on_cancel(message.transfer_id, message.nonce, message.grant_id)
        self.writes.on_cancel(message, origin)

    def on_write_ended(self, report: WriteEnded) -> None:
        """What was written, or will not be, need not be kept any more."""
        ended = self.writes.on_ended(report)
        if ended is not None:
            self._write_over(*ended)

    def on_mover_restarted(self, report: MoverRestarted) -> None:
        """WRITEs among its handles are over or posted again."""
        for lease, wanted in self.writes.on_mover_restarted(report):
            self._write_over(lease, wanted)

    def _write_over(self, lease: Lease, wanted: bool) -> None:
        """One of its WRITEs is over; ``wanted``: it may be asked for again, until it ends like any lease."""
        if lease.token in self._by_token:
            if not wanted:
                self._release(lease, expired=False)
        elif not self.writes.uses(lease):
            self._manager.release(lease.key)

    def on_done(self, message: Done) -> None:
        """The consumer has read, or never will; a doubled or unknown message is ignored."""
        lease = self._by_token.get(message.token) or self._turns.get(message.token)
        if lease is not None:
            self._release(lease, expired=False)

    def sweep(self) -> None:
        """Let every lease go whose deadline has passed."""
        for lease in [lease for lease in self._by_token.values() if lease.deadline_ns <= self._journal.now_ns]:
            self._release(lease, expired=True)
        while (oldest := self._oldest_turn()) is not None and oldest.deadline_ns <= self._journal.now_ns:
            self._release(oldest, expired=True)
        self.writes.sweep()

    def next_deadline_ns(self) -> int | None:
        """When the next lease or WRITE runs out."""
        oldest, write = self._oldest_turn(), self.writes.next_deadline_ns()
        times = [lease.deadline_ns for lease in self._by_token.values()]
        if oldest is not None:
            times.append(oldest.deadline_ns)
        if write is not None:
            times.append(write)
        return min(times, default=None)

    def _oldest_turn(self) -> Lease | None:
        """All turns are kept equally long, so it is the one that ends first."""
        return next(iter(self._turns.values()), None)

    def _release(self, lease: Lease, *, expired: bool, gave_way: bool = False) -> None:
        self._slots.clear(lease.slot)
        if lease.next_turn:
            del self._turns[lease.token]
            self._turn_blocks -= lease.blocks
        else:
            del self._by_token[lease.token]
        self.announcements.ended(lease.transfer_id, "its lease has expired" if expired else "its lease has ended")
        if self.writes.uses(lease):
            blocks = self._manager.num_blocks_of(lease.key)
            self._manager.move(lease.key, Account.DEFERRED, "its lease is over, its WRITE is still under way")
        else:
            blocks = self._manager.release(lease.key)
        self._journal.emit(
            LeaseReleased(
                request_id=lease.request_id,
                at_ns=self._journal.now_ns,
                lease_id=lease.lease_id,
                blocks=blocks,
                expired=expired,
                next_turn=lease.next_turn,
                gave_way=gave_way,
            )
        )
