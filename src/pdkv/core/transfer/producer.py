"""What is kept for a peer under a lease, until that is done or the lease runs out (design 3.1).

P keeps finished prefills, for the decode instance; in bidirectional mode D keeps ended answers, for the next turn's
prefill. The latter stand for a fixed time, and give way to whoever needs memory here (policy strict).
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.core.blocks.manager import KVCacheManager
from pdkv.core.config import EngineConfig
from pdkv.core.events import LeaseGranted, LeaseReleased, LeaseRenewed
from pdkv.core.journal import Journal
from pdkv.core.ledger import Account
from pdkv.core.scheduler.request import Request
from pdkv.core.transfer.lease import LeaseSlots
from pdkv.core.transfer.messages import Done, Grant, Heartbeat, Withdraw
from pdkv.core.transfer.rendezvous import Announcements


@dataclass(slots=True)
class Lease:
    """One grant: whose KV, which slot, until when."""

    request_id: str
    transfer_id: str | None
    answer_id: str | None
    lease_id: int
    slot: int
    token: bytes
    blocks: int
    deadline_ns: int
    next_turn: bool = False

    @property
    def key(self) -> str:
        """Owner of the blocks in the manager."""
        return f"lease:{self.lease_id}"


class Producer:
    """Grants, renews and releases leases. `_release` is the only way a lease ends: slot first, then blocks."""

    def __init__(
        self,
        config: EngineConfig,
        manager: KVCacheManager,
        slots: LeaseSlots,
        announcements: Announcements,
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

    def may_prefill(self, request: Request, in_flight: int, in_flight_blocks: int) -> bool:
        """Whether one more prompt may be computed for a peer without pinning more than the allowed share.

        The ``in_flight`` prefills for peers will want a slot each and their ``in_flight_blocks``. A prompt larger than
        the whole share is let in when nothing else is leased. (The scheduler lets no other prefill for a peer pass one
        that waits here, so its turn comes. Nobody waits here for leases of its own answer: `NewRequest.answer_id`.)
        """
        while self._slots.num_free <= in_flight and self.give_way():
            pass
        pinned = int(self._manager.pool.ledger.counts[Account.RETAINED])
        if self._turns:
            pinned = min(pinned, sum(lease.blocks for lease in self._by_token.values()))
        pinned += in_flight_blocks
        limit = int(self._config.max_leased_fraction * (self._config.num_blocks - 1))
        needed = self._manager.blocks_for(request.num_prompt)
        return self._slots.num_free > in_flight and (pinned == 0 or pinned + needed <= limit)

    def grant(self, request: Request) -> Grant:
        """Keep the prompt's blocks for a consumer; the request's other blocks go back. Needs a free slot."""
        grant = self._lease(request, self._config.lease_ns, next_turn=False)
        self.announcements.granted(request, grant)
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
        grant = self._slots.grant(blocks, request.tokens[:computed], request.cached_tokens, mark_tokens=mark_tokens)
        deadline_ns = self._journal.now_ns + lasts_ns
        lease = Lease(
            request_id=request.request_id,
            transfer_id=request.new.transfer_id,
            answer_id=request.new.answer_id,
            lease_id=grant.lease_id,
            slot=grant.slot,
            token=grant.token,
            blocks=len(grant.block_ids),
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
        if not self._turns or not self._config.transfer.kept_gives_way:
            return False
        self._release(next(iter(self._turns.values())), expired=False, gave_way=True)
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
            deadline_ns = received_ns + self._config.lease_extension_ns
            if lease is None or deadline_ns <= lease.deadline_ns:
                continue
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

    def next_deadline_ns(self) -> int | None:
        """When the next lease runs out."""
        oldest = self._oldest_turn()
        return min(
            (lease.deadline_ns for lease in (*self._by_token.values(), *((oldest,) if oldest else ()))), default=None
        )

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
