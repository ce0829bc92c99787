"""D's memory that it granted to be written, and wants back: in quarantine until nothing can be written there.

Its producer is told (CANCEL), again and again until it says that it has stopped. What its word does not cover, or where
there is none in time, is fenced here: whoever may still write is ended (design 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from pdkv.core.config import EngineConfig
from pdkv.core.journal import Journal
from pdkv.core.ports import Revoked, SendMessage
from pdkv.core.scheduler.request import Request
from pdkv.core.transfer.lease import LeaseSlots
from pdkv.core.transfer.messages import Awaited, CancelGrant, Fenced, Noted, NotWritten, OfGrant, Peer, WriteGrant
from pdkv.core.transfer.quarantine import Quarantine

_CANCELS_PER_FENCE = 4  # CANCEL is repeated so often within the fence time


@dataclass(slots=True)
class Withdrawn:
    """A grant that nobody waits for any more, and its producer may still write under: its blocks are in quarantine."""

    request_id: str
    awaited: Awaited
    grant: WriteGrant
    deadline_ns: int
    next_cancel_ns: int
    cut_off: bool = False  # its producer has stopped; what has left it is to be fenced here


def _owner(grant_id: int) -> str:
    return f"grant:{grant_id}"


class WithdrawnGrants:
    """Every grant of this instance's memory that was given up, until its last possible write is over."""

    def __init__(
        self,
        config: EngineConfig,
        slots: LeaseSlots,
        quarantine: Quarantine,
        journal: Journal,
        outbox: list[SendMessage],
    ) -> None:
        self._config, self._slots, self._quarantine = config, slots, quarantine
        self._journal, self._outbox = journal, outbox
        self._grants: dict[int, Withdrawn] = {}  # by grant id
        self._evict: list[int] = []

    def __len__(self) -> int:
        return len(self._grants)

    def add(self, request: Request, awaited: Awaited, grant: WriteGrant, cause: str, *, cut_off: bool = False) -> None:
        """All that the request holds belongs to its grant now. Its producer is told, unless it has said ``cut_off``."""
        self._slots.disarm(grant.slot)
        owner, blocks, danger = _owner(grant.grant_id), len(grant.block_ids), "its producer may still write"
        deadline_ns = self._quarantine.enter(request, owner, grant.grant_id, grant.first_token, blocks, cause, danger)
        one = Withdrawn(request.request_id, awaited, grant, deadline_ns, self._journal.now_ns)
        self._grants[grant.grant_id] = one
        if cut_off:
            self._fence_here(one)
        elif self._config.transfer.push_answers:
            one.next_cancel_ns = self.cancel(awaited, grant)

    def cancel(self, awaited: Awaited, grant: WriteGrant) -> int:
        """Tell its producer; returns when it must be told again."""
        cancel = CancelGrant(awaited.transfer_id, awaited.peer.engine_id, grant.nonce, grant.grant_id)
        self._outbox.append(SendMessage(awaited.peer, cancel))
        return self._journal.now_ns + self._config.fence_timeout_ns // _CANCELS_PER_FENCE

    # ------------------------------------------------------------------------------------------------------ its end

    def on_message(self, message: OfGrant, peer: Peer) -> bool:
        """Whether it is about one of these; its producer's word, and nobody else's, is taken."""
        one = self._grants.get(message.grant_id)
        if one is None:
            return False
        if one.awaited.peer == peer and not isinstance(message, Noted):
            if isinstance(message, NotWritten | Fenced) and message.cut_off:
                self._fence_here(one)
            else:
                self._fence(one)
        return True

    def on_fenced(self, grant_ids: tuple[int, ...]) -> None:
        """Seen to here: nothing can be written under these any more."""
        for one in [self._grants[grant_id] for grant_id in grant_ids if grant_id in self._grants]:
            self._fence(one)

    def _fence_here(self, one: Withdrawn) -> None:
        """Its producer can do no more about it: whoever may still write here is ended at once."""
        if not one.cut_off:
            one.cut_off, one.deadline_ns = True, self._journal.now_ns

    def _fence(self, one: Withdrawn) -> None:
        grant = one.grant
        del self._grants[grant.grant_id]
        self._slots.clear(grant.slot)
        self._quarantine.leave(one.request_id, _owner(grant.grant_id), grant.grant_id, len(grant.block_ids))

    # ----------------------------------------------------------------------------------------------------- deadlines

    def sweep(self) -> None:
        """Cancel again; have whoever may still write ended when a fence takes too long."""
        now_ns = self._journal.now_ns
        for grant_id, one in self._grants.items():
            if one.next_cancel_ns <= now_ns and not one.cut_off:
                one.next_cancel_ns = self.cancel(one.awaited, one.grant)
            if one.deadline_ns <= now_ns:
                self._evict.append(grant_id)
                one.deadline_ns = now_ns + self._config.fence_timeout_ns

    def deadlines_ns(self) -> list[int]:
        """When `sweep` is wanted, for each."""
        every = self._grants.values()
        return [one.deadline_ns if one.cut_off else min(one.next_cancel_ns, one.deadline_ns) for one in every]

    # ----------------------------------------------------------------------------------------------------- the outbox

    def peers(self) -> tuple[Peer, ...]:
        """Who still has to say that it has stopped."""
        return tuple(one.awaited.peer for one in self._grants.values())

    def revoked(self) -> tuple[Revoked, ...]:
        """Grants that are not fenced yet."""
        return tuple(Revoked(grant_id, one.grant.slot) for grant_id, one in self._grants.items())

    def take_evicted(self) -> tuple[int, ...]:
        """Grants whose producers must be ended as far as they may still write here, once."""
        evicted, self._evict = tuple(self._evict), []
        return evicted
